"""A plan as text: what was asked, the table, what the saving buys, and the command."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from samo.planner.command import has_dense_phase
from samo.planner.search import Option, room
from samo.utils.formatting import count, percent, size, three_digits

if TYPE_CHECKING:
    from samo.planner.answer import Plan

__all__ = ["describe", "text"]

NAMES: Final = {
    "samo": "samo",
    "paper": "SAMO paper, 2 + 24 f bytes",
    "8-bit": "dense, 8-bit state",
    "dense": "dense, mixed precision",
    "autocast": "dense, autocast (samo's dense phase)",
}
_PARTS: Final = {
    "compute": "compute",
    "bubble": "bubble",
    "point_to_point": "p2p",
    "reduce": "reduce",
    "expand_compress": "expand",
    "optimizer": "update",
}
_BYTES: Final = {
    "values": "values",
    "gradients": "grads",
    "moments": "moments",
    "bitmap": "bitmap",
    "dense": "dense",
    "activations": "activ.",
    "logits": "logits",
    "workspace": "work",
    "slack": "slack",
}
_SHOWN: Final = 5


def text(plan: "Plan") -> str:
    """Return a plan as lines for a terminal."""
    return "\n".join(_lines(plan))


def _lines(plan: "Plan") -> Iterator[str]:
    job, cluster, best = plan.job, plan.cluster, plan.best
    kinds = {matrix.kind for layer in job.network.layers for matrix in layer.matrices}
    pruned = ", ".join(f"{k} {percent(value)}" for k, value in job.sparsity if value and k in kinds)
    frozen = f", frozen: {', '.join(sorted(job.frozen))}" if job.frozen else ""
    yield (
        f"{job.network.name}: {count(job.network.num_params)} parameters, pruned: "
        f"{pruned or 'nothing'}{frozen}; {job.batch} x {job.context:,} tokens a step"
    )
    hardware = cluster.hardware
    yield (
        f"{cluster.num_gpus} x {hardware.name}, {size(room(cluster))} of "
        f"{size(hardware.memory_bytes)} usable each ({hardware.source})"
    )
    yield ""
    is_many = cluster.num_gpus > 1
    options = plan.options[: _SHOWN if is_many else None]
    yield from _memory_table(options, list(plan.rivals.items()), is_many=is_many)
    yield ""
    yield from _time_table(options, list(plan.rivals.items()), is_many=is_many)
    yield ""
    yield "predicted, GB (10^9 bytes) at the peak of a step; * does not fit. docs/plan.md: errors"
    fewest = [f"{NAMES[scheme].split(' (')[0]} {n or 'none'}" for scheme, n in plan.fewest.items()]
    yield f"fewest {hardware.name} it fits on, as a power of two: {'; '.join(fewest)}"
    for scheme, other in plan.rivals.items():
        if best is not None and other.fits:
            ratio = best.time.total / other.time.total
            memory = best.memory.needed_bytes / other.memory.needed_bytes
            yield f"against {NAMES[scheme]}: {ratio:.2f} of its time, {memory:.2f} of its memory"
    if best is not None and (better := _better(plan, best)):
        yield f"{better} is at least as good here, if you do not need a pruned model"
    if best is None:
        needed = plan.options[0].memory.needed_bytes
        yield (
            f"nothing fits: the least is {size(needed)} on each GPU, {describe(plan.options[0])}, "
            f"{size(needed - room(cluster))} too much. This would fit:"
        )
        yield from (f"  {line}" for line in plan.advice or ["nothing that samo plan knows"])
        return
    yield ""
    yield f"{describe(best)}, micro-batches of {best.layout.micro_batch}:"
    yield from (f"  {line}" for line in plan.command.splitlines())
    if not job.network.command:
        return
    if not has_dense_phase(job, best.layout, cluster):
        yield "dense steps do not fit on this mesh: start from --masks, or from --init to prune"


def _better(plan: "Plan", best: Option) -> str:
    """Return a dense scheme that is no slower and needs no more memory, or nothing."""
    for scheme in ("8-bit", "dense"):
        other = plan.rivals[scheme]
        is_fast = other.time.total <= best.time.total
        if other.fits and is_fast and other.memory.needed_bytes <= best.memory.needed_bytes:
            return NAMES[scheme]
    return ""


def describe(option: Option) -> str:
    """Return a layout in words, without its mesh."""
    own = option.layout
    weights = f"budget {size(own.weights)}" if isinstance(own.weights, int) else own.weights
    parts = [weights, own.state] if own.scheme == "samo" else [NAMES[own.scheme]]
    parts += ["FSDP2"] if own.shard else []
    parts += ["checkpointed"] if own.checkpointing else []
    return ", ".join(parts)


def _mesh(option: Option) -> str:
    return f"{option.layout.pipe} x {option.layout.data}"


def _rows(
    options: Sequence[Option], rivals: Sequence[tuple[str, Option]]
) -> Iterator[tuple[str, Option]]:
    for option in [*options, *(option for _, option in rivals)]:
        yield describe(option) + ("" if option.fits else " *"), option


def _memory_table(
    options: Sequence[Option], rivals: Sequence[tuple[str, Option]], *, is_many: bool
) -> Iterator[str]:
    lines = [["", *(["pipe x data"] if is_many else []), "peak", *_BYTES.values()]]
    for name, option in _rows(options, rivals):
        found = [option.memory.needed_bytes, *(option.memory.at_peak[kind] for kind in _BYTES)]
        mesh = [_mesh(option)] if is_many else []
        lines.append([name, *mesh, *(_gigabytes(value) for value in found)])
    yield from _table(lines)


def _time_table(
    options: Sequence[Option], rivals: Sequence[tuple[str, Option]], *, is_many: bool
) -> Iterator[str]:
    parts = dict(_PARTS)
    if not is_many:
        parts = {key: parts[key] for key in ("compute", "expand_compress", "optimizer")}
    extra = ["pipe x data"] if is_many else []
    lines = [["", *extra, "micro-b.", "step, s", *parts.values()]]
    for name, option in _rows(options, rivals):
        times = [option.time.total, *(getattr(option.time, part) for part in parts)]
        mesh = [_mesh(option)] if is_many else []
        shown = [three_digits(value) if value else "-" for value in times]
        lines.append([name, *mesh, str(option.layout.micro_batch), *shown])
    yield from _table(lines)


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.1f}" if value >= 5e7 else "-"


def _table(lines: list[list[str]]) -> Iterator[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        first = line[0].ljust(widths[0])
        yield "  ".join([first, *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:]))]).rstrip()
