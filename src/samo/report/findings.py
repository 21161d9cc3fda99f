"""What the runs show, in numbers and sentences: pure arithmetic, nothing is drawn here."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from samo.memory.predict import Kind
from samo.report import grid
from samo.report.runs import Eval, Run, State
from samo.utils import formatting

__all__ = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A run in the company of others: its label, and the place that gives it its colour."""

    run: Run
    label: str
    place: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar of the memory figure."""

    label: str
    total_bytes: int
    kinds: Mapping[Kind, int]
    """Bytes by kind; empty where only their sum is known."""
    num_params: int | None
    is_measured: bool
    entry: Entry | None = None
    """The run it belongs to; None for dense training and the paper's formula."""


def entries(runs: Sequence[Run]) -> list[Entry]:
    """Give each run a label of its own: its name, and its folder where names repeat."""
    names = Counter(run.name for run in runs)
    labels: list[str] = []
    for run in runs:
        label = formatting.shortened(run.name, 60)
        if names[run.name] > 1:
            label = f"{label} ({formatting.shortened(run.path.resolve().name, 30)})"
        if label in labels:
            label = f"{label} #{len(labels) + 1}"
        labels.append(label)
    return [
        Entry(run=run, label=label, place=i) for i, (run, label) in enumerate(zip(runs, labels))
    ]


def tokens_per_s(run: Run) -> float:
    """Return the median throughput of the last phase, without the first line, which warms up."""
    return _median_of_last_phase(run, run.steps.tokens_per_s)


def step_ms(run: Run) -> float:
    """Return the median step time of the last phase."""
    return _median_of_last_phase(run, run.steps.step_ms)


def _median_of_last_phase(run: Run, column: Sequence[float]) -> float:
    start = run.steps.phases[-1][0] if run.steps.phases else 0
    values = [value for value in column[start:] if math.isfinite(value)]
    return statistics.median(values[1:] if len(values) > 2 else values) if values else math.nan


