"""The events of a run: what training reports to its listeners, and the lines of ``metrics.jsonl``.

Each class is one kind of line. `Event.to_json` writes it, `from_json` and `read_events` read it
back:

    Evaluated(step=5, ...)  <->  {"event": "eval", "step": 5, "valid_loss": 2.0, ...}

``docs/metrics.md`` explains every field. Imports no torch.
"""

import json
import math
import typing
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Protocol

from samo.errors import RunError

__all__ = []

Phase = Literal["dense", "samo"]
DrawReason = Literal["dense_steps", "masks", "settled", "limit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened after ``step`` optimizer steps."""

    step: int

    def to_json(self) -> str:
        """Return the line of ``metrics.jsonl``. Floats that are not finite become null.

        Example:
            >>> from samo.train.events import Evaluated
            >>> Evaluated(step=5, valid_loss=2.0, perplexity=7.4, tokens=640, elapsed_s=1.5).to_json()
            '{"event": "eval", "step": 5, "valid_loss": 2.0, "perplexity": 7.4, "tokens": 640,
            "elapsed_s": 1.5}'
        """
        values = {entry.name: _finite(getattr(self, entry.name)) for entry in fields(self)}
        return json.dumps({"event": NAMES[type(self)], **values})


@dataclass(frozen=True, kw_only=True, slots=True)
class Started(Event):
    """The run starts at its first step."""

    steps: int
    """Steps the run will have taken at its end."""
    time: float
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed(Started):
    """The run resumes from a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped(Event):
    """An optimizer step: every ``log_every`` steps, and the last."""

    phase: Phase
    """How the step was taken: dense, or samo (compressed state)."""
    loss: float
    """Training loss of this step in nats per token."""
    lr: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    epoch: float
    tokens_per_s: float
    """Since the last line, without validation, saving and compiling."""
    step_ms: float
    """Time per step since the last line, without validation, saving and compiling."""
    memory_bytes: int
    """On a CPU the memory of the process, on a GPU the peak allocation so far."""
    skipped_steps: int
    """Steps so far that changed nothing because a gradient was not finite."""
    elapsed_s: float
    """Training time so far, over all resumes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated(Event):
    """A validation."""

    valid_loss: float
    """In nats per token."""
    perplexity: float
    tokens: int
    elapsed_s: float
    """Training time so far, over all resumes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed(Event):
    """Early-bird compared the masks that pruning would give now with earlier ones."""

    distances: list[float]
    """To earlier masks, oldest first: to all of them, or to those in the queue."""
    largest: float | None
    """The largest distance within the queue; None for the first masks."""
    threshold: float
    """The largest distance at which masks agree."""
    queue: int
    """Number of masks that must agree, including the newest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned(Event):
    """The masks are drawn: pruned weights stay 0 from the next step."""

    kept: int
    """Of the ``numel`` weights of the pruned matrices."""
    numel: int
    sparsity: float
    reason: DrawReason
    """The dense phase is over, masks were given, they settled, or they had not at the limit."""
    distances: list[float]
    """Early-bird: from the newest masks to the others in the queue, oldest first."""
    threshold: float | None
    """Early-bird: the largest distance at which masks agree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remapped(Event):
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounted(Event):
    """The bytes of model state, after the first step of a phase and at the end.

    On the first rank they are those of all stages together, on other ranks their own.
    """

    num_params: int
    """Dense parameters of the model."""
    measured_bytes: int
    predicted_bytes: int
    dense_bytes: int
    """What dense training would hold."""
    paper_bytes: int | None
    """What the formula of the SAMO paper gives; None without masks."""
    measured: dict[str, int]
    """Measured bytes by kind (`samo.memory.predict.KINDS`)."""
    predicted: dict[str, int]
    weights: str | int | None
    """Dense weights are resident, streamed, or resident up to this many bytes; None before pruning."""
    rank_bytes: list[int]
    """Measured bytes of every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountedAgain(Accounted):
    """The same after the first step of a resumed run. For displays: the file already has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled(Event):
    """Blocks were compiled in this step: the first of a phase, or one after the masks changed."""

    seconds: float
    """Not included in the time of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiling(Event):
    """The next step compiles blocks. For displays: not written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged(Event):
    """What a rank has sent since the run started or resumed; only with several ranks."""

    rank: int
    stage: int
    """Its place on the axis pipe."""
    replica: int
    """Its place on the axis data."""
    gradient_bytes: int
    """Bytes of gradients reduced with other replicas, in the type they are sent in."""
    activation_bytes: int
    """Bytes sent to neighbouring stages; torch's own schedules do not count them."""
    memory_bytes: int
    """As in `Stepped`, of this rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved(Event):
    """A checkpoint was written."""

    path: str
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NotSaved(Event):
    """A checkpoint could not be written; the last good one remains."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled(Event):
    """The model generated text."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended(Event):
    """The run, or this part of it, is over."""

    reason: Literal["done", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticked(Event):
    """Any optimizer step. For displays: not written."""


NAMES: dict[type[Event], str] = {
    Started: "start",
    Resumed: "resume",
    Stepped: "step",
    Evaluated: "eval",
    Observed: "observe",
    Pruned: "prune",
    Remapped: "remap",
    Accounted: "state",
    Compiled: "compile",
    Exchanged: "traffic",
    Saved: "save",
    NotSaved: "save_failed",
    Sampled: "sample",
    Ended: "end",
}
"""The events that are written, and their names in the file."""

_KINDS = {name: kind for kind, name in NAMES.items()}
_FIELDS = {kind: typing.get_type_hints(kind) for kind in NAMES}


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
        ValueError: The line is not the whole JSON of an event, or a field is missing or of another
            type.
    """
    try:
        record = json.loads(line)
        kind = _KINDS.get(record["event"])
        if kind is None:
            return None
        return kind(**{name: _typed(record[name], hint) for name, hint in _FIELDS[kind].items()})
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"not an event: {error!r}") from None


def read_events(path: Path) -> tuple[list[Event], int]:
    """Read a file of events, also while the run writes it.

    Returns:
        The events, and the number of lines that cannot be read: a kill may leave one, the last.

    Raises:
        RunError: The file cannot be read. A missing one is empty: the run has not begun.
    """
    events, broken = [], 0
    try:
        with open(path, "rb") as file:
            for line in filter(bytes.strip, file):
                try:
                    event = from_json(line)
                except ValueError:
                    broken += 1
                    continue
                if event is not None:
                    events.append(event)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RunError(
            f"'{path}' cannot be read: {error.strerror or error}; make it readable, or leave this run "
            "out"
        ) from None
    return events, broken


def _typed(value: Any, hint: Any) -> Any:
    """Return a JSON value as the type of a field."""
    if type(value) is hint and hint is not float:  # not isinstance: a bool is not a number
        return value
    if hint is float and (value is None or type(value) in (int, float)):
        number = math.nan if value is None else float(value)
        return number if math.isfinite(number) else math.nan
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal and value in inner:
        return value
    if origin is list and isinstance(value, list):
        return [_typed(item, inner[0]) for item in value]
    if origin is dict and isinstance(value, dict):
        return {key: _typed(item, inner[1]) for key, item in value.items()}
    if origin is UnionType:
        if value is None and NoneType in inner:
            return None
        for option in inner:
            with suppress(ValueError):
                return _typed(value, option)
    raise ValueError(f"{value!r} is not of type {hint}")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
