"""What the runs show, in numbers and sentences. Nothing is drawn here.

A sentence ranks runs only where a careful reader would: losses within 2 % of each other and speeds
within 5 % are "about the same", and runs on other data or hardware are not compared at all.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from samo.report.memory_bars import holder
from samo.report.runs import Run, finite_evals
from samo.utils.formatting import NOTHING, count, duration, loss, percent, size, three_digits

__all__ = []

_SAME_LOSS: Final = 0.02
"""Other seeds move the loss of a run by about this fraction,"""
_SAME_SPEED: Final = 0.05
"""and other load on the machine its speed."""
DATA: Final = ("data", "fingerprint")
HARDWARE: Final = ("hardware", "device_name")


# Numbers of a run


def tokens_per_s(run: Run) -> float:
    """Return the median throughput of the last phase without its first line, which warms up."""
    return _median([step.tokens_per_s for step in run.phases[-1]] if run.steps else [])


def step_ms(run: Run) -> float:
    """Return the median step time of the last phase without its first line."""
    return _median([step.step_ms for step in run.phases[-1]] if run.steps else [])


def _median(values: Sequence[float]) -> float:
    values = [value for value in values if math.isfinite(value)]
    return statistics.median(values[1:] if len(values) > 2 else values) if values else math.nan


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


# A run in words


def ranks(run: Run) -> str:
    """Return the mesh of ranks, such as "4 ranks: 2 stages x 2 replicas"; empty for one process."""
    axes = [(run.num_stages, "stages"), (run.num_replicas, "replicas")]
    axes = [(number, name) for number, name in axes if number > 1]
    parts = " x ".join(f"{number:,} {name}" for number, name in axes)
    return f"{run.num_ranks:,} ranks: {parts}" if parts else ""


def largest_rank(run: Run) -> str:
    """Return what the rank with the most model state holds; empty for one process."""
    sizes = run.state.rank_bytes if run.state else []
    return f"largest rank {size(max(sizes))}" if len(sizes) > 1 else ""


def held(run: Run) -> str:
    """Return the model state of a run, where it is, and how much less it is than dense training's."""
    if run.state is None:
        return NOTHING
    less = saved(run) or 0
    parts = [
        f"{size(run.state.measured_bytes)}{_where(run)}",
        f"{percent(less)} less than dense training" if less > 0 else "",
        largest_rank(run) if run.num_stages > 1 else "",
    ]
    return ", ".join(filter(None, parts))


def _where(run: Run) -> str:
    if run.num_stages > 1:
        return f" in {run.num_stages:,} stages together"
    return " on each rank" if run.num_replicas > 1 else ""


def status(run: Run) -> str:
    """Return how the run ended."""
    return {None: "still running, or killed", "done": "finished"}.get(run.end, run.end or "")


def about(run: Run) -> str:
    """Return how a run trains and how it ended, in a few words."""
    sparsity = f"{percent(run.masks.sparsity)} sparse" if run.masks else ""
    return ", ".join(filter(None, [run.mode, sparsity, run.dtype, ranks(run), status(run)]))


def warnings(run: Run) -> str:
    """Return what is wrong with a run; empty if nothing is."""
    lost = sum(math.isnan(step.loss) for step in run.steps)
    broken = f"{run.broken_lines:,} line{'s' * (run.broken_lines > 1)} of metrics.jsonl"
    notes = [
        f"{lost:,} of {len(run.steps):,} logged losses are not finite" if lost else "",
        f"{broken} could not be read" if run.broken_lines else "",
        "it failed" if run.end == "failed" else "",
        "" if run.steps else "no step was logged",
    ]
    return "; ".join(filter(None, notes))


def ticket_finding(run: Run) -> str:
    """Say when and why early-bird drew its ticket, or how far from it the masks are."""
    last = run.observations[-1]
    apart = "one look so far" if last.largest is None else f"distance {last.largest:.3f}"
    if run.prune is None:
        return f"Masks have not settled so far: {apart}, threshold {last.threshold:g}"
    drawn = f"The ticket was drawn at step {run.prune.step:,}"
    if run.prune.reason == "settled":
        why = f": the last {last.queue} masks agree, {apart} at most"
    else:
        why = f", the limit: masks had not settled, {apart}"
    return f"{drawn}{why}, threshold {last.threshold:g}"


