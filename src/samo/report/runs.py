"""A run folder read back: ``run.json`` and the events, without torch and without drawing.

A run may still be training, may have been killed in the middle of a line, or may not have reached
its first validation: what is missing is None or empty.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from samo.errors import RunError
from samo.train.events import (
    Accounted,
    Ended,
    Evaluated,
    Event,
    Observed,
    Pruned,
    Remapped,
    Sampled,
    Saved,
    Started,
    Stepped,
    read_events,
)
from samo.train.run_dir import RunDir
from samo.utils.formatting import shortened

__all__ = []

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run folder holds; `read_run` builds it."""

    path: Path
    about: Mapping[str, Any]
    """The content of run.json."""
    events: Sequence[Event]
    broken_lines: int
    """Lines of metrics.jsonl that could not be read; a killed run may leave one."""
    label: str = ""
    """What the page calls it: unlike its name, unique there."""
    place: int = 0
    """Its place on the page, which determines its colour."""

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of run.json; empty if it has none."""
        value = self.about.get(name)
        return value if isinstance(value, dict) else {}

    def _setting(self, name: str) -> str:
        settings = self.section("config").get("run")
        return str(settings.get(name, "")) if isinstance(settings, dict) else ""

    @property
    def name(self) -> str:
        """The name of the run; by default that of its folder."""
        return str(self.about.get("name") or self.path.resolve().name)

    @property
    def mode(self) -> str:
        """How it trains: samo or dense."""
        return self._setting("mode")

    @property
    def dtype(self) -> str:
        """Type of the weights."""
        return self._setting("dtype")

    @property
    def num_params(self) -> int | None:
        """Dense parameters of the model."""
        count = self.section("model").get("num_params")
        return count if type(count) is int else None

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return self._axis("pipe")

    @property
    def num_replicas(self) -> int:
        """Replicas of each stage."""
        return self._axis("data")

    def _axis(self, name: str) -> int:
        size = self.section("ranks").get(name)
        return size if type(size) is int and size > 0 else 1

    @property
    def num_ranks(self) -> int:
        """Processes that train together."""
        return self.num_stages * self.num_replicas

    # Events

    def _all(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @cached_property
    def steps(self) -> Sequence[Stepped]:
        """The logged steps."""
        return self._all(Stepped)

    @cached_property
    def evals(self) -> Sequence[Evaluated]:
        """The validations."""
        return self._all(Evaluated)

    @cached_property
    def observations(self) -> Sequence[Observed]:
        """The comparisons of masks by early-bird."""
        return self._all(Observed)

    @cached_property
    def changes(self) -> Sequence[Remapped]:
        """The changes of the masks after they were drawn."""
        return self._all(Remapped)

    @cached_property
    def prune(self) -> Pruned | None:
        """The draw of the masks."""
        return _last(self._all(Pruned))

    @cached_property
    def state(self) -> Accounted | None:
        """The last account of model state."""
        return _last(self._all(Accounted))

    @cached_property
    def sample(self) -> Sampled | None:
        """The last text that the model generated."""
        return _last(self._all(Sampled))

    @cached_property
    def saved(self) -> Saved | None:
        """The last checkpoint."""
        return _last(self._all(Saved))

    @cached_property
    def last_eval(self) -> Evaluated | None:
        """The last validation with a finite loss."""
        return _last(finite_evals(self.events))

    @cached_property
    def last_step(self) -> int:
        """The last step that left an event."""
        return max((event.step for event in self.events), default=0)

    @property
    def end(self) -> str | None:
        """Why it ended: done, interrupted or failed; None while it runs, or if it was killed."""
        last = _last([event for event in self.events if isinstance(event, Ended | Started)])
        return last.reason if isinstance(last, Ended) else None

    @property
    def masks(self) -> Pruned | Remapped | None:
        """The last event about masks, which has their sizes now."""
        return self.changes[-1] if self.changes else self.prune

    @property
    def is_pruned_in_steps(self) -> bool:
        """Whether the masks lost weights after they were drawn."""
        return any(change.dropped > change.grown for change in self.changes)

    @property
    def phases(self) -> list[Sequence[Stepped]]:
        """The logged steps, apart for each phase."""
        return [list(steps) for _, steps in itertools.groupby(self.steps, lambda step: step.phase)]

    @property
    def elapsed_s(self) -> float:
        """Training time in seconds; NaN before the first logged step."""
        return self.steps[-1].elapsed_s if self.steps else math.nan


def finite_evals(events: Iterable[Event]) -> list[Evaluated]:
    """Return the validations with a finite loss."""
    return [e for e in events if isinstance(e, Evaluated) and math.isfinite(e.valid_loss)]


def _last(events: Sequence[E]) -> E | None:
    return events[-1] if events else None


def read_run(path: str | Path) -> Run:
    r"""Read a run folder.

    Example:
        >>> import json, pathlib, tempfile
        >>> from samo.report.runs import read_run
        >>> from samo.train.events import Ended
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     about = {"format": "samo-run", "version": 1, "name": "notes"}
        ...     _ = pathlib.Path(folder, "run.json").write_text(json.dumps(about))
        ...     line = Ended(step=20, reason="done").to_json()
        ...     _ = pathlib.Path(folder, "metrics.jsonl").write_text(f"{line}\n")
        ...     run = read_run(folder)
        >>> run.name, run.last_step, run.end, run.last_eval
        ('notes', 20, 'done', None)

    Raises:
        RunError: The folder is missing or is not a run folder, or its files cannot be read.
    """
    folder = RunDir(Path(path))
    if not folder.run_file.is_file():
        raise RunError(f"'{path}' is not a run folder: {_advice(folder.path)}")
    about = folder.read_run()
    events, broken_lines = read_events(folder.metrics)
    return Run(path=folder.path, about=about, events=events, broken_lines=broken_lines)


def _advice(path: Path) -> str:
    """Return what was found instead of a run, and what to pass."""
    if not path.exists():
        return "it does not exist; pass a folder that 'samo train' wrote"
    if not path.is_dir():
        return "it is a file; pass the folder around it, which holds run.json and metrics.jsonl"
    if below := sorted(path.glob("*/run.json")):
        names = ", ".join(f"'{file.parent}'" for file in below[:3])
        more = f" and {len(below) - 3:,} more" if len(below) > 3 else ""
        return f"it has no run.json, but there are runs in it; pass those: {names}{more}"
    return "it has no run.json; pass a folder that 'samo train' wrote"


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs of a page, and label them: by name, and by folder where names repeat."""
    runs = [read_run(path) for path in paths]
    names = Counter(run.name for run in runs)
    labels: list[str] = []
    for run in runs:
        label = shortened(run.name, 60)
        if names[run.name] > 1:
            label = f"{label} ({shortened(run.path.resolve().name, 30)})"
        labels.append(f"{label} #{len(labels) + 1}" if label in labels else label)
    return [replace(run, label=label, place=i) for i, (run, label) in enumerate(zip(runs, labels))]
