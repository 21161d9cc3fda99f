"""Gradual pruning, SET and RigL on compressed state, against plain versions on dense tensors."""

import copy
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samo
from samo.core.compress import masks as masks_in, named_weights
from samo.core.weight import Weight
from samo.pruning import growth as choices, schedules
from samo.pruning.dynamic import _pattern_of
from samo.pruning.growth import Growth
from tests.meters import DenseGradients, LargestTensor, small_gpt, tokens
from tests.ranks import run_ranks

NAMES = ("0.weight", "2.weight")


def build(sparsity: float | None = 0.8, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 9))
    if sparsity is None:
        masks = samo.Masks.whole(model)
    else:
        masks = samo.prune(model, sparsity, method="random")
    return samo.compress_(model, masks, dtype=dtype, kernels="reference")


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: mask.to_bool() for name, mask in masks_in(model).items()}


def weights_of(model: nn.Module) -> dict[str, Weight]:
    return dict(named_weights(model))


def dense_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the dense weights."""
    return {name: model.get_submodule(name[0]).weight.detach().clone() for name in NAMES}


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).float().square().mean().backward()


def dense_gradients(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the same weights in an ordinary model."""
    dense = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 9))
    dense.load_state_dict(samo.dense_state_dict(model))
    for x in batches:
        backward(dense, x)
    return {name: gradient_of(dense, name) for name in NAMES}


def gradient_of(model: nn.Module, name: str) -> Tensor:
    grad = model.get_parameter(name).grad
    assert grad is not None
    return grad


# Schedules


def test_schedules_are_those_of_the_papers() -> None:
    for step in range(10, 111):
        expected = 0.95 + (0.2 - 0.95) * (1 - (step - 10) / 100) ** 3
        assert schedules.cubic_sparsity(step, 10, 110, 0.2, 0.95) == pytest.approx(expected)
        expected = 0.4 / 2 * (1 + math.cos(step * math.pi / 200))
        assert schedules.cosine_fraction(step, 200, 0.4) == pytest.approx(expected)
    assert schedules.cubic_sparsity(0, 10, 110, 0.2, 0.95) == pytest.approx(0.2)
    assert schedules.cubic_sparsity(500, 10, 110, 0.2, 0.95) == 0.95


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


# Gradual pruning


def test_gradual_pruning_keeps_the_largest_of_what_was_kept() -> None:
    model = build(None)
    opt = samo.AdamW(model.parameters(), lr=1e-2)
    pruning = samo.GradualPruning(model, opt, 0.9, start=4, stop=27, every=5, initial=0.3)
    kept = masks_of(model)
    changes = []
    for step in range(1, 31):
        backward(model, torch.randn(8, 40))
        opt.step()
        opt.zero_grad()
        before = dense_of(model)
        masks = pruning.step()
        if masks is None:
            continue
        changes.append(step)
        for name in NAMES:
            part = min(1.0, (step - 4) / 23)
            numel = before[name].numel()
            count = numel - round(numel * (0.9 + (0.3 - 0.9) * (1 - part) ** 3))
            score = before[name].abs().masked_fill(~kept[name], -1).view(-1)
            expected = torch.zeros(numel, dtype=torch.bool)
            expected[score.argsort(descending=True)[:count]] = True
            kept[name] = expected.view_as(before[name])
            assert torch.equal(masks[name].to_bool(), kept[name])
            assert torch.equal(dense_of(model)[name], before[name] * kept[name])
    assert changes == [4, 9, 14, 19, 24, 27]


def test_a_model_that_is_sparser_than_the_schedule_waits_for_it() -> None:
    model = build(0.8)
    opt = samo.AdamW(model.parameters())
    pruning = samo.GradualPruning(model, opt, 0.9, start=0, stop=10, every=1)
    masks = [pruning.step() for _ in range(10)]
    assert [found is not None for found in masks].index(True) == 5  # 0.9 * (1 - 0.4**3) = 0.84
    assert masks[-1] is not None
    assert masks[-1].sparsity == pytest.approx(0.9, abs=1e-3)


