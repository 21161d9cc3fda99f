"""SET and RigL on compressed state, against plain versions on dense tensors."""

import copy
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samo
from samo.core.compress import masks as masks_in
from samo.core.modules import named_weights
from samo.core.weight import Weight
from tests.meters import DenseGradients, small_gpt, tokens
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
