"""The figures of the report: losses, memory, throughput, early masks, and a pipeline's passes."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from samo.pipeline.timeline import Event as Pass, Timeline
from samo.report.findings import PARTS, Bar, last_loss, tokens_per_s
from samo.report.runs import Run, finite_evals
from samo.report.theme import LIGHT, new_figure, run_colour, run_dashes
from samo.train.events import Stepped
from samo.utils import formatting

_LEFT: Final = 52
_START: Final = 0.05
"""Fraction of a run whose training losses, much higher than later ones, do not stretch the axis."""
_LETTERS: Final = 18

Label = tuple[str, str, float]
"""Text, colour and height of what is written at the end of a curve."""


def loss_figure(runs: Sequence[Run]) -> Figure:
    """Draw training losses, faint and smoothed, and validation losses as circles."""
    figure, axes = _curve_figure(330, runs, "0.000")
    labels: list[Label] = []
    visible: list[float] = []
    for run in runs:
        colour, evals = run_colour(run.place), finite_evals(run.evals)
        _draw_phases(axes, run, runs, lambda step: step.loss)
        axes.plot(
            [e.step for e in evals],
            [e.valid_loss for e in evals],
            "o",
            color=LIGHT["page"],
            markeredgecolor=colour,
            markeredgewidth=1.6,
            markersize=5.5,
            markevery=max(1, len(evals) // 40),
            clip_on=False,
            zorder=4,
        )
        late = _START * run.last_step
        losses = [step.loss for step in run.steps if step.step >= late]
        losses = [loss for loss in losses if math.isfinite(loss)]
        visible += np.percentile(losses, [1, 99]).tolist() if losses else []
        visible += [e.valid_loss for e in evals]
        if run.last_eval or losses:
            end = run.last_eval.valid_loss if run.last_eval else last_loss(run)
            labels.append(_end_label(run, formatting.loss(end), end))
    if visible:
        margin = 0.08 * (max(visible) - min(visible)) or 0.1
        axes.set_ylim(min(visible) - margin, max(visible) + margin)
    _finish(axes, runs, "loss, nats per token")
    _mark_pruning(axes, runs)
    _label_ends(axes, labels)
    return figure


def throughput_figure(runs: Sequence[Run]) -> Figure:
    """Draw tokens per second from 0, faint and smoothed."""
    figure, axes = _curve_figure(264, runs, "00,000")
    labels: list[Label] = []
    highest = 0.0
    for run in runs:
        _draw_phases(axes, run, runs, lambda step: step.tokens_per_s)
        if math.isfinite(rate := tokens_per_s(run)):
            labels.append(_end_label(run, formatting.count(rate), rate))
            rates = [step.tokens_per_s for step in run.steps]
            highest = max(highest, float(np.nanpercentile(rates, 99)), rate)
    axes.set_ylim(0, 1.15 * highest or 1.0)
    _finish(axes, runs, "tokens/s")
    _mark_pruning(axes, runs)
    _label_ends(axes, labels)
    return figure


def memory_figure(bars: Sequence[Bar]) -> Figure:
    """Draw one stacked bar a row: solid if measured, pale if it comes from arithmetic."""
    left = min(230.0, 16 + 8.2 * max(len(bar.label) for bar in bars))
    figure, axes = new_figure(34 * len(bars) + 10, left=left, right=166, top=4, bottom=6)
    axes.set_axis_off()
    widest = max(bar.total for bar in bars) or 1
    axes.set_xlim(0, widest)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    for row, bar in enumerate(bars):
        start = 0
        for kind in PARTS:
            width = bar.kinds.get(kind, 0)
            axes.barh(
                row,
                width,
                left=start,
                height=0.6,
                color=LIGHT[kind],
                alpha=0.55 if bar.place is None else 1.0,
                edgecolor=LIGHT["page"],
                linewidth=0.8 if width > 0.015 * widest else 0.0,  # a thin part would be all edge
            )
            start += width
        weight = "normal" if bar.place is None else "bold"
        colour = LIGHT["ink"] if bar.place is None else run_colour(bar.place)
        label = formatting.shortened(bar.label, 30)
        _write(axes, label, (0, row), (-10, 0), ha="right", color=colour, weight=weight)
        text = formatting.size(bar.total)
        if bar.num_params:
            text += f"   {formatting.three_digits(bar.total / bar.num_params)} B/param"
        _write(axes, text, (bar.total, row), (7, 0), weight=weight)
    return figure


def tradeoff_figure(points: Sequence[tuple[float, float, Run]]) -> Figure:
    """Draw the validation loss of runs over their model state."""
    runs = [run for _, _, run in points]
    figure, axes = _curve_figure(264, runs, "0.000")
    for held, loss, run in points:
        axes.plot([held], [loss], "o", color=run_colour(run.place), markersize=8)
    axes.margins(0.08, 0.15)
    _finish(axes, runs, "validation loss")
    axes.set_xlim(0, 1.08 * max(held for held, _, _ in points))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda held, _: formatting.size(held)))
    axes.set_xlabel("model state", fontsize=11)
    _label_ends(axes, [_end_label(run, formatting.loss(loss), loss) for _, loss, run in points])
    return figure


def ticket_figure(run: Run) -> Figure:
    """Draw the largest distance between early-bird's last masks over steps."""
    looks = [look for look in run.observations if look.largest is not None]
    last = run.observations[-1]
    figure, axes = new_figure(264, left=_LEFT, right=24, top=26, bottom=40)
    x, y = [look.step for look in looks], [look.largest or 0.0 for look in looks]
    axes.plot(x, y, color=run_colour(run.place), marker="o", markersize=4)
    axes.axhline(last.threshold, color=LIGHT["muted"], linewidth=1.4, linestyle="--", zorder=1)
    axes.set_ylim(0, 1.25 * max([*y, last.threshold, 0.01]))
    _finish(axes, [run], f"largest distance between the last {last.queue} masks")
    axes.set_xlim(0, 1.04 * max(last.step, run.prune.step if run.prune else 0) or 1)
    _write(axes, f"threshold {last.threshold:g}", (0, last.threshold), (4, 9), color=LIGHT["muted"])
    _mark_pruning(axes, [run])
    return figure


