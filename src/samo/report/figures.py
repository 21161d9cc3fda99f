"""The figures of the report: losses, memory, throughput, and masks over layers and over time."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from samo.memory.predict import KINDS
from samo.report.curves import smooth, spread
from samo.report.findings import last_loss, tokens_per_s
from samo.report.memory_bars import Bar
from samo.report.runs import Run, finite_evals
from samo.report.theme import LIGHT, RUN_COLOURS, new_figure, place, run_colour, run_dashes
from samo.train.events import Stepped
from samo.utils import formatting

__all__ = []

_WIDTH: Final = 760
_LEFT: Final = 52
_START: Final = 0.05
"""Fraction of a run whose losses, much higher than all later ones, do not stretch the axis."""
_MARKERS: Final = 40
_LETTERS: Final = 18
_AGREE: Final = ListedColormap([LIGHT["run2"]])

Label = tuple[str, str, float]
"""Text, colour and height of what is written at the end of a curve."""


def loss_figure(runs: Sequence[Run]) -> Figure:
    """Draw training losses, faint and smoothed, and validation losses as circles."""
    figure, axes = _curve_figure(330, runs, "0.000")
    labels: list[Label] = []
    visible: list[float] = []
    for run in runs:
        colour = run_colour(run.place)
        _draw_phases(axes, run, runs, lambda step: step.loss)
        axes.plot(
            [e.step for e in run.evals],
            [e.valid_loss for e in run.evals],
            "o",
            color=LIGHT["page"],
            markeredgecolor=colour,
            markeredgewidth=1.6,
            markersize=5.5,
            markevery=max(1, len(run.evals) // _MARKERS),
            clip_on=False,
            zorder=4,
        )
        late = _START * run.last_step
        losses = [step.loss for step in run.steps if step.step >= late]
        losses = [loss for loss in losses if math.isfinite(loss)]
        visible += np.percentile(losses, [1, 99]).tolist() if losses else []
        visible += [e.valid_loss for e in finite_evals(run.evals) if e.step >= late]
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
    figure = new_figure(_WIDTH, 34 * len(bars) + 10)
    left = min(230.0, 16 + 8.2 * max(len(bar.label) for bar in bars))
    axes = place(figure, left=left, right=166, top=4, bottom=6)
    axes.set_axis_off()
    widest = max(bar.total for bar in bars) or 1
    axes.set_xlim(0, widest)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    for row, bar in enumerate(bars):
        start = 0
        for kind in (*KINDS, "whole"):
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


def density_figure(masks: Mapping[str, tuple[int, int]]) -> Figure:
    """Draw the fraction of weights that each tensor keeps over its layer, one line for each kind.

    Args:
        masks: Kept weights and all weights of each tensor.
    """
    kinds: dict[str, dict[int, float]] = {}
    for name, (kept, numel) in masks.items():
        layer = re.search("[0-9]+", name)  # blocks.3.mlp.0.weight: layer 3 of blocks.*.mlp.0
        kind = re.sub("[0-9]+", "*", name.removesuffix(".weight"), count=1)
        kinds.setdefault(kind, {})[int(layer[0]) if layer else 0] = kept / max(numel, 1)
    names = list(kinds)[: 3 * RUN_COLOURS]  # more lines cannot be told apart
    room = 16 + 7.4 * max(min(len(name), _LETTERS + 8) for name in names)
    figure = new_figure(_WIDTH, 264)
    axes = place(figure, left=_LEFT, right=room, top=26, bottom=40)
    labels: list[Label] = []
    for number, name in enumerate(names):
        layers, y = zip(*sorted(kinds[name].items()))
        colour, dashes = run_colour(number), run_dashes(number)
        axes.plot(layers, y, color=colour, linestyle=dashes, marker="o", markersize=3.5)
        labels.append((formatting.shortened(name, _LETTERS + 8), colour, y[-1]))
    axes.set_xlim(-0.3, max(max(kinds[name]) for name in names) + 0.3)
    axes.set_ylim(0, 1.15 * max(max(kinds[name].values()) for name in names) or 1.0)
    _finish_axes(axes, "weights kept", "layer", percent=True)
    _label_ends(axes, labels)
    return figure


def ticket_figure(run: Run) -> Figure:
    """Draw all distances between early-bird's masks as a map, and the one that decides over steps."""
    looks = run.observations
    threshold = looks[-1].threshold
    figure = new_figure(_WIDTH, 330)
    grid = place(figure, left=_LEFT, right=_WIDTH - _LEFT - 264, top=26, bottom=40)
    cells = np.full((len(looks), len(looks)), np.nan)
    for row, look in enumerate(looks):
        known = look.distances[-row:] if row else []
        cells[row, row - len(known) : row] = known
    agree = np.where(cells <= threshold, 1.0, np.nan)
    most = 1.4 * cells[np.isfinite(cells)].max(
        initial=threshold
    )  # no blue too dark for a dark page
    grid.imshow(cells, cmap="Blues", vmin=0.0, vmax=most, interpolation="none", aspect="auto")
    grid.imshow(agree, cmap=_AGREE, interpolation="none", aspect="auto")
    ticks = np.unique(np.linspace(0, len(looks) - 1, 5).astype(int)).tolist()
    names = [f"{looks[tick].step:,}" for tick in ticks]
    grid.set_xticks(ticks, names)
    grid.set_yticks(ticks, names)
    grid.spines["bottom"].set_visible(False)
    grid.set_xlabel("step of the earlier masks", fontsize=11)
    _title(grid, "step of the later masks")

    axes = place(figure, left=_LEFT + 264 + 84, right=24, top=26, bottom=40)
    full = [look for look in looks if len(look.distances) >= look.queue - 1]
    x, y = [look.step for look in full], [look.largest or 0.0 for look in full]
    axes.plot(x, y, color=LIGHT["accent"], linewidth=2.0, marker="o", markersize=3)
    axes.axhline(threshold, color=LIGHT["run2"], linewidth=1.4, linestyle="--", zorder=1)
    axes.set_xlim(0, 1.04 * max(looks[-1].step, run.prune.step if run.prune else 0) or 1)
    axes.set_ylim(0, 1.15 * max([*y, threshold, 0.01]))
    _finish_axes(axes, f"largest distance among {looks[-1].queue} masks in a row", "step")
    is_low = threshold < 0.15 * axes.get_ylim()[1]  # no room between the line and the axis
    va, shift = ("bottom", 4) if is_low else ("top", -4)
    text = f"threshold {threshold:g}"
    _write(axes, text, (0, threshold), (4, shift), va=va, color=LIGHT["run2"], weight="bold")
    if run.prune is not None:
        why = "settled" if run.prune.reason == "settled" else "limit"
        _mark_step(axes, run.prune.step, f"drawn at step {run.prune.step:,}: {why}")
    return figure