def test_a_model_sparser_than_the_final_sparsity_is_refused() -> None:
    model = build(0.9)
    opt = samo.AdamW(model.parameters())
    with pytest.raises(
        samo.MaskError, match=r"sparser already \(0\.900, in every tensor\) than sparsity 0\.5, so"
    ):
        samo.GradualPruning(model, opt, sparsity=0.5, start=1, stop=10, every=2)
    samo.GradualPruning(model, opt, sparsity=0.9, start=1, stop=10, every=2)  # as in a resumed run
    mixed = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    samo.compress_(mixed, samo.prune(mixed, 0.9, rules={"2.weight": 0.25}))
    opt = samo.AdamW(mixed.parameters())
    masks = samo.GradualPruning(mixed, opt, 0.5, start=0, stop=1, every=1).step()
    assert masks is not None
    assert [round(mask.sparsity, 3) for mask in masks.values()] == [0.9, 0.5]


def test_a_resumed_gradual_pruning_keeps_counting_and_catches_up_after_the_stop() -> None:
    model = build(None)
    opt = samo.AdamW(model.parameters())
    settings = {"sparsity": 0.9, "start": 0, "stop": 10, "every": 5, "initial": 0.5}
    first, second, late = (samo.GradualPruning(model, opt, **settings, seed=n) for n in (5, 6, 7))
    assert [n for n in range(1, 5) if first.step() is not None] == []  # at step `every` first
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.state_dict()["seed"] == 5
    masks = second.step()
    assert masks is not None
    assert masks.sparsity == pytest.approx(0.85, abs=1e-3)
    late.load_state_dict({**first.state_dict(), "steps": 15})
    masks = late.step()
    assert masks is not None
    assert masks.sparsity == pytest.approx(0.9, abs=1e-3)
    assert late.step() is None


# Dynamic masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_set_drops_the_smallest_and_grows_at_random(dtype: torch.dtype) -> None:
    model = build(dtype=dtype)
    opt = samo.AdamW(model.parameters(), lr=1e-2, entry_steps=True)
    moving = samo.DynamicSparse(model, opt, drop=0.4, every=3, stop=10)
    for step in range(1, 13):
        backward(model, torch.randn(8, 40, dtype=dtype))
        opt.step()
        opt.zero_grad()
        before = masks_of(model)
        dense = {name: torch.zeros(before[name].shape) for name in NAMES}
        for name in NAMES:
            dense[name][before[name]] = model.get_parameter(name).detach()
        masks = moving.step()
        assert (masks is not None) == (step in (3, 6, 9))
        for name in NAMES if masks is not None else ():
            count = round(0.4 / 2 * (1 + math.cos(step * math.pi / 10)) * int(before[name].sum()))
            after = masks[name].to_bool()
            assert after.sum() == before[name].sum()
            score = dense[name].abs().masked_fill(~before[name], -1).view(-1)
            cut = score.sort(descending=True)[0][int(before[name].sum()) - count - 1]
            assert after.view(-1)[score > cut].all()  # late entries often have equal magnitudes
            new = after & ~before[name]
            assert 0 < new.sum() <= count
            assert not dense_of(model)[name][new].any()
            ages = torch.full(after.shape, -1, dtype=torch.int16)
            ages[after] = opt.state[model.get_parameter(name)]["age"]
            assert (ages[new] == 0).all()
            assert (ages[after & before[name]] > 0).all()


