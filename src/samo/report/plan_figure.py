"""A plan as a figure: memory at the peak and seconds of a step, by kind; a pipeline's timeline."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from samo.pipeline.timeline import Timeline
from samo.planner.answer import Plan
from samo.planner.search import Option
from samo.planner.simulator import simulate_step
from samo.report.figures import draw_passes
from samo.report.theme import LIGHT, drawing

_BYTES: Final = {  # label and colour
    "dense": ("dense weights", "dense"),
    "values": ("values", "values"),
    "bitmap": ("bitmap", "bitmap"),
    "moments": ("moments", "moments"),
    "gradients": ("gradients", "gradients"),
    "activations": ("activations", "run2"),
    "logits": ("logits", "run4"),
    "workspace": ("workspace", "run5"),
    "slack": ("slack", "line"),
}
_SECONDS: Final = {
    "compute": ("compute", "run0"),
    "bubble": ("bubble", "line"),
    "point_to_point": ("point-to-point", "run4"),
    "reduce": ("reduce and gather", "run1"),
    "expand_compress": ("expand and compress", "run2"),
    "optimizer": ("update", "run3"),
}
_SHOWN: Final = 6
_MOST_STAGES: Final = 32
_MICRO_BATCHES: Final = 16
_INCH: Final = 72  # pixels


def draw(plan: Plan, kind: str = "svg") -> bytes:
    """Return the figure as a file of the kind "svg" or "png"."""
    options, best = [*plan.options[:_SHOWN], *plan.rivals.values()], plan.best
    heights = [26 * len(options)] * 2
    if best is not None and 1 < best.layout.pipe <= _MOST_STAGES:
        heights.append(14 * best.layout.pipe)
    with drawing():
        size = (860 / _INCH, (sum(heights) + 80 * len(heights)) / _INCH)
        figure = Figure(figsize=size, dpi=_INCH, layout="constrained")
        where = f"{plan.cluster.num_gpus} x {plan.cluster.hardware.name}"
        figure.suptitle(f"{plan.job.network.name} on {where}, predicted", fontsize=12)
        first, second, *third = figure.subplots(len(heights), height_ratios=heights)
        _bars(first, options, [option.memory.at_peak for option in options], _BYTES, 1e-9)
        first.axvline(plan.cluster.hardware.usable_bytes / 1e9, color=LIGHT["ink"], linewidth=1)
        first.set_xlabel("GB of a GPU at the peak; line: what it has")
        _bars(second, options, [asdict(option.time) for option in options], _SECONDS, 1.0)
        second.set_xlabel("seconds of a step")
        if best is not None and third:
            _timeline(third[0], simulate_step(plan.job, best.layout, plan.cluster))
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, facecolor=LIGHT["page"])
        return buffer.getvalue()


def _bars(
    axes: Axes,
    options: Sequence[Option],
    parts: Sequence[Mapping[str, float]],
    looks: Mapping[str, tuple[str, str]],
    scale: float,
) -> None:
    rows, left = range(len(options)), [0.0] * len(options)
    for kind, (label, colour) in looks.items():
        widths = [part[kind] * scale for part in parts]
        if any(widths):
            axes.barh(rows, widths, 0.7, left=left, color=LIGHT[colour], label=label)
        left = [a + b for a, b in zip(left, widths)]
    names = []
    for option in options:
        mesh = f"{option.layout.mesh}: " if option.layout.num_ranks > 1 else ""
        names.append(f"{mesh}{option.layout}{'' if option.fits else ' *'}")
    axes.set_yticks(rows, names, fontsize=9)
    axes.set_ylim(len(options) - 0.5, -0.5)
    axes.grid(axis="x")
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=9, frameon=False, fontsize=8,
        handlelength=0.8, columnspacing=0.9,
    )  # fmt: skip


def _timeline(axes: Axes, line: Timeline) -> None:
    """Draw the start of a step of the best layout, as the pipeline's engine orders its passes."""
    count = min(_MICRO_BATCHES, line.num_micro_batches)
    end = max(event.end for event in line.events if event.micro_batch < count)
    shown = [event for event in line.events if event.end <= end]
    draw_passes(axes, shown, line.num_stages, scale=1.0)
    axes.set_xlabel(
        f"seconds until {count} of {line.num_micro_batches} micro-batches are done, simulated; "
        "pale: forward"
    )