def change_figure(runs: Sequence[Run]) -> Figure:
    """Draw the sparsity over steps, or where it is constant the fraction replaced at each change."""
    figure, axes = _curve_figure(264, runs, "00.0 %")
    labels: list[Label] = []
    highest = 0.0
    is_sparser = runs[0].is_pruned_in_steps
    for run in runs:
        colour = run_colour(run.place)
        x = [change.step for change in run.changes]
        if is_sparser and run.prune is not None:
            x = [run.prune.step, *x, run.last_step]
            y = [run.prune.sparsity, *(change.sparsity for change in run.changes)]
            y.append(y[-1])
            axes.step(x, y, where="post", color=colour, linestyle=run_dashes(run.place))
        else:
            y = [change.replaced for change in run.changes]
            axes.vlines(x, 0, y, color=colour, linewidth=2.0, alpha=0.5)
            axes.plot(x, y, "o", color=colour, markersize=4.5)
        highest = max(highest, *y)
        labels.append(_end_label(run, formatting.percent(y[-1]), y[-1]))
    axes.set_ylim(0, 1.0 if is_sparser else 1.15 * highest or 1.0)
    what = "weights pruned" if is_sparser else "kept weights replaced"
    _finish(axes, runs, what, percent=True)
    _label_ends(axes, labels)
    return figure