def rigl_retold(weight: Tensor, kept: Tensor, grad: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Drop the smallest, then grow the largest gradients among all that are not kept any more."""
    score = weight.abs().masked_fill(~kept, -1).view(-1)
    survivors = torch.zeros(weight.numel(), dtype=torch.bool)
    survivors[score.argsort(descending=True)[: int(kept.sum()) - count]] = True
    score = grad.abs().view(-1).masked_fill(survivors, -1)
    grown = torch.zeros(weight.numel(), dtype=torch.bool)
    grown[score.argsort(descending=True)[:count]] = True
    return survivors.view_as(weight), (survivors | grown).view_as(weight)


def test_rigl_decides_as_its_dense_retelling() -> None:
    model = build()
    # Adam's first updates are all of one size, and equals are told apart by a hash.
    opt = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    moving = samo.DynamicSparse(model, opt, grow="gradient", drop=0.5, every=4, stop=14)
    changes = []
    for step in range(1, 18):
        x = torch.randn(8, 40)
        gradients = dense_gradients(model, [x])
        before = dense_of(model)
        kept = masks_of(model)
        backward(model, x)
        opt.step()
        opt.zero_grad()
        stepped = dense_of(model)
        masks = moving.step()
        if masks is None:
            continue
        changes.append(step)
        for name in NAMES:
            count = round(0.25 * (1 + math.cos(step * math.pi / 14)) * int(kept[name].sum()))
            _, expected = rigl_retold(before[name], kept[name], gradients[name], count)
            assert torch.equal(masks[name].to_bool(), expected), (step, name)
            # what was dropped and chosen again has stayed as it was
            assert torch.equal(dense_of(model)[name], stepped[name] * expected)
    assert changes == [4, 8, 12]


def grown_by_parts(num_parts: int, candidates: int | None) -> float:
    """Return which part of the entries that the exact sum of micro-batches grows is grown."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 64))
    dense, target = copy.deepcopy(model), nn.Linear(128, 64).requires_grad_(False)
    samo.compress_(model, samo.prune(model, 0.9, method="random"))
    dense.load_state_dict(samo.dense_state_dict(model))
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(
        model, opt, grow="gradient", every=1, stop=10**6, candidates=candidates
    )
    weight = weights_of(model)["0.weight"]
    kept, before = weight.mask.to_bool(), model[0].weight.detach().clone()
    model(10 * torch.randn(32, 128)).square().mean().backward()
    model.zero_grad()  # not a step: those gradients are gone, and so are their scores
    for x in torch.randn(32, 128).chunk(num_parts):
        for each in (model, dense):
            (each(x) - target(x)).square().mean().backward()
    count = round(0.3 * int(kept.sum()))
    survivors, expected = rigl_retold(before, kept, gradient_of(dense, "0.weight"), count)
    masks = moving.step()
    assert masks is not None
    wanted, got = expected & ~survivors, masks["0.weight"].to_bool() & ~survivors
    assert got.sum() == wanted.sum() == count
    return float((got & wanted).sum()) / count


@pytest.mark.parametrize(("num_parts", "least"), [(1, 1.0), (8, 0.62)])
def test_micro_batches_add_up_and_an_earlier_step_leaves_nothing_behind(
    num_parts: int, least: float
) -> None:
    """Micro-batches of different inputs: exact for one, and for all entries as candidates."""
    assert grown_by_parts(num_parts, 4) >= least
    assert grown_by_parts(num_parts, None) >= 0.999  # sums in another order round otherwise


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


@pytest.mark.parametrize("candidates", [None, 16])
def test_a_tied_weight_counts_all_its_uses(candidates: int | None) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(20, 20, bias=False)
            self.b = nn.Linear(20, 20, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(x) + self.a(x.flip(1))  # two gradients

    torch.manual_seed(3)
    model = samo.compress_(Twice(), samo.prune(Twice(), 0.8, method="random"))
    kept = masks_in(model)["a.weight"].to_bool()
    before = model.a.weight.detach().clone()
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(
        model, opt, grow="gradient", every=1, stop=10, candidates=candidates
    )
    x = torch.randn(8, 20)
    dense = nn.Linear(20, 20, bias=False)
    dense.weight.data.copy_(before)
    (dense(x) + dense(x.flip(1))).square().mean().backward()
    model(x).square().mean().backward()
    masks = moving.step()
    count = round(0.15 * (1 + math.cos(math.pi / 10)) * 80)
    assert torch.equal(
        masks["a.weight"].to_bool(), rigl_retold(before, kept, dense.weight.grad, count)[1]
    )


@pytest.mark.parametrize("style", ["tied", "checkpointed", "reentrant"])
def test_rigl_holds_at_most_the_largest_dense_gradient(style: str) -> None:
    model = small_gpt(is_tied=style == "tied", is_checkpointed=style == "checkpointed")
    if style == "reentrant":
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=True)
    masks = samo.prune(model, sparsity=0.9)
    samo.compress_(model, masks)
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(model, opt, grow="gradient", every=1, stop=10)
    weights = [weight.detach() for weight in masks.parameters_of(model).values()]
    largest = max(weight.nbytes for weight in weights)
    batch = tokens()
    for _ in range(2):
        with DenseGradients(weights, model.parameters()) as meter:
            for _ in range(2):
                model(batch, batch).backward()
        opt.step()
        opt.zero_grad()
        with DenseGradients(weights) as choosing:
            assert moving.step() is not None
        assert 0 < meter.peak_bytes <= largest
        assert choosing.peak_bytes == 0
    assert {name: mask.kept for name, mask in masks_in(model).items()} == {
        name: mask.kept for name, mask in masks.items()
    }


@pytest.mark.parametrize("kind", ["samo", "torch"])
def test_float16_gradients_that_overflow_leave_the_masks_alone(kind: str) -> None:
    model = build(dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    make = samo.AdamW if kind == "samo" else torch.optim.AdamW
    opt = make(model.parameters())
    moving = samo.DynamicSparse(model, opt, grow="gradient", every=1, stop=9)
    before = masks_of(model)
    for scale in (1e30, 1.0):
        loss = model(torch.randn(8, 40).half()).float().square().mean()
        (scaler.scale(loss) * scale).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert (moving.step() is None) == (scale > 1)
        same = all(torch.equal(mask, before[name]) for name, mask in masks_of(model).items())
        assert same == (scale > 1)


def test_weights_are_watched_in_the_step_of_a_replacement_alone() -> None:
    model = build()
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(model, opt, grow="gradient", every=3, stop=7)
    watched = []
    for _ in range(10):
        watched.append([len(weights_of(model)[name].layout.watchers) for name in NAMES])
        backward(model, torch.randn(8, 40))
        moving.step()
    assert watched == [[int(step in (2, 5))] * 2 for step in range(10)]
    moving.detach()
    moving = samo.DynamicSparse(model, opt, grow="gradient", every=1, stop=9)
    assert len(weights_of(model)["0.weight"].layout.watchers) == 1
    assert not weights_of(copy.deepcopy(model))["0.weight"].layout.watchers
    del moving
    assert not weights_of(model)["0.weight"].layout.watchers


@pytest.mark.parametrize("grow", ["random", "gradient"])
def test_a_resumed_run_is_bit_for_bit_the_same(grow: Any, tmp_path: Path) -> None:
    def start(model: nn.Module) -> tuple[samo.AdamW, samo.DynamicSparse]:
        opt = samo.AdamW(model.parameters(), lr=1e-2, entry_steps=True)
        return opt, samo.DynamicSparse(model, opt, grow=grow, every=2, stop=30, seed=7)

    def run(model: nn.Module, opt: samo.AdamW, moving: samo.DynamicSparse, first: int) -> None:
        for step in range(first, first + 5):
            backward(model, torch.randn(8, 40, generator=torch.Generator().manual_seed(step)))
            opt.step()
            opt.zero_grad()
            moving.step()

    model = build()
    opt, moving = start(model)
    run(model, opt, moving, 0)
    samo.save(tmp_path / "at", model, opt, extra={"moving": moving.state_dict()})
    run(model, opt, moving, 5)

    again = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 9))
    samo.compress_(again, samo.load_masks(tmp_path / "at"), kernels="reference")
    again_opt, again_moving = start(again)
    extra = samo.load(tmp_path / "at", again, again_opt)
    again_moving.load_state_dict(extra["moving"])
    run(again, again_opt, again_moving, 5)
    assert again_moving.state_dict() == moving.state_dict()
    assert (moving.state_dict()["steps"], moving.state_dict()["seed"]) == (10, 7)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_growing_by_gradient_needs_a_backward_pass() -> None:
    model = build()
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(model, opt, grow="gradient", every=1, stop=10)
    with pytest.raises(samo.CompressionError, match="step 1 grows entries by their gradients"):
        moving.step()
    backward(model, torch.randn(8, 40))
    assert moving.step() is not None  # the failed step did not count
    moving.detach()
    with pytest.raises(samo.CompressionError, match="this DynamicSparse is detached"):
        moving.step()


