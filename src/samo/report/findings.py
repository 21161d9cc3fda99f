"""What the runs show, in numbers and sentences. Nothing is drawn here.

A sentence ranks runs only beyond noise: losses within 2 % of each other are "about the same", and
runs on other data or hardware are not compared at all. Speeds are never ranked.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from samo.memory.predict import KINDS
from samo.pipeline.timeline import Timeline
from samo.report.runs import Run, finite_evals
from samo.train.events import Stepped
from samo.utils.formatting import NOTHING, count, duration, loss, percent, size, three_digits

_SAME_LOSS: Final = 0.02
"""Other seeds move the loss of a run by about this fraction."""
DATA: Final = ("data", "fingerprint")
HARDWARE: Final = ("hardware", "device_name")
PARTS: Final = (*KINDS, "whole")
"""Kinds of bytes, in the order of a bar; "whole" where only the sum is known."""


# Numbers of a run


def tokens_per_s(run: Run) -> float:
    """Return the median throughput of the last phase."""
    return _median_of_last_phase(run, lambda step: step.tokens_per_s)


def step_ms(run: Run) -> float:
    """Return the median step time of the last phase."""
    return _median_of_last_phase(run, lambda step: step.step_ms)


def _median_of_last_phase(run: Run, value: Callable[[Stepped], float]) -> float:
    steps = run.phases[-1] if run.phases else []
    found = [value(step) for step in steps if math.isfinite(value(step))]
    if len(found) > 2:
        del found[0]  # warms up
    return statistics.median(found) if found else math.nan


def last_loss(run: Run) -> float:
    """Return the mean training loss over the last fiftieth of the logged steps."""
    steps = run.steps[-max(1, len(run.steps) // 50) :]
    values = [step.loss for step in steps if math.isfinite(step.loss)]
    return statistics.fmean(values) if values else math.nan


def saved(run: Run) -> float | None:
    """Return the fraction of dense training's model state that this run does not hold."""
    state = run.state
    return 1 - state.measured_bytes / state.dense_bytes if state and state.dense_bytes else None


def bytes_per_param(run: Run) -> float | None:
    """Return measured bytes of model state per dense parameter."""
    state = run.state
    return state.measured_bytes / state.num_params if state and state.num_params else None


NUMBERS: Final[dict[str, Callable[[Run], str]]] = {
    "parameters": lambda run: count(run.num_params),
    "sparsity": lambda run: percent(run.masks.sparsity if run.masks else None),
    "changes of masks": lambda run: change_finding(run) if run.changes else NOTHING,
    "steps": lambda run: count(run.last_step),
    "tokens": lambda run: count(run.steps[-1].tokens if run.steps else None),
    "training loss": lambda run: loss(last_loss(run)) + " (text and teacher)" * run.has_teacher,
    "validation loss": lambda run: loss(run.last_eval.valid_loss if run.last_eval else None),
    "model state": lambda run: size(run.state.measured_bytes if run.state else None),
    "state, B/param": lambda run: three_digits(bytes_per_param(run)),
    "saved against dense": lambda run: percent(saved(run)),
    "tokens/s": lambda run: count(tokens_per_s(run)),
    "step, ms": lambda run: three_digits(step_ms(run)),
    "memory of the process": lambda run: size(run.steps[-1].memory_bytes if run.steps else None),
    "checkpoint": lambda run: size(run.saved.bytes if run.saved else None),
    "training time": lambda run: duration(run.elapsed_s),
    "ended": lambda run: status(run),
}
"""The rows of the table that puts runs side by side."""


# A run in words


def ranks(run: Run) -> str:
    """Return the mesh of ranks, such as "4 ranks: 2 stages x 2 replicas"; empty for one process."""
    axes = [(run.num_stages, "stages"), (run.num_replicas, "replicas")]
    parts = " x ".join(f"{number:,} {name}" for number, name in axes if number > 1)
    return f"{run.num_ranks:,} ranks: {parts}" if parts else ""


def largest_rank(run: Run) -> str:
    """Return the model state of the rank with the most; empty for one process."""
    sizes = run.state.rank_bytes if run.state else []
    return f"largest rank {size(max(sizes))}" if len(sizes) > 1 else ""


def held(run: Run) -> str:
    """Return the model state of a run, and how much less it is than dense training's."""
    if run.state is None:
        return NOTHING
    less = saved(run) or 0
    dense = three_digits(run.state.dense_bytes / max(run.state.num_params, 1))
    parts = [
        f"{size(run.state.measured_bytes)}{_where(run)}",
        f"{percent(less)} less than dense training ({dense} B/param)" if less > 0 else "",
        largest_rank(run) if run.num_stages > 1 else "",
    ]
    return ", ".join(filter(None, parts))


def _where(run: Run) -> str:
    if run.num_stages > 1:
        return f" in {run.num_stages:,} stages together"
    return " on each rank" if run.num_replicas > 1 else ""


def status(run: Run) -> str:
    """Return how the run ended."""
    return {None: "running, or killed", "done": "finished"}.get(run.end, run.end or "")


