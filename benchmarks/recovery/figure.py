"""Draw rows of the benchmark: perplexity over sparsity, pruned and trained again.

python -m benchmarks.recovery.figure rows.jsonl
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

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

__all__ = []

STYLES = {"pruned": "o:", "samo": "o-", "distilled": "s--", "lora": "^-."}
"""Marker and line of each contender."""


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: a colour for each method, a line style for each contender."""
    methods = list(dict.fromkeys(row["method"] for row in rows if "method" in row))
    sparsities = sorted({row["sparsity"] for row in rows if "sparsity" in row})
    contenders = [name for name in STYLES if any(row["contender"] == name for row in rows)]
    with drawing():
        figure = new_figure(880, 460)
        axes = place(figure, left=64, right=190, top=48, bottom=52)
        axes.set_yscale("log")
        axes.grid(axis="y", which="both")
        for number, method in enumerate(methods):
            for contender in contenders:
                points = sorted(
                    (row["sparsity"], row["ppl"])
                    for row in rows
                    if row.get("method") == method and row["contender"] == contender
                )
                if points:
                    x, y = zip(*points)
                    label, colour = f"{method}, {contender}", run_colour(number)
                    axes.plot(x, y, STYLES[contender], color=colour, markersize=5, label=label)
        for row in rows:
            if "method" not in row:
                axes.axhline(row["ppl"], color=LIGHT["muted"], linewidth=1)
                text = {"dense": "dense, as it came", "unpruned": "dense, trained alike"}
                axes.annotate(
                    text[row["contender"]], (1.01, row["ppl"]), xycoords=("axes fraction", "data"),
                    va="bottom" if row["contender"] == "dense" else "top",  # these two are often close
                    color=LIGHT["muted"], fontsize=10,
                )  # fmt: skip
        axes.set_xticks(sparsities, [f"{sparsity:.0%}" for sparsity in sparsities])
        low, high = axes.get_ylim()
        ticks = [tick for base in (10, 100, 1e3, 1e4, 1e5) for tick in (base, 2 * base, 5 * base)]
        ticks = [tick for tick in ticks if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("sparsity")
        first = rows[0]
        axes.set_title(f"Perplexity of {first['model']} on held-out text", loc="left", fontsize=13)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.62), frameon=False, fontsize=10)
        return to_png(figure), to_svg(figure)


def main() -> None:
    """Write the figure beside the rows, as PNG and SVG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    path = parser.parse_args().rows
    write_figure(draw(read_lines(path)), path.parent, path.stem)


if __name__ == "__main__":
    main()
