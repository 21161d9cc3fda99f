"""How much of a reduction does backward hide: ranks whose backward passes sleep, with real collectives.

Ranks that share cores with the threads of gloo hide nothing: sending takes the time that computing needs.
Here a layer's backward pass sleeps, as a host does that waits for its GPU, so that the cores are free to send.
"""

import copy
import time
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from benchmarks.measure import Row, arguments, in_turns, show, spread, write_rows
from benchmarks.ranks import run

__all__ = ["main"]

LAYERS: Final = 12
BACKWARD_MS: Final = 10.0
SHARDS: Final[tuple[Literal["state"] | None, ...]] = (None, "state")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class SleepyLinear(nn.Linear):
    """A linear layer whose backward pass takes a time of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(super().forward(x), BACKWARD_MS / 1e3)


def train(rank: int, num_ranks: int, width: int, rounds: int) -> list[Row]:
    """Time what this rank waits for, with the reduction overlapped by backward, and behind it."""
    data = samo.mesh(device="cpu")["data"]
    torch.manual_seed(0)
    layers = [SleepyLinear(width, width, bias=False) for _ in range(LAYERS)]
    whole = nn.Sequential(*layers).to(torch.bfloat16)
    masks = samo.prune(whole, 0.9)
    x = torch.ones(1, width, dtype=torch.bfloat16)
    rows: list[Row] = []
    for shard in SHARDS:
        models: dict[str, nn.Module] = {}
        for name, is_overlapped in (("overlapped", True), ("after backward", False)):
            models[name] = samo.compress_(copy.deepcopy(whole), masks)
            # A layer a bucket, or nearly: a reduction begins when its bucket is full.
            samo.replicate(
                models[name],
                data,
                shard=shard,
                bucket_bytes=width * width * 0.2,
                overlap=is_overlapped,
            )

        waits: dict[str, list[float]] = {name: [] for name in models}

        def backward(
            name: str, models: dict[str, nn.Module] = models, waits: dict[str, list[float]] = waits
        ) -> None:
            model = models[name]
            model.zero_grad()
            before = samo.traffic(model).exposed_s
            model(x).sum().backward()
            waits[name].append((samo.traffic(model).exposed_s - before) * 1e3)

        calls = {name: (lambda name=name: backward(name)) for name in models}
        times = in_turns(calls, rounds=rounds, prepare=dist.barrier)
        for name, model in models.items():
            waited = spread(waits[name][-rounds:])
            traffic = samo.traffic(model)
            rows.append(
                {
                    "reduction": name,
                    "shard": str(shard),
                    "ranks": num_ranks,
                    "exposed_ms": waited["median"],
                    "exposed_p20_ms": waited["p20"],
                    "exposed_p80_ms": waited["p80"],
                    "in_flight_ms": traffic.in_flight_s / traffic.reductions * 1e3,
                    "pass_ms": spread(times[name])["median"],
                    "width": width,
                    "rounds": rounds,
                }
            )
    return rows


def main() -> None:
    """Run the benchmark and print its table."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="passes of each kind")
    options = parser.parse_args()
    rows: list[Row] = run(2, train, 64 if options.toy else 1024, options.rounds)
    columns = ["ranks", "shard", "reduction", "exposed_ms", "exposed_p20_ms", "exposed_p80_ms", "in_flight_ms", "pass_ms"]  # fmt: skip
    show(rows, columns)
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
