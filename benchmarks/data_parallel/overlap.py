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
from benchmarks.measure import Row, arguments, in_turns, show, spread, time_ms, write_rows
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
    """Time backward on this rank, with the reduction overlapped, behind it, and left out."""
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

        def backward(name: str, models: dict[str, nn.Module] = models) -> float:
            model = models[name.removesuffix(", alone")]
            model.zero_grad()
            if name.endswith(", alone"):
                with samo.no_sync(model):
                    return time_ms(lambda: model(x).sum().backward())
            return time_ms(lambda: model(x).sum().backward())

        calls = {
            f"{name}{more}": (lambda name=name, more=more: backward(name + more))
            for name in models
            for more in ("", ", alone")
        }
        times = in_turns(calls, rounds=rounds, prepare=dist.barrier)
        for name, model in models.items():
            both = zip(times[name], times[f"{name}, alone"])
            found = spread([with_ - without for with_, without in both])
            traffic = samo.traffic(model)
            rows.append(
                {
                    "reduction": name,
                    "shard": str(shard),
                    "ranks": num_ranks,
                    "backward_ms": spread(times[name])["median"],
                    "exposed_ms": found["median"],
                    "exposed_p20_ms": found["p20"],
                    "exposed_p80_ms": found["p80"],
                    "in_flight_ms": traffic.in_flight_s / traffic.reductions * 1e3,
                    "width": width,
                    "rounds": rounds,
                }
            )
    return rows


def main() -> None:
    """Run the benchmark and print its table."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="backward passes of each kind")
    options = parser.parse_args()
    rows: list[Row] = []
    for num_ranks in (2,) if options.toy else (2, 4):
        rows += run(num_ranks, train, 64 if options.toy else 2048, options.rounds)
    columns = ["ranks", "shard", "reduction", "backward_ms", "exposed_ms", "exposed_p20_ms", "exposed_p80_ms", "in_flight_ms"]  # fmt: skip
    show(rows, columns)
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
