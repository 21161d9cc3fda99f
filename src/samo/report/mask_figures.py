"""Figures of masks in time: distances of early-bird's masks to each other, and masks that change."""

from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Affine2D

from samo.report.figures import EndLabel, Size, curve_axes, finish, label_ends
from samo.report.findings import Entry
from samo.report.mask_events import Observation, square
from samo.report.runs import Run
from samo.report.theme import LIGHT, new_figure, place, run_colour, run_dashes
from samo.utils import formatting

__all__ = []

AGREE: Final = "run2"
"""Role of the colour of distances within the threshold,"""
DIFFER: Final = "accent"
"""and of larger ones, the larger the stronger."""

_MOST_LOOKS: Final = 64
_SHADES: Final = 8
_LEFT: Final = 48


def ticket_figure(run: Run, size: Size) -> Figure:
    """Draw all distances as a map, and beside or below it the one that decides, over the steps."""
    side = 300 if size.is_wide else size.width - _LEFT - 12
    if size.is_wide:
        figure = new_figure(size.width, side + 66)
        grid = place(figure, left=_LEFT, right=size.width - _LEFT - side, top=26, bottom=40)
        left = _LEFT + side + 84
        curve = place(figure, left=left, right=24, top=26, bottom=40)
    else:
        figure = new_figure(size.width, side + 66 + 250)
        grid = place(figure, left=_LEFT, right=12, top=26, bottom=40 + 250)
        curve = place(figure, left=_LEFT, right=16, top=side + 66 + 34, bottom=40)
    _draw_map(grid, run, size)
    _draw_largest(curve, run, size)
    return figure


def _draw_map(axes: Axes, run: Run, size: Size) -> None:
    """Draw a cell for each pair: the later mask down, the earlier one across."""
    looks = _thinned(run.observations)
    cells = square(run.observations)
    place_of = {id(look): i for i, look in enumerate(run.observations)}
    places = [place_of[id(look)] for look in looks]
    threshold = run.observations[-1].threshold
    known = [value for row in cells for value in row if value is not None]
    highest = max([*known, threshold])
    shades: dict[int, list[tuple[int, int]]] = {}
    for y, i in enumerate(places):
        for x, j in enumerate(places[:y]):
            value = cells[i][j]
            if value is not None:
                part = (value - threshold) / (highest - threshold) if highest > threshold else 1.0
                shade = 0 if value <= threshold else 1 + min(int(_SHADES * part), _SHADES - 1)
                shades.setdefault(shade, []).append((x, y))
    for shade, found in sorted(shades.items()):
        # One path for a shade: thousands of cells would make a large page.
        squares = [
            Path.unit_rectangle().transformed(Affine2D().translate(x - 0.5, y - 0.5))
            for x, y in found
        ]
        axes.add_patch(
            PathPatch(
                Path.make_compound_path(*squares),
                facecolor=LIGHT[DIFFER if shade else AGREE],
                alpha=0.1 + 0.85 * shade / _SHADES if shade else 0.9,
                edgecolor=LIGHT["page"],
                linewidth=0.6 if len(looks) <= 30 else 0.15,
            )
        )
    number = len(looks)
    axes.set_xlim(-0.5, number - 0.5)
    axes.set_ylim(number - 0.5, -0.5)
    wanted = MaxNLocator(5 if size.is_wide else 4, integer=True).tick_values(0, number - 1)
    ticks = sorted({int(tick) for tick in wanted if 0 <= tick < number})
    names = [f"{looks[tick].step:,}" for tick in ticks]
    axes.set_xticks(ticks, names)
    axes.set_yticks(ticks, names)
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel("step of the earlier masks", fontsize=11)
    _above(axes, "step of the later masks")
    _mark_queue(axes, run, looks)
    looked = (
        f"{len(run.observations):,} look{'' if len(run.observations) == 1 else 's'} at the masks"
    )
    lines = [looked, f"furthest apart: {max(known):.3f}" if known else ""]
    axes.text(
        number - 0.5,
        -0.5,
        "\n".join(filter(None, lines)),
        ha="right",
        va="top",
        color=LIGHT["muted"],
        fontsize=11,
    )


def _mark_queue(axes: Axes, run: Run, looks: Sequence[Observation]) -> None:
    """Frame the comparisons of the draw: the newest masks with the others in the queue."""
    in_queue = min(run.observations[-1].queue, len(looks))
    if run.prune is None or in_queue < 2:
        return
    number = len(looks)
    axes.add_patch(
        Rectangle(
            (number - in_queue - 0.5, number - 1.5),
            in_queue - 1,
            1,
            fill=False,
            edgecolor=LIGHT["ink"],
            linewidth=1.6,
            clip_on=False,
            zorder=5,
        )
    )


