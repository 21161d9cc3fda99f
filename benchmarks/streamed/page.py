"""The page of a result: the table of each line, and the frontier, all made from rows.

    python -m benchmarks.streamed.page FIRST.jsonl SECOND.jsonl --out benchmarks/results/NAME

Rows of a later file stand in place of those of the same line and contender before them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from benchmarks.drawing import write_figure
from benchmarks.measure import Row, read_lines, write_lines
from benchmarks.step import command
from benchmarks.streamed.frontier import frontier_figure
from benchmarks.streamed.lines import LINES
from samo.bench import step
from samo.bench.rows import Row as BenchRow, failures, markdown
from samo.utils import atomic_io


def merge(files: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the rows of several files in the order of the lines, the last of each contender."""
    order = [*LINES]
    found = {(row["line"], row["name"]): row for rows in files for row in rows}
    return sorted(found.values(), key=lambda row: order.index(row["line"]))


def tables(rows: Sequence[Row]) -> str:
    """Return the table that `samo bench step` makes of each line, under its command."""
    parts = []
    for name, line in LINES.items():
        names = [field.name for field in fields(BenchRow)]
        own = [BenchRow(**{n: row[n] for n in names}) for row in rows if row["line"] == name]
        if own:
            parts += [f"## {line.title}", f"    {command(line.config)}"]
            parts += [markdown(step.tabulate(own)).rstrip()]
            parts += [f"Not measured: {'; '.join(failures(own))}."] if failures(own) else []
    return "\n\n".join(parts)


def write(folder: Path, rows: Sequence[Row]) -> None:
    """Write rows, page and figure."""
    write_lines(folder / "rows.jsonl", rows)
    figure = frontier_figure([row for row in rows if row["line"] == "frontier"])
    if figure is not None:
        write_figure(figure, folder, "frontier")
    parts = [
        "# Streamed and compiled weights",
        f"{_where(rows)} [docs/benchmarks.md](../../../docs/benchmarks.md) explains every column.",
        tables(rows),
        *(["![Step time over peak memory](frontier.png)"] if figure is not None else []),
        "Every number, with its spread: rows.jsonl. `python -m benchmarks.streamed.page` makes the page from it.",
    ]
    atomic_io.write_bytes(folder / "README.md", "\n\n".join(parts).encode() + b"\n")


def _where(rows: Sequence[Row]) -> str:
    def several(key: str) -> str:
        return ", ".join(sorted({str(row[key] or "unknown") for row in rows}))

    versions = rows[-1]["versions"]
    named = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions
    )
    return f"{several('device_name')}, {named}, {several('date')}; commit {several('commit')}."


def main() -> None:
    """Write the page of some files of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+", type=Path, help="files that bench.py has written")
    parser.add_argument("--out", type=Path, required=True, help="folder for the page")
    options = parser.parse_args()
    write(options.out, merge([read_lines(path) for path in options.rows]))


if __name__ == "__main__":
    main()
