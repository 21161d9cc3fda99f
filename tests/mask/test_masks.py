"""Masks against plain boolean tensors."""

import pytest
import torch
from hypothesis import given, strategies as st
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
def test_set_operations_are_those_of_booleans(
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


@given(shapes, seeds, densities, densities)
def test_hamming_and_distance_are_those_of_booleans(
    shape: tuple[int, ...], seed: int, density_a: float, density_b: float
) -> None:
    a, b = random_bool(shape, seed, density_a), random_bool(shape, seed + 1, density_b)
    mask_a, mask_b = Mask.from_bool(a), Mask.from_bool(b)
    most = max(int(a.sum()), int(b.sum()))
    assert mask_a.hamming(mask_b) == (int((a ^ b).sum()) / a.numel() if a.numel() else 0)
    assert mask_a.distance(mask_b) == ((most - int((a & b).sum())) / most if most else 0)
    assert mask_a.distance(mask_b) == mask_b.distance(mask_a)


@given(shapes, seeds)
def test_a_mask_differs_from_itself_in_nothing(shape: tuple[int, ...], seed: int) -> None:
    mask = Mask.from_bool(random_bool(shape, seed))
    assert mask.hamming(mask) == mask.distance(mask) == 0


@given(shapes, seeds, seeds)
def test_equal_masks_and_only_those_have_equal_fingerprints_and_hashes(
    shape: tuple[int, ...], seed_a: int, seed_b: int
) -> None:
    a, b = random_bool(shape, seed_a), random_bool(shape, seed_b)
    mask_a, mask_b = Mask.from_bool(a), Mask.from_bool(b)
    equal = torch.equal(a, b)
    assert (mask_a == mask_b) is equal
    assert (mask_a.fingerprint() == mask_b.fingerprint()) is equal
    assert len({mask_a, mask_b}) == 2 - equal


def test_masks_of_other_shapes_are_not_equal() -> None:
    mask = Mask.from_bool(random_bool((4, 6)))
    assert mask != Mask.from_bool(random_bool((4, 6)).view(6, 4))
    assert mask != "a mask"
    assert mask.fingerprint() != Mask(mask.shape[::-1], mask.words).fingerprint()


@given(shapes, seeds)
def test_zero_clears_the_pruned_entries_and_touches_no_other(
    shape: tuple[int, ...], seed: int
) -> None:
    keep = random_bool(shape, seed)
    dense = torch.randn(shape)
    expected = torch.where(keep, dense, 0)
    assert Mask.from_bool(keep).zero_(dense) is dense
    assert torch.equal(dense, expected)


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


def test_a_mask_counts_its_bytes() -> None:
    mask = Mask.from_bool(random_bool((100, 100)))
    assert mask.nbytes == 2 * 157 * 4 + 5 * 8  # 157 pairs of words, 5 blocks


def test_a_mask_is_shown_with_shape_and_counts() -> None:
    mask = Mask.from_bool(torch.arange(5000).view(50, 100) < 1250)
    assert repr(mask) == "Mask(50x100, 1,250 of 5,000 kept, sparsity 0.750)"
    assert repr(Mask.from_bool(torch.tensor(True))).startswith("Mask(scalar, 1 of 1")


def test_moving_a_mask_to_where_it_is_gives_the_mask() -> None:
    mask = Mask.from_bool(random_bool((5, 5)))
    assert mask.to("cpu") is mask
    assert two_masks().to("cpu") == two_masks()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
def test_a_mask_of_something_else_than_booleans_is_refused(dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("numel", [1, 31, 32, 33, 63, 65, 100])
@pytest.mark.parametrize("place", ["first", "last"])
def test_bits_past_the_last_weight_are_refused(numel: int, place: str) -> None:
    mask = Mask.from_bool(torch.ones(numel, dtype=torch.bool))
    bit = numel if place == "first" else 32 * mask.words.numel() - 1
    words = mask.words.clone().view(torch.uint8)
    words[bit // 8] |= 1 << bit % 8
    message = rf"a mask of {numel} weights has bits set past its last weight; .*from_bool"
    with pytest.raises(ValueError, match=message):
        Mask((numel,), words.view(torch.int32))


@pytest.mark.parametrize("operation", ["__and__", "__or__", "__xor__", "hamming", "distance"])
def test_masks_of_other_shapes_do_not_mix(operation: str) -> None:
    a, b = Mask.from_bool(random_bool((4, 6))), Mask.from_bool(random_bool((6, 4)))
    with pytest.raises(MaskError, match=r"shape \(4, 6\) but the other side has \(6, 4\); build"):
        getattr(a, operation)(b)


def test_zero_refuses_a_tensor_of_another_shape() -> None:
    with pytest.raises(MaskError, match=r"shape \(4, 6\) but the other side has \(24,\)"):
        Mask.from_bool(random_bool((4, 6))).zero_(torch.ones(24))


# The masks of a model


def test_masks_are_a_mapping_in_the_order_given() -> None:
    masks = two_masks()
    assert list(masks) == ["layers.0.weight", "layers.1.weight"]
    assert len(masks) == 2
    assert "layers.0.weight" in masks
    assert "layers.0.bias" not in masks
    assert masks.get("layers.0.bias") is None


def test_masks_add_up_their_counts() -> None:
    masks = two_masks()
    kept = sum(mask.kept for mask in masks.values())
    assert (masks.numel, masks.kept) == (1577, kept)
    assert masks.sparsity == 1 - kept / 1577
    assert repr(masks).startswith(f"Masks(2 tensors, {kept} of 1,577 weights kept, sparsity 0.")


def test_no_masks_at_all_are_fine() -> None:
    none = Masks({})
    assert (none.numel, none.kept, none.sparsity) == (0, 0, 0)
    assert none.hamming(none) == none.distance(none) == 0


def test_an_unknown_name_is_a_key_error_with_the_nearest_name() -> None:
    with pytest.raises(KeyError, match=r"no mask for 'layer.0.weight' \(did you mean 'layers.0"):
        two_masks()["layer.0.weight"]


@given(seeds, seeds)
def test_masks_compare_as_one_long_mask(seed_a: int, seed_b: int) -> None:
    def build(seed: int) -> tuple[Masks, Mask]:
        parts = [random_bool((n,), seed + n, 0.3) for n in (70, 130)]
        masks = Masks({str(i): Mask.from_bool(part) for i, part in enumerate(parts)})
        return masks, Mask.from_bool(torch.cat(parts))

    (a, long_a), (b, long_b) = build(seed_a), build(seed_b)
    assert a.hamming(b) == long_a.hamming(long_b)
    assert a.distance(b) == long_a.distance(long_b)
    assert (a & b).kept == (long_a & long_b).kept
    assert (a | b).kept == (long_a | long_b).kept


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
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    keep = random_bool((8, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Masks({"1.weight": Mask.from_bool(keep)}).apply_(model)
    before["1.weight"] = torch.where(keep, before["1.weight"], 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_apply_clears_a_tied_weight_under_either_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    Masks({"b.weight": Mask.from_bool(torch.eye(4, dtype=torch.bool))}).apply_(model)
    assert model.get_parameter("a.weight").count_nonzero() == 4


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


def test_from_zeros_reads_off_what_is_not_zero() -> None:
    keep = [random_bool((30, 50)), random_bool((20, 30), density=0.2)]
    masks = Masks.from_zeros(model_with_zeros(*keep))
    assert [masks[f"{i}.weight"].to_bool().equal(keep[i]) for i in range(2)] == [True, True]


def test_from_zeros_takes_minus_zero_as_pruned_and_nan_as_kept() -> None:
    model = model_with_zeros(torch.ones(1, 4, dtype=torch.bool))
    model[0].weight.data = torch.tensor([[0.0, -0.0, float("nan"), 1e-45]])
    expected = torch.tensor([[False, False, True, True]])
    assert Masks.from_zeros(model)["0.weight"] == Mask.from_bool(expected)


def test_from_zeros_leaves_out_tensors_with_few_zeros_and_what_is_skipped() -> None:
    keep = [random_bool((100, 100), density=density) for density in (0.98, 0.5, 0.5)]
    model = model_with_zeros(*keep)
    assert list(Masks.from_zeros(model, skip=["2.*"])) == ["1.weight"]
    assert list(Masks.from_zeros(model, min_sparsity=0.01)) == ["0.weight", "1.weight", "2.weight"]


@pytest.mark.parametrize(("zeros", "found"), [(4, False), (5, True), (6, True)])
def test_from_zeros_takes_a_tensor_from_min_sparsity_on(zeros: int, found: bool) -> None:
    keep = [torch.arange(100).view(10, 10) >= count for count in (zeros, 50)]
    assert ("0.weight" in Masks.from_zeros(model_with_zeros(*keep))) is found


def test_from_zeros_refuses_a_dense_model_and_names_its_sparsest_weight() -> None:
    keep = [torch.arange(100).view(10, 10) >= zeros for zeros in (1, 4)]
    message = r"not pruned: its sparsest weight '1.weight' has 4.0% zeros, under min_sparsity=0.05"
    with pytest.raises(MaskError, match=message):
        Masks.from_zeros(model_with_zeros(*keep))


def test_from_zeros_refuses_a_tensor_that_is_all_zero() -> None:
    keep = [random_bool((10, 10)), torch.zeros(10, 10, dtype=torch.bool)]
    message = r"all 100 weights of '1.weight' are 0, .* skip=\['1.weight'\]"
    with pytest.raises(MaskError, match=message):
        Masks.from_zeros(model_with_zeros(*keep))


def test_from_zeros_refuses_a_skip_that_matches_nothing() -> None:
    with pytest.raises(ValueError, match=r"skip pattern '9\.\*' matches no parameter"):
        Masks.from_zeros(model_with_zeros(random_bool((4, 4))), skip=["9.*"])


def test_from_zeros_finds_a_matrix_that_has_another_name_first() -> None:
    model = nn.Module()
    model.table = nn.Parameter(torch.eye(4))
    model.layer = nn.Linear(4, 4)
    model.layer.weight = model.table
    assert Masks.from_zeros(model)["layer.weight"].kept == 4


def test_from_torch_prune_takes_the_masks_under_the_names_they_will_have() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    torch_prune.random_unstructured(model[1], "weight", amount=0.5)
    expected = model.get_buffer("1.weight_mask") != 0
    masks = Masks.from_torch_prune(model)
    assert dict(masks) == {"1.weight": Mask.from_bool(expected)}
    torch_prune.remove(model[1], "weight")
    assert list(masks.parameters_of(model)) == ["1.weight"]


def test_from_torch_prune_ignores_masks_of_something_else() -> None:
    layer = torch_prune.random_unstructured(nn.Linear(8, 8), "weight", amount=0.5)
    layer.register_buffer("attention_mask", torch.ones(3))
    assert list(Masks.from_torch_prune(layer)) == ["weight"]


def test_from_torch_prune_refuses_a_model_without_masks() -> None:
    message = r"no parameter was pruned with torch.nn.utils.prune .*'weight_mask'.*samo.prune"
    with pytest.raises(MaskError, match=message):
        Masks.from_torch_prune(nn.Linear(4, 4))


def test_from_zeros_needs_something_to_look_at() -> None:
    with pytest.raises(MaskError, match="no weight was looked for zeros"):
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


def test_set_operations_of_masks_are_those_of_each() -> None:
    a, b = two_masks(), two_masks()
    b = Masks({name: Mask.from_bool(mask.to_bool().flip(0)) for name, mask in b.items()})
    for name in a:
        of_a, of_b = a[name].to_bool(), b[name].to_bool()
        assert torch.equal((a & b)[name].to_bool(), of_a & of_b)
        assert torch.equal((a | b)[name].to_bool(), of_a | of_b)
        assert torch.equal((a ^ b)[name].to_bool(), of_a ^ of_b)
        assert torch.equal((a - b)[name].to_bool(), of_a & ~of_b)


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
    for settings in ({"sparsity": 0.75}, {"sparsity": 0.75, "scope": "erk"}, {"pattern": "1:4"}):
        assert prune(model, **settings) == prune(dense, **settings)
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
