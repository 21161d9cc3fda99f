"""SET and RigL on compressed state, against plain versions on dense tensors."""

import copy
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from samo.core.compress import masks as masks_in
from samo.core.modules import named_weights
from samo.core.weight import Weight
from samo.pruning.growth import Growth, grow_largest
from tests.meters import DenseGradients, LargestTensor, small_gpt, tokens
from tests.ranks import run_ranks

NAMES = ("0.weight", "2.weight")


def build(sparsity: float | None = 0.8, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(2)
    model = network()
    masks = samo.prune(model, sparsity, method="random") if sparsity else samo.Masks.ones(model)
    return samo.compress_(model, masks, dtype=dtype, kernels="reference")


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: mask.to_bool() for name, mask in masks_in(model).items()}


def weights_of(model: nn.Module) -> dict[str, Weight]:
    return dict(named_weights(model))


def dense_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the dense weights, in float32."""
    state = samo.dense_state_dict(model)
    return {name: state[name].clone() for name in NAMES}


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).float().square().mean().backward()


def train_step(model: Any, opt: Any, x: Tensor | None = None) -> None:
    backward(model, torch.randn(8, 40).to(model[0].weight.dtype) if x is None else x)
    opt.step()
    opt.zero_grad()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 9))


def changes(
    schedule: Any, model: nn.Module, opt: Any, steps: int
) -> Iterator[tuple[int, str, Tensor, Tensor, Tensor]]:
    """Train, and yield each new mask: step, name, weight and mask of before, mask."""
    for step in range(1, steps + 1):
        train_step(model, opt)
        dense, kept = dense_of(model), masks_of(model)
        for name, mask in (schedule.step() or {}).items():
            yield step, name, dense[name], kept[name], mask.to_bool()


def largest(scores: Tensor, kept: Tensor, count: int) -> Tensor:
    """Return which ``count`` of the kept entries have the largest scores."""
    found = torch.zeros(scores.numel(), dtype=torch.bool)
    order = scores.abs().masked_fill(~kept, -1).view(-1).argsort(descending=True)
    found[order[:count]] = True
    return found.view_as(scores)


def test_set_drops_the_smallest_and_grows_at_random() -> None:
    model = build(dtype=torch.bfloat16)
    opt = samo.AdamW(model.parameters(), lr=1e-2, entry_steps=True)
    moving = samo.DynamicSparse(model, opt, drop=0.4, every=3, stop=10)
    seen = []
    for step, name, dense, before, after in changes(moving, model, opt, 12):
        seen.append((step, name))
        kept = int(before.sum())
        count = round(0.4 / 2 * (1 + math.cos(step * math.pi / 10)) * kept)
        assert after.sum() == kept
        cut = dense[before].abs().sort(descending=True).values[kept - count - 1]
        assert after[dense.abs() > cut].all()  # late entries often have equal magnitudes
        new = after & ~before
        assert 0 < new.sum() <= count
        assert not dense_of(model)[name][new].any()
        ages = torch.full(after.shape, -1, dtype=torch.int16)
        ages[after] = opt.state[model.get_parameter(name)]["age"]
        assert (ages[new] == 0).all()
        assert (ages[after & before] > 0).all()
    assert seen == [(step, name) for step in (3, 6, 9) for name in NAMES]


def rigl_retold(weight: Tensor, kept: Tensor, grad: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Drop the smallest, then grow the largest gradients among all that are not kept any more."""
    survivors = largest(weight, kept, int(kept.sum()) - count)
    return survivors, survivors | largest(grad, ~survivors, count)


def test_rigl_decides_as_its_dense_retelling() -> None:
    model = build()
    # Adam's first updates are all of one size, and equals are told apart by a hash.
    opt = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    moving = samo.DynamicSparse(model, opt, grow="gradient", drop=0.5, every=4, stop=14)
    changes = []
    for step in range(1, 18):
        x = torch.randn(8, 40)
        dense: Any = network()
        dense.load_state_dict(samo.dense_state_dict(model))
        backward(dense, x)
        before, kept = dense_of(model), masks_of(model)
        train_step(model, opt, x)
        stepped = dense_of(model)
        masks = moving.step()
        if masks is None:
            continue
        changes.append(step)
        for name in NAMES:
            count = round(0.25 * (1 + math.cos(step * math.pi / 14)) * int(kept[name].sum()))
            grad = dense.get_parameter(name).grad
            _, expected = rigl_retold(before[name], kept[name], grad, count)
            assert torch.equal(masks[name].to_bool(), expected), (step, name)
            # what was dropped and chosen again has stayed as it was
            assert torch.equal(dense_of(model)[name], stepped[name] * expected)
    assert changes == [4, 8, 12]


