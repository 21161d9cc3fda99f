"""The page of a result: one table of all lines, and the frontier. All of it is made from rows.

    python -m benchmarks.streamed.page FIRST.jsonl SECOND.jsonl --out benchmarks/results/NAME

Rows of a later file stand in place of those of the same line and contender before them.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.step import command
from benchmarks.streamed.frontier import frontier_figure
from benchmarks.streamed.lines import LINES
from samo.bench.rows import Table, markdown
from samo.utils import atomic_io
from samo.utils.formatting import NOTHING, three_digits

__all__ = ["merge", "read_rows", "tabulate", "write"]

Row = dict[str, Any]

_HEAD = (
    "line",
    "contender",
    "step, ms",
    "p20-p80",
    "over masked",
    "in a row, ms",
    "over masked",
    "peak, GB",
    "over masked",
    "state, B/param",
    "warm-up, s",
    "compilations",
)


def read_rows(path: Path) -> list[Row]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def merge(files: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the rows of several files in the order of the lines, the last of each contender."""
    order = [*LINES]
    found = {(row["line"], row["name"]): row for rows in files for row in rows}
    return sorted(found.values(), key=lambda row: order.index(row["line"]))


def tabulate(rows: Sequence[Row]) -> Table:
    """Return the table of rows."""
    return Table(_HEAD, [_line(row) for row in rows])


def write(folder: Path, rows: Sequence[Row]) -> None:
    """Write rows, page and figure."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    atomic_io.write_bytes(folder / "rows.jsonl", text.encode())
    figure = frontier_figure([row for row in rows if row["line"] == "frontier"])
    if figure is not None:
        png, svg = figure
        atomic_io.write_bytes(folder / "frontier.png", png)
        atomic_io.write_bytes(folder / "frontier.svg", svg.encode())
    lines = [name for name in LINES if any(row["line"] == name for row in rows)]
    parts = [
        "# Streamed and compiled weights",
        "\n".join(f"    {command(LINES[name].config)}" for name in lines),
        _where(rows),
        "Step: forward, backward and update, median. Over masked: step and peak over those of masked dense "
        "training, compiled in the same way; of several rounds, the median of the ratios within each "
        "(all of them: `round_ms` in the rows). Step: after a pause of 0.1 s, so that the host's work before the first kernel counts. In a row: 10 steps without a pause, "
        "as in training. Peak: memory allocated, with CUDA graphs reserved. Warm-up: three "
        "steps, five with CUDA graphs, in which torch compiles and records. Where contenders were compiled, or "
        "did not fit into memory together, they were measured one after the other.",
        markdown(tabulate(rows)).rstrip(),
        *(["![Step time over peak memory](frontier.png)"] if figure is not None else []),
        "Every number, with its spread: rows.jsonl. `python -m benchmarks.streamed.page` makes the page from it.",
    ]
    atomic_io.write_bytes(folder / "README.md", "\n\n".join(parts).encode() + b"\n")


def _line(row: Row) -> tuple[str, ...]:
    line = LINES[row["line"]]
    if row["median"] is None:
        return (line.title, row["name"], row["failure"], *[NOTHING] * (len(_HEAD) - 3))
    found = row["figures"]
    peak = found["peak_bytes"]
    return (
        line.title,
        row["name"],
        three_digits(row["median"]),
        f"{three_digits(row['p20'])}-{three_digits(row['p80'])}",
        _ratio(found["over_masked"]),
        three_digits(found["in_a_row_ms"]),
        _ratio(found.get("in_a_row_over_masked")),
        three_digits(peak and peak / 1e9),
        _ratio(found["peak_over_masked"]),
        three_digits(found["state_bytes_per_param"]),
        f"{found['warm_up_s']:.1f}",
        _compilations(found),
    )


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _compilations(found: Row) -> str:
    if "compilations" not in found:
        return NOTHING
    skips = found.get("cudagraph_skips")
    return str(found["compilations"]) + (f", {skips} without CUDA graphs" if skips else "")


def _where(rows: Sequence[Row]) -> str:
    def several(key: str) -> str:
        return ", ".join(dict.fromkeys(str(row[key] or "unknown") for row in rows))

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
    write(options.out, merge([read_rows(path) for path in options.rows]))


if __name__ == "__main__":
    main()
