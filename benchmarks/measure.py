"""Clock, machine and result rows, shared by all benchmarks."""

import argparse
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import samo

Row = dict[str, Any]


def time_ms(run: Callable[[], object]) -> float:
    """Run once and return the milliseconds it took."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def in_turns(
    contenders: dict[str, Callable[[], object]], *, rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Time contenders in turns, so that a machine that slows down slows them all; milliseconds.

    The order changes from round to round: who comes after whom matters to caches and to memory.
    """
    for _ in range(warm_up):
        for run in contenders.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(contenders), len(contenders)):
            times[name].append(time_ms(contenders[name]))
    return times


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return median, 20th and 80th percentile of some times."""
    ordered = sorted(times)
    last = len(ordered) - 1
    at = {"p20": 0.2, "median": 0.5, "p80": 0.8}
    return {name: round(ordered[round(part * last)], 3) for name, part in at.items()}


def keep_freed_memory() -> None:
    """Start again with glibc told to keep freed memory, as a GPU's allocator does.

    By default it is returned to the system at the end of a step and fetched back, page by page, in
    the next one, by some contenders more than by others.
    """
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        large = str(2**32)
        settings = {"MALLOC_TRIM_THRESHOLD_": large, "MALLOC_MMAP_THRESHOLD_": large}
        os.execve(sys.executable, sys.orig_argv, os.environ | settings)


def environment() -> Row:
    """Describe machine, versions and commit."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "malloc": {k: v for k, v in os.environ.items() if k.startswith(("MALLOC_", "LD_PRELOAD"))},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "samo": samo.__version__,
        "commit": commit,
    }


def write_rows(path: Path | None, rows: Iterable[Row]) -> None:
    """Write one JSON object a line, each with the environment."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for row in rows:
            file.write(json.dumps(row | environment()) + "\n")


def show(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Print rows as a Markdown table."""
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="file for the raw rows, JSON lines")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, only to see that it runs")
    return parser


def _cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 10
        else (f"{value:.1f}" if isinstance(value, float) else str(value))
    )
