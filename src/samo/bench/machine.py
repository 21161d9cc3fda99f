"""``samo plan --measure``: time this machine, and write a hardware file for ``samo plan --gpu``.

Products and copies give its peak rates, two small GPTs the fractions that a step achieves of them,
samo's kernels their time over that of a copy. Under torchrun or `samo launch` all ranks measure at
the same time, so that what they share is shared, and an all-reduce gives the link.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from samo.bench.kernels import Problem, floor_bytes
from samo.bench.timing import flusher, free, in_turns, spread
from samo.distributed.mesh import mesh
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig
from samo.planner.cost import stage_times
from samo.planner.hardware import Cluster, Hardware, Link, write_hardware
from samo.planner.memory import Job, Layout
from samo.planner.network import gpt, sparsities
from samo.utils.environment import hardware as describe
from samo.utils.formatting import size, three_digits

__all__ = ["measure"]

_KERNELS: Final = {
    "expand": "expand",
    "compress": "compress, to fp32",
    "update": "update, exact",
    "update_lean": "update, lean",
    "update_dense": "update, dense",
}
Row = tuple[float, float, float]
_ROUNDS: Final = 15
_ENDLESS: Final = 1e300


def measure(path: Path, say: Callable[[str], object]) -> Hardware:
    """Time this machine and write the file; on many ranks the first one does."""
    is_joined = dist.is_initialized()
    ranks = mesh().size() if "RANK" in os.environ else 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = describe(device)
    dtype = torch.float32
    if device.type == "cuda":
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
    flops, rows = _products_and_steps(device, dtype)
    bandwidth, factors = _kernels(device)
    fractions = _fractions(rows, flops, bandwidth)
    link = _link(ranks, device)
    found = Hardware(
        name=path.stem,
        memory_bytes=about["memory_bytes"] / (1 if device.type == "cuda" else ranks),
        flops=flops,
        bandwidth=bandwidth,
        flops_fraction=fractions[0],
        bandwidth_fraction=fractions[1],
        gpus_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        launch_s=_launch(device),
        reserved_bytes=0.8e9 if device.type == "cuda" else 0.0,
        dtype=str(dtype).removeprefix("torch."),
        source=f"measured: {about['device_name']}, {ranks} ranks, {about['threads']} threads",
        # Over a copy at the rate that steps achieve.
        **{key: value * fractions[1] for key, value in factors.items()},  # type: ignore[arg-type]
    )
    if link is not None:
        found = replace(found, intra=link, link_fraction=1.0)
    if int(os.environ.get("RANK", "0")) == 0:
        write_hardware(found, path)
        say(
            f"{found.source}: {three_digits(flops / 1e12)} TFLOP/s in products, "
            f"{size(bandwidth)}/s in copies; steps achieve {fractions[0]:.2f} and "
            f"{fractions[1]:.2f} of them\n"
            + (f"all-reduce of {ranks} ranks: {size(link.bandwidth)}/s\n" if link else "")
            + f"plan with it: samo plan MODEL --gpu {path}\n"
        )
    if dist.is_initialized() and not is_joined:
        dist.barrier()
        dist.destroy_process_group()
    return found


def _products_and_steps(device: torch.device, dtype: torch.dtype) -> tuple[float, list[Row]]:
    """Return the FLOP/s of a product; and FLOP, bytes and seconds of the steps of two GPTs."""
    is_cuda = device.type == "cuda"
    width = 8192 if is_cuda else 768
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {"product": lambda: a @ b}
    costs: dict[str, tuple[float, float]] = {}
    for own in (2048, 256) if is_cuda else (384, 96):
        config = GPTConfig(num_layers=4, width=own, num_heads=4, context=256, vocab_size=1024)
        job = Job(
            network=gpt(config),
            sparsity=tuple(sparsities(0.0).items()),
            batch=8 if is_cuda else 2,
            context=256,
            dtype=str(dtype).removeprefix("torch."),
        )
        calls[f"{own}"], costs[f"{own}"] = _step(config, job, device, dtype), _unit_costs(job)
    times = in_turns(calls, rounds=_ROUNDS, device=device)
    medians = {name: spread(found)["median"] / 1e3 for name, found in times.items()}
    return 2 * width**3 / medians["product"], [(*costs[k], medians[k]) for k in costs]


def _kernels(device: torch.device) -> tuple[float, dict[str, float]]:
    """Return the bandwidth of a copy, and each kernel's time over that of copying its bytes."""
    problem = Problem(2 ** (28 if device.type == "cuda" else 22), 0.1, device)
    calls = {name: problem.operation(name) for name in ("copy", *_KERNELS.values())}
    times = in_turns(calls, rounds=_ROUNDS, device=device, prepare=flusher(device))
    numel, kept = problem.mask.numel, problem.mask.kept
    rates = {
        name: floor_bytes(name, numel, kept) / spread(found)["median"] * 1e3
        for name, found in times.items()
    }
    del problem, calls
    free(device)
    return rates["copy"], {key: rates["copy"] / rates[name] for key, name in _KERNELS.items()}