def _draw_largest(axes: Axes, run: Run, size: Size) -> None:
    """Draw the largest distance within the queue over the steps, the threshold, and the draw."""
    full = [seen for seen in run.observations if len(seen.recent) == seen.queue - 1]
    threshold = run.observations[-1].threshold
    x, y = [seen.step for seen in full], [max(seen.recent) for seen in full]
    colour = LIGHT[DIFFER]
    axes.plot(x, y, color=colour, linewidth=2.0, marker="o", markersize=3 if len(x) < 60 else 0)
    axes.axhline(threshold, color=LIGHT[AGREE], linewidth=1.4, linestyle=(0, (4, 3)), zorder=1)
    last = max(run.observations[-1].step, run.prune.step if run.prune else 0)
    axes.set_xlim(0, 1.04 * last or 1)
    axes.set_ylim(0, 1.15 * max([*y, threshold, 0.01]))
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(5 if size.is_wide else 4, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2f}"))
    axes.set_xlabel("step", fontsize=11)
    _above(axes, f"largest distance among {run.observations[-1].queue} masks in a row")
    is_low = threshold < 0.15 * axes.get_ylim()[1]  # no room between the line and the axis
    axes.annotate(
        f"threshold {threshold:g}",
        (0, threshold),
        xytext=(4, 4 if is_low else -4),
        textcoords="offset points",
        va="bottom" if is_low else "top",
        color=LIGHT[AGREE],
        weight="bold",
        fontsize=11,
    )
    if run.prune is not None:
        _mark_draw(axes, run, y[-1] if y else threshold)


def _mark_draw(axes: Axes, run: Run, height: float) -> None:
    assert run.prune is not None
    axes.axvline(
        run.prune.step, color=LIGHT["muted"], linewidth=1.0, linestyle=(0, (2, 2)), zorder=1
    )
    axes.plot([run.prune.step], [height], "o", color=LIGHT["ink"], markersize=6, zorder=5)
    why = "settled" if run.prune.reason == "settled" else "limit"
    axes.annotate(
        f"drawn at step {formatting.count(run.prune.step)}: {why}",
        (run.prune.step, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-5, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        color=LIGHT["ink"],
        fontsize=11,
    )


def _above(axes: Axes, text: str) -> None:
    axes.annotate(
        text,
        (0, 1),
        xycoords="axes fraction",
        xytext=(-_LEFT, 10),
        textcoords="offset points",
        color=LIGHT["muted"],
        fontsize=11,
    )


def _thinned(observations: Sequence[Observation]) -> list[Observation]:
    """Take some of many looks, and those of the last queue always.

    Example:
        >>> from samo.report.mask_events import Observation
        >>> from samo.report.mask_figures import _thinned
        >>> about = {"threshold": 0.1, "queue": 3}
        >>> looks = [Observation(step=i, distances=(0.1,) * i, **about) for i in range(100)]
        >>> [look.step for look in _thinned(looks)][-5:]
        [94, 96, 97, 98, 99]
    """
    if len(observations) <= _MOST_LOOKS:
        return list(observations)
    last = observations[-1]
    if len(last.distances) < len(observations) - 1:  # no history: a band, and its end tells most
        return list(observations[-_MOST_LOOKS:])
    older, newest = observations[: -last.queue], observations[-last.queue :]
    every = -(-len(older) // (_MOST_LOOKS - last.queue))
    return [*older[::-1][::every][::-1], *newest]


def change_figure(shown: Sequence[Entry], size: Size) -> Figure:
    """Draw the sparsity over the steps, or where it stays the same the share that is replaced."""
    figure = new_figure(size.width, round(0.8 * size.height))
    axes = curve_axes(figure, size, shown, "00.0 %")
    labels, highest = [], 0.0
    is_sparser = any(entry.run.is_pruned_in_steps for entry in shown)
    for entry in shown:
        run, colour = entry.run, run_colour(entry.place)
        if not run.changes or run.prune is None:
            continue
        if is_sparser:
            x, y = _sparsities(run)
            axes.step(x, y, where="post", color=colour, linestyle=run_dashes(entry.place))
        else:
            x = [float(change.step) for change in run.changes]
            y = [change.replaced for change in run.changes]
            axes.vlines(x, 0, y, color=colour, linewidth=2.0, alpha=0.5)
            axes.plot(x, y, "o", color=colour, markersize=4.5)
        highest = max(highest, *y)
        labels.append(EndLabel(entry=entry, y=y[-1], text=formatting.percent(y[-1])))
    axes.set_ylim(0, 1.0 if is_sparser else 1.15 * highest or 1.0)
    finish(axes, shown, size, "pruned" if is_sparser else "kept weights replaced")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formatting.percent(value)))
    label_ends(axes, labels, size)
    return figure


def _sparsities(run: Run) -> tuple[list[float], list[float]]:
    """Return steps and sparsities from the draw to the last step."""
    assert run.prune is not None
    first = run.changes[0]
    before = 1 - (1 - first.sparsity) / max(1 - first.dropped + first.replaced, 1e-9)
    x = [float(run.prune.step), *(float(change.step) for change in run.changes)]
    y = [before, *(change.sparsity for change in run.changes)]
    return [*x, float(run.last_step)], [*y, y[-1]]
