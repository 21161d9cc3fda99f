"""Deadlocks and races of NCCL transports at random timings, on a model of GPUs and NCCL.

2 to 4 stages, 2 to 6 micro-batches, 1, 2 or 8 hardware queues, outputs that are contiguous or not,
all drawn by seed. The transport of this version also has to find the losses of one process.
"""

import multiprocessing
from collections import Counter
from typing import Final

import torch

from benchmarks.measure import Row, arguments, show, write_rows
from benchmarks.pipeline.nccl_0_1 import NcclTransport01
from benchmarks.pipeline.nccl_model import Case, NcclOnTheModel, try_timing

__all__ = ["main", "run"]

TRANSPORTS: Final = {"this version": NcclOnTheModel, "0.1": NcclTransport01}
QUEUES: Final = (1, 2, 8)


def _count(name: str, seeds: range) -> Counter[tuple[int, str]]:
    torch.set_num_threads(1)
    found: Counter[tuple[int, str]] = Counter()
    for seed in seeds:
        case, is_new = Case.draw(seed), name != "0.1"
        outcome, losses = try_timing(TRANSPORTS[name], seed, case, is_eager=is_new)
        if is_new and not outcome:
            wanted = case.loss(seed)
            if not all(torch.equal(loss, wanted) for each in losses for loss in each):
                outcome = "wrong loss"
        found[case.num_queues, outcome or "right"] += 1
    return found


def run(name: str, timings: int, processes: int = 2) -> list[Row]:
    """Return a row for each number of hardware queues."""
    parts = [range(start, timings, 8 * processes) for start in range(8 * processes)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        counts = sum(pool.starmap(_count, [(name, part) for part in parts]), Counter())
    rows = []
    for queues in QUEUES:
        own = {outcome: number for (q, outcome), number in counts.items() if q == queues}
        row: Row = {"transport": name, "queues": queues, "timings": sum(own.values())}
        outcomes = ("deadlock", "race", "wrong loss", "right")
        rows.append(row | {outcome: own.get(outcome, 0) for outcome in outcomes})
    return rows


def main() -> None:
    """Try the timings and print counts."""
    parser = arguments(__doc__)
    parser.add_argument("--timings", type=int, default=10_000, help="for this version")
    parser.add_argument("--timings-0-1", type=int, default=1_000, help="for the transport of 0.1")
    options = parser.parse_args()
    numbers = {"this version": options.timings, "0.1": options.timings_0_1}
    rows = [row for name, n in numbers.items() for row in run(name, 20 if options.toy else n)]
    show(rows, ["transport", "queues", "timings", "deadlock", "race", "wrong loss", "right"])
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