# Which weights and masks


def two_layers(sparsity: float = 0.9) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    return samo.compress_(model, samo.prune(model, sparsity))


def schedule(kind: str, model: nn.Module, opt: Any) -> Any:
    if kind == "gradual":
        return samo.GradualPruning(model, opt, 0.97, start=0, stop=1, every=1)
    return samo.DynamicSparse(model, opt, grow=kind, every=1, stop=9)  # type: ignore[arg-type]


def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 64)).square().mean().backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("kind", ["random", "gradient", "gradual"])
@pytest.mark.parametrize("why", ["frozen", "no optimizer"])
def test_weights_that_nothing_trains_keep_mask_and_values(kind: str, why: str) -> None:
    model = two_layers()
    if why == "frozen":
        model[0].requires_grad_(False)
    opt = samo.AdamW((model if why == "frozen" else model[2]).parameters())
    moving = schedule(kind, model, opt)
    before = [model[0].weight.detach().clone(), model[2].weight.detach().clone()]
    masks = None
    for _ in range(3):
        step(model, opt)
        masks = moving.step() or masks
    assert masks is not None
    assert list(masks) == ["0.weight", "2.weight"]
    assert torch.equal(model[0].weight, before[0])
    assert not torch.equal(masks["2.weight"].to_bool(), before[1] != 0)