def change_finding(run: Run) -> str:
    """Say how the masks of a run changed after they were drawn."""
    first, last = run.changes[0], run.changes[-1]
    number = f"{len(run.changes):,} change{'s' * (len(run.changes) > 1)} of the masks"
    if run.is_pruned_in_steps:
        return f"{number}, to {percent(last.sparsity)} sparsity at step {last.step:,}"
    replaced = f"{number} replaced {percent(first.replaced)} of the kept weights"
    if first is last:
        return replaced
    return f"{replaced} at first and {percent(last.replaced)} at step {last.step:,}"


def density_finding(masks: Mapping[str, tuple[int, int]]) -> str:
    """Say how sparsity is spread over tensors, from the kept weights and all weights of each."""
    sparsity = {name: 1 - kept / max(numel, 1) for name, (kept, numel) in masks.items()}
    low, high = min(sparsity, key=sparsity.__getitem__), max(sparsity, key=sparsity.__getitem__)
    texts = percent(sparsity[low]), percent(sparsity[high])
    if texts[0] == texts[1]:
        return f"All pruned tensors are {texts[0]} sparse"
    return f"Sparsity runs from {texts[0]} in {low} to {texts[1]} in {high}"


# Several runs in words


def summary(runs: Sequence[Run]) -> str:
    """Say in one line what was run."""
    sizes = {run.num_params for run in runs}
    of = f" of a model with {count(runs[0].num_params)} parameters" if len(sizes) == 1 else ""
    if len(runs) > 1:
        low, high = min(run.last_step for run in runs), max(run.last_step for run in runs)
        steps = f"{high:,} steps" if low == high else f"{low:,} to {high:,} steps"
        return f"{len(runs)} runs{of}, {steps}."
    run = runs[0]
    parts = [f"A {run.mode} run{of}", f"on {ranks(run)}" if run.num_ranks > 1 else ""]
    if run.prune and run.masks:
        when = f"at step {run.prune.step:,}"
        if run.is_pruned_in_steps:
            when = f"from step {run.prune.step:,} to {run.changes[-1].step:,}"
        parts.append(f"pruned to {percent(run.masks.sparsity)} sparsity {when}")
    tokens = f" ({run.steps[-1].tokens:,} tokens)" if run.steps else ""
    parts += [f"{run.last_step:,} steps{tokens}", status(run)]
    return ", ".join(filter(None, parts)) + "."


def loss_finding(runs: Sequence[Run]) -> str:
    """Say what the loss curves show."""
    judged = [(last.valid_loss, run) for run in runs if (last := run.last_eval)]
    if len(judged) > 1:
        return _ranking(judged)
    run, last = runs[0], runs[0].last_eval
    if len(runs) > 1:
        return "Loss"
    if last is None:
        value = loss(last_loss(run))
        return f"The training loss is {value}; not validated yet" if run.steps else "Loss"
    if run.prune and run.masks and last.step > run.prune.step:
        before = finite_evals(run.events[: run.events.index(run.prune)])
        was = f"; it was {loss(before[-1].valid_loss)} before pruning" if before else ""
        sparsity = percent(run.masks.sparsity)
        return f"At {sparsity} sparsity the validation loss reaches {loss(last.valid_loss)}{was}"
    return f"The validation loss is {loss(last.valid_loss)} at step {last.step:,}"


def _ranking(judged: Sequence[tuple[float, Run]]) -> str:
    low, high = min(value for value, _ in judged), max(value for value, _ in judged)
    if differ([run for _, run in judged], DATA):
        return f"Validation losses from {loss(low)} to {loss(high)}, of different texts"
    if high - low <= _SAME_LOSS * abs(low):
        span = loss(low) if loss(low) == loss(high) else f"{loss(low)} to {loss(high)}"
        return f"All runs reach about the same validation loss, {span}"
    near_low = [run.label for value, run in judged if value - low <= _SAME_LOSS * abs(low)]
    near_high = [run.label for value, run in judged if high - value <= _SAME_LOSS * abs(high)]
    best = [label for label in near_low if label not in near_high]
    worst = [label for label in near_high if label not in near_low]
    verb = "has" if len(best) == 1 else "have"
    text = f"{listed(best)} {verb} the lowest validation loss, {_about(low, best)}; "
    text += f"{listed(worst)} the highest, {_about(high, worst)}"
    steps = {run.last_step for _, run in judged}
    return f"{text} (after different numbers of steps)" if len(steps) > 1 else text


