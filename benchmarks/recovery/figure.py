"""Draw rows of the benchmark: perplexity over sparsity, pruned and trained again.

python -m benchmarks.recovery.figure rows.jsonl
"""

import argparse
import math
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

STYLES = {"pruned": "o:", "samo": "o-", "distilled": "s--", "lora": "^-."}
"""Marker and line of each contender."""
LONGER = {"samo": "D-", "distilled": "P--", "lora": "v-."}
"""The same with more tokens than others had."""


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: a colour for each method, a line style for each contender."""
    methods = list(dict.fromkeys(row["method"] for row in rows if "method" in row))
    sparsities = sorted({row["sparsity"] for row in rows if "sparsity" in row})
    budgets = sorted({row["tokens"] for row in rows if "tokens" in row})
    keys = [(name, budget) for name in STYLES for budget in (None, *budgets)]
    with drawing():
        figure = new_figure(880, 460)
        axes = place(figure, left=64, right=200, top=48, bottom=52)
        axes.set_yscale("log")
        axes.grid(axis="y", which="both")
        for number, method in enumerate(methods):
            for contender, tokens in keys:
                points = sorted(
                    (row["sparsity"], row["ppl"])
                    for row in rows
                    if row.get("method") == method
                    and (row["contender"], row.get("tokens")) == (contender, tokens)
                )
                if points:
                    x, y = zip(*points)
                    styles = LONGER if tokens and tokens > budgets[0] else STYLES
                    label = ", ".join([method, contender, *budget_of(tokens, budgets)])
                    colour = run_colour(number)
                    axes.plot(x, y, styles[contender], color=colour, markersize=5, label=label)
        axes.set_xticks(sparsities, [f"{sparsity:.0%}" for sparsity in sparsities])
        lines = sorted((row for row in rows if "method" not in row), key=lambda row: -row["ppl"])
        for row in lines:
            axes.axhline(row["ppl"], color=LIGHT["muted"], linewidth=1)
        low, high = axes.get_ylim()
        label_height, top = (high / low) ** 0.036, math.inf
        for row in lines:
            text = {"dense": "dense, as it came", "unpruned": "dense, trained alike"}
            top = min(row["ppl"], top / label_height)  # under the last label
            axes.annotate(
                ", ".join([text[row["contender"]], *budget_of(row.get("tokens"), budgets)]),
                (1.01, top), xycoords=("axes fraction", "data"), va="center",
                color=LIGHT["muted"], fontsize=10,
            )  # fmt: skip
        ticks = [tick for base in (10, 100, 1e3, 1e4, 1e5) for tick in (base, 2 * base, 5 * base)]
        ticks = [tick for tick in ticks if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("sparsity")
        title = f"Perplexity of {rows[0]['model']} on held-out text"
        if len(budgets) > 1:
            title += "; after millions of tokens of training"
        axes.set_title(title, loc="left", fontsize=13)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.62), frameon=False, fontsize=10)
        return to_png(figure), to_svg(figure)


def budget_of(tokens: int | None, budgets: Sequence[int]) -> list[str]:
    """Return the tokens of a contender, in millions, where they differ."""
    return [f"{tokens / 1e6:.3g} M"] if tokens and len(budgets) > 1 else []


def main() -> None:
    """Write the figure beside the rows, as PNG and SVG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    path = parser.parse_args().rows
    write_figure(draw(read_lines(path)), path.parent, path.stem)


if __name__ == "__main__":
    main()