def _fractions(rows: list[Row], flops: float, bandwidth: float) -> tuple[float, float]:
    """Return the fractions of both rates with which the cost model meets both steps."""
    (a1, b1, t1), (a2, b2, t2) = rows  # the larger one first
    # t = a / F + b / B, twice.
    determinant = a1 * b2 - a2 * b1
    x, y = (t1 * b2 - t2 * b1) / determinant, (a1 * t2 - a2 * t1) / determinant
    if x <= 0 or y <= 0:  # noise: blame one rate for all of the larger step
        y = max(y, 1 / bandwidth)
        x = max((t1 - b1 * y) / a1, 1 / flops)
    return 1 / x / flops, 1 / y / bandwidth


def _unit_costs(job: Job) -> tuple[float, float]:
    """Return the FLOP and the bytes that the cost model counts for forward and backward."""
    found = []
    for flops, bandwidth in ((1.0, _ENDLESS), (_ENDLESS, 1.0)):
        unit = Hardware(
            name="unit", memory_bytes=1, flops=flops, bandwidth=bandwidth, flops_fraction=1.0,
            bandwidth_fraction=1.0, launch_s=0.0,
        )  # fmt: skip
        layout = Layout(scheme="8-bit", micro_batch=job.batch)
        (one,) = stage_times(job, layout, Cluster(hardware=unit))
        found.append(one.forward + one.backward)
    return found[0], found[1]


def _step(
    config: GPTConfig, job: Job, device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    """Return a function that runs forward and backward once."""
    model = GPT(config).to(device, dtype)
    tokens = torch.randint(config.vocab_size, (job.batch, job.context), device=device)

    def step() -> None:
        model.zero_grad()
        model(tokens, tokens).backward()

    return step


def _launch(device: torch.device) -> float:
    """Return the host time of a small operator."""
    x = torch.zeros(1, device=device)
    began = time.perf_counter()
    for _ in range(1000):
        x.add_(1.0)
    return (time.perf_counter() - began) / 1000


def _link(ranks: int, device: torch.device) -> Link | None:
    """Return the link between ranks, from an all-reduce of few and of many bytes."""
    if ranks == 1:
        return None
    times = {}
    for numel in (2**8, 2**22):
        x = torch.zeros(numel, device=device)
        calls = {"reduce": lambda x=x: dist.all_reduce(x)}
        times[numel] = spread(in_turns(calls, rounds=_ROUNDS, device=device)["reduce"])["median"]
    latency, whole = times[2**8] / 1e3, times[2**22] / 1e3
    sent = 2 * (ranks - 1) / ranks * 4 * 2**22
    bandwidth = sent / max(whole - latency, 1e-9)
    return Link(bandwidth=bandwidth, latency_s=latency / (2 * (ranks - 1)))
