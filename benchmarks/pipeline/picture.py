"""Timelines as a picture: one band for each stage, forward passes light, backward passes dark."""

from collections.abc import Mapping
from typing import Final

from benchmarks.drawing import LIGHT, drawing, new_figure, place, to_png
from samo.pipeline.timeline import Timeline

_WIDTH: Final = 960
_BAND: Final = 26
_COLOURS: Final = {"forward": LIGHT["run5"], "backward": LIGHT["run0"]}


def draw(timelines: Mapping[str, Timeline]) -> bytes:
    """Return a PNG of timelines under each other, on one scale of time.

    Example:
        >>> from benchmarks.pipeline.picture import draw
        >>> from samo.planner.simulator import simulate
        >>> draw({"message-driven": simulate(2, 4)})[1:4]
        b'PNG'

    Args:
        timelines: What to draw, by title.
    """
    heights = [_BAND * line.num_stages + 44 for line in timelines.values()]
    height = sum(heights) + 40
    longest = max(line.span for line in timelines.values())
    with drawing():
        figure = new_figure(_WIDTH, height)
        top = 6.0
        for (title, line), own in zip(timelines.items(), heights):
            is_last = top + own > height - 60
            axes = place(figure, left=64, right=16, top=top + 28, bottom=height - top - own + 10)
            busy = sum(event.end - event.start for event in line.events)
            idle = 1 - busy / (line.span * line.num_stages)
            label = f"{title}: {line.span:.3g} in all, {idle:.0%} idle"
            axes.set_title(label, loc="left", fontsize=12, color=LIGHT["ink"])
            origin = line.events[0].start
            for event in line.events:
                length = event.end - event.start
                axes.broken_barh(
                    [(event.start - origin, length)],
                    (event.stage - 0.42, 0.84),
                    facecolor=_COLOURS[event.what],
                    edgecolor=LIGHT["page"],
                    linewidth=0.8,
                )
                if length > longest / 60:
                    axes.text(
                        event.start - origin + length / 2,
                        event.stage,
                        str(event.micro_batch),
                        ha="center",
                        va="center_baseline",
                        fontsize=9,
                        color=LIGHT["ink"] if event.what == "forward" else LIGHT["page"],
                    )
            axes.set_xlim(0, longest)
            axes.set_ylim(line.num_stages - 0.4, -0.6)
            axes.set_yticks(range(line.num_stages), [f"stage {s}" for s in range(line.num_stages)])
            axes.tick_params(axis="x", labelbottom=is_last, length=3 if is_last else 0)
            if is_last:
                axes.set_xlabel(
                    "time (a forward pass of even stages takes 1); light: forward, dark: backward"
                )
            top += own
        return to_png(figure)
