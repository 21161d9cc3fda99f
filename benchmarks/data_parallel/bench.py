"""What do data-parallel ranks send, wait for and hold: samo beside DDP and DeepSpeed's ZeRO.

All contenders train the same 90 % pruned GPT over a byte vocabulary in bfloat16, on ranks of this
machine that talk over gloo. They take turns, one step each, in the same processes.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist

import samo
from benchmarks.data_parallel import deepspeed_peer
from benchmarks.data_parallel.contenders import DDP, Contender, Samo
from benchmarks.measure import (
    Row,
    arguments,
    in_turns,
    keep_freed_memory,
    show,
    spread,
    time_ms,
    write_rows,
)
from benchmarks.ranks import run
from samo.models import GPT, GPTConfig

SPARSITY = 0.9
COLUMNS = (
    "contender",
    "ranks",
    "pruned_mb",
    "pruned_ratio",
    "sent_mb",
    "communication_ms",
    "communication_ratio",
    "in_flight_ms",
    "exposed_ms",
    "step_ms",
    "state_mb",
    "predicted_mb",
)


def pruned_gpt(shape: dict[str, int]) -> tuple[GPT, samo.Masks]:
    """Return a bfloat16 GPT and its masks, the same on all ranks."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**shape)).to(torch.bfloat16)
    return model, samo.prune(model, SPARSITY)


def train(
    rank: int, num_ranks: int, shape: dict[str, int], tokens: int, rounds: int, bucket_mb: float
) -> list[Row]:
    """Train all contenders on this rank and measure."""
    data = samo.mesh(device="cpu")["data"]
    model, masks = pruned_gpt(shape)
    rivals: list[Contender] = []
    for is_overlapped in (True, False):
        rivals.append(
            DDP(
                copy.deepcopy(model),
                masks,
                data.get_group(),
                is_overlapped=is_overlapped,
            )
        )
        for shard in (None, "state"):
            rivals.append(
                Samo(
                    copy.deepcopy(model),
                    masks,
                    data,
                    shard=shard,  # type: ignore[arg-type]
                    bucket_mb=bucket_mb,
                    is_overlapped=is_overlapped,
                )
            )
    torch.manual_seed(rank)
    batch = torch.randint(0, 256, (1, tokens + 1))
    for rival in rivals:  # buckets are laid out, kernels loaded, memory fetched
        rival.step(batch)
        rival.step(batch)
    before = {rival.name: rival.traffic() for rival in rivals}
    backward: dict[str, list[tuple[float, float]]] = {rival.name: [] for rival in rivals}

    def step(rival: Contender) -> None:
        alone = rival.step(batch, is_synced=False)
        together = rival.step(batch)
        backward[rival.name].append((alone, together))

    def whole(rival: Contender) -> float:
        dist.barrier()
        return time_ms(lambda: rival.step(batch))

    for _ in range(rounds):
        for rival in rivals:
            dist.barrier()
            step(rival)
    after = {rival.name: rival.traffic() for rival in rivals}
    steps = {rival.name: [whole(rival) for _ in range(rounds)] for rival in rivals}

    alone = in_turns(
        {rival.name: rival.communicate for rival in rivals},
        rounds=3 * rounds,
        prepare=dist.barrier,
    )
    rows = []
    for rival in rivals:
        name = rival.name
        then, now = before[name], after[name]
        held = rival.state_bytes()
        sent = spread(alone[name])
        purposes = ("gradients", "values")
        rows.append(
            {
                "contender": name,
                "ranks": num_ranks,
                "argument_mb": _per_step(then, now, "argument_bytes", purposes, rounds),
                "pruned_mb": _per_step(then, now, "pruned_bytes", purposes, rounds),
                "sent_mb": (now.sent_bytes - then.sent_bytes) / rounds / 1e6,
                "communication_ms": sent["median"],
                "communication_p20_ms": sent["p20"],
                "communication_p80_ms": sent["p80"],
                "in_flight_ms": (now.in_flight_s - then.in_flight_s) / rounds * 1e3,
                "waited_ms": (now.exposed_s - then.exposed_s) / rounds * 1e3,
                "exposed_ms": spread([(b - a) * 1e3 for a, b in backward[name]])["median"],
                "step_ms": spread(steps[name])["median"],
                "state_mb": held["measured"] / 1e6,
                "predicted_mb": held["predicted"] / 1e6,
                "num_params": sum(param.numel() for param in model.parameters()),
                "tokens": tokens,
                "rounds": rounds,
                "bucket_mb": bucket_mb,
                "sparsity": SPARSITY,
            }
        )
    return rows


def _per_step(
    then: samo.Traffic, now: samo.Traffic, what: str, purposes: tuple[str, ...], rounds: int
) -> float:
    def read(found: samo.Traffic, purpose: str) -> Any:
        return getattr(getattr(found, purpose), what)

    return sum(read(now, purpose) - read(then, purpose) for purpose in purposes) / rounds / 1e6


def with_ratios(rows: list[Row]) -> list[Row]:
    """Add what each row has of DDP's at the same number of ranks.

    Bytes on the wire, not those of arguments: an all-reduce sends an argument twice, a reduce-scatter
    and an all-gather once each.
    """
    for row in rows:
        (ddp,) = (r for r in rows if r["contender"] == "DDP" and r["ranks"] == row["ranks"])
        twice = 1 if "shard=state" in row["contender"] else 2
        row["pruned_ratio"] = twice * row["pruned_mb"] / (2 * ddp["pruned_mb"])
        row["communication_ratio"] = row["communication_ms"] / ddp["communication_ms"]
    return rows


def main() -> None:
    """Run the benchmark and print its table."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each contender")
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="numbers of ranks")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each rank in a step")
    parser.add_argument("--bucket-mb", type=float, default=5.0, help="MB of samo's buckets")
    options = parser.parse_args()
    if not options.toy:
        keep_freed_memory()
    shape = {"num_layers": 14, "width": 768, "num_heads": 12, "context": 256}
    tokens, bucket_mb, ranks = options.tokens, options.bucket_mb, options.ranks or [1, 2, 4]
    if options.toy:
        shape = {"num_layers": 2, "width": 32, "num_heads": 2, "context": 16}
        tokens, bucket_mb, ranks = 8, 0.02, options.ranks or [2]
    rows: list[Row] = []
    for num_ranks in ranks:
        found = run(
            num_ranks,
            train,
            shape,
            tokens,
            options.rounds,
            bucket_mb,
            preload=["benchmarks.data_parallel.contenders"],
        )
        rows += with_ratios(found)
        rows += deepspeed_peer.rows(num_ranks, shape, tokens, options.rounds)
    show(rows, COLUMNS)
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
