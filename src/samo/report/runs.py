"""Read a run folder back: ``run.json`` and ``metrics.jsonl``, without torch and without drawing.

A run may still be going, may have been killed in the middle of a line, or may not have reached its
first evaluation: what is there is read, and what is not there is None, empty or NaN. Unknown events
and fields are passed over, so that an older samo reads the runs of a newer one.
"""

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from samo.errors import RunError
from samo.memory.predict import KINDS, Kind
from samo.report import mask_events
from samo.report.fields import count, number, numbers, text
from samo.report.mask_events import Change, Observation, Prune

__all__ = []

_FORMAT: Final = "samo-run"
_VERSION: Final = 1


def _column() -> "array[float]":
    return array("d")


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The logged steps as columns of equal length; what a line did not say is NaN."""

    step: "array[float]" = field(default_factory=_column)
    loss: "array[float]" = field(default_factory=_column)
    tokens: "array[float]" = field(default_factory=_column)
    tokens_per_s: "array[float]" = field(default_factory=_column)
    step_ms: "array[float]" = field(default_factory=_column)
    memory_bytes: "array[float]" = field(default_factory=_column)
    elapsed_s: "array[float]" = field(default_factory=_column)
    phases: list[tuple[int, str]] = field(default_factory=list)
    """Row at which a phase starts, and its name: dense or samo."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def spans(self) -> list[tuple[int, int, str]]:
        """First row, row after the last, and name of each phase."""
        starts = [start for start, _ in self.phases]
        ends = [*starts[1:], len(self)]
        return [(start, end, name) for (start, name), end in zip(self.phases, ends)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Eval:
    """One evaluation on the validation split."""

    step: int
    loss: float
    perplexity: float


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Bytes of model state, from the ledger; None for what the run did not say."""

    step: int
    num_params: int | None
    measured_bytes: int | None
    predicted_bytes: int | None
    dense_bytes: int | None
    paper_bytes: int | None
    measured: Mapping[Kind, int]
    predicted: Mapping[Kind, int]
    rank_bytes: Sequence[int]
    """Measured bytes of every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Text the model wrote."""

    step: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything a run folder says; `read_run` builds it."""

    path: Path
    name: str
    command: str
    started: str
    """Date and time in ISO form, as the run wrote it; empty if it did not."""
    config: Mapping[str, object]
    model: Mapping[str, object]
    data: Mapping[str, object]
    versions: Mapping[str, object]
    hardware: Mapping[str, object]
    ranks: Mapping[str, object]
    last_step: int
    """The last step that left a trace; 0 before the first."""
    steps: Steps
    evals: Sequence[Eval]
    observations: Sequence[Observation]
    """Looks of early-bird at the masks."""
    prune: Prune | None
    changes: Sequence[Change]
    """Changes of the masks after they were drawn."""
    state: State | None
    """The last account of the ledger."""
    checkpoint_bytes: int | None
    """Size of the last checkpoint."""
    samples: Sequence[Sample]
    end: str | None
    """Why it ended: done, interrupted or failed; None while it runs, or if it was killed."""
    broken_lines: int
    """Lines of ``metrics.jsonl`` that could not be read; a killed run leaves one."""

    @property
    def mode(self) -> str:
        """How it trained: samo or dense; empty if the run does not say."""
        section = self.config.get("run")
        return text(section.get("mode")) if isinstance(section, dict) else ""

    @property
    def dtype(self) -> str:
        """Type of the weights; empty if the run does not say."""
        section = self.config.get("run")
        return text(section.get("dtype")) if isinstance(section, dict) else ""

    @property
    def is_pruned_in_steps(self) -> bool:
        """Whether masks lost weights after they were drawn."""
        return any(change.dropped > change.replaced for change in self.changes)

    @property
    def num_params(self) -> int | None:
        """Dense parameters of the model."""
        said = count(self.model.get("num_params"))
        return self.state.num_params if said is None and self.state else said

    @property
    def is_on_many_ranks(self) -> bool:
        """Whether there was more than one rank."""
        return self.num_stages * self.num_replicas > 1

    @property
    def num_stages(self) -> int:
        """Stages that the model was cut into."""
        return count(self.ranks.get("pipe")) or 1

    @property
    def num_replicas(self) -> int:
        """Replicas of each stage."""
        return count(self.ranks.get("data")) or 1

    @property
    def last_eval(self) -> Eval | None:
        """The last evaluation whose loss is a number."""
        finite = (e for e in reversed(self.evals) if math.isfinite(e.loss))
        return next(finite, None)

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far; NaN if the run does not say."""
        return self.steps.elapsed_s[-1] if len(self.steps) else math.nan


def read_run(path: str | Path) -> Run:
    r"""Read a run folder.

    Example:
        >>> import json, pathlib, tempfile
        >>> from samo.report.runs import read_run
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     about = {"format": "samo-run", "version": 1, "name": "notes"}
        ...     metrics = [{"event": "step", "step": 10, "loss": 2.5}, {"event": "step", "step": 20}]
        ...     _ = pathlib.Path(folder, "run.json").write_text(json.dumps(about))
        ...     _ = pathlib.Path(folder, "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
        ...     run = read_run(folder)
        >>> run.name, run.last_step, run.steps.loss[0], run.last_eval
        ('notes', 20, 2.5, None)

    Raises:
        RunError: The folder is missing or is no run folder, or its files cannot be read.
    """
    path = Path(path)
    about = _read_about(path)
    steps, evals, samples = Steps(), [], []
    observations: list[Observation] = []
    changes: list[Change] = []
    prune: Prune | None = None
    state: State | None = None
    checkpoint_bytes: int | None = None
    end: str | None = None
    last_step = broken_lines = 0
    columns = [(name, getattr(steps, name)) for name in Steps.__slots__ if name != "phases"]
    for record in _records(path / "metrics.jsonl"):
        if record is None:
            broken_lines += 1
            continue
        event, step = record.get("event"), count(record.get("step"))
        last_step = max(last_step, step or 0)
        if event == "step" and step is not None:
            phase = text(record.get("phase"))
            if not steps.phases or steps.phases[-1][1] != phase:
                steps.phases.append((len(steps), phase))
            for name, column in columns:
                column.append(number(record.get(name)))
        elif event == "eval" and step is not None:
            evals.append(_eval(step, record))
        elif event == "prune":
            prune = mask_events.prune(step or 0, record, len(evals))
        elif event == "observe" and (seen := mask_events.observation(step or 0, record)):
            observations.append(seen)
        elif event == "remap" and (changed := mask_events.change(step or 0, record, prune)):
            changes.append(changed[0])
            prune = changed[1]
        elif event == "state":
            state = _state(step or 0, record)
        elif event == "save":
            checkpoint_bytes = count(record.get("bytes"))
        elif event == "sample":
            samples.append(Sample(step=step or 0, text=text(record.get("text"))))
        elif event == "end":
            end = text(record.get("reason")) or None
        elif event == "resume":
            end = None  # it goes on: what ended was the part before
    return Run(
        path=path,
        name=text(about.get("name")) or path.resolve().name,
        command=text(about.get("command")),
        started=text(about.get("started")),
        config=_section(about, "config"),
        model=_section(about, "model"),
        data=_section(about, "data"),
        versions=_section(about, "versions"),
        hardware=_section(about, "hardware"),
        ranks=_section(about, "ranks"),
        last_step=last_step,
        steps=steps,
        evals=evals,
        observations=observations,
        prune=prune,
        changes=changes,
        state=state,
        checkpoint_bytes=checkpoint_bytes,
        samples=samples,
        end=end,
        broken_lines=broken_lines,
    )


def _read_about(path: Path) -> dict[str, object]:
    file = path / "run.json"
    if not file.is_file():
        raise RunError(f"'{path}' is not a run folder: {_what_is_there(path)}")
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"'{file}' cannot be read: {error}; it is the JSON that 'samo train' writes at its start, "
            "take another copy of the run"
        ) from None
    kind = about.get("format") if isinstance(about, dict) else None
    if kind != _FORMAT:
        raise RunError(
            f"'{file}' does not describe a run: its format is {kind!r}, not {_FORMAT!r}; give a folder "
            "that 'samo train' wrote"
        )
    if about.get("version") != _VERSION:
        raise RunError(
            f"'{file}' has version {about.get('version')!r}, this samo reads version {_VERSION}; "
            "update samo"
        )
    return dict(about)


def _what_is_there(path: Path) -> str:
    """Say what was looked for, what was found instead, and what to give."""
    if not path.exists():
        return "it does not exist; give a folder that 'samo train' wrote"
    if not path.is_dir():
        return "it is a file; give the folder around it, which holds run.json and metrics.jsonl"
    below = sorted(file.parent.name for file in path.glob("*/run.json"))
    if below:
        names = ", ".join(f"'{path / name}'" for name in below[:3])
        more = f" and {len(below) - 3:,} more" if len(below) > 3 else ""
        return f"looked for run.json in it and found runs below it; give those: {names}{more}"
    return (
        "looked for run.json and metrics.jsonl in it, found no run.json; give a folder that "
        "'samo train' wrote"
    )


def _records(file: Path) -> Iterator[dict[str, object] | None]:
    """Yield the object of each line, or None for a line that holds none."""
    if not file.exists():
        return  # killed before its first event
    try:
        with open(file, "rb") as lines:
            for line in lines:
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                yield record if isinstance(record, dict) else None
    except OSError as error:
        raise RunError(
            f"'{file}' cannot be read: {error.strerror or error}; make it readable, or leave this run out"
        ) from None


def _eval(step: int, record: Mapping[str, object]) -> Eval:
    return Eval(
        step=step,
        loss=number(record.get("valid_loss")),
        perplexity=number(record.get("perplexity")),
    )


def _state(step: int, record: Mapping[str, object]) -> State:
    return State(
        step=step,
        num_params=count(record.get("num_params")),
        measured_bytes=count(record.get("measured_bytes")),
        predicted_bytes=count(record.get("predicted_bytes")),
        dense_bytes=count(record.get("dense_bytes")),
        paper_bytes=count(record.get("paper_bytes")),
        measured=_kinds(record.get("measured")),
        predicted=_kinds(record.get("predicted")),
        rank_bytes=[int(size) for size in numbers(record.get("rank_bytes")) if size >= 0],
    )


def _kinds(value: object) -> dict[Kind, int]:
    sizes = value if isinstance(value, dict) else {}
    return {kind: size for kind in KINDS if (size := count(sizes.get(kind))) is not None}


def _section(about: Mapping[str, object], name: str) -> dict[str, object]:
    value = about.get(name)
    return dict(value) if isinstance(value, dict) else {}
