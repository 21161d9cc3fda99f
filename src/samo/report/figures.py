"""The figures of the report: loss, memory, throughput. Each draws into axes that somebody else made.

Every figure comes in two sizes, `WIDE` for a desk and `NARROW` for a phone, where labels move from
beside the data to above it and lines have fewer points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from samo.memory.predict import KINDS
from samo.report.curves import Floats, smooth, spread, thin
from samo.report.findings import Bar, Entry, tokens_per_s
from samo.report.theme import LIGHT, new_figure, place, run_colour, run_dashes
from samo.utils import formatting

__all__ = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How large a figure is drawn."""

    name: str
    width: int
    """Pixels."""
    height: int
    """Pixels, of a figure with curves."""
    points: int
    """Most points of a curve."""
    label: int
    """Most letters of a run's label beside its curve; 0 for none."""

    @property
    def is_wide(self) -> bool:
        """Whether labels fit beside what they name."""
        return self.label > 0


WIDE: Final = Size(name="wide", width=760, height=330, points=2000, label=18)
NARROW: Final = Size(name="narrow", width=350, height=270, points=800, label=0)

_LEFT: Final = 48
_START: Final = 0.05
"""Share of a run whose losses, much higher than all later ones, do not stretch the axis."""
_MARKERS: Final = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class EndLabel:
    """What stands beside the end of a run's curve."""

    entry: Entry
    y: float
    text: str


def loss_figure(shown: Sequence[Entry], size: Size) -> Figure:
    """Draw the losses over the steps."""
    figure = new_figure(size.width, size.height)
    draw_loss(curve_axes(figure, size, shown, "0.000"), shown, size)
    return figure


def throughput_figure(shown: Sequence[Entry], size: Size) -> Figure:
    """Draw the tokens a second over the steps."""
    figure = new_figure(size.width, round(0.8 * size.height))
    fastest = max((rate for e in shown if (rate := tokens_per_s(e.run)) > 0), default=0.0)
    draw_throughput(curve_axes(figure, size, shown, formatting.count(fastest)), shown, size)
    return figure


def memory_figure(bars: Sequence[Bar], size: Size) -> Figure:
    """Draw bytes of model state as stacked bars."""
    pitch = 34 if size.is_wide else 46
    figure = new_figure(size.width, pitch * len(bars) + 10)
    left = min(230.0, 14 + 6.9 * max(len(bar.label) for bar in bars)) if size.is_wide else 0
    axes = place(figure, left=left, right=166 if size.is_wide else 68, top=4, bottom=6)
    draw_memory(axes, bars, is_wide=size.is_wide)
    return figure


def curve_axes(figure: Figure, size: Size, shown: Sequence[Entry], value: str) -> Axes:
    """Add axes that leave room to the right for labels with values as long as ``value``."""
    return place(figure, left=_LEFT, right=label_room(size, shown, value), top=26, bottom=40)


def label_room(size: Size, shown: Sequence[Entry], value: str) -> float:
    """Return the pixels that the labels beside the ends of curves need."""
    longest = max((min(len(entry.label), size.label) for entry in shown), default=0)
    return 16 + (8.2 if size.is_wide else 7.4) * (len(value) + (longest + 2) * size.is_wide)