@pytest.mark.parametrize("kind", ["random", "gradient", "gradual"])
def test_a_model_of_which_nothing_is_trained_is_refused(kind: str) -> None:
    model = two_layers()
    elsewhere = two_layers()
    other = samo.AdamW(elsewhere.parameters())
    with pytest.raises(samo.MaskError, match=r"none of the 2 tensors with a mask can change it"):
        schedule(kind, model, other)


def test_masks_with_a_structure_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    samo.compress_(model, samo.prune(model, pattern="2:4"))
    opt = samo.AdamW(model.parameters())
    with pytest.raises(samo.MaskError, match=r"the mask of '0.weight' has the pattern 2:4, which"):
        samo.DynamicSparse(model, opt, every=1, stop=9)

    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)
    model = nn.Sequential(*layers)
    kept = torch.arange(16) < 7
    ticket = samo.Masks(
        {
            "0.weight": samo.Mask.from_bool(kept.view(16, 1, 1, 1).expand(model[0].weight.shape)),
            "1.weight": samo.Mask.from_bool(kept),
            "1.bias": samo.Mask.from_bool(kept),
            "3.weight": samo.Mask.from_bool(kept.view(1, 16, 1, 1).expand(model[3].weight.shape)),
        }
    )
    samo.compress_(model, ticket)
    opt = samo.AdamW(model.parameters())
    with pytest.raises(samo.MaskError, match=r"'1.weight' keeps 7 of 16 channels, and entries"):
        samo.DynamicSparse(model, opt, every=1, stop=9)
    pruning = samo.GradualPruning(model, opt, 0.9, start=0, stop=1, every=1)
    masks = pruning.step()  # entries are only dropped, and scales are no matrices
    assert masks is not None
    assert masks["1.weight"] == ticket["1.weight"]
    assert masks["1.bias"] == ticket["1.bias"]
    assert (masks & ticket) == masks
    assert masks["0.weight"] != ticket["0.weight"]