def _about(value: float, labels: Sequence[str]) -> str:
    return loss(value) if len(labels) == 1 else f"about {value:.2f}"


def memory_finding(runs: Sequence[Run]) -> str:
    """Say what the memory bars show."""
    stated = [(run.state.measured_bytes, run.state.dense_bytes, run) for run in runs if run.state]
    least, dense, run = min(stated, key=lambda each: each[0])
    text = f"{holder(run, len(stated))} holds {size(least)}{_where(run)}"
    return f"{text}, dense training {size(dense)}"


def throughput_finding(runs: Sequence[Run]) -> str:
    """Say what the throughput curves show."""
    rates = [rate for run in runs if math.isfinite(rate := tokens_per_s(run))]
    low, high = min(rates, default=math.nan), max(rates, default=math.nan)
    if len(rates) < 2:
        return f"{count(low)} tokens/s"
    span = f"{count(low)} to {count(high)} tokens/s"
    if differ(runs, HARDWARE):
        return f"{span}, on different hardware"
    return f"About the same speed: {span}" if high <= (1 + _SAME_SPEED) * low else span


def differ(runs: Sequence[Run], key: tuple[str, str]) -> bool:
    """Return whether runs have different values of a key in a section of run.json."""
    section, name = key
    return len({str(run.section(section).get(name)) for run in runs}) > 1


def listed(names: Sequence[str]) -> str:
    """Join names: a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


# The table that compares runs


@dataclass(frozen=True, slots=True)
class Quantity:
    """A row of the table."""

    name: str
    value: Callable[[Run], float | None]
    write: Callable[[float | None], str]
    best: Callable[[Sequence[float]], float] | None = None
    """Which of several values is best: `min` or `max`."""
    tolerance: float = 0.0
    """Values within this fraction of the best are as good."""
    needs: tuple[str, str] | None = None
    """What must be equal in run.json for values to be compared."""

    def row(self, runs: Sequence[Run]) -> list[tuple[str, bool]] | None:
        """Return text and whether it is among the best, for each run; None if no run knows it.

        Example:
            >>> from samo.report.findings import Quantity
            >>> speed = Quantity("speed", float, "{:.0f}".format, max, tolerance=0.05)
            >>> speed.row([100, 98, 50])  # stand-ins for runs
            [('100', True), ('98', True), ('50', False)]
        """
        values = [math.nan if (v := self.value(run)) is None else v for run in runs]
        known = list(filter(math.isfinite, values))
        if not known:
            return None
        is_best = [False] * len(runs)
        if self.best is not None and not (self.needs and differ(runs, self.needs)):
            best = self.best(known)
            is_best = [abs(value - best) <= self.tolerance * abs(best) for value in values]
        if sum(is_best) == len(known):
            is_best = [False] * len(runs)  # none is better than another
        return list(zip(map(self.write, values), is_best))


QUANTITIES: Final = (
    Quantity("parameters", lambda run: run.num_params, count),
    Quantity("sparsity", lambda run: run.masks.sparsity if run.masks else None, percent),
    Quantity("steps", lambda run: run.last_step, count),
    Quantity("tokens", lambda run: run.steps[-1].tokens if run.steps else None, count),
    Quantity("training loss", last_loss, loss, min, _SAME_LOSS, DATA),
    Quantity(
        "validation loss",
        lambda run: run.last_eval.valid_loss if run.last_eval else None,
        loss,
        min,
        _SAME_LOSS,
        DATA,
    ),
    Quantity("model state", lambda run: run.state.measured_bytes if run.state else None, size, min),
    Quantity("state, B/param", bytes_per_param, three_digits),
    Quantity("saved against dense", saved, percent),
    Quantity("tokens/s", tokens_per_s, count, max, _SAME_SPEED, HARDWARE),
    Quantity("step, ms", step_ms, three_digits),
    Quantity(
        "memory in use",
        lambda run: run.steps[-1].memory_bytes if run.steps else None,
        size,
    ),
    Quantity("checkpoint", lambda run: run.saved.bytes if run.saved else None, size),
    Quantity("training time", lambda run: run.elapsed_s, duration),
)
