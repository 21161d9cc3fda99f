"""The frontier: step time over peak memory, from streamed over budgets to resident, beside the rivals."""

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from matplotlib.axes import Axes

from benchmarks.drawing import LIGHT, Figure, drawing, new_figure, place, to_png, to_svg
from samo.utils.formatting import count, percent

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


class Point(NamedTuple):
    """A contender: the line it belongs to, how much of the dense weights is resident, where it lies."""

    line: str
    share: float
    label: str
    peak: float
    step: float


def frontier_figure(rows: Sequence[dict[str, Any]]) -> Figure | None:
    """Draw step time over peak memory; None if nothing was measured on a GPU."""
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
        _label(axes, points)
        return to_png(figure), to_svg(figure)


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
    low, high = 0.7 * min(peaks), 1.35 * max(peaks)
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


def _label(axes: Axes, points: Sequence[Point]) -> None:
    """Write each name beside its dot: samo's budgets above or below the line, others to a side."""
    colours = {"exact": LIGHT["run0"], "lean": LIGHT["run2"], "rival": LIGHT["muted"]}
    left = {"xytext": (-9, 0), "ha": "right", "va": "center"}
    right = {"xytext": (9, 0), "ha": "left", "va": "center"}
    above = {"xytext": (3, 7), "ha": "left", "va": "bottom"}
    below = {"xytext": (-3, -7), "ha": "left", "va": "top"}
    edge = max(point.peak for point in points) / 2
    for point in points:
        place: dict[str, Any] = right
        if point.share > 0:
            place = above if point.line == "exact" else below
        elif point.line != "rival" or point.peak > edge:
            place = left
        axes.annotate(
            point.label,
            (point.peak, point.step),
            textcoords="offset points",
            fontsize=10,
            color=colours[point.line],
            **place,
        )
