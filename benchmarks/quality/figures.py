"""Figures of quality, in the look of the report: every seed as a dot, and curves with their spread."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from benchmarks.drawing import (
    LIGHT,
    Figure,
    drawing,
    new_figure,
    place,
    run_colour,
    run_dashes,
    to_png,
    to_svg,
)
from samo.report.figures import spread

_WIDTH: Final = 880


class Curve(NamedTuple):
    """The mean over seeds, with the lowest and the highest."""

    label: str
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def dots_figure(
    contenders: Sequence[tuple[str, Sequence[float]]], *, title: str, form: str
) -> Figure:
    """Draw a line of dots for each contender, one dot a seed, the mean as a stroke and as a number.

    Args:
        contenders: Label and values of each, from the top.
        title: Above the figure; the first contender is what all are to be compared with.
        form: How a number is written, such as ``".3f"``.
    """
    means = [sum(values) / len(values) for _, values in contenders]
    with drawing():
        figure = new_figure(_WIDTH, 34 * len(contenders) + 96)
        axes = place(figure, left=230, right=90, top=48, bottom=40)
        axes.set_title(title, loc="left", fontsize=14, color=LIGHT["ink"], weight="bold", pad=14)
        axes.axvline(means[0], color=LIGHT["muted"], linewidth=0.8)
        for at, ((_, values), mean) in enumerate(zip(contenders, means)):
            axes.plot(
                values, [at] * len(values), "o", color=LIGHT["run0"], alpha=0.55, markersize=7
            )
            axes.plot([mean, mean], [at - 0.3, at + 0.3], color=LIGHT["ink"], linewidth=2)
            axes.annotate(
                f"{mean:{form}}",
                (1.02, at),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=12,
            )
        axes.set_yticks(range(len(contenders)), [label for label, _ in contenders], fontsize=12)
        axes.set_ylim(len(contenders) - 0.5, -0.5)
        axes.grid(axis="x")
        return to_png(figure), to_svg(figure)


def curves_figure(
    curves: Sequence[Curve],
    *,
    title: str,
    axis: str,
    low: float,
    high: float,
    is_log: bool = False,
) -> Figure:
    """Draw curves with a band from the lowest to the highest seed, named at their right ends.

    Args:
        curves: At most 18, for distinct colours and dashes.
        title: Above the figure.
        axis: What x counts.
        low: Where the picture begins on the y axis,
        high: and where it ends. What lies outside is cut off.
        is_log: Whether x grows by factors; points are marked then.
    """
    height, top, bottom = 460, 56, 48
    with drawing():
        figure = new_figure(_WIDTH, height)
        axes = place(figure, left=56, right=230, top=top, bottom=bottom)
        axes.set_title(title, loc="left", fontsize=14, color=LIGHT["ink"], weight="bold", pad=14)
        for number, curve in enumerate(curves):
            colour, dashes = run_colour(number), run_dashes(number)
            marker = "o" if is_log else None
            axes.plot(
                curve.x, curve.mean, color=colour, linestyle=dashes, linewidth=2, marker=marker
            )
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
        axes.set_ylim(low, high)
        right = max(curve.x[-1] for curve in curves)
        if is_log:
            axes.set_xscale("log")
            marks = sorted({at for curve in curves for at in curve.x})
            axes.set_xticks(marks, [f"{at:g}" for at in marks])
            axes.set_xticks([], minor=True)
        else:
            axes.set_xlim(0, right)
        axes.set_xlabel(axis)
        axes.grid(axis="y")
        ends = [min(max(curve.mean[-1], low), high) for curve in curves]
        gap = (high - low) * 18 / (height - top - bottom)
        for number, (curve, at) in enumerate(zip(curves, spread(ends, gap, low, high))):
            axes.annotate(
                curve.label,
                xy=(curve.x[-1] if is_log else right, ends[number]),
                xytext=(1.04, at),
                textcoords=("axes fraction", "data"),
                va="center",
                fontsize=11,
                color=run_colour(number),
                arrowprops={
                    **{"arrowstyle": "-", "relpos": (0, 0.5)},
                    **{"color": run_colour(number), "linewidth": 0.8},
                },
            )
        return to_png(figure), to_svg(figure)
