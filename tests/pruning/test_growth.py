"""The choice of entries to drop and to grow, against sorting."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import samo
from samo.core.weight import Weight
from samo.pruning import growth as choices
from samo.pruning.growth import Growth
from tests.meters import LargestTensor
from tests.pruning.test_dynamic import build, weights_of

# Choices, against sorting


@given(st.data())
@settings(max_examples=60)
def test_choices_are_those_of_sorting(data: st.DataObject) -> None:
    numel = data.draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    keep = torch.rand(numel, generator=generator) < data.draw(st.floats(0, 1))
    scores = torch.randperm(numel, generator=generator) - numel / 2 + 0.25  # no two of one size
    mask = samo.Mask.from_bool(keep)
    free = numel - mask.kept
    count = data.draw(st.integers(0, free))
    grown = choices.grow_largest("a", scores, mask, count, seed=1)
    order = scores.abs().masked_fill(keep, -1).argsort(descending=True)[:count]
    assert torch.equal(
        grown.to_bool(), torch.zeros(numel, dtype=torch.bool).scatter(0, order, True)
    )

    drawn = choices.grow_random("a", mask, count, seed=1)
    assert drawn.kept == count
    assert (drawn & mask).kept == 0
    assert drawn == choices.grow_random("a", mask, count, seed=1)

    kept = data.draw(st.integers(0, mask.kept))
    pruned = choices.prune_to("a", mask, scores[keep], kept, seed=1)
    order = scores.abs().masked_fill(~keep, -1).argsort(descending=True)[:kept]
    assert torch.equal(
        pruned.to_bool(), torch.zeros(numel, dtype=torch.bool).scatter(0, order, True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_entries_that_are_taken_rank_below_zero_gradients(dtype: torch.dtype) -> None:
    mask = samo.Mask.from_bool(torch.tensor([True, True, False, False, False, True]))
    scores = torch.tensor([9.0, math.nan, 0, 1, 0, math.inf], dtype=dtype)
    grown = choices.grow_largest("a", scores, mask, 3, seed=0)
    assert grown.to_bool().tolist() == [False, False, True, True, True, False]
    tiny = torch.arange(6.0, dtype=torch.float64) * 1e-60
    assert choices.grow_largest("a", tiny, mask, 1, seed=0).to_bool().nonzero() == 4


def test_random_growth_is_uniform_over_seeds() -> None:
    mask = samo.Mask.from_bool(torch.arange(64) < 32)
    counts = sum(choices.grow_random("a", mask, 8, seed).to_bool().int() for seed in range(100))
    assert not counts[:32].any()
    assert counts[32:].float().mean() == 25
    assert 8 < counts[32:].min() < counts[32:].max() < 45  # 25 expected, standard deviation 4.3


def part(weight: Weight, growth: Growth, grad: list[float], *, is_first: bool = False) -> None:
    weight.values.grad = None if is_first else torch.ones_like(weight.values)
    growth.add(torch.tensor([grad]))


def test_parts_of_a_gradient_are_summed_from_the_first_in_which_an_entry_is_large() -> None:
    model = nn.Sequential(nn.Linear(6, 1, bias=False))
    samo.compress_(
        model,
        samo.Masks({"0.weight": samo.Mask.from_bool(torch.tensor([[True] * 2 + [False] * 4]))}),
    )
    weight = weights_of(model)["0.weight"]
    with torch.no_grad():
        weight.values.copy_(torch.tensor([5.0, 1.0]))
    growth = Growth(weight, 0.5, seed=0, candidates=1)
    assert growth.decide() is None
    part(weight, growth, [9, 9, 3, 0, 2, 0], is_first=True)
    assert growth.decide().to_bool().tolist() == [[True, True] + [False] * 4]  # its own place
    part(weight, growth, [9, 0, 3, 0, 2, 0], is_first=True)  # a new sum
    assert growth.decide().to_bool().tolist() == [[True, False, True] + [False] * 3]
    part(weight, growth, [9, 0, -3, 1, 2, 0])  # the candidate is at 0, the fifth enters with 2
    assert growth.decide().to_bool().tolist() == [[True] + [False] * 3 + [True, False]]
    part(weight, growth, [9, 0, 0, float("inf"), 0, 0])
    assert not growth.is_finite


def test_a_mask_that_changed_in_between_is_left_alone_until_there_is_a_new_gradient() -> None:
    model = build()
    weight = weights_of(model)["0.weight"]
    growth = Growth(weight, 0.3, seed=0)
    growth.add(torch.randn(64, 40))
    assert growth.decide() is not None
    samo.remap_(model, samo.prune(model, 0.95))
    assert growth.decide() is None
    growth.add(torch.randn(64, 40))
    decided = growth.decide()
    assert decided is not None
    assert decided.kept == weight.kept


def test_nothing_as_large_as_a_large_weight_is_made_to_choose_its_entries() -> None:
    model = nn.Sequential(nn.Linear(2048, 1024, bias=False))
    samo.compress_(model, samo.prune(model, 0.95, method="random"))
    weight = weights_of(model)["0.weight"]
    growth = Growth(weight, 0.3, seed=0)
    grad = torch.randn(1024, 2048)
    with LargestTensor() as meter:
        growth.add(grad)
        weight.values.grad = torch.ones_like(weight.values)
        growth.add(grad)
        decided = growth.decide()
    assert decided is not None
    assert 0 < meter.numel <= 2**20 < weight.shape.numel()
