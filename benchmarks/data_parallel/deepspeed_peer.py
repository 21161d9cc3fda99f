"""DeepSpeed's ZeRO on the same model: what its stages send and hold, where DeepSpeed is installed.

It runs in processes of its own, since it takes over torch.distributed. Its masks are dense: weights are
multiplied by them after a step, which saves nothing and costs little.
"""

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import Row, is_installed, spread
from benchmarks.ranks import run

STAGES = (1, 2, 3)

# How often an argument goes over a rank's wire, times (R - 1) / R: as in samo.parallel.traffic.
PASSES = {
    "all_reduce": 2,
    "reduce": 1,
    "reduce_scatter_tensor": 1,
    "reduce_scatter_single": 1,
    "all_gather_into_tensor": 1,
    "all_gather_single": 1,
    "all_gather": 1,
    "broadcast": 1,
}


def rows(num_ranks: int, shape: dict[str, int], tokens: int, rounds: int) -> list[Row]:
    """Return a row for each stage, or none where DeepSpeed is not installed."""
    if not is_installed("deepspeed"):
        return []
    return [run(num_ranks, train, shape, tokens, rounds, stage) for stage in STAGES]


def train(
    rank: int, num_ranks: int, shape: dict[str, int], tokens: int, rounds: int, stage: int
) -> Row:
    """Train with one stage of ZeRO and measure."""
    counted = _count_collectives()
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore", FutureWarning)  # it calls torch by older names
    import deepspeed

    from benchmarks.data_parallel.bench import SPARSITY, pruned_gpt

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model, masks = pruned_gpt(shape)
    masks.apply_(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "overlap_comm": False},
            "steps_per_print": 10**9,
        },
    )
    torch.manual_seed(rank)
    batch = torch.randint(0, 256, (1, tokens + 1))

    def step() -> None:
        engine.backward(engine(batch[:, :-1], batch[:, 1:]))
        engine.step()

    step()
    step()
    counted.update(argument=0.0, sent=0.0, seconds=0.0)
    times = []
    for _ in range(rounds):
        dist.barrier()
        begun = time.perf_counter()
        step()
        times.append((time.perf_counter() - begun) * 1e3)
    num_params = sum(getattr(param, "ds_numel", param.numel()) for param in model.parameters())
    return {
        "contender": f"DeepSpeed {deepspeed.__version__}, ZeRO {stage}",
        "ranks": num_ranks,
        "argument_mb": counted["argument"] / rounds / 1e6,
        "sent_mb": counted["sent"] * (num_ranks - 1) / num_ranks / rounds / 1e6,
        "in_flight_ms": counted["seconds"] / rounds * 1e3,
        "step_ms": spread(times)["median"],
        "state_mb": _state_bytes(engine) / 1e6,
        "num_params": num_params,
        "tokens": tokens,
        "rounds": rounds,
        "sparsity": SPARSITY,
    }


def _count_collectives() -> dict[str, float]:
    """Count the bytes of torch.distributed's collectives from now on, and time those that block."""
    counted = {"argument": 0.0, "sent": 0.0, "seconds": 0.0}

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            given = [t for t in [*args, *kwargs.values()] if isinstance(t, Tensor)]
            lists = [a for a in [*args, *kwargs.values()] if isinstance(a, list)]
            given += [t for row in lists for t in row if isinstance(t, Tensor)]
            largest = max((t.nbytes for t in given), default=0)
            if name == "all_gather":
                largest = sum(t.nbytes for row in lists for t in row)
            counted["argument"] += largest
            counted["sent"] += PASSES[name] * largest
            begun = time.perf_counter()
            result = function(*args, **kwargs)
            counted["seconds"] += time.perf_counter() - begun
            return result

        return counting

    for name in PASSES:
        if hasattr(dist, name):
            setattr(dist, name, wrap(name, getattr(dist, name)))
    return counted


def _state_bytes(engine: Any) -> int:
    """Return the bytes of weights, gradients and optimizer state that this rank holds."""
    seen: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                add(item)
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)

    for param in engine.module.parameters():
        add([param, param.grad, getattr(param, "ds_tensor", None)])
    zero = engine.optimizer
    for name, value in vars(zero).items():
        if any(word in name for word in ("fp16", "bit16", "fp32", "ipg", "averaged", "partition")):
            add(value)
    inner = zero.optimizer
    add([group["params"] for group in inner.param_groups])
    add(list(inner.state.values()))
    return sum(seen.values())
