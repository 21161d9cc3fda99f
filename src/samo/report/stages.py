"""When each pipeline stage computed what: the last batch of a run as a figure and a sentence."""

from collections.abc import Iterator
from typing import NamedTuple

from matplotlib.figure import Figure

from samo.report.runs import Run
from samo.report.theme import LIGHT, new_figure, run_colour
from samo.utils import formatting

__all__ = []


class _Pass(NamedTuple):
    stage: int
    number: int
    start_ms: float
    length_ms: float
    is_backward: bool


def _passes(run: Run) -> Iterator[_Pass]:
    """Yield the passes of a run's last batch; a file may hold anything."""
    line = run.timeline
    if line is None:
        return
    rows = list(zip(line.stages, line.numbers, line.start_ms, line.end_ms))
    for place, (stage, number, start, end) in enumerate(rows):
        if 0 <= stage < line.num_stages and 0 <= start <= end < 1e12:
            yield _Pass(stage, number, start, end - start, 2 * place >= len(rows))


def timeline_finding(run: Run) -> str:
    """Return how long the batch took, and for which part of it stages stood idle."""
    passes = list(_passes(run))
    span = max((each.start_ms + each.length_ms for each in passes), default=0.0)
    if run.timeline is None or not span:
        return "No pass was recorded."
    busy = sum(each.length_ms for each in passes) / (span * run.timeline.num_stages)
    return (
        f"{run.timeline.micro_batches} micro-batches passed {run.timeline.num_stages} stages in "
        f"{span:,.0f} ms; stages stood idle for {formatting.percent(1 - busy)} of that time."
    )


def timeline_figure(run: Run) -> Figure:
    """Draw a row of passes for each stage."""
    passes = list(_passes(run))
    num_stages = max((each.stage for each in passes), default=0) + 1
    span = max((each.start_ms + each.length_ms for each in passes), default=0.0) or 1.0
    height = 26 * min(num_stages, 64) + 60
    figure, axes = new_figure(height, left=64, right=24, top=12, bottom=40)
    colour = run_colour(run.place)
    for each in passes:
        axes.broken_barh(
            [(each.start_ms, each.length_ms)],
            (each.stage - 0.4, 0.8),
            facecolor=colour,
            alpha=1.0 if each.is_backward else 0.35,
            edgecolor=LIGHT["page"],
            linewidth=0.8,
        )
        if each.length_ms > span / 60:
            axes.text(
                each.start_ms + each.length_ms / 2,
                each.stage,
                str(each.number),
                ha="center",
                va="center_baseline",
                fontsize=9,
                color=LIGHT["page" if each.is_backward else "ink"],
            )
    axes.set_xlim(0, span)
    axes.set_ylim(num_stages - 0.5, -0.5)
    rows = range(0, num_stages, -(-num_stages // 16))
    axes.set_yticks(rows, [f"stage {stage}" for stage in rows])
    axes.set_xlabel("ms")
    return figure
