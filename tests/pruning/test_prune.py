"""Pruning against a plain sort of (magnitude, hash, place), on one tensor and over a model."""

import math
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from samo.errors import MaskError
from samo.mask import bitmap
from samo.mask.masks import Masks
from samo.pruning import topk
from samo.pruning.prune import prune
from samo.pruning.topk import flat_slice, hashes
from tests.meters import NewBytes

Scope = Literal["tensor", "global"]

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def model_of(*weights: Tensor) -> nn.Sequential:
    """Return a model whose parameters '0.weight', '1.weight', ... are ``weights``."""
    layers = [nn.Linear(1, 1, bias=False) for _ in weights]
    for layer, weight in zip(layers, weights):
        layer.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
    return nn.Sequential(*layers)


def reference_hashes(name: str, numel: int, seed: int) -> np.ndarray:
    """Compute the hashes with numpy's unsigned integers, which need no masks to shift."""

    def mix(z: np.ndarray) -> np.ndarray:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    salt = mix(np.array([seed % 2**63], np.uint64)) ^ np.uint64(zlib.crc32(name.encode()))
    index = np.arange(numel, dtype=np.uint64)
    return mix(index * np.uint64(0x9E3779B97F4A7C15) + salt) >> np.uint64(33)


def reference(
    weights: Mapping[str, Tensor], sparsity: float, seed: int = 0, method: str = "magnitude"
) -> dict[str, Tensor]:
    """Keep the largest of all ``weights`` together, by sorting them."""
    hashes = [reference_hashes(name, weight.numel(), seed) for name, weight in weights.items()]
    hash_of = np.concatenate(hashes).astype(np.int64)
    flat = torch.cat([weight.reshape(-1).double() for weight in weights.values()])
    magnitude = flat.abs().numpy() if method == "magnitude" else np.zeros(len(flat))
    place = np.arange(len(flat))
    order = np.lexsort((place, -hash_of, -magnitude))
    keep = torch.zeros(len(flat), dtype=torch.bool)
    keep[torch.from_numpy(order[: len(flat) - round(len(flat) * sparsity)])] = True
    parts = keep.split([weight.numel() for weight in weights.values()])
    return {name: part.view(weights[name].shape) for name, part in zip(weights, parts)}


def assert_masks(masks: Masks, expected: Mapping[str, Tensor]) -> None:
    assert list(masks) == list(expected)
    for name, keep in expected.items():
        assert torch.equal(masks[name].to_bool(), keep), name


def expected_masks(
    model: nn.Module, sparsity: float, scope: Scope, **settings: Any
) -> dict[str, Tensor]:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if scope == "global":
        return reference(weights, sparsity, **settings)
    expected = {}
    for name, weight in weights.items():
        expected.update(reference({name: weight}, sparsity, **settings))
    return expected


