"""What do streamed and compiled weights cost a training step on a GPU, beside masked dense training?

Each line is a call of ``benchmarks.step`` in a process of its own; ``lines.py`` has them. Rows are
written after each line, so that they are kept when time runs out.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import Row, read_lines, write_lines
from benchmarks.step import command
from benchmarks.streamed.lines import LINES
from benchmarks.streamed.page import tables
from samo.bench.settings import StepConfig


def run_line(config: StepConfig, limit_s: float | None) -> list[Row]:
    """Measure one line in a process of its own and return its rows."""
    with tempfile.TemporaryDirectory() as parent:
        out = Path(parent) / "step"
        line = command(config)
        print(f"\n$ {line}", flush=True)
        words = [sys.executable, *shlex.split(line)[1:], "--out", str(out)]
        try:
            subprocess.run(words, timeout=limit_s)
        except subprocess.TimeoutExpired:
            print("stopped: the time is up", flush=True)
        found = out / "rows.jsonl"
        return read_lines(found) if found.exists() else []


def main() -> None:
    """Measure the lines and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", nargs="*", help=f"of {', '.join(LINES)}; by default all")
    parser.add_argument("--out", type=Path, help="file for the raw rows, JSON lines")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, only to see that it runs")
    parser.add_argument("--seconds", type=float, help="stop after this time, with what there is")
    options = parser.parse_args()
    unknown = set(options.lines) - set(LINES)
    if unknown:
        parser.error(f"there is no line {', '.join(sorted(unknown))}")
    end = time.monotonic() + (options.seconds or float("inf"))
    rows: list[Row] = []
    for name in options.lines or LINES:
        left = end - time.monotonic()
        if left < 1:
            print(f"no time for {name}", flush=True)
            continue
        start = time.monotonic()
        config = replace(LINES[name].config, quick=options.toy)
        found = run_line(config, left if options.seconds else None)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        rows += [{"line": name, **row} for row in found]
        if options.out is not None:
            write_lines(options.out, rows)
    print(f"\n{tables(rows)}", flush=True)


if __name__ == "__main__":
    main()