def grown_by_parts(num_parts: int, candidates: int | None) -> float:
    """Return which part of the entries that the exact sum of micro-batches grows is grown."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 64))
    dense: Any = copy.deepcopy(model)
    target = nn.Linear(128, 64).requires_grad_(False)
    samo.compress_(model, samo.prune(model, 0.9, method="random"))
    dense.load_state_dict(samo.dense_state_dict(model))
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(
        model, opt, grow="gradient", every=1, stop=10**6, candidates=candidates
    )
    weight = weights_of(model)["0.weight"]
    kept, before = weight.mask.to_bool(), model[0].weight.detach().clone()
    model(10 * torch.randn(32, 128)).square().mean().backward()
    # Not a step: those gradients are gone, or zero, and so are their scores.
    model.zero_grad(set_to_none=num_parts == 1)
    for x in torch.randn(32, 128).chunk(num_parts):
        for each in (model, dense):
            (each(x) - target(x)).square().mean().backward()
    count = round(0.3 * int(kept.sum()))
    survivors, expected = rigl_retold(before, kept, dense[0].weight.grad, count)
    masks = moving.step()
    assert masks is not None
    wanted, got = expected & ~survivors, masks["0.weight"].to_bool() & ~survivors
    assert got.sum() == wanted.sum() == count
    return float((got & wanted).sum()) / count


def test_micro_batches_add_up_and_an_earlier_step_leaves_nothing_behind() -> None:
    assert grown_by_parts(1, 4) == 1
    assert grown_by_parts(8, 4) >= 0.62
    assert grown_by_parts(8, None) >= 0.999  # sums in another order round otherwise


def test_rigl_holds_at_most_the_largest_dense_gradient() -> None:
    model = small_gpt(is_tied=True, is_checkpointed=True)
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
    assert [mask.kept for mask in masks_in(model).values()] == [m.kept for m in masks.values()]


@pytest.mark.parametrize("make", [samo.AdamW, torch.optim.AdamW], ids=["samo", "torch"])
def test_float16_gradients_that_overflow_leave_the_masks_alone(make: Any) -> None:
    model = build(dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
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
    moving = samo.DynamicSparse(model, opt, grow="gradient", every=1, stop=9)
    assert len(weights_of(model)["0.weight"].layout.watchers) == 1
    assert not weights_of(copy.deepcopy(model))["0.weight"].layout.watchers
    del moving
    assert not weights_of(model)["0.weight"].layout.watchers


@pytest.mark.parametrize("grow", ["random", "gradient"])
def test_a_resumed_run_is_bit_for_bit_the_same(grow: Any) -> None:
    def run(model: nn.Module, opt: samo.AdamW, moving: samo.DynamicSparse, first: int) -> None:
        for step in range(first, first + 5):
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
            train_step(model, opt, x)
            moving.step()

    model = build()
    opt = samo.AdamW(model.parameters(), lr=1e-2, entry_steps=True)
    moving = samo.DynamicSparse(model, opt, grow=grow, every=2, stop=30, seed=7)
    run(model, opt, moving, 0)
    twin, twin_opt = copy.deepcopy((model, opt))
    twin_moving = samo.DynamicSparse(twin, twin_opt, grow=grow, every=2, stop=30)
    twin_moving.load_state_dict(moving.state_dict())
    run(model, opt, moving, 5)
    run(twin, twin_opt, twin_moving, 5)
    assert twin_moving.state_dict() == moving.state_dict()
    assert (moving.state_dict()["steps"], moving.state_dict()["seed"]) == (10, 7)
    for name, value in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value)


def test_growing_by_gradient_needs_a_backward_pass() -> None:
    model = build()
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(model, opt, grow="gradient", every=1, stop=10)
    with pytest.raises(samo.CompressionError, match="step 1 grows entries by gradient"):
        moving.step()
    backward(model, torch.randn(8, 40))
    assert moving.step() is not None  # the failed step did not count


# Growth


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_entries_that_are_taken_rank_below_zero_gradients(dtype: torch.dtype) -> None:
    mask = samo.Mask.from_bool(torch.tensor([True, True, False, False, False, True]))
    scores = torch.tensor([9.0, math.nan, 0, 1, 0, math.inf], dtype=dtype)
    grown = grow_largest("a", scores, mask, 3, seed=0)
    assert grown.to_bool().tolist() == [False, False, True, True, True, False]
    tiny = torch.arange(6.0, dtype=torch.float64) * 1e-60
    assert grow_largest("a", tiny, mask, 1, seed=0).to_bool().nonzero() == 4


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
    assert growth.scores is not None
    assert not growth.scores.isfinite().all()


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_micro_batches_without_a_gradient_of_kept_entries_count(weights: Any) -> None:
    found = []
    for order in ((0, 1), (1, 0)):
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        keep = (torch.arange(4) == 0).expand(4, 4)
        samo.compress_(model, samo.Masks({"0.weight": samo.Mask.from_bool(keep)}), weights=weights)
        opt = samo.AdamW(model.parameters())
        moving = samo.DynamicSparse(
            model, opt, grow="gradient", every=1, stop=10, drop=0.5, candidates=None
        )
        batches = torch.tensor([[0.0, 10.0, 0.0, 0.0], [1e-3, 0.0, 1.0, 0.0]])
        for number in order:
            model(batches[number : number + 1]).sum().backward()
        opt.step()
        masks = moving.step()
        assert masks is not None
        found.append(masks["0.weight"].to_bool().any(0).tolist())
    assert found == [[True, True, False, False]] * 2


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


# Replicas

CASES = [
    ("gradient", 1, "views"),
    ("gradient", 2, "model"),
    ("gradient", 1, "wrapper"),
    ("gradient", 1, "group"),
    ("random", 1, "model"),
]
"""How entries grow, micro-batches, and what DynamicSparse gets to know of the replicas."""


def train(rank: int, num_ranks: int, grow: Any, parts: int, how: str) -> dict[str, Tensor]:
    """Train a few steps on a part of each batch, cut into micro-batches; return the dense state."""
    torch.manual_seed(2)
    model = network().double()
    samo.compress_(model, samo.prune(model, 0.8, method="random"), kernels="reference")
    ddp: Any = model
    if num_ranks > 1:
        is_view = how == "views"
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=is_view)
    opt = samo.AdamW(model.parameters(), lr=1e-2, entry_steps=True)
    moving = samo.DynamicSparse(
        ddp if how == "wrapper" else model,
        opt,
        grow=grow,
        every=2,
        stop=9,
        candidates=None,
        group=dist.group.WORLD if how == "group" and num_ranks > 1 else None,
    )
    moved = 0
    for step in range(4):
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(step)).double()
        # The order of rows by which one rank sees in each micro-batch what several see together.
        batches = x.view(parts, num_ranks, -1, 40)[:, rank]
        for index, batch in enumerate(batches):
            is_last = index == parts - 1 or num_ranks == 1
            with nullcontext() if is_last else ddp.no_sync():
                (ddp(batch).square().mean() / parts).backward()
        opt.step()
        opt.zero_grad(set_to_none=step % 2 == 0)
        moved += moving.step() is not None
    assert moved == 2
    return samo.dense_state_dict(model)


def drift() -> samo.Masks | None:
    """Move masks after the values of the ranks have drifted apart."""
    model = build()
    ddp = nn.parallel.DistributedDataParallel(model)
    moving = samo.DynamicSparse(model, samo.AdamW(model.parameters()), every=1, stop=9)
    backward(ddp, torch.randn(8, 40))
    values = model.get_parameter("0.weight")
    with torch.no_grad():
        values.add_(dist.get_rank() * torch.randn(values.shape))
    return moving.step()


def replicas(rank: int, num_ranks: int) -> tuple[list[dict[str, Tensor]], samo.Masks | None]:
    model = build()
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(model, opt, grow="gradient", every=1, stop=9)
    with pytest.raises(samo.CompressionError, match=r"not wrapped in DistributedDataParallel"):
        backward(model, torch.randn(8, 40))
    del moving
    return [train(rank, num_ranks, *case) for case in CASES], drift()


def test_replicas_move_masks_as_one_process_does() -> None:
    alone = [train(0, 1, *case) for case in CASES]
    ranks = run_ranks(2, replicas)
    for states, _ in ranks:
        for case, state, expected in zip(CASES, states, alone, strict=True):
            for name, value in state.items():
                assert torch.equal(value != 0, expected[name] != 0), case
                torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
    assert ranks[0][1] == ranks[1][1] is not None  # unequal values: the masks of the first
