"""The frontier: step time over peak memory, from streamed over budgets to resident, beside the rivals."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.transforms import Bbox

from benchmarks.drawing import LIGHT, Figure, drawing, new_figure, place, to_png, to_svg
from samo.utils.formatting import count, percent

__all__ = ["Figure", "draw", "frontier_figure"]

_WIDTH: Final = 880
_HEIGHT: Final = 520
_TICKS: Final = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150)
_RIVALS: Final = {
    "dense": "dense",
    "masked": "masked dense",
    "autocast": "autocast",
    "flashoptim": "FlashOptim",
    "flashoptim-release": "FlashOptim, gradient release",
}
_CLEAR: Final = 4
"""Pixels around a dot that no label may touch."""


class Point(NamedTuple):
    """A contender: the line it belongs to, how much of the dense weights is resident, where it lies."""

    line: str
    share: float
    label: str
    peak: float
    step: float


def frontier_figure(rows: Sequence[dict[str, Any]]) -> Figure | None:
    """Draw step time over peak memory; None if nothing was measured on a GPU."""
    figure = draw(rows)
    return None if figure is None else (to_png(figure), to_svg(figure))


def draw(rows: Sequence[dict[str, Any]]) -> Canvas | None:
    """Return the figure itself."""
    measured = [row for row in rows if row["median"] and row["figures"]["peak_bytes"]]
    points = sorted(map(_point, measured))
    if not points:
        return None
    about = measured[0]["parameters"]
    tokens = f"{about['batch_size']} x {count(about['context'])} tokens"
    shape = about["shape"].replace("gpt3-", "GPT-3 ").upper()
    with drawing():
        figure = new_figure(_WIDTH, _HEIGHT)
        axes = place(figure, left=64, right=24, top=72, bottom=56)
        for text, height, style in (
            (
                f"Step time and peak memory of {shape}, {percent(about['sparsity'])} pruned",
                26,
                {"fontsize": 14, "weight": "bold", "color": LIGHT["ink"]},
            ),
            (
                f"{tokens}, {measured[0]['device_name']}. Percent: dense weights that stay resident, the "
                "others are streamed. Lower and further left is better",
                46,
                {"fontsize": 11, "color": LIGHT["muted"]},
            ),
        ):
            figure.text(16 / _WIDTH, 1 - height / _HEIGHT, text, **style)
        for line, colour in (("exact", LIGHT["run0"]), ("lean", LIGHT["run2"])):
            found = [point for point in points if point.line == line]
            axes.plot(
                [point.peak for point in found],
                [point.step for point in found],
                color=colour,
                linewidth=2,
                marker="o",
                markersize=7,
            )
        rivals = [point for point in points if point.line == "rival"]
        axes.plot(
            [point.peak for point in rivals],
            [point.step for point in rivals],
            "s",
            color=LIGHT["whole"],
            markersize=8,
        )
        _scale(axes, points)
        _label(figure, axes, points)
    return figure


def _point(row: dict[str, Any]) -> Point:
    name, peak, step = row["name"], row["figures"]["peak_bytes"] / 1e9, row["median"]
    budget = re.fullmatch(r"budget-(.*)%(-lean)?", name)
    if budget:
        line = "lean" if budget[2] else "exact"
        return Point(line, float(budget[1]) / 100, f"{budget[1]} %", peak, step)
    for line, streamed, resident in (
        ("exact", "streamed", "samo"),
        ("lean", "streamed-lean", "lean"),
    ):
        if name == streamed:
            return Point(line, 0.0, f"streamed, {line}", peak, step)
        if name == resident:
            return Point(line, 1.0, f"resident, {line}", peak, step)
    return Point("rival", 0.0, _RIVALS.get(name, name), peak, step)


def _scale(axes: Axes, points: Sequence[Point]) -> None:
    peaks, steps = [point.peak for point in points], [point.step for point in points]
    low, high = 0.8 * min(peaks), 1.35 * max(peaks)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    room = max(0.15 * (max(steps) - min(steps)), 0.01 * max(steps))
    axes.set_ylim(min(steps) - room, max(steps) + room)
    axes.set_xlabel("peak memory, GB (logarithmic)")
    axes.set_ylabel("step, ms")
    axes.grid(axis="y")


def _label(figure: Canvas, axes: Axes, points: Sequence[Point]) -> None:
    """Write each name beside its dot, at the first place where it touches nothing."""
    FigureCanvasAgg(figure)
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    at = [axes.transData.transform((point.peak, point.step)) for point in points]
    taken = [Bbox.from_extents(x - _CLEAR, y - _CLEAR, x + _CLEAR, y + _CLEAR) for x, y in at]
    taken += _lines_between(points, at)
    inside = axes.get_window_extent(renderer)
    colours = {"exact": LIGHT["run0"], "lean": LIGHT["run2"], "rival": LIGHT["muted"]}
    # Ends of lines and rivals first: they say what the others are between.
    order = sorted(points, key=lambda point: point.share not in (0.0, 1.0))
    for point in order:
        for dx, dy, across, up in _places(above=point.line != "lean"):
            text = axes.annotate(
                point.label,
                (point.peak, point.step),
                xytext=(dx, dy),
                textcoords="offset points",
                ha=across,
                va=up,
                fontsize=11 if point.share in (0.0, 1.0) else 10,
                color=colours[point.line],
            )
            box = text.get_window_extent(renderer)
            is_inside = inside.x0 <= box.x0 and box.x1 <= inside.x1
            is_inside &= inside.y0 <= box.y0 and box.y1 <= inside.y1
            if is_inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _places(*, above: bool) -> Iterator[tuple[float, float, str, str]]:
    """Return where a label may stand beside its dot, the best first: offset and alignment."""
    first, second = (1, -1) if above else (-1, 1)
    for far in (9, 16, 24, 34, 46, 60):
        for side in (first, second):
            up = "bottom" if side > 0 else "top"
            yield 0, side * far, "center", up
            yield far / 2, side * far, "left", up
            yield -far / 2, side * far, "right", up
        yield far, 0, "left", "center"
        yield -far, 0, "right", "center"


def _lines_between(points: Sequence[Point], at: Sequence[Any]) -> list[Bbox]:
    """Return small boxes along the lines from dot to dot."""
    boxes = []
    for (one, (x0, y0)), (other, (x1, y1)) in zip(zip(points, at), list(zip(points, at))[1:]):
        if one.line == other.line != "rival":
            for part in range(1, 12):
                x, y = x0 + (x1 - x0) * part / 12, y0 + (y1 - y0) * part / 12
                boxes.append(Bbox.from_extents(x - 2, y - 2, x + 2, y + 2))
    return boxes
