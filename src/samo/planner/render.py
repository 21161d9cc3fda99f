"""A plan as text: the answer, what was asked, tables, what the saving buys, and the command."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from samo.planner.search import COMFORTABLE, Option, dense_phase, room
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
_SHORT: Final = {
    "paper": "SAMO paper",
    "8-bit": "dense 8-bit",
    "dense": "dense mixed",
    "autocast": "dense autocast",
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
    "values": ("values", "bitmap"),
    "grads": ("gradients",),
    "moments": ("moments",),
    "dense": ("dense",),
    "activ.": ("activations",),
    "work": ("logits", "workspace"),
}
_WIDTH: Final = 100
_SHOWN: Final = 6  # options; with the other schemes ten rows


def text(plan: "Plan") -> str:
    """Return a plan as lines for a terminal."""
    lines = []
    for line in _lines(plan):
        is_prose = not line.startswith(" ") and len(line) > _WIDTH
        lines += textwrap.wrap(line, _WIDTH, subsequent_indent="  ") if is_prose else [line]
    return "\n".join(lines)


def _lines(plan: "Plan") -> Iterator[str]:
    job, cluster, best = plan.job, plan.cluster, plan.best
    kinds = {matrix.kind for layer in job.network.layers for matrix in layer.matrices}
    pruned = ", ".join(f"{k} {percent(value)}" for k, value in job.sparsity if value and k in kinds)
    if plan.pruned_by:
        by = (
            "assumed; set --sparsity"
            if plan.pruned_by == "assumed"
            else f"read from {plan.pruned_by}"
        )
        pruned = f"{pruned or 'nothing'} ({by})"
    yield _answer(plan)
    yield ""
    frozen = f", frozen: {', '.join(sorted(job.frozen))}" if job.frozen else ""
    yield (
        f"{job.network.name}: {count(job.network.num_params)} parameters, pruned: "
        f"{pruned or 'nothing'}{frozen}; {job.batch} x {job.context:,} tokens a step"
    )
    hardware = cluster.hardware
    yield (
        f"{cluster.num_gpus} x {hardware.name}, {size(room(cluster))} usable of "
        f"{size(hardware.memory_bytes)} each"
    )
    if hardware.source:
        yield f"({hardware.source})"
    yield ""
    is_many = cluster.num_gpus > 1
    options = plan.options[:_SHOWN]
    shown = [*options, *plan.rivals.values()]
    yield from _memory_table(shown, is_many=is_many)
    yield ""
    yield from _time_table(shown, is_many=is_many)
    yield ""
    yield (
        "All predicted; docs/plan.md has the errors. * does not fit. needs: peak, and 5 % that the "
        "allocator loses. values: with bitmaps. work: logits and workspace. ckpt: checkpointed "
        "activations. mesh: stages x replicas. size: sequences of a micro-batch."
    )
    if len(plan.options) > len(options):
        yield f"{len(plan.options) - len(options)} more layouts are in --json."
    keeper = "the process" if job.dtype == "float32" else "CUDA's context and libraries"
    yield (
        f"usable: {size(hardware.memory_bytes)}, which is {hardware.memory_bytes / 2**30:.1f} GiB "
        f"(a GB is 10^9 bytes, a GiB 2^30), less {size(hardware.reserved_bytes)} for {keeper}."
    )
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
        yield "This would fit:"
        yield from (f"  {line}" for line in plan.advice or ["nothing that samo plan knows"])
        return
    yield ""
    yield f"{describe(best)}, micro-batches of {best.layout.micro_batch}:"
    yield from (f"  {line}" for line in plan.command.splitlines())
    if not job.network.command:
        return
    if not dense_phase(job, best.layout, cluster).fits:
        yield "dense steps do not fit on this mesh: start from --masks, or from --init to prune"


def _answer(plan: "Plan") -> str:
    """Return the first line: whether it fits, with what, how fast."""
    space, first = room(plan.cluster), plan.options[0]
    needed = first.memory.needed_bytes
    own = first.layout
    mesh = f" on {own.pipe} x {own.data} (stages x replicas)" if own.num_ranks > 1 else ""
    each = " on each" if own.num_ranks > 1 else ""
    what = f"{describe(first)}{mesh} needs {size(needed)} of {size(space)}{each}"
    if not first.fits:
        more = f"; instead {plan.advice[0]}" if plan.advice else ""
        return f"No: even {what}{more}"
    seconds, rate = first.time.total, first.tokens / first.time.total
    took = f"{three_digits(seconds)} s" if seconds >= 1 else f"{three_digits(1e3 * seconds)} ms"
    word = "Barely" if needed > COMFORTABLE * space else "Yes"
    return f"{word}: {what}, {took} a step ({count(rate)} tokens/s)"


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


def _label(option: Option) -> str:
    """Return a layout in few words, for a table."""
    own = option.layout
    weights = f"budget {size(own.weights)}" if isinstance(own.weights, int) else own.weights
    words = [weights, own.state] if own.scheme == "samo" else [_SHORT[own.scheme]]
    words += ["FSDP2"] if own.shard else []
    words += ["ckpt"] if own.checkpointing else []
    return " ".join([*words, *([] if option.fits else ["*"])])


def _memory_table(options: Sequence[Option], *, is_many: bool) -> Iterator[str]:
    largest = max(option.memory.needed_bytes for option in options)
    name, unit = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    rows = []
    for option in options:
        memory = option.memory
        parts = [sum(memory.at_peak[kind] for kind in kinds) for kinds in _BYTES.values()]
        rows.append([memory.needed_bytes, memory.peak_bytes, *parts])
    cells = [
        [f"{value / unit:,.1f}" if value >= unit / 20 else "-" for value in row] for row in rows
    ]
    yield from _table(name, ["needs", "peak", *_BYTES], options, cells, is_many=is_many)


def _time_table(options: Sequence[Option], *, is_many: bool) -> Iterator[str]:
    parts = dict(_PARTS)
    if not is_many:
        parts = {key: parts[key] for key in ("compute", "expand_compress", "optimizer")}
    name, unit, digits = "s", 1.0, 2
    longest = max(option.time.total for option in options)
    if longest < 1:
        name, unit, digits = "ms", 1e-3, 1
    elif longest >= 100:
        digits = 1
    cells = []
    for option in options:
        times = [option.time.total, *(getattr(option.time, part) for part in parts)]
        shown = (f"{value / unit:,.{digits}f}" for value in times)
        zero = f"{0:.{digits}f}"
        # Many GPUs have more parts of a step, and no room for the rate.
        rate = [] if is_many else [count(option.tokens / option.time.total)]
        times_shown = ("-" if s == zero else s for s in shown)
        cells.append([str(option.layout.micro_batch), *rate, *times_shown])
    header = ["size", *([] if is_many else ["tokens/s"]), "step", *parts.values()]
    yield from _table(name, header, options, cells, is_many=is_many)


def _table(
    unit: str,
    header: Sequence[str],
    options: Sequence[Option],
    cells: Sequence[Sequence[str]],
    *,
    is_many: bool,
) -> Iterator[str]:
    lines = [[unit, *(["mesh"] if is_many else []), *header]]
    for option, row in zip(options, cells):
        own = option.layout
        mesh = [f"{own.pipe} x {own.data}"] if is_many else []
        lines.append([_label(option), *mesh, *row])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        first = line[0].ljust(widths[0])
        yield "  ".join([first, *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:]))]).rstrip()
