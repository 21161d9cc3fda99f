"""The events of a run: what training reports to its listeners, and the lines of ``metrics.jsonl``.

Each class with a name is one kind of line; ``docs/metrics.md`` explains every field:

    Evaluated(step=5, ...)  <->  {"event": "eval", "step": 5, "valid_loss": 2.0, ...}

Imports no torch.
"""

import json
import math
import typing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, Protocol, dataclass_transform

from samo.errors import RunError
from samo.train.config_io import typed
from samo.utils import untrusted

Phase = Literal["dense", "samo"]
DrawReason = Literal["dense_steps", "masks", "settled", "limit"]

NAMES: Final[dict[type["Event"], str]] = {}
"""The events that are written, and their names in the file."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened after ``step`` optimizer steps. Subclasses are dataclasses too."""

    step: int

    def __init_subclass__(cls, name: str = "") -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        if name:
            NAMES[cls] = name

    def to_json(self) -> str:
        """Return the line of ``metrics.jsonl``. Floats that are not finite become null."""
        values: dict[str, Any] = {"event": NAMES[type(self)]}
        for entry in fields(self):
            value = getattr(self, entry.name)
            is_finite = not isinstance(value, float) or math.isfinite(value)
            values[entry.name] = value if is_finite else None
        return json.dumps(values)


class Started(Event, name="start"):
    """The run starts at its first step."""

    steps: int
    time: float


class Resumed(Started, name="resume"):
    """The run resumes from a checkpoint."""


class Opened(Event, name="data"):
    """What the run trains on, and what it holds out."""

    tokens: int
    sequences: int
    valid_tokens: int


class Stepped(Event, name="step"):
    """An optimizer step: every ``log_every`` steps, and the last."""

    phase: Phase
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    epoch: float
    tokens_per_s: float
    step_ms: float
    memory_bytes: int
    skipped_steps: int
    elapsed_s: float


class Evaluated(Event, name="eval"):
    """A validation."""

    valid_loss: float
    perplexity: float
    tokens: int
    elapsed_s: float


class Observed(Event, name="observe"):
    """Early-bird compared the masks that pruning would give now with earlier ones."""

    distances: list[float]
    largest: float | None
    threshold: float
    queue: int


class Pruned(Event, name="prune"):
    """The masks are drawn: pruned weights stay 0 from the next step."""

    kept: int
    numel: int
    sparsity: float
    reason: DrawReason
    distances: list[float] = field(default_factory=list)
    threshold: float | None = None


class Chosen(Event, name="layout"):
    """How weights and state are kept, and why, of a run that has chosen by what fits."""

    reason: str


class Remapped(Event, name="remap"):
    """The masks changed: dropped weights are 0 from here on, grown weights start at 0."""

    kept: int
    numel: int
    sparsity: float
    dropped: int
    grown: int

    @property
    def replaced(self) -> float:
        """Grown weights as a fraction of those kept before."""
        return self.grown / max(self.kept + self.dropped - self.grown, 1)


class Accounted(Event, name="state"):
    """The bytes of model state of all stages, after the first step of a phase and at the end."""

    num_params: int
    measured_bytes: int
    predicted_bytes: int
    dense_bytes: int
    paper_bytes: int | None
    measured: dict[str, int]
    predicted: dict[str, int]
    weights: str | int | None
    rank_bytes: list[int]


class Compiling(Event):
    """The next step compiles blocks. For displays: not written."""


class Exchanged(Event, name="traffic"):
    """What a rank has sent since the run started or resumed; only with several ranks."""

    rank: int
    stage: int
    replica: int
    gradient_bytes: int
    activation_bytes: int
    memory_bytes: int


class Scheduled(Event, name="timeline"):
    """When each pipeline stage computed what in the last batch; only with several stages.

    Entries of the lists belong together. Forward passes first, then as many backward passes.
    """

    num_stages: int
    micro_batches: int
    stages: list[int]
    numbers: list[int]
    start_ms: list[float]
    end_ms: list[float]


class Saved(Event, name="save"):
    """A checkpoint was written; training stood still for the first part of that time."""

    path: str
    bytes: int
    seconds: float
    stall_s: float


class Sampled(Event, name="sample"):
    """The model generated text."""

    prompt: str
    text: str


class Ended(Event, name="end"):
    """The run, or this part of it, is over."""

    reason: Literal["done", "interrupted", "failed"]


class Ticked(Event):
    """Any optimizer step. For displays: not written."""


_MOST_READ: Final = 2**28
"""Bytes of a file of events that are read, from its end: about a million lines."""
_KINDS: Final = {name: kind for kind, name in NAMES.items()}
_FIELDS: Final = {kind: typing.get_type_hints(kind) for kind in NAMES}


class Listener(Protocol):
    """Receives the events of a run."""

    def on(self, event: Event) -> None:
        """Handle an event."""


def from_json(line: str | bytes) -> Event | None:
    """Return the event of a line; None for a kind that this version does not know.

    Unknown fields are ignored. A float that is null becomes NaN.

    Example:
        >>> from samo.train.events import from_json
        >>> from_json('{"event": "end", "step": 9, "reason": "done"}')
        Ended(step=9, reason='done')

    Raises:
        ValueError: The line is cut off, or a field is missing or of another type.
    """
    try:
        record = json.loads(line)
        kind = _KINDS.get(record["event"])
        if kind is None:
            return None
        values: dict[str, Any] = {}
        for name, hint in _FIELDS[kind].items():
            is_nan = hint is float and record[name] is None
            values[name] = math.nan if is_nan else typed(record[name], hint)
        return kind(**values)
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"not an event: {error!r}") from None


def read_events(path: Path, *, last_bytes: int = _MOST_READ) -> tuple[list[Event], int]:
    """Read the end of a file of events, and count broken lines; a missing file is empty.

    A kill may leave one broken line, the last.
    """
    events, broken = [], 0
    try:
        lines = untrusted.read_end(path, last_bytes).splitlines() if path.exists() else []
    except (OSError, ValueError) as error:
        raise RunError(f"'{path}' cannot be read: {error}; leave this run out") from None
    for line in filter(bytes.strip, lines):
        try:
            event = from_json(line)
        except ValueError:
            broken += 1
            continue
        if event is not None:
            events.append(event)
    return events, broken