def draw_loss(axes: Axes, shown: Sequence[Entry], size: Size) -> None:
    """Draw raw losses faintly, smoothed ones on top, evaluations as circles and the prune step."""
    labels, heights, lows = [], [], []
    for entry in shown:
        run, colour, dashes = entry.run, run_colour(entry.place), run_dashes(entry.place)
        x, raw = np.asarray(run.steps.step), np.asarray(run.steps.loss)
        spans = [(start, stop) for start, stop, _ in run.steps.spans]
        mean = smooth(raw, spans)
        axes.plot(*thin(x, raw, size.points), color=colour, alpha=0.22, linewidth=0.9)
        for start, stop in spans:
            line = thin(x[start:stop], mean[start:stop], size.points)
            axes.plot(*line, color=colour, linestyle=dashes, linewidth=_width(entry, shown))
        if len(x) == 1:
            axes.plot(x, raw, "o", color=colour, markersize=4)
        at = np.array([float(e.step) for e in run.evals])
        valid = np.array([e.loss for e in run.evals])
        axes.plot(
            at,
            valid,
            "o",
            color=LIGHT["page"],
            markeredgecolor=colour,
            markeredgewidth=1.6,
            markersize=5.5,
            markevery=max(1, -(-len(at) // _MARKERS)),
            clip_on=False,
            zorder=4,
        )
        after = _START * run.last_step
        seen = np.concatenate([mean[x >= after], valid[at >= after]])
        heights += seen[np.isfinite(seen)].tolist()
        lows += raw[np.isfinite(raw)].tolist() if len(x) < 10 else seen[np.isfinite(seen)].tolist()
        end = run.last_eval.loss if run.last_eval else _last_finite(mean)
        if math.isfinite(end):
            labels.append(EndLabel(entry=entry, y=end, text=formatting.loss(end)))
    if heights:
        low, high = min(lows), max([*heights, *lows] if len(heights) < 10 else heights)
        margin = 0.08 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
    finish(axes, shown, size, "loss, nats per token")
    mark_prune_steps(axes, shown)
    label_ends(axes, labels, size)


def _width(entry: Entry, shown: Sequence[Entry]) -> float:
    """Return a line's width: of a few runs the first is widest, to be seen under an equal one."""
    return 2.0 if len(shown) > 3 else 2.0 + 1.5 * (len(shown) - 1 - list(shown).index(entry))


def draw_throughput(axes: Axes, shown: Sequence[Entry], size: Size) -> None:
    """Draw tokens a second: each line faintly, smoothed on top, from 0 on."""
    labels, highest = [], 0.0
    for entry in shown:
        run, colour = entry.run, run_colour(entry.place)
        x, raw = np.asarray(run.steps.step), np.asarray(run.steps.tokens_per_s)
        spans = [(start, stop) for start, stop, _ in run.steps.spans]
        mean = smooth(raw, spans)
        axes.plot(*thin(x, raw, size.points), color=colour, alpha=0.22, linewidth=0.9)
        for start, stop in spans:
            line = thin(x[start:stop], mean[start:stop], size.points)
            dashes, width = run_dashes(entry.place), _width(entry, shown)
            axes.plot(*line, color=colour, linestyle=dashes, linewidth=width)
        if len(x) == 1:
            axes.plot(x, raw, "o", color=colour, markersize=4)
        if math.isfinite(rate := tokens_per_s(run)):
            labels.append(EndLabel(entry=entry, y=rate, text=formatting.count(rate)))
            highest = max(highest, float(np.nanpercentile(raw, 99)), rate)
    axes.set_ylim(0, 1.15 * highest or 1.0)
    finish(axes, shown, size, "tokens/s")
    mark_prune_steps(axes, shown)
    label_ends(axes, labels, size)


def draw_memory(axes: Axes, bars: Sequence[Bar], *, is_wide: bool, text_size: float = 12.0) -> None:
    """Draw one stacked bar a row, its label to the left or above it, its sum to the right.

    Measured bars are solid; what comes from a formula is pale.
    """
    axes.set_axis_off()
    widest = max(bar.total_bytes for bar in bars)
    axes.set_xlim(0, widest)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    height = 0.6 if is_wide else 0.34
    for row, bar in enumerate(bars):
        middle = row if is_wide else row + 0.2
        parts: list[tuple[str, int]] = [
            (kind, bar.kinds[kind]) for kind in KINDS if bar.kinds.get(kind)
        ]
        left = 0.0
        for role, width in parts or [("whole", bar.total_bytes)]:
            axes.barh(
                middle,
                width,
                left=left,
                height=height,
                color=LIGHT[role],
                alpha=1.0 if bar.is_measured else 0.55,
                edgecolor=LIGHT["page"],
                linewidth=0.8 if width > 0.015 * widest else 0.0,  # a thin part would be all edge
            )
            left += width
        weight = "bold" if bar.is_measured else "normal"
        colour = LIGHT["ink"] if bar.entry is None else run_colour(bar.entry.place)
        axes.annotate(
            formatting.shortened(bar.label, 30 if is_wide else 44),
            (0, middle if is_wide else row - 0.2),
            xytext=(-10 if is_wide else 0, 0),
            textcoords="offset points",
            ha="right" if is_wide else "left",
            va="center",
            color=colour,
            weight=weight,
            fontsize=text_size,
            annotation_clip=False,
        )
        text = formatting.size(bar.total_bytes)
        if bar.num_params and is_wide:
            text += f"   {formatting.three_digits(bar.total_bytes / bar.num_params)} B/param"
        axes.annotate(
            text,
            (bar.total_bytes, middle),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=LIGHT["ink"],
            weight=weight,
            fontsize=text_size - 0.5,
            annotation_clip=False,
        )


def finish(axes: Axes, shown: Sequence[Entry], size: Size, quantity: str) -> None:
    """Give curves over steps their axes, and say above them what they show."""
    axes.set_xlim(0, max([entry.run.last_step for entry in shown if entry.run.last_step] or [1]))
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(
        MaxNLocator(7 if size.is_wide else 4, integer=True, steps=[1, 2, 2.5, 5, 10])
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    low, high = axes.get_ylim()
    decimals = 0 if high - low > 10 else 1 if high - low > 1 else 2
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, decimals)))
    axes.set_xlabel("step", fontsize=11)
    axes.annotate(  # above the axis and upright, where it is read first
        quantity,
        (0, 1),
        xycoords="axes fraction",
        xytext=(-_LEFT, 12),
        textcoords="offset points",
        color=LIGHT["muted"],
        fontsize=11,
    )


