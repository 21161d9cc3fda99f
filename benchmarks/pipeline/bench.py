"""Message-driven pipeline against torch's Schedule1F1B: 4 gloo stages whose passes are sleeps.

Sleeps take the place of computation, so that four ranks fit on two cores and nothing but waiting is
measured. All contenders sleep the same seeded times for the same passes and take turns step by step. Fixed
and free order are compared at equal limits: with as many micro-batches in flight as there are stages, and
with one more.
"""

import multiprocessing
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import samo
from benchmarks.measure import Row, arguments, show, spread, write_rows

__all__ = ["main"]

STAGES: Final = 4
MICRO_BATCHES: Final = 16
FORWARD_MS: Final = 10.0
SPREADS: Final = {"even": 0.0, "jittering": 0.5, "often late": 1.2}
"""Standard deviation of the logarithm of a pass's time, by case."""
CONTENDERS: Final[dict[str, dict[str, Any]]] = {
    "torch Schedule1F1B": {"schedule": "1f1b"},
    "torch Schedule1F1B, one more": {"schedule": "1f1b"},
    "message-driven, limits 4 4 4 4": {"schedule": "message-driven"},
    "message-driven, limits 4 3 2 1": {"schedule": "message-driven", "in_flight": [4, 3, 2, 1]},
    "message-driven, limits 5 5 5 5": {"schedule": "message-driven", "in_flight": 5},
}


class SleepyLayer(nn.Module):
    """Sleeps in both passes, as long as a seed says."""

    def __init__(self, stage: int, spread: float, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.stage, self.spread, self.scale = stage, spread, scale
        self.start(0)

    def start(self, step: int) -> None:
        """Begin a step: micro-batches are counted from 0 again."""
        self.step = step
        self.counts = {"forward": 0, "backward": 0}

    def sleep(self, what: str) -> None:
        """Sleep for the next micro-batch's pass."""
        number = self.counts[what]
        self.counts[what] = number + 1
        draw = random.Random(f"{self.step} {self.stage} {what} {number % MICRO_BATCHES}")
        # Of mean 1, so that cases compare.
        factor = draw.lognormvariate(-(self.spread**2) / 2, self.spread)
        factor *= 2 if what == "backward" else 1
        time.sleep(FORWARD_MS * self.scale * factor / 1e3)

    def forward(self, x: Tensor) -> Tensor:
        self.sleep("forward")
        return _SleepyBackward.apply(x * self.weight, self)


class _SleepyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SleepyLayer) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.layer.sleep("backward")
        return grads[0], None


def work(rank: int, store: str, rounds: int, scale: float, results: Any) -> None:
    """Run all contenders on one rank; the first one reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=STAGES)
    mesh = init_device_mesh("cpu", (STAGES,), mesh_dim_names=("pipe",))
    x, y = torch.randn(MICRO_BATCHES, 16_384), torch.randn(MICRO_BATCHES, 16_384)
    found: list[tuple[str, str, list[float]]] = []
    for case, deviation in SPREADS.items():
        pipelines = {
            name: samo.Pipeline(
                [SleepyLayer(stage, deviation, scale) for stage in range(STAGES)],
                nn.functional.mse_loss,
                mesh,
                MICRO_BATCHES,
                timeout=120,
                **settings,
            )
            for name, settings in CONTENDERS.items()
        }
        warm_up_once_more(pipelines["torch Schedule1F1B, one more"])
        times: dict[str, list[float]] = {name: [] for name in pipelines}
        for step in range(rounds + 2):  # two to warm up: links are made, torch finds shapes
            for name, pipeline in pipelines.items():
                for layer in pipeline.module.children():
                    assert isinstance(layer, SleepyLayer)
                    layer.start(step)
                dist.barrier()
                begin = time.perf_counter()
                pipeline.step(x, target=y)
                dist.barrier()
                times[name].append((time.perf_counter() - begin) * 1e3)
        found += [(case, name, values[2:]) for name, values in times.items()]
        for pipeline in pipelines.values():
            pipeline.close()
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def warm_up_once_more(pipeline: samo.Pipeline) -> None:
    """Let torch's 1F1B take one forward pass more before its first backward pass, on every stage."""
    schedule: Any = pipeline._runner._schedule  # type: ignore[union-attr]
    schedule._num_stages += 1  # of which it only computes how many come first


def run(*, rounds: int, scale: float) -> list[Row]:
    """Start the ranks and return a row for each contender and case."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.pipelining", "samo.pipeline.api", __name__])
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        calls = [(rank, store, rounds, scale, results) for rank in range(STAGES)]
        ranks = [context.Process(target=work, args=call) for call in calls]
        for process in ranks:
            process.start()
        found = results.get(timeout=600)
        for process in ranks:
            process.join()
    rows = []
    for case, name, times in found:
        baseline = next(t for c, n, t in found if c == case and n == "torch Schedule1F1B")
        ratios = spread([a / b for a, b in zip(times, baseline)])
        whole = spread(times)
        rows.append(
            {
                "stages": case,
                "contender": name,
                "step_ms": whole["median"],
                "step_p20_ms": whole["p20"],
                "step_p80_ms": whole["p80"],
                "ratio": whole["median"] / spread(baseline)["median"],
                "paired_ratio": ratios["median"],
                "paired_ratio_p20": ratios["p20"],
                "paired_ratio_p80": ratios["p80"],
                "num_stages": STAGES,
                "micro_batches": MICRO_BATCHES,
                "forward_ms": FORWARD_MS * scale,
                "spread": SPREADS[case],
                "rounds": rounds,
            }
        )
    return rows


def main() -> None:
    """Run the benchmark and print its table."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="steps of each contender")
    options = parser.parse_args()
    rows = run(rounds=options.rounds, scale=0.05 if options.toy else 1.0)
    show(
        rows,
        ["stages", "contender", "step_ms", "step_p20_ms", "step_p80_ms", "ratio", "paired_ratio_p20", "paired_ratio_p80"],
    )  # fmt: skip
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
