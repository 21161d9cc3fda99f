"""Masks against plain boolean tensors."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

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
    keep = [random_bool((30, 50), seed=1), random_bool((7, 11), seed=2, density=0.1)]
    return Masks({f"layers.{i}.weight": Mask.from_bool(part) for i, part in enumerate(keep)})


# One mask


@given(shapes, seeds, densities, densities)
def test_operations_are_those_of_booleans(
    shape: tuple[int, ...], seed: int, density_a: float, density_b: float
) -> None:
    a, b = random_bool(shape, seed, density_a), random_bool(shape, seed + 1, density_b)
    mask_a, mask_b = Mask.from_bool(a), Mask.from_bool(b)
    assert torch.equal(mask_a.to_bool(), a)
    assert (mask_a.shape, mask_a.numel, mask_a.kept) == (shape, a.numel(), int(a.sum()))
    assert mask_a.sparsity == (1 - mask_a.kept / mask_a.numel if mask_a.numel else 0)
    pairs = [(mask_a & mask_b, a & b), (mask_a | mask_b, a | b)]
    for result, expected in pairs:
        assert result == Mask.from_bool(expected)
        assert result.kept == expected.sum()
    assert mask_a.common(mask_b) == (a & b).sum()
    assert Mask.ones(shape) == Mask.from_bool(torch.ones(shape, dtype=torch.bool))
    equal = torch.equal(a, b)
    assert (mask_a == mask_b) is equal
    assert (mask_a.fingerprint() == mask_b.fingerprint()) is equal
    assert len({mask_a, mask_b}) == 2 - equal
    dense = torch.randn(shape)
    zeroed = torch.where(a, dense, 0)
    assert mask_a.zero_(dense) is dense
    assert torch.equal(dense, zeroed)


def test_is_zeroed_looks_at_all_pruned_entries_and_no_others() -> None:
    keep = torch.rand(1025, 1024) < 0.5  # two chunks
    keep[-1, -1] = False
    mask = Mask.from_bool(keep)
    for dense in (keep.float(), keep.float().t().contiguous().t()):
        assert mask.is_zeroed(dense)
        assert mask.is_zeroed(-torch.zeros(keep.shape))
        dense[-1, -1] = 1e-30
        assert not mask.is_zeroed(dense)


def test_zero_writes_plus_zero_over_anything_on_any_stride() -> None:
    keep = random_bool((1025, 1024))  # two chunks
    gone = torch.tensor([-0.0, float("nan"), float("inf")]).repeat(2**20)[: (~keep).sum()]
    whole, turned, wide = torch.empty(1025, 1024), torch.empty(1024, 1025), torch.empty(1025, 2048)
    for dense in (whole, turned.t(), wide[:, ::2]):
        dense.fill_(-1.0)
        dense[~keep] = gone
        Mask.from_bool(keep).zero_(dense)
        assert torch.equal(dense, -keep.float())
        assert not dense[~keep].signbit().any()


def test_a_part_is_the_mask_of_an_entry_of_the_first_dimension() -> None:
    keep = random_bool((3, 64, 64))  # two blocks each
    for index in (0, 2, -1):
        part = Mask.from_bool(keep).part(index)
        assert part is not None
        first, mask = part
        assert first == keep[: index % 3].sum()
        assert torch.equal(mask.to_bool(), keep[index])
    assert Mask.from_bool(keep).part(3) is None
    assert Mask.from_bool(keep[:, :, :50]).part(0) is None  # cuts a block


def test_a_mask_owns_its_bits_and_gives_them_in_one_tensor() -> None:
    mask = Mask.from_bool(torch.arange(5000).view(50, 100) < 1250)
    assert repr(mask) == "Mask(50x100, 1,250 of 5,000 kept, sparsity 0.750)"
    assert mask.nbytes == 2 * 79 * 4 + 3 * 8  # 79 pairs of words, 3 blocks
    assert mask.to("cpu") is mask
    again = Mask.from_packed(mask.shape, mask.packed, mask.kept)
    assert again == mask
    assert torch.equal(again.offsets, mask.offsets)
    words = torch.zeros(2, dtype=torch.int32)
    mask = Mask((64,), words)
    words.fill_(-1)
    assert not mask.to_bool().any()


def test_words_that_are_no_mask_are_refused() -> None:
    with pytest.raises(TypeError, match=r"boolean tensor, got torch.uint8.*scores > threshold"):
        Mask.from_bool(torch.ones(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"a mask cannot have shape \(-1,\)"):
        Mask((-1,), torch.empty(0, dtype=torch.int32))
    for words in (torch.zeros(2).int(), torch.zeros(4).long(), torch.zeros(2, 2).int()):
        with pytest.raises(ValueError, match=r"a mask of 100 weights needs 4 int32 words, got"):
            Mask((10, 10), words)


@pytest.mark.parametrize("numel", [1, 31, 32, 63, 65])
def test_bits_past_the_last_weight_are_refused(numel: int) -> None:
    mask = Mask.ones((numel,))
    for bit in (numel, 32 * mask.words.numel() - 1):
        words = mask.words.clone().view(torch.uint8)
        words[bit // 8] |= 1 << bit % 8
        with pytest.raises(ValueError, match=rf"{numel} weights has bits set past its last"):
            Mask((numel,), words.view(torch.int32))


@pytest.mark.parametrize("operation", ["__and__", "__or__", "common", "zero_", "is_zeroed"])
def test_other_shapes_do_not_mix(operation: str) -> None:
    mask = Mask.from_bool(random_bool((4, 6)))
    other = (
        torch.ones(6, 4)
        if operation.startswith(("zero", "is"))
        else Mask.from_bool(random_bool((6, 4)))
    )
    with pytest.raises(MaskError, match=r"shape \(4, 6\), the other operand has \(6, 4\)"):
        getattr(mask, operation)(other)


# The masks of a model


def test_masks_are_a_mapping_with_counts() -> None:
    masks = two_masks()
    assert list(masks) == ["layers.0.weight", "layers.1.weight"]
    kept = sum(mask.kept for mask in masks.values())
    assert (masks.numel, masks.kept) == (1577, kept)
    assert repr(masks).startswith(f"Masks(2 tensors, {kept} of 1,577 weights kept, sparsity 0.")
    assert masks.to("cpu") == masks
    others = Masks({name: Mask.from_bool(random_bool(m.shape, 9)) for name, m in masks.items()})
    assert masks & others == Masks({name: mask & others[name] for name, mask in masks.items()})
    none = Masks({})
    assert (none.numel, none.kept, none.sparsity) == (0, 0, 0)
    with pytest.raises(MaskError, match=r"only one of the two has a mask for 'layers\.0\.weight'"):
        _ = masks & none
    with pytest.raises(TypeError, match=r"mask of 'weight' is a Tensor; .*Mask\.from_bool\(tensor"):
        Masks({"weight": torch.ones(8, 8, dtype=torch.bool)})  # type: ignore[dict-item]


def test_the_fingerprint_depends_on_names_and_bits_but_not_on_order() -> None:
    (a, b), (one, two) = two_masks().keys(), two_masks().values()
    pairs = [{a: one, b: two}, {b: two, a: one}, {a: two, b: one}, {a: one, "c": two}]
    first, backwards, swapped, renamed = (Masks(pair).fingerprint() for pair in pairs)
    assert first == backwards
    assert len({first, swapped, renamed}) == 3


def test_apply_clears_the_pruned_weights_of_a_model_and_no_others() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[1].weight
    keep = random_bool((8, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Masks({"2.weight": Mask.from_bool(keep)}).apply_(model)  # its other name
    before["1.weight"] = before["2.weight"] = torch.where(keep, before["1.weight"], 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_masks_that_do_not_fit_are_refused() -> None:
    masks = Masks({"0.wieght": two_masks()["layers.1.weight"], **two_masks()})
    with pytest.raises(MaskError, match=r"3 of 3 masks name no .*, first '0.wieght'.*'0\.weight'"):
        masks.apply_(nn.Sequential(nn.Linear(11, 7)))
    masks = Masks({"weight": two_masks()["layers.1.weight"]})
    with pytest.raises(MaskError, match=r"has shape \(7, 11\), the parameter has \(11, 7\); build"):
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
    with pytest.raises(MaskError, match=r"the sparsest of 2 tensors has 4 % zeros, less than 5 %"):
        Masks.from_zeros(model_with_zeros(*keep[:2]))
    with pytest.raises(MaskError, match=r"all 100 weights of '1.weight' are 0, .* skip=\['1.we"):
        Masks.from_zeros(model_with_zeros(keep[0], keep[2]))
    with pytest.raises(ValueError, match=r"skip pattern '9\.\*' matches no parameter"):
        Masks.from_zeros(model_with_zeros(keep[0]), skip=["9.*"])
    with pytest.raises(MaskError, match="not pruned: the sparsest of 0 tensors"):
        Masks.from_zeros(nn.Embedding(4, 4))


def test_from_zeros_sees_a_pruned_head_and_passes_over_one_that_starts_at_zero() -> None:
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("body", "head", "lm_head")})
    with torch.no_grad():
        model["body"].weight[:4] = 0
        model["head"].weight[:, :4] = 0
        model["lm_head"].weight.zero_()
    assert sorted(Masks.from_zeros(model)) == ["body.weight", "head.weight"]


def test_masks_of_ones_are_for_what_would_be_pruned() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    assert list(Masks.ones(model)) == ["1.weight", "2.weight"]
    assert list(Masks.ones(model, skip=["2.*"])) == ["1.weight"]


# Compressed models, whose parameters are 1-D


def tied_experts() -> nn.Module:
    model = nn.ModuleDict({"experts": nn.Module(), "a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})
    model["experts"].up = nn.Parameter(torch.randn(2, 8, 12))
    model["experts"].is_transposed = True  # type: ignore[assignment]
    model["b"].weight = model["a"].weight
    return model


def test_masks_of_a_compressed_model_are_made_as_of_a_dense_one() -> None:
    dtype = torch.bfloat16
    model = tied_experts()
    first = prune(model, 0.5)
    assert list(first) == ["experts.up", "a.weight"]
    compress_(model, first, dtype=dtype)
    assert prunable(model) == list(first)
    dense = tied_experts().to(dtype)
    dense.load_state_dict(dense_state_dict(model, dtype=dtype))
    for how in ({"sparsity": 0.75}, {"sparsity": 0.75, "scope": "erk"}, {"pattern": "1:4"}):
        assert prune(model, **how) == prune(dense, **how)
    assert Masks.ones(model) == Masks.ones(dense)
    assert Masks.from_zeros(model) == first
    shapes = [tuple(weight.shape) for weight in first.parameters_of(model).values()]
    assert shapes == [(2, 8, 12), (4, 8)]
    with pytest.raises(MaskError, match=r"'a.weight' has shape \(8, 4\), the parameter has \(4, 8"):
        Masks({"a.weight": Mask.ones((8, 4))}).parameters_of(model)


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
