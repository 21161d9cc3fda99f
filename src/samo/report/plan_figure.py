"""A plan as a figure: memory at the peak and seconds of a step, by kind; a pipeline's timeline."""

import io
from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from samo.pipeline.timeline import Timeline
from samo.planner.answer import Plan
from samo.planner.search import Option
from samo.planner.simulator import simulate_step
from samo.report.theme import LIGHT, drawing, new_figure

__all__ = []

_BYTES: Final = {
    "dense": "dense weights",
    "values": "values",
    "bitmap": "bitmap",
    "moments": "moments",
    "gradients": "gradients",
    "activations": "activations",
    "logits": "logits",
    "workspace": "workspace",
    "slack": "slack",
}
_SECONDS: Final = {
    "compute": "compute",
    "bubble": "bubble",
    "point_to_point": "point-to-point",
    "reduce": "reduce and gather",
    "expand_compress": "expand and compress",
    "optimizer": "update",
}
_COLOURS: Final = {
    **{kind: LIGHT[kind] for kind in ("dense", "values", "bitmap", "moments", "gradients")},
    "activations": LIGHT["run2"], "logits": LIGHT["run4"], "workspace": LIGHT["run5"],
    "slack": LIGHT["line"], "compute": LIGHT["run0"], "bubble": LIGHT["line"],
    "point_to_point": LIGHT["run4"], "reduce": LIGHT["run1"], "expand_compress": LIGHT["run2"],
    "optimizer": LIGHT["run3"],
}  # fmt: skip
_ROW: Final = 26
_SHOWN: Final = 5
_MOST_STAGES: Final = 32
_MICRO_BATCHES: Final = 16


def draw(plan: Plan, kind: str = "svg") -> bytes:
    """Return the figure as a file of the kind "svg" or "png"."""
    is_many = plan.cluster.num_gpus > 1
    options = [*plan.options[: _SHOWN if is_many else 12], *plan.rivals.values()]
    best = plan.best
    stages = best.layout.pipe if best is not None else 1
    has_line = 1 < stages <= _MOST_STAGES
    part = _ROW * len(options)
    height = 2 * part + 190 + (14 * stages + 70 if has_line else 0)
    with drawing():
        figure, first = new_figure(height, left=300, right=20, top=60, bottom=height - 60 - part)
        _bars(first, options, [o.memory.at_peak for o in options], _BYTES, 1e-9)
        first.axvline(plan.cluster.hardware.usable_bytes / 1e9, color=LIGHT["ink"], linewidth=1)
        first.set_title(
            f"{plan.job.network.name} on {plan.cluster.num_gpus} x {plan.cluster.hardware.name}, "
            "predicted: GB of a GPU at the peak; line: what it has",
            loc="left", x=-0.65, fontsize=12, pad=36,
        )  # fmt: skip
        second = _add(figure, height, 60 + part + 95, part)
        times = [{key: getattr(o.time, key) for key in _SECONDS} for o in options]
        _bars(second, options, times, _SECONDS, 1.0)
        second.set_title("seconds of a step", loc="left", x=-0.65, fontsize=12, pad=36)
        if has_line and best is not None:
            line = simulate_step(plan.job, best.layout, plan.cluster)
            _timeline(_add(figure, height, 2 * part + 240, 14 * stages), line)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, facecolor=LIGHT["page"])
        return buffer.getvalue()


def _add(figure: Figure, height: float, top: float, size: float) -> Axes:
    width = figure.get_size_inches()[0] * figure.dpi
    box = (300 / width, 1 - (top + size) / height, 1 - 320 / width, size / height)
    return figure.add_axes(box)


def _bars(
    axes: Axes,
    options: Sequence[Option],
    parts: Sequence[dict[str, float]],
    labels: dict[str, str],
    scale: float,
) -> None:
    left = [0.0] * len(options)
    for kind, label in labels.items():
        widths = [part[kind] * scale for part in parts]
        if any(widths):
            rows = range(len(options))
            axes.barh(rows, widths, 0.7, left=left, color=_COLOURS[kind], label=label)
        left = [a + b for a, b in zip(left, widths)]
    names = [
        (f"{o.layout.mesh}: " if o.layout.num_ranks > 1 else "")
        + str(o.layout)
        + ("" if o.fits else " *")
        for o in options
    ]
    axes.set_yticks(range(len(options)), names, fontsize=9)
    axes.set_ylim(len(options) - 0.5, -0.5)
    axes.grid(axis="x")
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.67, 1.0), ncols=9, frameon=False, fontsize=8,
        handlelength=0.8, columnspacing=0.9,
    )  # fmt: skip


def _timeline(axes: Axes, line: Timeline) -> None:
    """Draw the start of a step of the best layout, as the pipeline's engine orders its passes."""
    origin, count = line.events[0].start, min(_MICRO_BATCHES, line.num_micro_batches)
    end = max(event.end for event in line.events if event.micro_batch < count)
    for event in line.events:
        if event.start >= end:
            continue
        colour = LIGHT["run5" if event.what == "forward" else "run0"]
        span = [(event.start - origin, event.end - event.start)]
        axes.broken_barh(span, (event.stage - 0.4, 0.8), facecolor=colour)
    axes.set_ylim(line.num_stages - 0.5, -0.5)
    axes.set_title(
        f"stages over seconds, simulated until {count} of {line.num_micro_batches} micro-batches "
        "are done; light: forward",
        loc="left", x=-0.65, fontsize=12,
    )  # fmt: skip