@pytest.mark.parametrize("pattern", ["2:4", "1:16"])
@pytest.mark.parametrize("layer", [nn.Linear(64, 48), nn.Conv2d(32, 8, 3)], ids=["linear", "conv"])
def test_patterns_are_told_from_random_masks(pattern: str, layer: nn.Module) -> None:
    kept, group = map(int, pattern.split(":"))
    drawn = samo.prune(layer, pattern=pattern)["weight"]
    assert _pattern_of(drawn, 1) == pattern
    like = samo.prune(layer, 1 - kept / group, method="random")["weight"]
    assert _pattern_of(like, 1) is None
    assert _pattern_of(samo.Mask.whole(drawn.shape), 1) is None


@pytest.mark.parametrize("grow", ["random", "gradient"])
@pytest.mark.parametrize("is_deleted", [True, False])
def test_one_object_moves_the_masks_of_a_weight(grow: Any, is_deleted: bool) -> None:
    model = two_layers()
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(model, opt, grow=grow, every=1, stop=9)
    with pytest.raises(
        samo.CompressionError, match=r"another DynamicSparse already moves the mask of '0.weight'"
    ):
        samo.DynamicSparse(model, opt, every=2, stop=9)
    step(model, opt)
    assert moving.step() is not None
    twin = copy.deepcopy(model)  # nothing moves the masks of the copy yet
    samo.DynamicSparse(twin, samo.AdamW(twin.parameters()), every=2, stop=9)
    if is_deleted:
        del moving
    else:
        moving.detach()
    samo.DynamicSparse(model, opt, every=2, stop=9)


# What the weights are


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_written_to_the_model_are_what_is_compared(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    samo.compress_(model, samo.Masks.whole(model), dtype=dtype)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    pruning = samo.GradualPruning(model, opt, 0.5, start=0, stop=1, every=1)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(64, 64))
    expected = samo.prune(model, 0.5)["0.weight"]
    masks = pruning.step()
    assert masks is not None
    assert expected.distance(masks["0.weight"]) < 0.01  # bfloat16 has equals


@pytest.mark.parametrize("kind", ["random", "gradient", "gradual"])
def test_weights_that_are_not_finite_are_refused(kind: str) -> None:
    model = two_layers()
    opt = samo.AdamW(model.parameters())
    moving = schedule(kind, model, opt)
    model(torch.randn(4, 64)).square().mean().backward()
    weight = weights_of(model)["0.weight"]
    before = weight.mask
    with torch.no_grad():
        weight.values[int(weight.values.abs().argmax())] = torch.nan
    with pytest.raises(ValueError, match=r"1 of the 410 kept weights of '0.weight' are NaN or inf"):
        moving.step()
    assert weight.mask is before


# Gradients


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_set_to_zero_leave_no_scores_behind(set_to_none: bool) -> None:
    found = []
    for discards in (True, False):
        model = build()
        opt = samo.AdamW(model.parameters())
        moving = samo.DynamicSparse(model, opt, grow="gradient", every=1, stop=100)
        if discards:
            backward(model, 100 * torch.randn(8, 40))
            opt.zero_grad(set_to_none=set_to_none)
        backward(model, torch.randn(8, 40, generator=torch.Generator().manual_seed(5)))
        found.append(moving.step())
    assert found[0] == found[1]