@st.composite
def models(draw: st.DrawFn) -> nn.Sequential:
    """Draw models of one dtype or of several, many of them with few distinct magnitudes."""
    dtypes = draw(st.sampled_from([[dtype] for dtype in FLOATS] + [FLOATS[:2], FLOATS[1:]]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    distinct = draw(st.sampled_from([1, 2, 5, 10**6]))
    weights = []
    for index in range(draw(st.integers(1, 4))):
        shape = draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
        values = torch.randn(distinct, generator=generator)
        if distinct < 10:
            values[0] = 0.0
        chosen = torch.randint(distinct, shape, generator=generator)
        signs = torch.randint(2, shape, generator=generator) * 2 - 1
        weights.append((values[chosen] * signs).to(dtypes[index % len(dtypes)]))
    return model_of(*weights)


# What is kept


@pytest.mark.filterwarnings("ignore:.* would be kept")  # ties of zeros
@settings(max_examples=60)
@given(
    models(),
    st.floats(0.01, 0.99),
    st.sampled_from(["tensor", "global"]),
    st.integers(),
    st.sampled_from(["magnitude", "random"]),
)
def test_pruning_keeps_what_a_sort_keeps(
    model: nn.Sequential, sparsity: float, scope: Scope, seed: int, method: Any
) -> None:
    expected = expected_masks(model, sparsity, scope, seed=seed, method=method)
    if all(keep.any() for keep in expected.values()):
        assert_masks(prune(model, sparsity, scope=scope, seed=seed, method=method), expected)
    else:
        with pytest.raises(MaskError, match="would keep none"):
            prune(model, sparsity, scope=scope, seed=seed, method=method)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_selection_continues_over_chunks(
    dtype: torch.dtype, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitmap, "_CHUNK_BLOCKS", 1)
    weights = [torch.randn(61, 101).to(dtype), torch.randn(2049).round().to(dtype)]
    weights.append(torch.ones(3, 2048, dtype=dtype))
    model = model_of(*weights)
    assert_masks(prune(model, 0.7, scope=scope), expected_masks(model, 0.7, scope))


def test_float64_is_compared_in_float64() -> None:
    close = torch.ones(100, dtype=torch.float64)
    close[:50] += 1e-12
    assert torch.equal(prune(model_of(close), 0.5)["0.weight"].to_bool(), torch.arange(100) < 50)
    tiny = (torch.arange(1, 101, dtype=torch.float64) * 1e-60).view(25, 4)
    keep = prune(model_of(tiny), pattern="1:4")["0.weight"].to_bool()
    assert torch.equal(keep, torch.tensor([False, False, False, True]).repeat(25, 1))
    huge = torch.tensor([1.0, 1e300], dtype=torch.float64)
    masks = prune(model_of(huge, torch.full((2,), 2.0)), 0.5, scope="global")
    assert masks["0.weight"].to_bool().tolist() == [False, True]


# Ties


def test_entries_whose_hashes_collide_are_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitmap, "_CHUNK_BLOCKS", 1)
    monkeypatch.setattr(topk, "hashes", lambda name, seed, index: (index % 2).to(torch.int32))
    masks = prune(model_of(*torch.ones(2, 5000)), 0.3, scope="global")
    odd = torch.arange(5000) % 2 == 1
    first, second = (mask.to_bool() for mask in masks.values())
    assert masks.kept == 7000
    assert first[odd].all()
    assert second[odd].all()
    assert first.logical_not().nonzero().min() == 4000  # 2,000 even places were left
    assert not second[~odd].any()


def test_any_integer_is_a_seed_and_the_hash_never_changes() -> None:
    for seed in (0, -1, 2**63 - 1, 2**63, 2**100):
        found = hashes("w", seed, torch.arange(1000))
        assert np.array_equal(found.numpy(), reference_hashes("w", 1000, seed))
    found = hashes("h.0.mlp.weight", 7, torch.tensor([0, 1, 2**31, 2**40]))
    assert found.tolist() == [732548127, 71850239, 1720293096, 300027857]


# What the tensors look like


VIEWS: dict[str, Any] = {
    "permuted": lambda x: x.view(60, 50, 2).permute(2, 0, 1),
    "one long column": lambda x: x.view(6000, 1)[::2],
    "channels last": lambda x: x.view(10, 6, 10, 10).to(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1].expand(50, 60),
    "scalar": lambda x: x[0],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("blocks", [1, 512], ids=["small chunks", "one chunk"])
def test_strides_make_no_difference(
    view: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitmap, "_CHUNK_BLOCKS", blocks)
    weight = VIEWS[view](torch.randn(6000).round(decimals=1))
    expected = weight.clone(memory_format=torch.contiguous_format)
    assert prune(model_of(weight), 0.4) == prune(model_of(expected), 0.4)
    for start, stop in [(0, weight.numel()), *bitmap.chunks(weight.numel())]:
        assert torch.equal(flat_slice(weight, start, stop), expected.view(-1)[start:stop])


def test_the_model_is_not_changed_and_torchs_defaults_make_no_difference() -> None:
    model = model_of(torch.randn(40, 40), torch.randn(40, 40).half())
    before = [(param.clone(), param._version) for param in model.parameters()]
    expected = prune(model, 0.5, scope="global")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert prune(model, 0.5, scope="global") == expected
    finally:
        torch.set_default_dtype(torch.float32)
    for param, (value, version) in zip(model.parameters(), before):
        assert torch.equal(param, value)
        assert param._version == version


def transient_bytes(weight: Tensor, **settings: Any) -> int:
    model = model_of(weight)
    with NewBytes() as meter:
        masks = prune(model, **{"sparsity": None if "pattern" in settings else 0.9, **settings})
    return meter.peak_bytes - sum(mask.nbytes for mask in masks.values())


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (torch.randn, {}),
        (lambda n: torch.randn(n).bfloat16(), {"scope": "global"}),
        (lambda n: torch.randn(n).double(), {}),
        (torch.ones, {}),
        (torch.ones, {"method": "random"}),
        (lambda n: torch.randn(n // 512, 512).t(), {}),
        (lambda n: torch.randn(n // 512, 512), {"pattern": "1:16"}),
    ],
    ids=["float32", "bfloat16", "float64", "all ties", "random", "transposed", "pattern"],
)
def test_transient_memory_does_not_grow_with_the_tensor(
    make: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = 2**14  # a 64th of the true one, for speed
    monkeypatch.setattr(bitmap, "_CHUNK_BLOCKS", chunk // bitmap.BLOCK_BITS)
    small, large = (transient_bytes(make(numel), **settings) for numel in (3 * chunk, 12 * chunk))
    tables = 8 * 8 * 2**16
    assert small <= 48 * chunk + tables
    assert large <= small + 5 * 8 * (12 * chunk // bitmap.BLOCK_BITS)  # a few counts a block


# Which tensors


def names_model() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(20, 10),
            "layers": nn.Sequential(*(nn.Linear(10, 10) for _ in range(3))),
            "norm": nn.LayerNorm(10),
            "lm_head": nn.Linear(10, 20),
        }
    )


LAYERS = [f"layers.{i}.weight" for i in range(3)]


@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize(
    ("skip", "rules", "expected"),
    [
        ((), None, {}),
        ("layers.[01].weight", {}, {LAYERS[0]: None, LAYERS[1]: None}),
        ((), {LAYERS[1]: 0}, {LAYERS[1]: None}),
        ((), {"layers.*": 0.9, "layers.2.*": 0.2}, dict(zip(LAYERS, [0.9, 0.9, 0.2]))),
        ((), {"layers.2.*": 0.2, "layers.*": 0.9}, dict.fromkeys(LAYERS, 0.9)),
        ((), {"lm_head.weight": 0.3}, {"lm_head.weight": 0.3}),
        ((), {"*": 0.9}, dict.fromkeys(LAYERS, 0.9)),
        (["layers.0.*"], {"layers.*": 0.9}, dict(zip(LAYERS, [None, 0.9, 0.9]))),
    ],
    ids=str,
)
def test_skip_and_rules_select_tensors(
    skip: Any, rules: Any, expected: dict[str, float | None], scope: Scope
) -> None:
    masks = prune(names_model(), 0.5, scope=scope, skip=skip, rules=rules)
    others = {name for name in LAYERS if name not in expected}
    assert {*masks} == others | {name for name, value in expected.items() if value is not None}
    assert all(round(masks[n].sparsity, 6) == expected[n] for n in masks if n in expected)
    assert sum(masks[name].kept for name in others) == 50 * len(others)


def test_sparsity_0_prunes_only_what_rules_say() -> None:
    assert dict(prune(names_model(), 0.0)) == {}
    for sparsity in (0, None):
        masks = prune(names_model(), sparsity, scope="global", rules={LAYERS[2]: 0.5})
        assert {name: mask.kept for name, mask in masks.items()} == {LAYERS[2]: 50}


def test_a_tied_weight_gets_one_mask_under_its_first_name() -> None:
    model = names_model()
    model["lm_head"].weight = model["embed"].weight
    assert list(prune(model, 0.5, rules={"lm_head.weight": 0.5})) == ["embed.weight", *LAYERS]
    rules = {"embed.weight": 0.1, "lm_head.weight": 0.5}
    assert dict(prune(model, 0, rules=rules))["embed.weight"].kept == 100


def test_a_weight_tied_to_a_plain_parameter_is_named_as_the_matrix() -> None:
    model = nn.Module()
    model.table = nn.Parameter(torch.randn(4, 4))
    model.layer = nn.Linear(4, 4)
    model.layer.weight = model.table
    assert list(prune(model, 0.5)) == ["layer.weight"]
    with pytest.raises(ValueError, match="none of the 3 parameters"):
        prune(model, 0.5, skip=["table"])


# Bad input


@pytest.mark.parametrize("value", [1, -0.1, math.nan, "0.9", None, 75])
def test_a_sparsity_out_of_range_is_refused_with_a_fraction(value: Any) -> None:
    example = r"0\.75 prunes 75 %" if value == 75 else r"0\.9 prunes 90 %"
    rule = rf"must be at least 0 and less than 1, got {value!r}; {example}"
    with pytest.raises(ValueError, match=f"^sparsity {rule}"):
        prune(names_model(), value)
    with pytest.raises(ValueError, match=rf"^rules\['layers\.\*'\] {rule}"):
        prune(names_model(), 0.5, rules={"layers.*": value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "l1"}, "method must be one of magnitude, random, wanda, sparsegpt, got 'l1'"),
        ({"scope": "layer"}, "scope must be one of tensor, global, erk, owl, got 'layer'"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"rules": ["layers.*"]}, r"rules must be a dict such as .*, got list"),
        ({"skip": ["layer.*"]}, r"skip pattern 'layer\.\*' matches no param"),
        ({"rules": {"layer.*": 0.5}}, r"rules pattern 'layer\.\*' matches no param"),
        ({"skip": ["layers.*"]}, r"none of the 11 parameters .*samo\.prunable"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prune(names_model(), 0.5, **settings)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        prune("model", 0.5)  # type: ignore[arg-type]


def test_weights_without_real_values_are_refused() -> None:
    model = model_of(torch.randn(9), torch.ones(9, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"'1\.weight' is torch.int8, .* skip=\['1\.weight'\]"):
        prune(model, 0.5, method="random")
    assert list(prune(model, 0.5, skip=["1.*"])) == ["0.weight"]
    with pytest.raises(ValueError, match=r"'0.weight' is on device 'meta' and has no values"):
        prune(model_of(torch.ones(4, 4, device="meta")), 0.5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_that_are_not_finite_are_counted_and_refused(dtype: torch.dtype) -> None:
    bad = torch.randn(2000).to(dtype)
    bad[[3, 5, 7]] = torch.tensor([math.nan, math.inf, -math.inf]).to(dtype)
    message = r"3 of the 2,000 weights of '1\.weight' are NaN or infinite; .*skip=\['1\.weight'\]"
    model = model_of(torch.randn(50).to(dtype), bad)
    with pytest.raises(ValueError, match=message):
        prune(model, 0.5, scope="global")
    assert prune(model, 0.5, method="random").sparsity == 0.5  # values do not matter


def test_a_sparsity_that_keeps_nothing_of_a_tensor_is_refused() -> None:
    with pytest.raises(MaskError, match=r"would keep none of the weights of '0\.weight'"):
        prune(model_of(torch.randn(4)), 0.95)
    with pytest.raises(MaskError, match=r"sparsity 0\.9999 would keep none"):
        prune(model_of(torch.ones(1, 2), torch.ones(500, 500)), 0.9999, scope="erk")
    model = model_of(torch.randn(100) + 100, torch.randn(100), torch.zeros(10))
    message = (
        r"none of the weights of '1\.weight', '2\.weight'; "
        r".*rules=\{'1.weight': 0.5, '2.weight': 0.5\}, or leave out with skip=\['1.weight', '2.we"
    )
    with pytest.raises(MaskError, match=message):
        prune(model, 0.9, scope="global")
    masks = prune(model, 0.9, scope="global", rules={"1.weight": 0.5}, skip=["2.*"])
    assert [mask.kept for mask in masks.values()] == [10, 50]


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, *FLOATS], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {"sparsity": 0.7},
        {"sparsity": 0.7, "scope": "global"},
        {"sparsity": 0.7, "scope": "erk"},
        {"sparsity": 0.7, "method": "random"},
        {"pattern": "2:4"},
        {"pattern": "3:10"},
    ],
    ids=str,
)
def test_a_gpu_keeps_what_a_cpu_keeps(dtype: torch.dtype | None, how: Any) -> None:
    weights = [torch.randn(1500, 1000), torch.randn(1000, 300).t(), torch.ones(500, 500)]
    dtypes = [dtype] * 3 if dtype else [torch.float32, torch.bfloat16, torch.float16]
    model = model_of(*(weight.to(kind) for weight, kind in zip(weights, dtypes)))
    expected = prune(model, **how)
    found = prune(model.cuda(), **how)
    assert {mask.words.device.type for mask in found.values()} == {"cuda"}
    assert found == expected.to("cuda")


@pytest.mark.gpu
def test_a_model_on_two_devices_has_one_threshold() -> None:
    model = model_of(torch.randn(1000, 500), torch.ones(500, 500), torch.randn(500, 500).round())
    expected = prune(model, 0.7, scope="global")
    model[1].cuda()
    found = prune(model, 0.7, scope="global")
    assert found.to("cpu") == expected


@pytest.mark.parametrize("scope", ["tensor", "global", "erk"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_weights_without_entries_are_left_out(scope: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 8), nn.Linear(8, 8))
    assert list(prune(model, 0.5, scope=scope)) == ["2.weight"]
    assert list(prune(model, 0.5, scope=scope, rules={"*.weight": 0.25})) == ["2.weight"]
    assert list(Masks.ones(model)) == ["2.weight"]


# Models that are pruned already


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"sparsity": 0.5}, "'0.weight' and 1 others have only 820 nonzero weights, and 4,096 wo"),
        ({"pattern": "2:4"}, "'0.weight' and 1 others have only 820 nonzero weights, and 4,096 w"),
        ({"sparsity": 0.5, "scope": "global"}, "only 820 nonzero weights, and 4,096 would be kept"),
        ({"sparsity": 0.5, "skip": ["1.*"]}, "'0.weight' has only 410 nonzero weights, and 2,048 "),
    ],
)
def test_one_warning_tells_that_zeros_are_kept(how: dict[str, Any], message: str) -> None:
    model = model_of(torch.randn(64, 64), torch.randn(64, 64))
    prune(model, 0.9).apply_(model)
    with pytest.warns(UserWarning, match=message) as found:
        prune(model, **how)
    (warning,) = found
    assert "already, so zeros are kept at random; samo.Masks.from_zeros(model)" in str(
        warning.message
    )
    assert "a sparsity above 0.900 prunes it further" in str(warning.message)
    assert warning.filename == __file__


def test_a_pruned_model_is_pruned_again_without_a_word() -> None:
    model = model_of(torch.randn(64, 64))
    masks = prune(model, 0.9)
    masks.apply_(model)
    assert prune(model, 0.9) == masks
    prune(model, 0.5, method="random")  # looks at no values
