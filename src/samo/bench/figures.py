"""The figures of ``samo bench``, in the look of the report."""

import io
from collections.abc import Sequence
from typing import Any, Final

from samo.bench.rows import Row, digits
from samo.report.theme import LIGHT, drawing, new_figure, place, run_colour, run_dashes, to_png
from samo.utils.formatting import percent

__all__ = []

_WIDTH: Final = 880
_TICKS: Final = [digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)]
_ORDER: Final = ("compress", "expand", "update, exact", "update, lean", "update, dense")

Figure = tuple[bytes, str]
"""A picture as PNG and as SVG."""
Line = tuple[str, Sequence[float], Sequence[float]]
"""Label, places on the x axis, heights."""


def kernels_figure(rows: Sequence[Row]) -> Figure | None:
    """Draw how far each operation is from its floor, over the number of weights."""
    measured = [row for row in rows if row.median is not None and row.name in _ORDER]
    if not measured:
        return None
    densities = sorted({row.parameters["density"] for row in measured})
    panels = []
    for density in densities:
        lines = []
        for name in _ORDER:
            found = [r for r in measured if (r.name, r.parameters["density"]) == (name, density)]
            if found:
                x = [row.parameters["numel"] for row in found]
                lines.append((name, x, [row.figures["times_floor"] for row in found]))
        panels.append((f"{percent(density)} kept", lines))
    return _lines(
        panels,
        title="Time over the time in which the bytes could move",
        axis="weights",
        names={
            row.parameters["numel"]: f"2^{row.parameters['numel'].bit_length() - 1}"
            for row in measured
        },
        is_log=False,
    )


def step_figure(rows: Sequence[Row]) -> Figure | None:
    """Draw time and memory of every contender as bars."""
    measured = [row for row in rows if row.median is not None]
    if not measured:
        return None
    on_gpu = all(row.figures["peak_bytes"] for row in measured)
    panels = [
        ("step, ms", [row.median or 0.0 for row in measured]),
        ("peak memory, GB", [row.figures["peak_bytes"] / 1e9 for row in measured])
        if on_gpu
        else (
            "state, bytes a parameter",
            [row.figures["state_bytes_per_param"] for row in measured],
        ),
    ]
    height = 34 * len(measured) + 76
    with drawing():
        figure = new_figure(_WIDTH, height)
        for column, (title, values) in enumerate(panels):
            axes = place(
                figure,
                left=150 + 370 * column,
                right=_WIDTH - 450 - 370 * column,
                top=44,
                bottom=12,
            )
            places = range(len(measured))
            colours = [
                LIGHT["run0"] if "ledger_measured_bytes" in row.figures else LIGHT["whole"]
                for row in measured
            ]
            axes.barh(places, values, color=colours, height=0.62)
            axes.invert_yaxis()
            axes.set_xticks([])
            axes.set_yticks(places, [row.name for row in measured] if column == 0 else [])
            axes.set_title(title, loc="left", fontsize=12, color=LIGHT["ink"], weight="bold")
            axes.spines["bottom"].set_visible(False)
            for at, value in zip(places, values):
                axes.annotate(
                    digits(value),
                    (value, at),
                    xytext=(6, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=11,
                )
        return to_png(figure), _to_svg(figure)


def _to_svg(figure: Any) -> str:
    """Return a figure as a file of its own; the theme's ``to_svg`` is for a page with a style sheet."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _lines(
    panels: Sequence[tuple[str, Sequence[Line]]],
    *,
    title: str,
    axis: str,
    names: dict[int, str],
    is_log: bool,
) -> Figure:
    """Draw panels of lines beside each other, each with its legend to the right of the last."""
    height, left, right, gap = 380, 56, 150, 44
    wide = (_WIDTH - left - right - gap * (len(panels) - 1)) / len(panels)
    labels = list(dict.fromkeys(label for _, lines in panels for label, _, _ in lines))
    highest = max(max(y) for _, lines in panels for _, _, y in lines)
    lowest = min(min(y) for _, lines in panels for _, _, y in lines)
    with drawing():
        figure = new_figure(_WIDTH, height)
        figure.text(
            left / _WIDTH, 1 - 24 / height, title, fontsize=14, weight="bold", color=LIGHT["ink"]
        )
        for column, (name, lines) in enumerate(panels):
            start = left + column * (wide + gap)
            axes = place(figure, left=start, right=_WIDTH - start - wide, top=64, bottom=52)
            axes.set_title(name, loc="left", fontsize=12, color=LIGHT["muted"])
            for label, x, y in lines:
                number = labels.index(label)
                axes.plot(
                    x,
                    y,
                    marker="o",
                    markersize=4,
                    linewidth=2,
                    color=run_colour(number),
                    linestyle=run_dashes(number),
                    label=label,
                )
            axes.axhline(1.0, color=LIGHT["muted"], linewidth=0.8)
            axes.set_xscale("log", base=2)
            if is_log:
                axes.set_yscale("log")
                low, high = min(0.8, lowest * 0.8), max(1.25, highest * 1.25)
                ticks = [tick for tick in _TICKS if low <= tick <= high]
                axes.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
                axes.set_ylim(low, high)
            else:
                axes.set_ylim(0, max(2.0, highest * 1.1))
            axes.set_xticks(list(names), list(names.values()), fontsize=9)
            axes.minorticks_off()
            axes.grid(axis="y")
            axes.set_xlabel(axis)
            if column == len(panels) - 1:
                axes.legend(
                    loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=11
                )
        return to_png(figure), _to_svg(figure)