def test_what_growth_holds_is_what_the_documents_say() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    samo.compress_(model, samo.prune(model, 0.9, method="random"))
    opt = samo.AdamW(model.parameters())
    for candidates in (1, 4):
        moving = None  # detaches the last one
        moving = samo.DynamicSparse(
            model, opt, grow="gradient", every=1, stop=10**6, candidates=candidates
        )
        model(torch.randn(2, 1024)).sum().backward()
        weight = weights_of(model)["0.weight"]
        found, kept = moving._growths["0.weight"]._found, weight.kept
        held = found.survivors.nbytes + found.candidates.nbytes + found.scores.nbytes
        bitmap = weight.mask.nbytes
        assert held == pytest.approx(bitmap + kept / 8 + 4 * candidates * 0.3 * kept, abs=32)


# State and settings


def test_a_state_of_other_settings_is_refused() -> None:
    model = build()
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(model, opt, every=2, stop=9, seed=5)
    state = moving.state_dict()
    moving.detach()
    other = samo.DynamicSparse(model, opt, every=3, stop=9)
    with pytest.raises(ValueError, match=r"by DynamicSparse with every=2, but this one has 3;"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"not the state of a DynamicSparse \(no 'steps', 'seed'"):
        other.load_state_dict({})
    with pytest.raises(ValueError, match=r"'steps' of the saved state must be a whole number of 0"):
        other.load_state_dict({**other.state_dict(), "steps": "many"})
    assert other.state_dict()["steps"] == 0


DYNAMIC: list[tuple[dict[str, Any], str]] = [
    ({"grow": "magic"}, r"grow='magic' is unknown; it is one of random, gradient"),
    ({"drop": "0.3"}, r"drop must be a number, got '0.3'"),
    ({"drop": 0}, r"in \(0, 1\], got 0"),
    ({"every": 2.5}, r"every must be a whole number of 1 or more, got 2.5"),
    ({"every": 0}, r"every must be a whole number of 1 or more, got 0"),
    ({"stop": True}, r"stop must be a whole number of 1 or more, got True"),
    ({"every": 9}, r"every 9 steps until step 9, which is never"),
    ({"seed": "x"}, r"seed must be a whole number, got 'x'"),
    ({"candidates": 0}, r"candidates must be a whole number of 1 or more, got 0"),
]


@pytest.mark.parametrize(("options", "message"), DYNAMIC, ids=str)
def test_bad_settings_of_dynamic_sparse_are_refused(options: Any, message: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=message):
        samo.DynamicSparse(
            model, samo.AdamW(model.parameters()), **{"every": 2, "stop": 9, **options}
        )


GRADUAL: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sparsity": "0.9"}, ValueError, r"sparsity must be a number, got '0.9'"),
    ({"initial": None}, ValueError, r"initial must be a finite number, got None"),
    ({"initial": 0.95}, ValueError, r"0 <= initial <= sparsity < 1, got initial=0.95 and"),
    ({"start": 0.5}, ValueError, r"start must be a whole number, got 0.5"),
    ({"start": 9}, ValueError, "got start=9, stop=9, every=1"),
    ({"seed": 1.5}, ValueError, r"seed must be a whole number, got 1.5"),
    ({"sparsity": 0.9995}, samo.MaskError, r"keep none of the 576 weights of '2.weight'"),
]


@pytest.mark.parametrize(("options", "error", "message"), GRADUAL, ids=str)
def test_bad_settings_of_gradual_pruning_are_refused(
    options: Any, error: type[Exception], message: str
) -> None:
    model = build()
    usual = {"sparsity": 0.9, "start": 0, "stop": 9, "every": 1}
    with pytest.raises(error, match=message):
        samo.GradualPruning(model, samo.AdamW(model.parameters()), **{**usual, **options})


