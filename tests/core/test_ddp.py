"""torch's own DistributedDataParallel and ZeroRedundancyOptimizer around a compressed model, as they are."""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

import samo
from samo.core import rank_checks
from samo.core.compress import dense_of
from samo.core.modules import named_weights
from samo.core.rank_checks import compare_masks
from tests.ranks import run_ranks

STEPS = 6
ROWS = 24
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_sync": {},
    "static_graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "bucket_view": {"gradient_as_bucket_view": True},
}


class Net(nn.Module):
    """Three layers, one of which may be left out."""

    def __init__(self, *, is_last_used: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = nn.Linear(12, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.is_last_used = is_last_used
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).tanh())
        return self.last(x) if self.is_last_used else x


def compressed(**settings: Any) -> Net:
    model = Net(**settings)
    samo.compress_(model, samo.prune(model, 0.8), kernels="reference")
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 12, generator=draw, dtype=torch.float64)
    return x, torch.randn(ROWS, 8, generator=draw, dtype=torch.float64)


def train(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    part: Callable[[Tensor], Tensor] = lambda rows: rows,
    *,
    num_micro_batches: int = 1,
    before_step: Callable[[int], None] = lambda step: None,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Train on this rank's part of every batch; in several pieces, of which the last one is reduced."""
    for step in range(STEPS):
        pieces = [part(rows).chunk(num_micro_batches) for rows in batch(step)]
        for number, (x, y) in enumerate(zip(*pieces)):
            is_held_back = number < num_micro_batches - 1
            with model.no_sync() if is_held_back and hasattr(model, "no_sync") else nullcontext():
                loss = nn.functional.mse_loss(model(x), y) / num_micro_batches
                loss.backward()
        before_step(step)
        opt.step()
        opt.zero_grad()
        after_step()


def part_of(rank: int, num_ranks: int) -> Callable[[Tensor], Tensor]:
    return lambda rows: rows.chunk(num_ranks)[rank]


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def check_close(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    """Compare with another order of sums alone between the two."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-12, atol=1e-12, msg=f"{what}: {name}"
        )


@functools.cache
def in_one_process(make: Any, is_last_used: bool = True, max_norm: float = 0.0) -> Any:
    model = compressed(is_last_used=is_last_used)
    norms: list[Tensor] = []

    def clip(step: int) -> None:
        if max_norm:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))

    train(model, make(model), before_step=clip)
    return state_of(model), norms


# DistributedDataParallel --------------------------------------------------------------------------


def every_mode(rank: int, num_ranks: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for mode, settings in MODES.items():
        model = compressed(is_last_used=mode != "unused")
        replicas = DistributedDataParallel(model, bucket_cap_mb=0.0001, **settings)
        opt = adamw(replicas)
        train(
            replicas,
            opt,
            part_of(rank, num_ranks),
            num_micro_batches=3 if mode == "no_sync" else 1,
        )
        found[mode] = state_of(model)
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replicas_train_as_one_process(num_ranks: int) -> None:
    everyones = run_ranks(num_ranks, every_mode)
    for mode in MODES:
        wanted, _ = in_one_process(adamw, mode != "unused")
        for rank, found in enumerate(everyones):
            check_close(found[mode], wanted, f"{mode}, rank {rank}")
    changed = in_one_process(adamw)[0]["first.weight"]
    assert not torch.equal(changed, compressed().state_dict()["first.weight"])


def in_bfloat16(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """torch's hook, which it wants a GPU for, by its name alone."""
    return bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


def with_hook(rank: int, num_ranks: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Send bfloat16, of a compressed model and of the masked dense one."""
    model, dense = compressed(), Net()
    masks = samo.prune(dense, 0.8)
    masks.apply_(dense)
    for net in (model, dense):
        replicas = DistributedDataParallel(net)
        replicas.register_comm_hook(None, in_bfloat16)

        def mask(step: int, net: nn.Module = net) -> None:
            for name, param in net.named_parameters():
                if net is dense and name in masks:
                    param.grad.mul_(masks[name].to_bool())

        train(replicas, adamw(replicas), part_of(rank, num_ranks), before_step=mask)
    return samo.dense_state_dict(model), state_of(dense)


def test_gradients_sent_in_bfloat16_are_those_of_masked_dense_replicas() -> None:
    exact = in_one_process(adamw)[0]["first.bias"]
    for found, wanted in run_ranks(2, with_hook):  # of two numbers the sum has one order
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert not torch.equal(found["first.bias"], exact), "nothing was rounded"


def clip(rank: int, num_ranks: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    model = compressed()
    replicas = DistributedDataParallel(model)
    norms = []

    def before_step(step: int) -> None:
        norms.append(nn.utils.clip_grad_norm_(replicas.parameters(), 0.1))

    train(replicas, adamw(replicas), part_of(rank, num_ranks), before_step=before_step)
    return state_of(model), norms


def test_clipping_is_that_of_one_process() -> None:
    wanted, wanted_norms = in_one_process(adamw, max_norm=0.1)
    assert all(norm > 0.1 for norm in wanted_norms)
    for found, norms in run_ranks(2, clip):
        check_close(found, wanted, "clipped")
        torch.testing.assert_close(norms, wanted_norms, rtol=1e-12, atol=0)


def other_masks(rank: int, num_ranks: int) -> str:
    model = Net()
    masks = dict(samo.prune(model, 0.8))
    masks |= samo.prune(nn.ModuleDict({"second": model.second}), 0.8, method="random", seed=rank)
    samo.compress_(model, samo.Masks(masks))
    replicas = DistributedDataParallel(model)
    with pytest.raises(samo.MaskError) as found:
        replicas(batch(0)[0])
    return str(found.value)


def test_masks_that_differ_are_refused_in_the_first_forward_pass_of_every_rank() -> None:
    for said in run_ranks(3, other_masks):
        assert said.startswith("the mask of 'second.weight' is not the same on rank")


def sent_bytes(rank: int, num_ranks: int) -> list[int]:
    """Count what is given to all-reduce for a dense model and for a compressed one."""
    found = []
    for sparsity in (0.0, 0.9):
        model = nn.Sequential(*(nn.Linear(width, 64, bias=False) for width in (48, 64, 64)))
        if sparsity:
            samo.compress_(model, samo.prune(model, sparsity))
        replicas = DistributedDataParallel(model)
        sizes: list[int] = []

        def count(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
            state.append(bucket.buffer().nbytes)
            return allreduce_hook(dist.group.WORLD, bucket)

        replicas.register_comm_hook(sizes, count)
        replicas(torch.ones(2, 48)).sum().backward()
        found.append(sum(sizes))
    return found


def test_replicas_send_the_kept_entries_alone() -> None:
    for dense, kept in run_ranks(2, sent_bytes):
        assert dense == 4 * 64 * (48 + 64 + 64)
        assert kept / dense == pytest.approx(0.1, rel=0.02)


# ZeroRedundancyOptimizer --------------------------------------------------------------------------


def samo_adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return samo.AdamW(model.parameters(), lr=1e-2, kernels="reference", **settings)


def check_fresh(model: nn.Module) -> None:
    with torch.no_grad():
        for name, weight in named_weights(model):
            assert torch.equal(
                model.get_submodule(name.rpartition(".")[0]).weight, dense_of(weight)
            )
            assert weight.dense is not None


BAD_STEP = 2


def spoil(model: nn.Module, step: int, values: tuple[float, ...]) -> None:
    """Put numbers into the gradient of the first parameter, which one rank alone updates."""
    if step == BAD_STEP:
        grad = next(model.parameters()).grad
        assert grad is not None
        grad[: len(values)] = torch.tensor(values)


def sharded(rank: int, num_ranks: int, name: str, bad: tuple[float, ...]) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of what it imports itself

    model = compressed()
    replicas = DistributedDataParallel(model)
    if name == "torch":
        opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        opt = ZeroRedundancyOptimizer(
            model.parameters(), samo.AdamW, lr=1e-2, kernels="reference", group=dist.group.WORLD
        )
    train(
        replicas,
        opt,
        part_of(rank, num_ranks),
        before_step=lambda step: spoil(model, step, bad),
        after_step=lambda: check_fresh(model),
    )
    return state_of(model), getattr(opt.optim, "skipped_steps", 0), len(opt.optim.state)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("torch", ()), ("samo", ()), ("samo", (math.nan,)), ("samo", (0.0, -math.inf))],
)
def test_sharded_state_trains_as_one_process_and_skips_the_same_steps(
    name: str, bad: tuple[float, ...]
) -> None:
    model = compressed()
    opt = (adamw if name == "torch" else samo_adamw)(model)
    train(model, opt, before_step=lambda step: spoil(model, step, bad))
    everyones = run_ranks(3, sharded, name, bad)
    for rank, (found, skipped, _) in enumerate(everyones):
        check_close(found, dict(model.state_dict()), f"{name}, rank {rank}")
        assert skipped == bool(bad)
    numbers = [number for _, _, number in everyones]
    assert sum(numbers) == len(list(model.parameters()))
    assert min(numbers) > 0


def test_masks_are_compared_in_a_group_without_a_named_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered: list[Tensor] = []
    gather = rank_checks._gather

    def noted(tensor: Tensor, group: Any) -> list[Tensor]:
        gathered.extend(found := gather(tensor, group))
        return found

    monkeypatch.setattr(rank_checks, "_gather", noted)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        masks = samo.masks(compressed())
        compare_masks(masks, None)
        assert [tensor.numel() for tensor in gathered] == [1, len(masks)]
    finally:
        dist.destroy_process_group()
