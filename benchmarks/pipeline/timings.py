"""Deadlocks and races of NCCL transports at random timings, on a model of GPUs and NCCL.

2 to 4 stages, 2 to 6 micro-batches, 1, 2 or 8 hardware queues, outputs that are contiguous or not,
all drawn by seed. samo's transport also has to find the losses of one process. Beside it there is
that of version 0.1, to show what the model finds.
"""

import multiprocessing
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch

from benchmarks.measure import Row, arguments, show, write_rows
from benchmarks.pipeline.nccl_0_1 import NcclTransport01
from benchmarks.pipeline.nccl_model import Case, NcclOnTheModel, try_timing

TRANSPORTS: Final[dict[str, Callable[..., Any]]] = {
    "samo": NcclOnTheModel,
    "samo 0.1": NcclTransport01,
}
QUEUES: Final = (1, 2, 8)


def outcome_of(name: str, seed: int, case: Case) -> str:
    """Return what one timing leads to: "right", "wrong loss", "deadlock" or "race"."""
    kind = TRANSPORTS[name]
    outcome, losses = try_timing(kind, seed, case, is_eager=kind is not NcclTransport01)
    if outcome or kind is NcclTransport01:  # whose hosts compute before the data is there
        return outcome or "right"
    wanted = case.loss(seed)
    is_right = all(torch.equal(loss, wanted) for each in losses for loss in each)
    return "right" if is_right else "wrong loss"


def _count(name: str, seeds: range) -> Counter[tuple[int, str]]:
    torch.set_num_threads(1)
    cases = [(seed, Case.draw(seed)) for seed in seeds]
    return Counter((case.num_queues, outcome_of(name, seed, case)) for seed, case in cases)


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
    parser.add_argument("--timings", type=int, default=10_000, help="of samo's transport")
    options = parser.parse_args()
    rows = []
    for name in TRANSPORTS:
        count = options.timings if name == "samo" else 1000
        rows += run(name, 20 if options.toy else count)
    show(rows, ["transport", "queues", "timings", "deadlock", "race", "wrong loss", "right"])
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