@pytest.mark.parametrize("kind", ["random", "gradual"])
def test_a_wrong_optimizer_or_model_is_refused(kind: str) -> None:
    model = build()
    for opt, found in ((None, "NoneType"), (model, "Sequential"), ("opt", "str"), ([1], "int")):
        with pytest.raises(TypeError, match=f"opt must be a torch.optim.Optimizer .* got {found};"):
            schedule(kind, model, opt)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        schedule(kind, "model", None)  # type: ignore[arg-type]
    bare = samo.compress_(nn.Linear(3, 3), samo.Masks({}), dtype=torch.bfloat16)
    for without in (nn.Linear(3, 3), bare):
        with pytest.raises(samo.CompressionError, match="no parameter of the model has a mask"):
            schedule(kind, without, samo.AdamW(without.parameters()))
    if kind == "random":
        whole = build(None)
        with pytest.raises(samo.MaskError, match=r"all 3,136 weights are kept, so none is left"):
            schedule(kind, whole, samo.AdamW(whole.parameters()))


def test_numpy_integers_are_integers() -> None:
    model = build()
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(model, [opt], every=np.int64(2), stop=9, seed=np.int64(3))
    assert type(moving.state_dict()["seed"]) is int


# Replicas


def replicas(rank: int, num_ranks: int, grow: Any, parts: int, how: str) -> dict[str, Tensor]:
    """Train a few steps on a part of each batch, cut into micro-batches, and return the dense state."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 9)).double()
    samo.compress_(model, samo.prune(model, 0.8, method="random"), kernels="reference")
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=how == "views")
    opt = samo.AdamW(model.parameters(), lr=1e-2, entry_steps=True)
    moving = samo.DynamicSparse(
        ddp if how == "wrapper" else model,
        opt,
        grow=grow,
        every=2,
        stop=9,
        candidates=None,
        group=dist.group.WORLD if how == "group" else None,
    )
    moved = 0
    for step in range(4):
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(step)).double()
        # The order of rows by which one rank sees in each micro-batch what several see together.
        batches = x.view(parts, num_ranks, -1, 40)[:, rank]
        for index, batch in enumerate(batches):
            with nullcontext() if index == parts - 1 else ddp.no_sync():
                (ddp(batch).square().mean() / parts).backward()
        opt.step()
        opt.zero_grad(set_to_none=step % 2 == 0)
        moved += moving.step() is not None
    assert moved == 2
    return samo.dense_state_dict(model)


@pytest.mark.parametrize(
    ("grow", "parts", "how"),
    [
        ("gradient", 1, "views"),
        ("gradient", 2, "model"),
        ("gradient", 1, "wrapper"),
        ("gradient", 1, "group"),
        ("random", 1, "model"),
    ],
)
def test_replicas_move_masks_as_one_process_does(grow: str, parts: int, how: str) -> None:
    (alone,) = run_ranks(1, replicas, grow, parts, how)
    for found in run_ranks(2, replicas, grow, parts, how):
        for name, value in found.items():
            assert torch.equal(value != 0, alone[name] != 0)
            torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-12)


def drifting(rank: int, num_ranks: int) -> samo.Masks:
    model = build()
    ddp = nn.parallel.DistributedDataParallel(model)
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(model, opt, every=1, stop=9)
    backward(ddp, torch.randn(8, 40))
    with torch.no_grad():
        model.get_parameter("0.weight").add_(
            rank * torch.randn(model.get_parameter("0.weight").shape)
        )
    masks = moving.step()
    assert masks is not None
    return masks


def test_ranks_with_unequal_values_get_the_masks_of_the_first() -> None:
    first, second = run_ranks(2, drifting)
    assert first == second


def alone_among_many(rank: int, num_ranks: int) -> None:
    model = build()
    moving = samo.DynamicSparse(
        model, samo.AdamW(model.parameters()), grow="gradient", every=1, stop=9
    )
    with pytest.raises(
        samo.CompressionError, match=r"not wrapped in DistributedDataParallel; pass group="
    ):
        backward(model, torch.randn(8, 40))
    moving.detach()


def test_ranks_without_ddp_or_group_are_refused() -> None:
    run_ranks(2, alone_among_many)