def about(run: Run) -> str:
    """Return how a run trains and how it ended, in a few words."""
    sparsity = f"{percent(run.masks.sparsity)} sparse" if run.masks else ""
    return ", ".join(filter(None, [run.mode, sparsity, run.dtype, ranks(run), status(run)]))


def warnings(run: Run) -> str:
    """Return what is wrong with a run; empty if nothing is."""
    lost = sum(math.isnan(step.loss) for step in run.steps)
    notes = [
        diverged(run) or worse(run),
        f"{lost:,} of {len(run.steps):,} logged losses are not finite" if lost else "",
        f"unreadable lines in metrics.jsonl: {run.broken_lines:,}" if run.broken_lines else "",
        "it failed" if run.end == "failed" else "",
        "" if run.steps else "no step was logged",
    ]
    return "; ".join(filter(None, notes))


def diverged(run: Run) -> str:
    """Say that the loss has risen far above that of guessing, or is not finite; else empty."""
    last, words = run.evals[-1].valid_loss if run.evals else 0.0, run.section("data")
    size = words.get("vocab_size")
    guessing = math.log(size) if type(size) is int and size > 1 else math.inf
    began = run.evals[0].valid_loss if len(run.evals) > 1 else -math.inf
    if math.isfinite(last) and (last <= 1.5 * guessing or last <= began):
        return ""
    found = f"{loss(last)}, and guessing gives {loss(guessing)}" if math.isfinite(last) else "NaN"
    return f"it diverged: the validation loss is {found}; lower --lr, or raise --warmup-steps"


def worse(run: Run) -> str:
    """Say that a model that came pruned has a higher loss than before; else empty."""
    first, last = run.evals[:1], run.last_eval
    if not first or first[0].step or last is None or last.valid_loss <= first[0].valid_loss:
        return ""
    before = loss(first[0].valid_loss)
    return f"the validation loss is higher than before training, {before}; lower --lr"


def pruned(run: Run) -> str:
    """Return the final sparsity and the steps of pruning, such as "90 % sparse from step 200"."""
    if run.prune is None or run.masks is None:
        return ""
    steps = f"from step {run.prune.step:,}"
    if run.is_pruned_in_steps:
        steps = f"pruned in steps {run.prune.step:,} to {run.changes[-1].step:,}"
    return f"{percent(run.masks.sparsity)} sparse, {steps}"


def ticket_finding(run: Run) -> str:
    """Say when and why early-bird drew its masks, or how far apart they still are."""
    last = run.observations[-1]
    apart = "" if last.largest is None else f"distance {last.largest:.3f}, "
    apart += f"threshold {last.threshold:g}"
    if run.prune is None:
        return f"Masks have not settled yet: {apart}"
    if run.prune.reason == "settled":
        return f"Masks settled at step {run.prune.step:,}: {apart}"
    return f"Masks had not settled by the limit, step {run.prune.step:,}: {apart}"


def change_finding(run: Run) -> str:
    """Say how the masks of a run changed after pruning."""
    first, last = run.changes[0], run.changes[-1]
    if run.is_pruned_in_steps:
        what = f"Masks were pruned further {len(run.changes):,} times"
        return f"{what}, to {percent(last.sparsity)} sparsity at step {last.step:,}"
    text = f"Masks changed {len(run.changes):,} times, replacing {percent(first.replaced)}"
    if first is not last:
        text += f" of the kept weights at first and {percent(last.replaced)} at step {last.step:,}"
    return text


def timeline_finding(line: Timeline) -> str:
    """Say how long a batch took in a pipeline, and for which part of it stages stood idle."""
    busy = sum(event.end - event.start for event in line.events) / line.num_stages
    return (
        f"{line.num_micro_batches} micro-batches passed {line.num_stages} stages in "
        f"{1e3 * line.span:,.0f} ms; stages stood idle for "
        f"{percent(1 - busy / line.span if line.span else None)} of that time."
    )


# Several runs in words


def summary(runs: Sequence[Run]) -> str:
    """Say in one line what was run."""
    sizes = {run.num_params for run in runs}
    of = f" of a model with {count(runs[0].num_params)} parameters" if len(sizes) == 1 else ""
    if len(runs) > 1:
        low, high = min(run.last_step for run in runs), max(run.last_step for run in runs)
        steps = f"{high:,} steps" if low == high else f"{low:,} to {high:,} steps"
        return f"{len(runs)} runs{of}, {steps}."
    (run,) = runs
    on = f" on {ranks(run)}" if run.num_ranks > 1 else ""
    tokens = f" ({run.steps[-1].tokens:,} tokens)" if run.steps else ""
    parts = [f"A {run.mode} run{of}{on}", pruned(run), f"{run.last_step:,} steps{tokens}"]
    return ", ".join(filter(None, [*parts, status(run)])) + "."


