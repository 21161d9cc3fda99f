"""Draw rows of the benchmark: perplexity over sparsity, pruned and trained again.

python -m benchmarks.recovery.figure rows.jsonl
"""

import argparse
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

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

TRAINED = {"samo": "o-", "distilled": "s--", "lora": "^-."}
"""Marker and line of each contender."""
LONGER = {"samo": "D-", "distilled": "P--", "lora": "v-."}
"""The same with more tokens than others had."""
DENSE = {"dense": "dense, as it came", "unpruned": "dense, trained alike"}
NAMES = {"sparsegpt": "SparseGPT", "wanda": "Wanda", "lora": "LoRA", "distilled": "with a teacher"}


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: a colour for each method, a line style for each contender."""
    pruned = [row for row in rows if row["contender"] == "pruned"]
    trained = [row for row in rows if row["contender"] in TRAINED]
    with drawing():
        figure = new_figure(980, 440)
        left = place(figure, left=72, right=640, top=64, bottom=52)
        right = place(figure, left=400, right=216, top=64, bottom=52)
        _plot(left, pruned, {"pruned": "o:"}, {})
        left.set_title("pruned", loc="left", fontsize=12)
        _plot(right, trained, TRAINED, LONGER)
        right.set_title("trained again", loc="left", fontsize=12)
        budgets = _budgets(rows)
        lines = [row for row in rows if row["contender"] in DENSE]
        for row in lines:
            right.axhline(row["ppl"], color=LIGHT["muted"], linewidth=1)
        right.set_yscale("log")
        low, high = right.get_ylim()
        top = math.inf
        for row in sorted(lines, key=lambda row: -row["ppl"]):
            top = min(row["ppl"], top / (high / low) ** 0.04)  # under the last label
            text = ", ".join([DENSE[row["contender"]], *budget_of(row.get("tokens"), budgets)])
            right.annotate(
                text, (1.01, top), xycoords=("axes fraction", "data"), va="center",
                color=LIGHT["muted"], fontsize=10,
            )  # fmt: skip
        right.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=10)
        for axes in (left, right):
            _label(axes, sorted({row["sparsity"] for row in rows if "sparsity" in row}))
        title = f"Perplexity of {rows[0]['model']} on held-out text"
        if len(budgets) > 1:
            title += "; M: million tokens of training"
        figure.text(72 / 980, 1 - 24 / 440, title, fontsize=13)
        return to_png(figure), to_svg(figure)


def _plot(axes: Any, rows: Sequence[Row], styles: dict[str, str], longer: dict[str, str]) -> None:
    """Draw a line for each method, contender and number of tokens."""
    budgets = _budgets(rows)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for key in product(methods, styles, (None, *budgets)):
        method, contender, tokens = key
        points = sorted(
            (row["sparsity"], row["ppl"])
            for row in rows
            if (row["method"], row["contender"], row.get("tokens")) == key
        )
        if points:
            x, y = zip(*points)
            style = (longer if budgets and tokens != budgets[0] else styles)[contender]
            names = [NAMES.get(name, name) for name in (method, contender)]
            label = ", ".join([*names, *budget_of(tokens, budgets)])
            axes.plot(
                x, y, style, color=run_colour(methods.index(method)), markersize=5, label=label
            )


def _label(axes: Any, sparsities: Sequence[float]) -> None:
    """Label a logarithmic axis of perplexity, and one of sparsities."""
    axes.set_yscale("log")
    axes.grid(axis="y", which="both")
    axes.set_xticks(sparsities, [f"{sparsity:.0%}" for sparsity in sparsities])
    axes.set_xlabel("sparsity")
    low, high = axes.get_ylim()
    steps = (1, 1.5, 2, 3, 5, 7) if high < 20 * low else (1,) if high > 2e3 * low else (1, 2, 5)
    ticks = [base * step for base in (1, 10, 100, 1e3, 1e4, 1e5, 1e6) for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.minorticks_off()


def _budgets(rows: Sequence[Row]) -> list[int]:
    return sorted({row["tokens"] for row in rows if "tokens" in row})


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
