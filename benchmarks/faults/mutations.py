"""Does any damaged or forged file crash samo, hang it, or pass for what it is not?

Each mutation copies a folder of files, damages one file (bytes flipped, cut, grown, zeroed; values
of JSON replaced by hostile ones; a link or a pipe in its place) and opens it by the public way, in
a process with 1 GB of memory more than it started with. Two of five are sealed: whoever forged them
has computed the checksums again.
"""

import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.faults import folders
from benchmarks.faults.cases import CASES as FILES, Case, build, open_cache
from benchmarks.faults.damage import damage
from benchmarks.measure import Row, arguments, show, write_rows
from samo.errors import SamoError

CASES: Final = FILES | folders.FOLDERS
LIMIT_S: Final = 60.0
"""On a busy machine; a load takes hundredths of a second."""
BAD: Final = ("crash", "hang", "unnamed", "wrong", "outside")
OUTCOMES: Final = ("refused", "same", "other", *BAD)


def main() -> None:
    """Mutate, and show how many of each kind of file were refused, or worse."""
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="mutations in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="name of one kind of file")
    options = parser.parse_args()
    count = 30 if options.toy else options.count
    names = [name for name in CASES if options.only in name]
    with tempfile.TemporaryDirectory(prefix="samo-mutations-") as folder:
        home = Path(folder)
        build(home / "good")
        folders.build(home / "good")
        rows = run(home, names, options.seed, count, options.workers)
    summary = [summarise(rows, name) for name in names] + [summarise(rows, "")]
    show(summary, ("kind", "count", "sealed", *OUTCOMES))
    for row in rows:
        if row["outcome"] in BAD:
            print(json.dumps(row))
    write_rows(options.out, summary + [row for row in rows if row["outcome"] in BAD])


def summarise(rows: list[Row], kind: str) -> Row:
    of = [row for row in rows if kind in ("", row["kind"])]
    found = Counter(row["outcome"] for row in of)
    sealed = sum(row["sealed"] for row in of)
    return {"kind": kind or "all", "count": len(of), "sealed": sealed} | {
        outcome: found[outcome] for outcome in OUTCOMES
    }


# Processes ---------------------------------------------------------------------------------------


def run(home: Path, names: list[str], seed: int, count: int, workers: int) -> list[Row]:
    """Return a row for each mutation, from processes that are replaced if they die or hang."""
    context = multiprocessing.get_context("fork")
    rows: list[Row] = []
    todo = {worker: list(range(worker, count, workers)) for worker in range(workers)}
    alive: dict[Connection, tuple[int, Any, float]] = {}

    def start(worker: int) -> None:
        if todo[worker]:
            here, there = context.Pipe(duplex=False)
            args = (home, worker, names, seed, todo[worker], there)
            process = context.Process(target=work, args=args)
            process.start()
            there.close()
            alive[here] = worker, process, time.monotonic()

    for worker in range(workers):
        start(worker)
    while alive:
        ready = wait(list(alive), timeout=1.0)
        for end, (worker, process, since) in list(alive.items()):
            is_late = end not in ready and time.monotonic() - since > LIMIT_S
            row = None
            if end in ready:
                with suppress(EOFError):
                    row = end.recv()
                    alive[end] = worker, process, time.monotonic()
            if row is None and (is_late or end in ready):  # killed, or dead, or done
                process.kill()
                process.join()
                del alive[end]
                if todo[worker]:
                    outcome = "hang" if is_late else "crash"
                    text = f"exit code {process.exitcode}"
                    row = describe(names, seed, todo[worker][0]) | {
                        "outcome": outcome,
                        "text": text,
                    }
            if row is not None:
                todo[worker].pop(0)
                rows.append(row)
                if row["outcome"] in BAD or len(rows) % 500 == 0:
                    print(f"{len(rows):,} of {count:,}", row, file=sys.stderr, flush=True)
            if end not in alive:
                start(worker)
    return rows


def describe(names: list[str], seed: int, number: int) -> Row:
    """Return which kind of file a mutation is of, and whether it is sealed."""
    draw = random.Random(f"{seed} {number}")
    kind = draw.choice(names)
    is_checkpoint = kind.startswith(("load", "inspect", "resume, rigl", "resume, early"))
    return {"number": number, "kind": kind, "sealed": is_checkpoint and draw.random() < 0.75}


def work(
    home: Path, worker: int, names: list[str], seed: int, numbers: list[int], end: Connection
) -> None:
    """Open mutations one after the other, and send what came of each."""
    torch.set_num_threads(1)
    os.fsync = lambda file: None  # type: ignore[assignment]  # nothing here outlives the machine
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    place = home / str(worker)
    expected: dict[str, str] = {}
    for kind in names:
        expected[kind] = CASES[kind].open(fresh(home, place, CASES[kind]))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in numbers:
        row = describe(names, seed, number)
        case = CASES[row["kind"]]
        path = fresh(home, place, case)
        draw = random.Random(f"{seed} {number} damage")
        row["damage"] = damage(path, case, draw, is_sealed=row["sealed"])
        try:
            found = case.open(path)
            is_wrong = case.is_guarded and not row["sealed"]
            row["outcome"] = "wrong" if is_wrong else "other"
            row["outcome"] = "same" if found == expected[row["kind"]] else row["outcome"]
        except SamoError as error:
            row |= {"outcome": "refused", "text": str(error)[:200]}
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the panics of Rust are no Exception
            row |= {"outcome": "unnamed", "text": f"{type(error).__name__}: {error}"[:300]}
        outside = place / "outside"
        if os.listdir(outside) != ["victim"] or (outside / "victim").read_text() != "victim":
            row["outcome"] = "outside"
        end.send(row)


def fresh(home: Path, place: Path, case: Case) -> Path:
    """Copy the good files of a case, beside a place that nobody may write to."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "outside").mkdir(parents=True)
    (place / "outside" / "victim").write_text("victim")
    path = shutil.copytree(home / "good" / case.folder, place / "case")
    if case.damaged.startswith("cache"):
        open_cache(path)
    return path


if __name__ == "__main__":
    main()
