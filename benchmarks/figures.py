"""Draw the result of ``samo bench kernels`` or ``samo bench step``.

    python -m benchmarks.figures benchmarks/results/kernels-h200-2026-11-16

Reads rows.jsonl in the folder, and writes NAME.png and NAME.svg beside it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.drawing import (
    LIGHT,
    Figure,
    drawing,
    new_figure,
    place,
    run_colour,
    to_png,
    to_svg,
    write_figure,
)
from benchmarks.measure import Row, read_lines
from samo.utils.formatting import percent, three_digits

_WIDTH: Final = 880
_ORDER: Final = ("compress", "expand", "update, exact", "update, lean", "update, dense")


def kernels_figure(rows: Sequence[Row]) -> Figure:
    """Draw how far each operation is from its floor, over the number of weights."""
    densities = sorted({row["parameters"]["density"] for row in rows})
    sizes = sorted({row["parameters"]["numel"] for row in rows})
    height, left, right, gap = 380, 56, 150, 44
    wide = (_WIDTH - left - right - gap * (len(densities) - 1)) / len(densities)
    highest = max(row["figures"]["times_floor"] for row in rows if row["name"] in _ORDER)
    with drawing():
        figure = new_figure(_WIDTH, height)
        title = "Time over the time in which the bytes could move"
        figure.text(left / _WIDTH, 1 - 24 / height, title, fontsize=14, weight="bold")
        for column, density in enumerate(densities):
            start = left + column * (wide + gap)
            axes = place(figure, left=start, right=_WIDTH - start - wide, top=64, bottom=52)
            axes.set_title(f"{percent(density)} kept", loc="left", fontsize=12)
            for number, name in enumerate(_ORDER):
                found = [
                    row
                    for row in rows
                    if (row["name"], row["parameters"]["density"]) == (name, density)
                ]
                axes.plot(
                    [row["parameters"]["numel"] for row in found],
                    [row["figures"]["times_floor"] for row in found],
                    marker="o",
                    color=run_colour(number),
                    label=name,
                )
            axes.axhline(1.0, color=LIGHT["muted"], linewidth=0.8)
            axes.set_ylim(0, max(2.0, highest * 1.1))
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [f"2^{size.bit_length() - 1}" for size in sizes], fontsize=9)
            axes.minorticks_off()
            axes.grid(axis="y")
            axes.set_xlabel("weights")
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=11)
        return to_png(figure), to_svg(figure)


def step_figure(rows: Sequence[Row]) -> Figure:
    """Draw time and memory of every contender as bars, samo's in colour."""
    panels = {"step, ms": [row["median"] for row in rows]}
    if all(row["figures"]["peak_bytes"] for row in rows):
        panels["peak memory, GB"] = [row["figures"]["peak_bytes"] / 1e9 for row in rows]
    else:
        panels["state, B/param"] = [row["figures"]["state_bytes_per_param"] for row in rows]
    is_ours = ["ledger_measured_bytes" in row["figures"] for row in rows]
    colours = [LIGHT["run0" if ours else "whole"] for ours in is_ours]
    places = range(len(rows))
    with drawing():
        figure = new_figure(_WIDTH, 34 * len(rows) + 76)
        for column, (title, values) in enumerate(panels.items()):
            left = 150 + 370 * column
            axes = place(figure, left=left, right=_WIDTH - left - 280, top=44, bottom=12)
            bars = axes.barh(places, values, color=colours, height=0.62)
            axes.bar_label(bars, [three_digits(value) for value in values], padding=6, fontsize=11)
            axes.invert_yaxis()
            axes.set_xticks([])
            axes.set_yticks(places, [row["name"] for row in rows] if column == 0 else [])
            axes.set_title(title, loc="left", fontsize=12, weight="bold")
            axes.spines["bottom"].set_visible(False)
        return to_png(figure), to_svg(figure)


def main() -> None:
    """Draw the figure of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="result of samo bench")
    folder = parser.parse_args().folder
    rows = [row for row in read_lines(folder / "rows.jsonl") if row["median"] is not None]
    name = rows[0]["bench"]
    write_figure({"kernels": kernels_figure, "step": step_figure}[name](rows), folder, name)
    print(f"{folder / name}.png and .svg")


if __name__ == "__main__":
    main()
