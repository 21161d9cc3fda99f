"""A plan as text: the answer, what was asked, tables, what the saving buys, and the command."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from samo.planner.memory import SCHEMES
from samo.planner.search import Option
from samo.utils.formatting import count, counted, percent, size, three_digits

if TYPE_CHECKING:
    from samo.planner.answer import Plan

_BYTES: Final = {
    "values": ("values", "bitmap"),
    "grads": ("gradients",),
    "moments": ("moments",),
    "dense": ("dense",),
    "activ.": ("activations",),
    "work": ("logits", "workspace"),
}
_SECONDS: Final = {
    "compute": "compute",
    "bubble": "bubble",
    "point_to_point": "p2p",
    "reduce": "reduce",
    "expand_compress": "expand",
    "optimizer": "update",
}
_ONLY_MANY: Final = ("bubble", "point_to_point", "reduce")
_WIDTH: Final = 100
_SHOWN: Final = 6  # options; with the other schemes ten rows
_LEGEND: Final = (
    "All predicted; see docs/plan.md for measured accuracy. * does not fit. needs: peak, and 5 % "
    "lost to the allocator. values: with bitmaps. work: logits and workspace. ckpt: checkpointed "
    "activations. mesh: stages x replicas. size: sequences of a micro-batch."
)


def text(plan: "Plan") -> str:
    """Return a plan as lines for a terminal."""
    lines = []
    for line in _lines(plan):
        is_prose = not line.startswith(" ") and len(line) > _WIDTH
        lines += textwrap.wrap(line, _WIDTH, subsequent_indent="  ") if is_prose else [line]
    return "\n".join(lines)


def _lines(plan: "Plan") -> Iterator[str]:
    job, hardware, best = plan.job, plan.cluster.hardware, plan.best
    yield _answer(plan)
    yield ""
    kinds = [f"{kind} {percent(value)}" for kind, value in job.network.sparsity.items() if value]
    pruned = ", ".join(kinds) or "nothing"
    if plan.pruned_by:
        pruned += (
            f" (read from {plan.pruned_by})" if plan.is_pruned else " (assumed; set --sparsity)"
        )
    frozen = f", frozen: {', '.join(job.network.frozen)}" if job.network.frozen else ""
    yield (
        f"{job.network.name}: {count(job.network.num_params)} parameters, pruned: "
        f"{pruned}{frozen}; {job.batch} x {job.context:,} tokens a step"
    )
    yield (
        f"{plan.cluster.num_gpus} x {hardware.name}, {size(hardware.usable_bytes)} usable"
        f"{_beside(plan)} of {size(hardware.memory_bytes)} each"
    )
    if hardware.source:
        yield f"({hardware.source})"
    if plan.host_bytes is not None:
        dense, small = map(size, plan.host_bytes)
        yield f"on the host, for each rank: {dense} to open a dense model, {small} a compressed one"
    yield ""
    shown = [*plan.options[:_SHOWN], *plan.rivals.values()]
    yield from _memory_table(plan, shown)
    yield ""
    yield from _time_table(plan, shown)
    yield ""
    yield _LEGEND
    if (more := len(plan.options) - _SHOWN) > 0:
        yield f"--json has {counted(more, 'more layout')}."
    keeper = "the process" if job.dtype == "float32" else "CUDA"
    if plan.teacher_bytes:
        keeper += f" and {size(plan.teacher_bytes)} for the teacher"
    own = hardware.reserved_bytes - plan.teacher_bytes
    yield (
        f"usable: {size(hardware.memory_bytes)}, which is {hardware.memory_bytes / 2**30:.1f} GiB "
        f"(a GB is 10^9 bytes, a GiB 2^30), less {size(own)} for {keeper}."
    )
    fewest = "; ".join(f"{SCHEMES[scheme]} {n or 'none'}" for scheme, n in plan.fewest.items())
    yield f"fewest devices it fits on, as a power of two: {fewest}"
    if best is None:
        yield "This would fit:"
        yield from (f"  {line}" for line in plan.advice or ["nothing that samo plan knows"])
        return
    for other in plan.rivals.values():
        if other.fits:
            ratio = best.time.total / other.time.total
            memory = best.memory.needed_bytes / other.memory.needed_bytes
            name = SCHEMES[other.layout.scheme]
            yield f"against {name}: {ratio:.2f} of its time, {memory:.2f} of its memory"
    if better := _better(plan, best):
        yield f"{better} is at least as good here, if you do not need a pruned model"
    yield ""
    yield f"{best.layout}, micro-batches of {best.layout.micro_batch}:"
    yield from (f"  {line}" for line in plan.command.splitlines())
    if "--dense-steps 0" in plan.command:
        yield "dense steps do not fit on this mesh: start from --masks, or from --init to prune"


def _answer(plan: "Plan") -> str:
    """Return the first line: whether it fits, with what, how fast."""
    first = plan.options[0]
    own, is_many = first.layout, plan.cluster.num_gpus > 1
    mesh = f" on {own.mesh} (stages x replicas)" if is_many else ""
    needed, usable = size(first.memory.needed_bytes), size(first.usable_bytes)
    each = " on each" if is_many else ""
    found = sorted(value for value in plan.job.network.sparsity.values() if value)
    low, high = (percent(value) for value in (found[0], found[-1])) if found else ("", "")
    share = high if low == high else f"{low.removesuffix(' %')} to {high}"
    guess = " (assumed)" if plan.is_assumed else ""
    pruned = f", at {share} sparsity{guess}" if found else ""
    if not first.fits:
        flags = "".join(plan.advice[:1]).partition(": ")[2]
        return (
            f"No{pruned}: even {own}{mesh} needs {needed}, and {usable} are usable{each}"
            f"{_beside(plan)}{flags and f'; try {flags}'}"
        )
    what = f"{own}{mesh} needs {needed} of {usable}{each}"
    seconds = first.time.total
    took = f"{three_digits(seconds)} s" if seconds >= 1 else f"{three_digits(1e3 * seconds)} ms"
    word = "Barely" if first.is_tight else "Yes"
    return f"{word}{pruned}: {what}, {took} a step ({count(plan.job.tokens / seconds)} tokens/s)"


def _beside(plan: "Plan") -> str:
    return f" beside the teacher's {size(plan.teacher_bytes)}" if plan.teacher_bytes else ""


def _better(plan: "Plan", best: Option) -> str:
    """Return a dense scheme that is no slower and needs no more memory, or nothing."""
    for other in (plan.rivals["8-bit"], plan.rivals["dense"]):
        is_fast = other.time.total <= best.time.total
        if other.fits and is_fast and other.memory.needed_bytes <= best.memory.needed_bytes:
            return SCHEMES[other.layout.scheme]
    return ""


def _memory_table(plan: "Plan", options: Sequence[Option]) -> Iterator[str]:
    rows = []
    for memory in (option.memory for option in options):
        parts = {name: sum(memory.at_peak[k] for k in kinds) for name, kinds in _BYTES.items()}
        rows.append({"needs": memory.needed_bytes, "peak": memory.peak_bytes, **parts})
    unit, scale = ("GB", 1e9) if max(row["needs"] for row in rows) >= 1e9 else ("MB", 1e6)
    return _table(_names(unit, plan, options), rows, scale, 1)


def _time_table(plan: "Plan", options: Sequence[Option]) -> Iterator[str]:
    is_many = plan.cluster.num_gpus > 1
    parts = {key: name for key, name in _SECONDS.items() if is_many or key not in _ONLY_MANY}
    rows = []
    for time in (option.time for option in options):
        rows.append({"step": time.total, **{parts[k]: getattr(time, k) for k in parts}})
    longest = max(row["step"] for row in rows)
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e-3)
    names = _names(unit, plan, options)
    names["size"] = [str(option.layout.micro_batch) for option in options]
    if not is_many:  # many GPUs have more parts of a step, and no room for the rate
        names["tokens/s"] = [count(plan.job.tokens / row["step"]) for row in rows]
    return _table(names, rows, scale, 1 if unit == "ms" or longest >= 100 else 2)


def _names(unit: str, plan: "Plan", options: Sequence[Option]) -> dict[str, list[str]]:
    """Return the columns that name an option; the unit of the others stands over the first."""
    found: dict[str, list[str]] = {unit: []}
    for option in options:
        words = str(option.layout).replace(", ", " ").replace("checkpointed", "ckpt")
        found[unit].append(words if option.fits else f"{words} *")
    if plan.cluster.num_gpus > 1:
        found["mesh"] = [option.layout.mesh for option in options]
    return found


def _table(
    names: Mapping[str, Sequence[str]],
    rows: Sequence[Mapping[str, float]],
    scale: float,
    digits: int,
) -> Iterator[str]:
    """Yield the lines of a table: columns of names, then of numbers, which are "-" for 0."""
    whole = [(name, *cells) for name, cells in names.items()]
    zero = f"{0:.{digits}f}"
    for name in rows[0]:
        cells = [f"{row[name] / scale:,.{digits}f}" for row in rows]
        whole.append((name, *("-" if cell == zero else cell for cell in cells)))
    widths = [max(map(len, column)) for column in whole]
    for first, *others in zip(*whole):
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()