def timeline_figure(line: Timeline) -> Figure:
    """Draw the passes of a pipeline's last batch."""
    height = 26 * min(line.num_stages, 64) + 60
    figure, axes = new_figure(height, left=64, right=24, top=12, bottom=40)
    draw_passes(axes, line.events, line.num_stages, scale=1e3)
    axes.set_xlabel("ms")
    return figure


def draw_passes(axes: Axes, passes: Sequence[Pass], num_stages: int, *, scale: float) -> None:
    """Draw passes in a row for each stage: forward pale, backward solid, numbered if wide."""
    origin = passes[0].start
    span = (max(each.end for each in passes) - origin) * scale or 1.0
    for each in passes:
        is_backward, start = each.what == "backward", (each.start - origin) * scale
        length = (each.end - each.start) * scale
        axes.broken_barh(
            [(start, length)],
            (each.stage - 0.4, 0.8),
            facecolor=run_colour(0),
            alpha=1.0 if is_backward else 0.35,
            edgecolor=LIGHT["page"],
            linewidth=0.8,
        )
        if length > span / 60:
            axes.text(
                start + length / 2,
                each.stage,
                str(each.micro_batch),
                ha="center",
                va="center_baseline",
                fontsize=9,
                color=LIGHT["page" if is_backward else "ink"],
            )
    axes.set_xlim(0, span)
    axes.set_ylim(num_stages - 0.5, -0.5)
    rows = range(0, num_stages, -(-num_stages // 16))
    axes.set_yticks(rows, [f"stage {stage}" for stage in rows])


# Parts of figures


def _curve_figure(height: int, runs: Sequence[Run], value: str) -> tuple[Figure, Axes]:
    """Return axes with room on the right for labels with values as long as ``value``."""
    letters = max(min(len(run.label), _LETTERS) for run in runs) + 2 + len(value)
    return new_figure(height, left=_LEFT, right=16 + 8.2 * letters, top=26, bottom=40)


def _draw_phases(
    axes: Axes, run: Run, runs: Sequence[Run], value: Callable[[Stepped], float]
) -> None:
    """Draw a quantity of the logged steps, faint, and its running mean within each phase."""
    colour, dashes = run_colour(run.place), run_dashes(run.place)
    # The first is widest, and shows beneath equal ones.
    after = len(runs) - 1 - list(runs).index(run)
    width = 2.0 + min(1.5, 3 / len(runs)) * after
    for phase in run.phases:
        x = np.array([step.step for step in phase], dtype=float)
        y = np.array([value(step) for step in phase])
        marker = "o" if len(x) == 1 else None
        axes.plot(x, y, color=colour, alpha=0.22, linewidth=0.9, marker=marker)
        x, y = x[np.isfinite(y)], y[np.isfinite(y)]
        window = min(max(5, len(run.steps) // 50), (len(x) + 1) // 2)  # a short phase has a line
        if window:
            # Full windows only: a mean over fewer values at the ends would bend the curve.
            means = [np.convolve(z, np.full(window, 1 / window), "valid") for z in (x, y)]
            axes.plot(*means, color=colour, linestyle=dashes, linewidth=width)


def _finish(axes: Axes, runs: Sequence[Run], quantity: str) -> None:
    """Set the x axis, ticks and grid, and write what the axes show."""
    axes.set_xlim(0, max(run.last_step for run in runs) or 1)
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    # As many decimals as the ticks have: a tick at 2.25 must not be labelled 2.2.
    ticks = [round(float(tick), 6) for tick in axes.get_yticks()]
    decimals = max(len(f"{tick:.6f}".rstrip("0").partition(".")[2]) for tick in ticks)
    # A diverged loss or a GPU's throughput has more digits than there is room for.
    style = ".6g" if max(map(abs, ticks)) >= 1e6 else f",.{decimals}f"
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format(value, style)))
    axes.set_xlabel("step", fontsize=11)
    # Above the y axis, where it is read first.
    at, shift = (0, 1), (-_LEFT, 12)
    _write(axes, quantity, at, shift, "axes fraction", va="bottom", color=LIGHT["muted"])


def _mark_pruning(axes: Axes, runs: Sequence[Run]) -> None:
    """Mark the steps of pruning, with the sparsity if all runs share it."""
    steps = sorted({run.prune.step for run in runs if run.prune})
    sparsities = {formatting.percent(run.masks.sparsity) for run in runs if run.masks}
    text = f"pruned to {sparsities.pop()}" if len(sparsities) == 1 else "pruned"
    for step in steps:
        axes.axvline(step, color=LIGHT["muted"], linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
    if steps:
        share = steps[0] / axes.get_xlim()[1]
        ha, shift = ("right", -5) if share > 0.6 else ("left", 5)
        y, va, up = (0, "bottom", 4) if share < 0.15 else (1, "top", -3)  # curves start top left
        where, style = ("data", "axes fraction"), {"ha": ha, "va": va, "color": LIGHT["muted"]}
        _write(axes, text, (steps[0], y), (shift, up), where, **style)


def _end_label(run: Run, value: str, y: float) -> Label:
    name = formatting.shortened(run.label, _LETTERS)
    return f"{name}  {value}", run_colour(run.place), y


def _label_ends(axes: Axes, labels: Sequence[Label]) -> None:
    """Write labels beside the ends of curves, moved apart where they would touch."""
    low, high = axes.get_ylim()
    gap = 15 * (high - low) / axes.get_window_extent().height
    places = spread([y for _, _, y in labels], gap, low, high)
    for (text, colour, _), y in zip(labels, places):
        coordinates = ("axes fraction", "data")
        _write(axes, text, (1, y), (10, 0), coordinates, color=colour, weight="bold")


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move labels apart until no two are closer than ``gap``, keeping their order."""
    gap = min(gap, (high - low) / max(len(values), 1))
    order = sorted(range(len(values)), key=values.__getitem__)
    places = [min(max(value, low), high) for value in values]
    for below, i in itertools.pairwise(order):
        places[i] = max(places[i], places[below] + gap)
    limit = high
    for i in reversed(order):
        places[i] = min(places[i], limit)
        limit = places[i] - gap
    return places


def _write(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    shift: tuple[float, float],
    coordinates: str | tuple[str, str] = "data",
    **style: Any,
) -> None:
    """Write text ``shift`` pixels from a point."""
    style = {"va": "center", "color": LIGHT["ink"], "fontsize": 11.5, **style}
    shifted: Any = {"textcoords": "offset points", "annotation_clip": False}
    axes.annotate(text, at, shift, xycoords=coordinates, **shifted, **style)
