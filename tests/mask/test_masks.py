"""Masks against plain boolean tensors."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from samo.core.compress import compress_, dense_state_dict
from samo.errors import MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import prunable
from samo.pruning.prune import prune

shapes = st.lists(st.integers(0, 20), max_size=3).map(tuple)
seeds = st.integers(0, 2**32)
densities = st.sampled_from([0.0, 0.1, 0.5, 1.0])


def random_bool(shape: tuple[int, ...], seed: int = 0, density: float = 0.5) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density


def two_masks() -> Masks:
    return Masks(
        {
            "layers.0.weight": Mask.from_bool(random_bool((30, 50), seed=1)),
            "layers.1.weight": Mask.from_bool(random_bool((7, 11), seed=2, density=0.1)),
        }
    )


# One mask


@given(shapes, seeds, densities)
def test_a_mask_gives_back_the_booleans_it_was_built_from(
    shape: tuple[int, ...], seed: int, density: float
) -> None:
    keep = random_bool(shape, seed, density)
    mask = Mask.from_bool(keep)
    assert torch.equal(mask.to_bool(), keep)
    assert mask.shape == shape
    assert (mask.numel, mask.kept) == (keep.numel(), int(keep.sum()))
    assert mask.sparsity == (1 - mask.kept / mask.numel if mask.numel else 0)


@pytest.mark.parametrize(
    "keep",
    [random_bool((40, 30)).t(), random_bool((40, 30))[:, ::3], torch.tensor(True).expand(5, 7)],
    ids=["transposed", "every third column", "expanded"],
)
def test_a_mask_takes_booleans_of_any_stride(keep: Tensor) -> None:
    assert torch.equal(Mask.from_bool(keep).to_bool(), keep)


@given(shapes, seeds, densities, densities)
def test_operations_are_those_of_booleans(
    shape: tuple[int, ...], seed: int, density_a: float, density_b: float
) -> None:
    a, b = random_bool(shape, seed, density_a), random_bool(shape, seed + 1, density_b)
    mask_a, mask_b = Mask.from_bool(a), Mask.from_bool(b)
    for result, expected in [
        (mask_a & mask_b, a & b),
        (mask_a | mask_b, a | b),
        (mask_a ^ mask_b, a ^ b),
    ]:
        assert result == Mask.from_bool(expected)
        assert result.kept == expected.sum()
    most = max(int(a.sum()), int(b.sum()))
    assert mask_a.hamming(mask_b) == (int((a ^ b).sum()) / a.numel() if a.numel() else 0)
    assert mask_a.distance(mask_b) == ((most - int((a & b).sum())) / most if most else 0)
    assert mask_a.distance(mask_b) == mask_b.distance(mask_a)
    assert mask_a.hamming(mask_a) == mask_a.distance(mask_a) == 0
    equal = torch.equal(a, b)
    assert (mask_a == mask_b) is equal
    assert (mask_a.fingerprint() == mask_b.fingerprint()) is equal
    assert len({mask_a, mask_b}) == 2 - equal
    dense = torch.randn(shape)
    zeroed = torch.where(a, dense, 0)
    assert mask_a.zero_(dense) is dense
    assert torch.equal(dense, zeroed)


def test_masks_of_other_shapes_are_not_equal() -> None:
    mask = Mask.from_bool(random_bool((4, 6)))
    assert mask != Mask.from_bool(random_bool((4, 6)).view(6, 4))
    assert mask != "a mask"
    assert mask.fingerprint() != Mask(mask.shape[::-1], mask.words).fingerprint()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0])
def test_zero_writes_plus_zero_over_anything(value: float) -> None:
    dense = Mask.from_bool(torch.tensor([True, False])).zero_(torch.tensor([value, value]))
    assert dense[1] == 0
    assert not dense[1].signbit()
    assert str(dense[0].item()) == str(value)


@pytest.mark.parametrize(
    "dense",
    [
        torch.randn(30, 40).t(),
        torch.randn(40, 60)[:, ::2],
        torch.randn(40, 2, 30)[:, 1],
        torch.randn(30, 40, dtype=torch.float64).t(),
    ],
    ids=["transposed", "every other column", "slice", "transposed float64"],
)
def test_zero_works_in_place_on_any_stride(dense: Tensor) -> None:
    keep = random_bool((40, 30))
    expected = torch.where(keep, dense, 0)
    Mask.from_bool(keep).zero_(dense)
    assert torch.equal(dense, expected)


def test_zero_reaches_the_entries_past_the_first_chunk() -> None:
    keep = random_bool((2**20 + 77,))
    dense = torch.ones(keep.shape, dtype=torch.int8)
    assert torch.equal(Mask.from_bool(keep).zero_(dense), keep.to(torch.int8))


def test_a_mask_shows_its_shape_counts_and_bytes() -> None:
    mask = Mask.from_bool(torch.arange(5000).view(50, 100) < 1250)
    assert repr(mask) == "Mask(50x100, 1,250 of 5,000 kept, sparsity 0.750)"
    assert repr(Mask.from_bool(torch.tensor(True))).startswith("Mask(scalar, 1 of 1")
    assert mask.nbytes == 2 * 79 * 4 + 3 * 8  # 79 pairs of words, 3 blocks
    assert mask.to("cpu") is mask


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_from_bool_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"boolean tensor, got {dtype}.*scores > threshold"):
        Mask.from_bool(torch.ones(3, dtype=dtype))


@pytest.mark.parametrize(
    ("words", "got"),
    [
        (torch.zeros(2, dtype=torch.int32), r"\(2,\) of torch.int32"),
        (torch.zeros(4, dtype=torch.int64), r"\(4,\) of torch.int64"),
        (torch.zeros(2, 2, dtype=torch.int32), r"\(2, 2\) of torch.int32"),
    ],
    ids=["too few", "another dtype", "another shape"],
)
def test_words_of_the_wrong_type_or_size_are_refused(words: Tensor, got: str) -> None:
    message = rf"a mask of 100 weights needs 4 int32 words, got {got}; .*from_bool"
    with pytest.raises(ValueError, match=message):
        Mask((10, 10), words)


@pytest.mark.parametrize("numel", [1, 31, 32, 63, 65])
@pytest.mark.parametrize("place", ["first", "last"])
def test_bits_past_the_last_weight_are_refused(numel: int, place: str) -> None:
    mask = Mask.from_bool(torch.ones(numel, dtype=torch.bool))
    bit = numel if place == "first" else 32 * mask.words.numel() - 1
    words = mask.words.clone().view(torch.uint8)
    words[bit // 8] |= 1 << bit % 8
    message = rf"a mask of {numel} weights has bits set past its last weight; .*from_bool"
    with pytest.raises(ValueError, match=message):
        Mask((numel,), words.view(torch.int32))


@pytest.mark.parametrize(
    "operation", ["__and__", "__or__", "__xor__", "hamming", "distance", "zero_"]
)
def test_other_shapes_do_not_mix(operation: str) -> None:
    mask = Mask.from_bool(random_bool((4, 6)))
    other = torch.ones(6, 4) if operation == "zero_" else Mask.from_bool(random_bool((6, 4)))
    with pytest.raises(
        MaskError, match=r"shape \(4, 6\) but the other operand has \(6, 4\); build"
    ):
        getattr(mask, operation)(other)


# The masks of a model


def test_masks_are_a_mapping_with_counts() -> None:
    masks = two_masks()
    assert list(masks) == ["layers.0.weight", "layers.1.weight"]
    assert len(masks) == 2
    assert "layers.0.weight" in masks
    assert masks.get("layers.0.bias") is None
    kept = sum(mask.kept for mask in masks.values())
    assert (masks.numel, masks.kept) == (1577, kept)
    assert masks.sparsity == 1 - kept / 1577
    assert repr(masks).startswith(f"Masks(2 tensors, {kept} of 1,577 weights kept, sparsity 0.")
    assert masks.to("cpu") == masks
    with pytest.raises(KeyError, match=r"no mask for 'layer.0.weight' \(did you mean 'layers.0"):
        masks["layer.0.weight"]


def test_masks_may_be_empty() -> None:
    none = Masks({})
    assert (none.numel, none.kept, none.sparsity) == (0, 0, 0)
    assert none.hamming(none) == none.distance(none) == 0


@settings(max_examples=25)
@given(seeds, seeds)
def test_masks_compare_as_one_long_mask(seed_a: int, seed_b: int) -> None:
    def build(seed: int) -> tuple[Masks, Mask]:
        parts = [random_bool((n,), seed + n, 0.3) for n in (70, 130)]
        masks = Masks({str(i): Mask.from_bool(part) for i, part in enumerate(parts)})
        return masks, Mask.from_bool(torch.cat(parts))

    (a, long_a), (b, long_b) = build(seed_a), build(seed_b)
    assert a.hamming(b) == long_a.hamming(long_b)
    assert a.distance(b) == long_a.distance(long_b)
    for combined, expected in [
        (a & b, long_a & long_b),
        (a | b, long_a | long_b),
        (a ^ b, long_a ^ long_b),
        (a - b, long_a ^ (long_a & long_b)),
    ]:
        bits = torch.cat([mask.to_bool() for mask in combined.values()])
        assert torch.equal(bits, expected.to_bool())


@pytest.mark.parametrize("operation", ["__and__", "__or__", "hamming", "distance"])
def test_masks_for_other_tensors_do_not_mix(operation: str) -> None:
    one = Masks({"layers.0.weight": two_masks()["layers.0.weight"]})
    with pytest.raises(MaskError, match=r"different tensors: 'layers\.1\.weight' is in only one"):
        getattr(two_masks(), operation)(one)


def test_the_fingerprint_depends_on_names_and_bits_but_not_on_order() -> None:
    masks = two_masks()
    backwards = Masks({name: masks[name] for name in reversed(list(masks))})
    renamed = Masks({f"{name}s": mask for name, mask in masks.items()})
    swapped = Masks(dict(zip(masks, reversed(list(masks.values())))))
    assert masks.fingerprint() == backwards.fingerprint()
    assert len({masks.fingerprint(), renamed.fingerprint(), swapped.fingerprint()}) == 3


def test_apply_clears_the_pruned_weights_of_a_model_and_no_others() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[1].weight
    keep = random_bool((8, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Masks({"2.weight": Mask.from_bool(keep)}).apply_(model)  # its other name
    before["1.weight"] = before["2.weight"] = torch.where(keep, before["1.weight"], 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_masks_that_name_no_parameter_are_refused() -> None:
    masks = Masks({"0.wieght": two_masks()["layers.1.weight"], **two_masks()})
    message = r"3 of 3 masks name no parameter of this model, the first is '0.wieght'.*'0\.weight'"
    with pytest.raises(MaskError, match=message):
        masks.apply_(nn.Sequential(nn.Linear(11, 7)))


def test_masks_of_the_wrong_shape_are_refused() -> None:
    masks = Masks({"weight": two_masks()["layers.1.weight"]})
    message = r"mask for 'weight' has shape \(7, 11\) but the parameter has \(11, 7\); build"
    with pytest.raises(MaskError, match=message):
        masks.apply_(nn.Linear(7, 11))


# Masks read off a model


def model_with_zeros(*keep: Tensor) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(part.shape[1], part.shape[0]) for part in keep))
    for layer, part in zip(model, keep):
        layer.weight.data = torch.where(part, 1.0, 0.0)
    return model


def test_from_zeros_reads_what_is_not_exactly_zero() -> None:
    keep = [random_bool((30, 50)), random_bool((20, 30), density=0.2)]
    masks = Masks.from_zeros(model_with_zeros(*keep))
    assert [masks[f"{i}.weight"].to_bool().equal(keep[i]) for i in range(2)] == [True, True]
    model = model_with_zeros(torch.ones(1, 4, dtype=torch.bool))
    model[0].weight.data = torch.tensor([[0.0, -0.0, float("nan"), 1e-45]])
    expected = torch.tensor([[False, False, True, True]])
    assert Masks.from_zeros(model)["0.weight"] == Mask.from_bool(expected)


def test_from_zeros_leaves_out_tensors_with_few_zeros_and_skipped_ones() -> None:
    keep = [torch.arange(100).view(10, 10) >= zeros for zeros in (4, 5, 50)]
    model = model_with_zeros(*keep)
    assert list(Masks.from_zeros(model)) == ["1.weight", "2.weight"]
    assert list(Masks.from_zeros(model, skip=["2.*"])) == ["1.weight"]
    assert list(Masks.from_zeros(model, min_sparsity=0.01)) == ["0.weight", "1.weight", "2.weight"]


def test_from_zeros_refuses_dense_and_empty_models() -> None:
    keep = [torch.arange(100).view(10, 10) >= zeros for zeros in (1, 4, 100)]
    message = r"not pruned: its sparsest weight '1.weight' has 4.0% zeros, under min_sparsity=0.05"
    with pytest.raises(MaskError, match=message):
        Masks.from_zeros(model_with_zeros(*keep[:2]))
    message = r"all 100 weights of '1.weight' are 0, .* skip=\['1.weight'\]"
    with pytest.raises(MaskError, match=message):
        Masks.from_zeros(model_with_zeros(keep[0], keep[2]))
    with pytest.raises(ValueError, match=r"skip pattern '9\.\*' matches no parameter"):
        Masks.from_zeros(model_with_zeros(keep[0]), skip=["9.*"])
    with pytest.raises(MaskError, match="no weight was checked for zeros"):
        Masks.from_zeros(nn.Embedding(4, 4))


def test_from_zeros_finds_a_matrix_that_has_another_name_first() -> None:
    model = nn.Module()
    model.table = nn.Parameter(torch.eye(4))
    model.layer = nn.Linear(4, 4)
    model.layer.weight = model.table
    assert Masks.from_zeros(model)["layer.weight"].kept == 4


def test_from_torch_prune_takes_masks_under_the_final_names() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    torch_prune.random_unstructured(model[1], "weight", amount=0.5)
    model.register_buffer("attention_mask", torch.ones(3))
    expected = model.get_buffer("1.weight_mask") != 0
    masks = Masks.from_torch_prune(model)
    assert dict(masks) == {"1.weight": Mask.from_bool(expected)}
    torch_prune.remove(model[1], "weight")
    assert list(masks.parameters_of(model)) == ["1.weight"]
    message = r"no parameter was pruned with torch.nn.utils.prune .*'weight_mask'.*samo.prune"
    with pytest.raises(MaskError, match=message):
        Masks.from_torch_prune(model)


def test_from_zeros_needs_something_to_look_at() -> None:
    with pytest.raises(MaskError, match="no weight was checked for zeros"):
        Masks.from_zeros(nn.Embedding(4, 4))


def test_a_mask_cannot_have_a_negative_size() -> None:
    with pytest.raises(ValueError, match=r"a mask cannot have shape \(-1,\)"):
        Mask((-1,), torch.empty(0, dtype=torch.int32))


def test_looking_for_a_name_that_is_not_there_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = Masks({"w": Mask.from_bool(torch.tensor([True]))})
    monkeypatch.setattr("samo.mask.masks.nearest", None)
    assert "v" not in masks


def test_a_mask_owns_its_bits() -> None:
    words = torch.zeros(2, dtype=torch.int32)
    mask = Mask((64,), words)
    words.fill_(-1)
    assert not mask.to_bool().any()


def test_from_zeros_sees_a_pruned_head_and_passes_over_one_that_starts_at_zero() -> None:
    model = nn.ModuleDict(
        {"body": nn.Linear(8, 8), "head": nn.Linear(8, 8), "lm_head": nn.Linear(8, 8)}
    )
    with torch.no_grad():
        model["body"].weight[:4] = 0
        model["head"].weight[:, :4] = 0
        model["lm_head"].weight.zero_()
    assert sorted(Masks.from_zeros(model)) == ["body.weight", "head.weight"]


@pytest.mark.parametrize("shape", [(0,), (1,), (63,), (64,), (65,), (2048,), (3, 683)], ids=str)
def test_a_whole_mask_keeps_everything(shape: tuple[int, ...]) -> None:
    assert Mask.whole(shape) == Mask.from_bool(torch.ones(shape, dtype=torch.bool))


def test_whole_masks_are_for_what_would_be_pruned() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    assert list(Masks.whole(model)) == ["1.weight", "2.weight"]
    masks = Masks.whole(model, skip=["2.*"])
    assert list(masks) == ["1.weight"]
    assert masks.sparsity == 0
    with pytest.raises(ValueError, match="skip pattern '3"):
        Masks.whole(model, skip=["3.*"])


def test_what_is_no_mask_is_refused_when_masks_are_made() -> None:
    with pytest.raises(TypeError, match=r"mask of 'weight' is a Tensor; .*Mask\.from_bool\(tensor"):
        Masks({"weight": torch.ones(8, 8, dtype=torch.bool)})  # type: ignore[dict-item]


# Compressed models, whose parameters are 1-D


def tied_experts() -> nn.Module:
    model = nn.ModuleDict({"experts": nn.Module(), "a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})
    model["experts"].up = nn.Parameter(torch.randn(2, 8, 12))
    model["experts"].is_transposed = True  # type: ignore[assignment]
    model["b"].weight = model["a"].weight
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_of_a_compressed_model_are_made_as_of_a_dense_one(dtype: torch.dtype) -> None:
    model = tied_experts()
    first = prune(model, 0.5)
    assert list(first) == ["experts.up", "a.weight"]
    compress_(model, first, dtype=dtype)
    assert prunable(model) == list(first)
    dense = tied_experts().to(dtype)
    dense.load_state_dict(dense_state_dict(model, dtype=dtype))
    for how in ({"sparsity": 0.75}, {"sparsity": 0.75, "scope": "erk"}, {"pattern": "1:4"}):
        assert prune(model, **how) == prune(dense, **how)
    assert Masks.whole(model) == Masks.whole(dense)
    assert Masks.from_zeros(model) == first
    assert {name: tuple(w.shape) for name, w in first.parameters_of(model).items()} == {
        "experts.up": (2, 8, 12),
        "a.weight": (4, 8),
    }
    with pytest.raises(
        MaskError, match=r"'a.weight' has shape \(8, 4\) but the parameter has \(4, 8"
    ):
        Masks({"a.weight": Mask.whole((8, 4))}).parameters_of(model)


def test_apply_clears_entries_of_a_compressed_model_and_of_its_values() -> None:
    model = tied_experts()
    compress_(model, prune(model, 0.5), dtype=torch.bfloat16)
    values = model["a"]._parameters["weight"]
    assert values is not None
    before, mask = values.detach().clone(), prune(model, 0.75)["a.weight"]
    Masks({"b.weight": mask}).apply_(model)  # its other name
    assert not model["a"].weight[~mask.to_bool()].any()
    assert int(model["a"].weight.count_nonzero()) == int(values.count_nonzero()) == mask.kept
    assert bool(torch.isin(values[values != 0], before).all())  # all of their digits