def last_loss(run: Run) -> float:
    """Return the mean training loss over the last fiftieth of the run, at least its last line."""
    number = max(1, len(run.steps) // 50)
    values = [value for value in run.steps.loss[-number:] if math.isfinite(value)]
    return statistics.fmean(values) if values else math.nan


def lost_losses(run: Run) -> int:
    """Count the logged losses that are not numbers."""
    return sum(map(math.isnan, run.steps.loss))


def saved(run: Run) -> float | None:
    """Return the share of dense training's model state that this run does not hold."""
    state = run.state
    if state is None or state.measured_bytes is None or not state.dense_bytes:
        return None
    return 1.0 - state.measured_bytes / state.dense_bytes


def held(run: Run) -> str:
    """Say what model state the run holds, where, and how much less that is than dense training's."""
    if run.state is None:
        return formatting.NOTHING
    less, where = saved(run), grid.holder(run)
    parts = [
        f"{formatting.size(run.state.measured_bytes)}{where and ' '}{where}",
        f"{formatting.percent(less)} less than dense training" if less and less > 0 else "",
        grid.largest(run) if run.num_stages > 1 else "",
    ]
    return ", ".join(filter(None, parts))


def bytes_per_param(run: Run) -> float | None:
    """Return measured bytes of model state for each dense parameter."""
    state, count = run.state, accounted_params(run)
    if state is None or state.measured_bytes is None or not count:
        return None
    return state.measured_bytes / count


def accounted_params(run: Run) -> int | None:
    """Return the dense parameters that the account is about: a tied weight counts on each of its stages."""
    count = run.state.num_params if run.state is not None else None
    return count or run.num_params


def status(run: Run) -> str:
    """Say how the run ended."""
    known = {"done": "finished", "interrupted": "interrupted", "failed": "failed"}
    if run.end is None:
        return "still running, or killed"
    return known.get(run.end, formatting.shortened(run.end, 40))


def bars(shown: Sequence[Entry]) -> list[Bar]:
    """Return the bars of the memory figure: dense training, the paper's formula, then each run.

    Baselines that several runs share are shown once. Of more than three runs, predictions that
    equal what was measured are left out.
    """
    stated = [entry for entry in shown if entry.run.state is not None]
    return [
        *_baseline("dense training", stated, lambda state: state.dense_bytes, dense_kinds),
        *_baseline("SAMO paper (formula)", stated, lambda state: state.paper_bytes, paper_kinds),
        *(bar for entry in stated for bar in _bars_of(entry, len(stated))),
    ]


def _baseline(
    label: str,
    stated: Sequence[Entry],
    size_of: Callable[[State], int | None],
    kinds_of: Callable[[Run], Mapping[Kind, int]],
) -> list[Bar]:
    sizes: dict[int, list[Entry]] = {}
    for entry in stated:
        if entry.run.state is not None and (size := size_of(entry.run.state)):
            sizes.setdefault(size, []).append(entry)
    found = []
    for size, sharing in sizes.items():
        run = sharing[0].run
        whose = f"{label}, {sharing[0].label}" if len(sizes) > 1 else label
        found.append(
            Bar(
                label=whose,
                total_bytes=size,
                kinds=kinds_of(run),
                num_params=accounted_params(run),
                is_measured=False,
            )
        )
    return found


def _holder(entry: Entry, num_stated: int) -> str:
    """Name who holds the memory: samo, if the one run with an account is compressed already."""
    is_compressed = entry.run.mode == "samo" and entry.run.prune is not None
    return "samo" if is_compressed and num_stated == 1 else entry.label


def _bars_of(entry: Entry, num_stated: int) -> list[Bar]:
    run, state = entry.run, entry.run.state
    assert state is not None
    name = _holder(entry, num_stated)
    found = []
    for what, size, kinds in (
        ("predicted", state.predicted_bytes, state.predicted),
        ("measured", state.measured_bytes, state.measured),
    ):
        is_repeated = num_stated > 3 and what == "predicted" and size == state.measured_bytes
        if size and not is_repeated:
            found.append(
                Bar(
                    label=f"{name}, {what}",
                    total_bytes=size,
                    kinds=kinds if sum(kinds.values()) == size else {},
                    num_params=accounted_params(run),
                    is_measured=what == "measured",
                    entry=entry,
                )
            )
    return found


def dense_kinds(run: Run) -> dict[Kind, int]:
    """Split dense training's bytes by kind; empty if they do not add up to what the run says."""
    state, count = run.state, accounted_params(run)
    if state is None or not state.dense_bytes or not count:
        return {}
    sizes = {
        "float32": (4, 4, 0),
        "bfloat16": (2, 6, 4),
        "float16": (2, 6, 4),
        "float64": (8, 8, 0),
    }
    if run.dtype not in sizes:
        return {}
    dense, gradients, values = (size * count for size in sizes[run.dtype])
    moments = state.dense_bytes - dense - gradients - values
    if moments < 0 or moments % (4 * count):
        return {}  # something is frozen: the run knows the sum, not its parts
    return {"dense": dense, "values": values, "gradients": gradients, "moments": moments}


def paper_kinds(run: Run) -> dict[Kind, int]:
    """Split the paper's 2 + 24f bytes by kind; empty if they do not add up to what the run says.

    For each kept weight: index 4, gradients 2 + 4, fp32 master 4 and its 16-bit copy 2, moments 8.
    Unpruned tensors are trained densely there: weights 2, gradients 6, master 4, moments 8.
    """
    state, prune, count = run.state, run.prune, accounted_params(run)
    if state is None or prune is None or not count:
        return {}
    kept, unpruned = prune.kept, count - prune.numel
    kinds: dict[Kind, int] = {
        "dense": 2 * count,
        "bitmap": 4 * kept,
        "values": 6 * kept + 4 * unpruned,
        "gradients": 6 * (kept + unpruned),
        "moments": 8 * (kept + unpruned),
    }
    return kinds if sum(kinds.values()) == state.paper_bytes else {}


# Sentences


def summary(shown: Sequence[Entry]) -> str:
    """Say in one line what was run."""
    runs = [entry.run for entry in shown]
    counts = {run.num_params for run in runs}
    of = f" of a model with {formatting.count(min(counts, key=str))} parameters"
    if len(counts) > 1 or None in counts:
        of = ""
    if len(runs) == 1:
        run = runs[0]
        parts = [f"{run.mode or 'one'} run{of}"]
        if layout := grid.ranks(run):
            parts.append(f"on {layout}")
        if run.prune is not None:
            when = f"at step {formatting.count(run.prune.step)}"
            if run.is_pruned_in_steps:
                last = formatting.count(run.changes[-1].step)
                when = f"from step {formatting.count(run.prune.step)} to {last}"
            parts.append(f"pruned to {formatting.percent(run.prune.sparsity)} sparsity {when}")
        tokens = run.steps.tokens[-1] if len(run.steps) else math.nan
        length = f"{formatting.count(run.last_step)} steps"
        if math.isfinite(tokens):
            length += f" ({formatting.count(tokens)} tokens)"
        parts += [length, status(run)]
        line = ", ".join(parts)
    else:
        steps = {run.last_step for run in runs}
        length = f"{formatting.count(max(steps))} steps"
        if len(steps) > 1:
            length = f"{formatting.count(min(steps))} to {length}"
        line = f"{len(runs)} runs{of}, {length}"
    return line[0].upper() + line[1:] + "."


def loss_finding(shown: Sequence[Entry]) -> str:
    """Say what the loss curves show."""
    judged = [(entry, last) for entry in shown if (last := entry.run.last_eval) is not None]
    if len(shown) == 1 and judged:
        run, last = shown[0].run, judged[0][1]
        if run.prune is not None and last.step > run.prune.step:
            before = [e for e in run.evals[: run.prune.evals_before] if math.isfinite(e.loss)]
            text = (
                f"At {formatting.percent(run.prune.sparsity)} sparsity the validation loss reaches "
                f"{formatting.loss(last.loss)}"
            )
            return (
                f"{text}; it was {formatting.loss(before[-1].loss)} before pruning"
                if before
                else text
            )
        return f"The validation loss is {formatting.loss(last.loss)} at step {formatting.count(last.step)}"
    if len(judged) > 1:
        losses = [formatting.loss(last.loss) for _, last in sorted(judged, key=lambda p: p[1].loss)]
        low, high = losses[0], losses[-1]
        if low == high:
            return f"All runs have the same validation loss, {low}"
        best, worst = (_having(judged, loss) for loss in (low, high))
        verb = "has" if losses.count(low) == 1 else "have"
        return f"{best} {verb} the lowest validation loss, {low}; {worst} the highest, {high}"
    if len(shown) == 1 and math.isfinite(last_loss(shown[0].run)):
        return f"The training loss is {formatting.loss(last_loss(shown[0].run))}; not evaluated yet"
    return "Loss"


def _having(judged: Sequence[tuple[Entry, Eval]], loss: str) -> str:
    """Name the runs with a loss, as far as it is written out."""
    names = [entry.label for entry, last in judged if formatting.loss(last.loss) == loss]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def memory_finding(shown: Sequence[Entry]) -> str:
    """Say what the memory bars show."""
    stated = [
        (entry, state, state.measured_bytes)
        for entry in shown
        if (state := entry.run.state) is not None and state.measured_bytes
    ]
    if not stated:
        return "Model state"
    entry, state, held = min(stated, key=lambda item: item[2])
    name = _holder(entry, len(stated))
    where = grid.holder(entry.run)
    text = f"{name} holds {formatting.size(held)}{where and ' '}{where}"
    return (
        f"{text}, dense training {formatting.size(state.dense_bytes)}"
        if state.dense_bytes
        else text
    )


def throughput_finding(shown: Sequence[Entry]) -> str:
    """Say what the throughput curves show."""
    rated = [(entry, rate) for entry in shown if math.isfinite(rate := tokens_per_s(entry.run))]
    if not rated:
        return "Throughput"
    if len(rated) == 1:
        return f"{formatting.count(rated[0][1])} tokens/s"
    rated.sort(key=lambda pair: -pair[1])
    # No ratio: runs made at different times had the machine to themselves or not.
    (_, high), (_, low) = rated[0], rated[-1]
    return f"{formatting.count(low)} to {formatting.count(high)} tokens/s"


# Numbers of the table


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """A row of the table that compares runs."""

    name: str
    value: Callable[[Run], float | None]
    write: Callable[[float | None], str]
    best: Callable[[Sequence[float]], float] | None = None
    """Which of several values is best: `min` or `max`; None where none is."""
    is_of_first_rank: bool = False
    """Whether it is the first rank's, where there are several."""


QUANTITIES: Final = (
    Quantity(name="parameters", value=lambda run: run.num_params, write=formatting.count),
    Quantity(
        name="sparsity of pruned tensors",
        value=lambda run: run.prune.sparsity if run.prune else None,
        write=formatting.percent,
    ),
    Quantity(name="steps", value=lambda run: run.last_step, write=formatting.count),
    Quantity(name="tokens", value=lambda run: _last(run.steps.tokens), write=formatting.count),
    Quantity(name="training loss", value=last_loss, write=formatting.loss, best=min),
    Quantity(
        name="validation loss",
        value=lambda run: run.last_eval.loss if run.last_eval else None,
        write=formatting.loss,
        best=min,
    ),
    Quantity(
        name="perplexity",
        value=lambda run: run.last_eval.perplexity if run.last_eval else None,
        write=formatting.three_digits,
        best=min,
    ),
    Quantity(
        name="model state",
        value=lambda run: run.state.measured_bytes if run.state else None,
        write=formatting.size,
        best=min,
    ),
    Quantity(name="state, B/param", value=bytes_per_param, write=formatting.three_digits, best=min),
    Quantity(name="saved against dense", value=saved, write=formatting.percent, best=max),
    Quantity(name="tokens/s", value=tokens_per_s, write=formatting.count, best=max),
    Quantity(name="step, ms", value=step_ms, write=formatting.three_digits, best=min),
    Quantity(
        name="memory in use",
        value=lambda run: _last(run.steps.memory_bytes),
        write=formatting.size,
        best=min,
        is_of_first_rank=True,
    ),
    Quantity(
        name="checkpoint", value=lambda run: run.checkpoint_bytes, write=formatting.size, best=min
    ),
    Quantity(name="training time", value=lambda run: run.elapsed_s, write=formatting.duration),
)


def _last(column: Sequence[float]) -> float | None:
    return column[-1] if len(column) else None
