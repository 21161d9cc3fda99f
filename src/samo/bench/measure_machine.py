"""``samo plan --measure``: time this machine, and write a hardware file for ``samo plan --gpu``.

Products and copies give its peak rates, two small GPTs the fractions that a step achieves of them,
samo's kernels their time over that of a copy. Under torchrun all ranks measure at the same time, so
that what they share is shared, and an all-reduce gives the link.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from samo.bench.kernels import Problem, floor_bytes
from samo.bench.timing import flusher, in_turns, spread
from samo.distributed.mesh import mesh
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig
from samo.planner.cost import stage_times
from samo.planner.hardware import PROCESS_BYTES, Cluster, Hardware, Link, write_hardware
from samo.planner.memory import Job, Layout
from samo.planner.network import gpt
from samo.utils.environment import hardware as describe
from samo.utils.formatting import counted, size, three_digits

_KERNELS: Final = {
    "expand": "expand",
    "compress": "compress, to fp32",
    "update": "update, exact",
    "update_lean": "update, lean",
    "update_dense": "update, dense",
}
_CPU_WIDTHS: Final = (("large", 384), ("small", 128))
_ROUNDS: Final = 15
_ENDLESS: Final = 1e300
_FEW, _MANY = 2**8, 2**22  # entries of an all-reduce


def measure(path: Path, say: Callable[[str], object]) -> Hardware:
    """Time this machine and write the file; on many ranks the first one does."""
    machine = Machine(mesh().size() if "RANK" in os.environ else 1)
    device = machine.device
    times = in_turns(machine.calls, rounds=_ROUNDS, device=device, prepare=flusher(device))
    found = machine.hardware(path.stem, times)
    if int(os.environ.get("RANK", "0")) == 0:
        write_hardware(found, path)
        link = f", {size(found.intra.bandwidth)}/s between ranks" if machine.ranks > 1 else ""
        say(
            f"{found.source}: {three_digits(found.flops / 1e12)} TFLOP/s in products, "
            f"{size(found.bandwidth)}/s in copies{link}; steps achieve {found.flops_fraction:.2f} "
            f"and {found.bandwidth_fraction:.2f} of the first two\n"
            f"plan with it: samo plan MODEL --gpu {path}\n"
        )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return found


class Machine:
    """What to time, and the hardware that follows from the times.

    Args:
        ranks: Ranks that measure at the same time.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.device = device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        is_cuda = device.type == "cuda"
        self.dtype = torch.float32
        if is_cuda:
            self.dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
        self.width = 8192 if is_cuda else 768
        a, b = (torch.randn(self.width, self.width, device=device, dtype=self.dtype) for _ in "ab")
        one = torch.zeros(1, device=device)
        self.problem = Problem(2 ** (26 if is_cuda else 21), 0.1, device)
        self.calls: dict[str, Callable[[], object]] = {
            "product": lambda: a @ b,
            "launches": lambda: [one.add_(1.0) for _ in range(100)],
            **{name: self.problem.operation(name) for name in ("copy", *_KERNELS.values())},
        }
        self.costs: dict[str, tuple[float, float]] = {}
        for name, width in (("large", 2048), ("small", 256)) if is_cuda else _CPU_WIDTHS:
            self._add_step(name, width, batch=8 if is_cuda else 4)
        for numel in (_FEW, _MANY) if ranks > 1 else ():
            x = torch.zeros(numel, device=device)
            self.calls[f"reduce {numel}"] = partial(dist.all_reduce, x)

    def _add_step(self, name: str, width: int, batch: int) -> None:
        """Add forward and backward of a small GPT, and what the cost model counts for it."""
        config = GPTConfig(num_layers=4, width=width, num_heads=4, context=256, vocab_size=1024)
        model = GPT(config).to(self.device, self.dtype)
        tokens = torch.randint(config.vocab_size, (batch, config.context), device=self.device)

        def step() -> None:
            model.zero_grad()
            model(tokens, tokens).backward()

        job = Job(
            network=gpt(config),
            batch=batch,
            context=config.context,
            dtype=str(self.dtype).removeprefix("torch."),
        )
        self.calls[name], self.costs[name] = step, _unit_costs(job)

    def hardware(self, name: str, times: Mapping[str, Sequence[float]]) -> Hardware:
        """Return what follows from the milliseconds of `calls`."""
        s = {call: spread(times[call])["median"] / 1e3 for call in self.calls}
        numel, kept = self.problem.mask.numel, self.problem.mask.kept
        flops = 2 * self.width**3 / s["product"]
        bandwidth = floor_bytes("copy", numel, kept) / s["copy"]
        flops_fraction, bandwidth_fraction = self._fractions(s, flops, bandwidth)
        # Of kernels: over a copy at the rate that steps achieve.
        factors: dict[str, Any] = {
            key: s[call] / floor_bytes(call, numel, kept) * bandwidth * bandwidth_fraction
            for key, call in _KERNELS.items()
        }
        if self.ranks > 1:
            sent = 2 * (self.ranks - 1) / self.ranks * 4 * _MANY
            latency = s[f"reduce {_FEW}"]
            rate = sent / max(s[f"reduce {_MANY}"] - latency, 1e-9)
            own = Link(bandwidth=rate, latency_s=latency / (2 * (self.ranks - 1)))
            factors |= {"intra": own, "link_fraction": 1.0}
        about, is_cuda = describe(self.device), self.device.type == "cuda"
        memory_bytes = about["memory_bytes"] / (1 if is_cuda else self.ranks)
        return Hardware(
            name=name,
            memory_bytes=memory_bytes,
            flops=flops,
            bandwidth=bandwidth,
            flops_fraction=flops_fraction,
            bandwidth_fraction=bandwidth_fraction,
            gpus_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks)),
            overlap=1.0 if is_cuda else 0.0,
            launch_s=s["launches"] / 100,
            reserved_bytes=0.8e9 if is_cuda else min(PROCESS_BYTES, memory_bytes / 2),
            dtype=str(self.dtype).removeprefix("torch."),
            source=(
                f"measured: {about['device_name']}, {counted(self.ranks, 'rank')}, "
                f"{counted(about['threads'], 'thread')}"
            ),
            **factors,
        )

    def _fractions(
        self, s: Mapping[str, float], flops: float, bandwidth: float
    ) -> tuple[float, float]:
        """Return the fractions of both rates with which the cost model meets both steps."""
        (a1, b1), (a2, b2) = self.costs["large"], self.costs["small"]
        t1, t2 = s["large"], s["small"]
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