def loss_finding(runs: Sequence[Run]) -> str:
    """Say what the loss curves show."""
    judged = [(last.valid_loss, run) for run in runs if (last := run.last_eval)]
    if len(judged) > 1:
        return _ranking(judged)
    run, last = runs[0], runs[0].last_eval
    if len(runs) > 1 or not run.steps:
        return "Loss"
    if last is None:
        return f"The training loss is {loss(last_loss(run))}; not validated yet"
    text = f"The validation loss is {loss(last.valid_loss)} at step {last.step:,}"
    if run.prune and last.step > run.prune.step:
        before = finite_evals(run.log[: run.log.index(run.prune)])
        text += f"; it was {loss(before[-1].valid_loss)} before pruning" if before else ""
        first = finite_evals(run.log)[0]
        text += f"; it was {loss(first.valid_loss)} before training" if not first.step else ""
    return text


def _ranking(judged: Sequence[tuple[float, Run]]) -> str:
    runs = [run for _, run in judged]
    low, high = min(value for value, _ in judged), max(value for value, _ in judged)
    span = f"{loss(low)} to {loss(high)}"
    if differ(runs, DATA):
        return f"Validation losses from {span}, on different texts"
    if high - low <= _SAME_LOSS * abs(low):
        return f"All runs end within {loss(high - low)} of each other: validation loss {span}"
    best = [run.label for value, run in judged if value - low <= _SAME_LOSS * abs(low)]
    text = f"{listed(best)} reached the lowest validation loss, {loss(low)}; "
    text += f"the highest is {loss(high)}"
    steps = {run.last_step for run in runs}
    return f"{text} (after different numbers of steps)" if len(steps) > 1 else text


@dataclass(frozen=True)
class Bar:
    """One bar of the memory figure."""

    label: str
    kinds: Mapping[str, int]
    num_params: int
    place: int | None = None  # of the run that measured it; None for arithmetic

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def bars(runs: Sequence[Run]) -> list[Bar]:
    """Return the baselines, each different one once, then the runs.

    A prediction is shown only where it differs from the measurement.
    """
    found: list[Bar] = []
    accounts = [(run, run.state) for run in runs if run.state]
    for label, name in (("dense training", "dense_bytes"), ("SAMO paper", "paper_bytes")):
        sizes = {getattr(state, name): (run, state) for run, state in reversed(accounts)}
        sizes.pop(None, None)  # a dense run has no size by the paper
        for whole, (run, state) in reversed(sizes.items()):
            title = label if len(sizes) == 1 else f"{label}, {run.label}"
            found.append(Bar(title, {"whole": whole}, state.num_params))
    for run, state in accounts:
        name, number = holder(run, len(accounts)), state.num_params
        if state.predicted_bytes != state.measured_bytes:
            found.append(Bar(f"{name}, predicted", state.predicted, number))
        found.append(Bar(f"{name}, measured", state.measured, number, run.place))
    return found


def holder(run: Run, num_accounts: int) -> str:
    """Return "samo" for a compressed run that is the only one with an account, or its label."""
    is_compressed = run.mode == "samo" and run.prune is not None
    return "samo" if is_compressed and num_accounts == 1 else run.label


def memory_finding(runs: Sequence[Run]) -> str:
    """Say what the memory bars show."""
    accounts = [(run.state.measured_bytes, run) for run in runs if run.state]
    least, run = min(accounts, key=lambda account: account[0])
    names = [holder(run, len(accounts)) for value, run in accounts if size(value) == size(least)]
    verb = "holds" if len(names) == 1 else "hold"
    dense = run.state.dense_bytes if run.state else None
    return f"{listed(names)} {verb} {size(least)}{_where(run)}, dense training {size(dense)}"


def tradeoff(runs: Sequence[Run]) -> list[tuple[float, float, Run]]:
    """Return bytes and validation loss of a sweep; empty if fewer than three runs compare."""
    found = [
        (r.state.measured_bytes, r.last_eval.valid_loss, r) for r in runs if r.state and r.last_eval
    ]
    is_sweep = len({size(held) for held, _, _ in found}) > 2 and not differ(runs, DATA)
    return sorted(found, key=lambda point: point[0]) if is_sweep else []


def tradeoff_finding(runs: Sequence[Run]) -> str:
    """Say what the run with the least state saves, and what it costs."""
    (small, low, least), *_, (large, high, most) = tradeoff(runs)
    less = f"{least.label} holds {percent(1 - small / large)} less than {most.label}"
    if abs(low - high) <= _SAME_LOSS * abs(high):
        return f"{less}; their losses are within {loss(abs(low - high))}"
    return f"{less}, and its loss is {loss(abs(low - high))} {'higher' if low > high else 'lower'}"


def throughput_finding(runs: Sequence[Run]) -> str:
    """Say what the throughput curves show."""
    rates = [rate for run in runs if math.isfinite(rate := tokens_per_s(run))]
    span = " to ".join(dict.fromkeys(count(f(rates)) for f in (min, max))) if rates else NOTHING
    return f"{span} tokens/s" + (", on different hardware" if differ(runs, HARDWARE) else "")


def differ(runs: Sequence[Run], key: tuple[str, str]) -> bool:
    """Return whether runs have different values of a key in a section of run.json."""
    section, name = key
    return len({str(run.section(section).get(name)) for run in runs}) > 1


def listed(names: Sequence[str]) -> str:
    """Join names: a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