def _tick(value: float, decimals: int) -> str:
    return f"{value / 1e6:,.1f}M" if abs(value) >= 1e6 else f"{value:,.{decimals}f}"


def mark_prune_steps(axes: Axes, shown: Sequence[Entry]) -> None:
    """Draw a line where masks were drawn, and say how many weights they prune."""
    steps = sorted({entry.run.prune.step for entry in shown if entry.run.prune is not None})
    for step in steps:
        axes.axvline(step, color=LIGHT["muted"], linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
    if not steps:
        return
    first = [e.run for e in shown if e.run.prune is not None and e.run.prune.step == steps[0]]
    at_first = {formatting.percent(run.prune.sparsity) for run in first if run.prune is not None}
    text = "pruned from here on" if any(run.is_pruned_in_steps for run in first) else "pruned"
    if all(run.observations for run in first):
        text = "ticket drawn, pruned"
    if len(at_first) == len(steps) == 1:
        text += f"{',' if ' on' in text else ''} to {at_first.pop()} sparsity"
    is_late = steps[0] > 0.6 * axes.get_xlim()[1]
    axes.annotate(
        text,
        (steps[0], 1),
        xycoords=("data", "axes fraction"),
        xytext=(-5 if is_late else 5, -3),
        textcoords="offset points",
        ha="right" if is_late else "left",
        va="top",
        color=LIGHT["muted"],
        fontsize=11,
    )


def label_ends(axes: Axes, labels: Sequence[EndLabel], size: Size) -> None:
    """Write each run's name and value beside the end of its curve, moved apart where they touch."""
    low, high = axes.get_ylim()
    pixels = axes.get_window_extent().height
    places = spread([label.y for label in labels], 15 * (high - low) / pixels, low, high)
    for label, y in zip(labels, places):
        name = formatting.shortened(label.entry.label, size.label) + "  " if size.is_wide else ""
        axes.annotate(
            name + label.text,
            (1, y),
            xycoords=("axes fraction", "data"),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            color=run_colour(label.entry.place),
            weight="bold",
            fontsize=12 if size.is_wide else 11,
            annotation_clip=False,
        )


def _last_finite(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else math.nan
