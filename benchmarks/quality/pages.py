"""The page of a result: what every page has, whatever was measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.figures import Figure
from samo.bench.rows import Table, markdown
from samo.utils import atomic_io

__all__ = ["figure_data", "write_page"]

Row = dict[str, Any]


def write_page(
    folder: Path,
    *,
    title: str,
    command: str,
    rows: Sequence[Row],
    notes: Sequence[str],
    table: Table,
    findings: Sequence[str],
    figures: Mapping[str, tuple[str, Figure]],
    more_tables: Mapping[str, Table] | None = None,
) -> None:
    """Write README.md and the figures; ``figures`` has a description and a picture for each name.

    Further tables, by their captions, come after the figures.
    """
    for name, (_, (png, svg)) in figures.items():
        atomic_io.write_bytes(folder / f"{name}.png", png)
        atomic_io.write_bytes(folder / f"{name}.svg", svg.encode())
    parts = [
        f"# {title}",
        f"    {command}",
        "\n".join(f"- {note}" for note in [_where(rows), *notes]),
        markdown(table).rstrip(),
        *(["\n".join(f"- {finding}" for finding in findings)] if findings else []),
        *(f"![{description}]({name}.png)" for name, (description, _) in figures.items()),
        *(
            f"{caption}:\n\n{markdown(more).rstrip()}"
            for caption, more in (more_tables or {}).items()
        ),
        "Every run, with its curve: rows.jsonl. The page is made from it: `--page-only`.",
    ]
    atomic_io.write_bytes(folder / "README.md", "\n\n".join(parts).encode() + b"\n")


def figure_data(rows: Sequence[Row], key: str) -> tuple[list[float], list[list[float]]]:
    """Return x, and for each x the values of all runs, of curves as pairs of x and y."""
    curves = [row[key] for row in rows]
    return [point[0] for point in curves[0]], [
        [curve[place][1] for curve in curves] for place in range(len(curves[0]))
    ]


def _where(rows: Sequence[Row]) -> str:
    dates = sorted({row["date"] for row in rows})
    devices = ", ".join(dict.fromkeys(row["device_name"] for row in rows))
    found = rows[-1]["versions"]
    versions = ", ".join(f"{name} {found[name]}" for name in ("samo", "torch", "python"))
    commits = ", ".join(dict.fromkeys(row["commit"] or "unknown" for row in rows))
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    at_once = ", ".join(map(str, sorted({row["parallel"] for row in rows})))
    return (
        f"Measured {when} on {devices}; {versions}; commit {commits}. Runs at a time: {at_once} (times "
        "are those of runs that shared the device)."
    )
