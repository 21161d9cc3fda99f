"""torch's own DistributedDataParallel and ZeroRedundancyOptimizer around a compressed model."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import samo
from samo.core.compress import dense_of
from samo.core.modules import named_weights
from tests.core.test_fsdp import (
    Net,
    batch,
    build,
    check_close,
    part_of,
    state_of,
    torch_adamw,
    train,
)
from tests.ranks import run_ranks

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_sync": {},
    "static_graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "bucket_view": {"gradient_as_bucket_view": True},
}


def compressed(mode: str = "plain") -> Net:
    model = build(weights="resident")
    model.is_again_used = mode != "unused"
    return model


@functools.cache
def in_one_process(mode: str = "plain", max_norm: float = 0.0) -> tuple[dict[str, Tensor], Any]:
    model = compressed(mode)
    norms = train(model, torch_adamw(model), max_norm=max_norm)
    return state_of(model), norms


# DistributedDataParallel --------------------------------------------------------------------------


def every_mode(rank: int, num_ranks: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for mode, settings in MODES.items():
        model = compressed(mode)
        replicas = DistributedDataParallel(model, bucket_cap_mb=0.0001, **settings)
        pieces = 2 if mode == "no_sync" else 1
        train(replicas, torch_adamw(replicas), part_of(rank, num_ranks), num_micro_batches=pieces)
        found[mode] = state_of(model)
    return found


def test_replicas_train_as_one_process() -> None:
    everyones = run_ranks(3, every_mode)
    for mode in MODES:
        wanted, _ = in_one_process("unused" if mode == "unused" else "plain")
        for rank, found in enumerate(everyones):
            check_close(found[mode], wanted, f"{mode}, rank {rank}")


def clip(rank: int, num_ranks: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    model = compressed()
    replicas = DistributedDataParallel(model)
    norms = train(replicas, torch_adamw(replicas), part_of(rank, num_ranks), max_norm=0.1)
    return state_of(model), norms


def other_masks(rank: int, num_ranks: int) -> str:
    model = Net()
    masks = dict(samo.prune(model, 0.8))
    masks |= samo.prune(nn.ModuleDict({"last": model.last}), 0.8, method="random", seed=rank)
    samo.compress_(model, samo.Masks(masks))
    with pytest.raises(samo.MaskError) as found:
        DistributedDataParallel(model)(batch(0)[0].float())
    return str(found.value)


def other_order(rank: int, num_ranks: int) -> str:
    """DistributedDataParallel itself would give one layer the values of the other."""
    names = ("a", "b") if rank == 0 else ("b", "a")
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(4, 4, bias=False))
    samo.compress_(model, samo.prune(model, 0.5, method="random"))
    with pytest.raises(samo.MaskError) as found:
        DistributedDataParallel(model)(torch.ones(1, 4))
    return str(found.value)


def sent_bytes(rank: int, num_ranks: int) -> list[int]:
    """Count what is given to all-reduce for a dense model and for a compressed one."""
    found = []
    for sparsity in (0.0, 0.9):
        model = nn.Sequential(*(nn.Linear(width, 64, bias=False) for width in (48, 64, 64)))
        if sparsity:
            samo.compress_(model, samo.prune(model, sparsity))
        replicas = DistributedDataParallel(model)
        sizes: list[int] = []

        def count(
            state: list[int],
            bucket: dist.GradBucket,  # type: ignore[name-defined]
        ) -> torch.futures.Future[Tensor]:
            state.append(bucket.buffer().nbytes)
            return allreduce_hook(dist.group.WORLD, bucket)

        replicas.register_comm_hook(sizes, count)
        replicas(torch.ones(2, 48)).sum().backward()
        found.append(sum(sizes))
    return found


def one_after_another(rank: int, num_ranks: int) -> list[Any]:
    return [part(rank, num_ranks) for part in (clip, other_masks, other_order, sent_bytes)]


def test_replicas_send_kept_entries_clip_and_compare_masks() -> None:
    state, norms = in_one_process(max_norm=0.1)
    assert all(norm > 0.1 for norm in norms)
    for clipped, refused, unordered, nbytes in run_ranks(2, one_after_another):
        check_close(clipped[0], state, "clipped")
        torch.testing.assert_close(clipped[1], norms, rtol=1e-12, atol=0)
        assert refused.startswith("the mask of 'last.weight' is not the same on rank")
        assert unordered.startswith("the parameters are not in the same order on rank")
        assert nbytes[0] == 4 * 64 * (48 + 64 + 64)  # dense
        assert nbytes[1] / nbytes[0] == pytest.approx(0.1, rel=0.02)


# ZeroRedundancyOptimizer --------------------------------------------------------------------------

CASES: list[tuple[type[torch.optim.Optimizer], tuple[float, ...]]] = [
    (torch.optim.AdamW, ()),
    (samo.AdamW, (math.nan,)),
    (samo.AdamW, (0.0, -math.inf)),
]


def spoil(model: nn.Module, bad: tuple[float, ...]) -> Callable[[int], None]:
    """Put numbers into the gradient of the first parameter, which one rank alone updates."""

    def put(step: int) -> None:
        if step == 2:
            next(model.parameters()).grad[: len(bad)] = torch.tensor(bad)  # type: ignore[index]

    return put


def sharded(rank: int, num_ranks: int) -> list[Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of what it imports itself

    found = []
    for make, bad in CASES:
        model = compressed()
        own = {"kernels": "reference", "group": dist.group.WORLD} if make is samo.AdamW else {}
        opt = ZeroRedundancyOptimizer(model.parameters(), make, lr=1e-2, **own)
        replicas = DistributedDataParallel(model)
        train(replicas, opt, part_of(rank, num_ranks), before_step=spoil(model, bad))
        with torch.no_grad():
            for name, weight in named_weights(model):
                dense = model.get_submodule(name.rpartition(".")[0]).weight
                assert torch.equal(dense, dense_of(weight))  # it is fresh
        skipped = getattr(opt.optim, "skipped_steps", 0)
        found.append((state_of(model), skipped, len(opt.optim.state)))
    return found


def test_sharded_state_trains_as_one_process_and_skips_the_same_steps() -> None:
    for (make, bad), everyones in zip(CASES, zip(*run_ranks(3, sharded))):
        model = compressed()
        own = {"kernels": "reference"} if make is samo.AdamW else {}
        opt = make(model.parameters(), lr=1e-2, **own)  # type: ignore[call-arg]
        train(model, opt, before_step=spoil(model, bad))
        for rank, (found, skipped, _) in enumerate(everyones):
            check_close(found, dict(model.state_dict()), f"{make.__name__}, rank {rank}")
            assert skipped == bool(bad)
        numbers = [number for _, _, number in everyones]
        assert sum(numbers) == len(list(model.parameters()))
        assert min(numbers) > 0
