"""A run folder read back: ``run.json`` and the events, without torch and without drawing.

A run may still be training, or may have been killed at any moment: what is missing is None or
empty.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from samo.errors import RunError
from samo.pipeline.timeline import Event as Pass, Timeline
from samo.train import events
from samo.train.events import Event, read_events
from samo.train.run_dir import RunDir
from samo.utils.formatting import shortened

E = TypeVar("E", bound=Event)
_WHATS: Final = ("forward", "backward")


class Run:
    """One run: run.json (``about``) and the events of metrics.jsonl by kind.

    ``broken_lines`` of the latter could not be read; a killed run may leave one.
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], log: Sequence[Event], broken_lines: int = 0
    ) -> None:
        self.path, self.about, self.log, self.broken_lines = path, about, log, broken_lines
        self.name = str(about.get("name") or path.resolve().name)
        self.label = self.name  # unique on a page
        self.place = 0  # on a page; determines its colour
        settings = _section(self.section("config"), "run")
        self.mode = str(settings.get("mode", ""))
        self.dtype = str(settings.get("dtype", ""))
        self.planned_steps = settings.get("steps")
        model = _section(self.section("config"), "model")
        self.has_teacher = model.get("teacher") is not None
        count = self.section("model").get("num_params")
        self.num_params = count if type(count) is int and 0 <= count < 2**63 else None
        self.num_stages = _axis(self.section("ranks"), "pipe")
        self.num_replicas = _axis(self.section("ranks"), "data")
        self.num_ranks = self.num_stages * self.num_replicas

        self.steps = _all(log, events.Stepped)
        self.evals = _all(log, events.Evaluated)
        self.observations = _all(log, events.Observed)
        self.changes = _all(log, events.Remapped)
        self.prune = _last(_all(log, events.Pruned))
        self.masks = self.changes[-1] if self.changes else self.prune  # their sizes now
        self.state = _last(_all(log, events.Accounted))
        self.timeline = _timeline(_last(_all(log, events.Scheduled)))
        self.sample = _last(_all(log, events.Sampled))
        self.saved = _last(_all(log, events.Saved))
        self.last_eval = _last(finite_evals(log))
        self.last_step = max((event.step for event in log), default=0)
        self.elapsed_s = self.steps[-1].elapsed_s if self.steps else math.nan
        self.phases = [
            list(steps) for _, steps in itertools.groupby(self.steps, lambda step: step.phase)
        ]
        self.is_pruned_in_steps = any(change.dropped > change.grown for change in self.changes)
        last = _last([e for e in log if isinstance(e, events.Ended | events.Started)])
        self.end = last.reason if isinstance(last, events.Ended) else None  # None: running, killed

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of run.json; empty if it has none."""
        return _section(self.about, name)


def finite_evals(log: Iterable[Event]) -> list[events.Evaluated]:
    """Return the validations with a finite loss."""
    return [e for e in log if isinstance(e, events.Evaluated) and math.isfinite(e.valid_loss)]


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _axis(sizes: Mapping[str, Any], name: str) -> int:
    size = sizes.get(name)
    return size if type(size) is int and size > 0 else 1


def _all(log: Iterable[Event], kind: type[E]) -> list[E]:
    return [event for event in log if isinstance(event, kind)]


def _last(found: Sequence[E]) -> E | None:
    return found[-1] if found else None


def _timeline(line: events.Scheduled | None) -> Timeline | None:
    """Return the passes of a run's last batch that make sense; None if there are none."""
    if line is None:
        return None
    rows = list(zip(line.stages, line.numbers, line.start_ms, line.end_ms))
    passes = [
        Pass(start / 1e3, end / 1e3, stage, _WHATS[2 * place >= len(rows)], number)
        for place, (stage, number, start, end) in enumerate(rows)
        if 0 <= stage < line.num_stages and 0 <= start <= end < 1e12
    ]
    return Timeline(line.num_stages, line.micro_batches, passes) if passes else None


def read_run(path: str | Path, **options: Any) -> Run:
    """Read a run folder; raise RunError if it is none. ``options`` are those of `read_events`."""
    folder = RunDir(Path(path))
    folder.check_is_run()
    if folder.metrics.exists() and not folder.metrics.is_file():  # a pipe would block
        raise RunError(f"'{folder.metrics}' is not a regular file; leave this run out")
    return Run(folder.path, folder.read_run(), *read_events(folder.metrics, **options))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs of a page, and label them: by name, and by folder where names repeat."""
    runs = [read_run(path) for path in paths]
    names = Counter(run.name for run in runs)
    labels: list[str] = []
    for place, run in enumerate(runs):
        label = shortened(run.name, 60)
        if names[run.name] > 1:
            label = f"{label} ({shortened(run.path.resolve().name, 30)})"
        run.label = f"{label} #{place + 1}" if label in labels else label
        run.place = place
        labels.append(run.label)
    return runs