# Parts of figures


def _curve_figure(height: int, runs: Sequence[Run], value: str) -> tuple[Figure, Axes]:
    """Return axes with room on the right for labels with values as long as ``value``."""
    letters = max(min(len(run.label), _LETTERS) for run in runs) + 2 + len(value)
    figure = new_figure(_WIDTH, height)
    return figure, place(figure, left=_LEFT, right=16 + 8.2 * letters, top=26, bottom=40)


def _draw_phases(
    axes: Axes, run: Run, runs: Sequence[Run], value: Callable[[Stepped], float]
) -> None:
    """Draw a quantity of the logged steps, faint and smoothed.

    The mean is taken apart for each phase: one across the step of pruning would hide its jump.
    """
    colour, dashes = run_colour(run.place), run_dashes(run.place)
    # Of a few runs the first is widest, and shows beneath an equal one.
    width = 2.0 if len(runs) > 3 else 2.0 + 1.5 * (len(runs) - 1 - list(runs).index(run))
    window = max(5, len(run.steps) // 50)
    for phase in run.phases:
        x = [step.step for step in phase]
        raw = np.array([value(step) for step in phase])
        marker = "o" if len(x) == 1 else None
        axes.plot(x, raw, color=colour, alpha=0.22, linewidth=0.9, marker=marker)
        smoothed = smooth(raw, window)
        axes.plot(x, smoothed, color=colour, linestyle=dashes, linewidth=width)


def _finish(axes: Axes, runs: Sequence[Run], quantity: str, *, percent: bool = False) -> None:
    axes.set_xlim(0, max(run.last_step for run in runs) or 1)
    _finish_axes(axes, quantity, "step", percent=percent)


def _finish_axes(axes: Axes, quantity: str, x: str, *, percent: bool = False) -> None:
    """Set ticks and grid, and write what the axes show."""
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    # As many decimals as the ticks have: a tick at 2.25 must not be labelled 2.2.
    ticks = [round(float(tick), 6) for tick in axes.get_yticks()]
    decimals = max(len(f"{tick:.6f}".rstrip("0").partition(".")[2]) for tick in ticks)
    write = formatting.percent if percent else lambda value: f"{value:,.{decimals}f}"
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axes.set_xlabel(x, fontsize=11)
    _title(axes, quantity)


def _title(axes: Axes, text: str) -> None:
    """Write what the y axis shows above it, where it is read first."""
    at, shift = (0, 1), (-_LEFT, 12)
    _write(axes, text, at, shift, "axes fraction", va="bottom", color=LIGHT["muted"])


def _mark_pruning(axes: Axes, runs: Sequence[Run]) -> None:
    """Mark the steps at which masks were drawn, and write the sparsity if all runs share both."""
    pruned = [run for run in runs if run.prune]
    steps = {run.prune.step for run in pruned if run.prune}
    sparsities = {formatting.percent(run.masks.sparsity) for run in pruned if run.masks}
    text = "pruned"
    if len(sparsities) == 1:
        text += f" to {sparsities.pop()}"
        if all(run.is_pruned_in_steps for run in pruned):
            text = text.replace("pruned", "pruned step by step")
    for step in sorted(steps):
        _mark_step(axes, step, text if step == min(steps) else "")


def _mark_step(axes: Axes, step: int, text: str) -> None:
    axes.axvline(step, color=LIGHT["muted"], linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
    share = step / axes.get_xlim()[1]
    ha, shift = ("right", -5) if share > 0.6 else ("left", 5)
    y, va, up = (0, "bottom", 4) if share < 0.15 else (1, "top", -3)  # curves start at the top left
    where, style = ("data", "axes fraction"), {"ha": ha, "va": va, "color": LIGHT["muted"]}
    _write(axes, text, (step, y), (shift, up), where, **style)


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
