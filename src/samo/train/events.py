"""What happens in a run, as data: the lines of ``metrics.jsonl``, and what a display is told.

Each class is one kind of line; ``docs/metrics.md`` explains every field. Imports no torch.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

__all__ = []

Phase = Literal["dense", "samo"]
DrawReason = Literal["dense_steps", "masks", "settled", "limit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened after ``step`` optimizer steps."""

    step: int

    def to_json(self) -> str:
        """Return the line of ``metrics.jsonl``; what is not finite becomes null.

        Example:
            >>> from samo.train.events import Evaluated
            >>> Evaluated(step=5, valid_loss=2.0, perplexity=7.4, tokens=640, elapsed_s=1.5).to_json()
            '{"event": "eval", "step": 5, "valid_loss": 2.0, "perplexity": 7.4, "tokens": 640, "elapsed_s": 1.5}'
        """
        values = {f.name: _finite(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return json.dumps({"event": NAMES[type(self)], **values})


@dataclass(frozen=True, kw_only=True, slots=True)
class Started(Event):
    """The run begins, at step 0 or at a checkpoint."""

    steps: int
    """Steps the run will have taken at its end."""
    time: float
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed(Started):
    """The run goes on from a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped(Event):
    """An optimizer step, every ``log_every`` of them and at the last."""

    phase: Phase
    """How the step was taken: dense, or samo (compressed state)."""
    loss: float
    """Training loss of this step: nats for each token."""
    lr: float
    """Learning rate."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    tokens: int
    """Tokens learned from so far."""
    epoch: float
    """Times the whole text has been seen so far."""
    tokens_per_s: float
    """Speed since the last line, validation, saving and compiling not counted."""
    step_ms: float
    """Time for one step since the last line, validation, saving and compiling not counted."""
    memory_bytes: int
    """On a CPU the memory of the process, on a GPU the highest allocation so far; all of it."""
    skipped_steps: int
    """Steps that changed nothing so far, because a gradient was not finite."""
    elapsed_s: float
    """Time of training so far, over all resumes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated(Event):
    """A validation."""

    valid_loss: float
    """Loss on the validation text: nats for each token."""
    perplexity: float
    """e to the power of that."""
    tokens: int
    """Tokens learned from so far."""
    elapsed_s: float
    """Time of training so far, over all resumes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed(Event):
    """Early-bird looked at the masks that pruning would give now."""

    distances: list[float]
    """Distances to masks before, oldest first: to all of them, or to those in the queue."""
    largest: float | None
    """The largest distance within the queue; null for the first masks of all."""
    threshold: float
    """The largest distance at which masks agree."""
    queue: int
    """Masks that must agree, the newest counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned(Event):
    """The masks are drawn; from the next step on pruned weights stay 0."""

    kept: int
    """Weights kept in the pruned matrices."""
    numel: int
    """Weights of those matrices."""
    sparsity: float
    """Fraction pruned."""
    reason: DrawReason
    """Why now: the dense phase was over, masks were given, they have settled, or had not at the limit."""
    distances: list[float]
    """Early-bird: distances of the newest masks to the others in the queue, oldest first."""
    threshold: float | None
    """Early-bird: the largest distance at which masks agree; null for other methods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remapped(Event):
    """The masks have changed; weights that were dropped stay 0 from here on."""

    kept: int
    """Weights kept in the pruned matrices now."""
    numel: int
    """Weights of those matrices."""
    sparsity: float
    """Fraction pruned."""
    dropped: int
    """Weights that are no longer kept."""
    grown: int
    """Weights that are kept anew; they start at 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounted(Event):
    """The bytes of model state, after the first step of a phase and at the end."""

    num_params: int
    """Dense parameters of the model."""
    measured_bytes: int
    """Model state held now."""
    predicted_bytes: int
    """The same by arithmetic."""
    dense_bytes: int
    """What dense training would hold."""
    paper_bytes: int | None
    """What the SAMO paper's formula gives; null without masks."""
    measured: dict[str, int]
    """Measured bytes by kind: dense (weights), bitmap, values, gradients, moments, corrections, ages."""
    predicted: dict[str, int]
    """Predicted bytes by kind."""
    weights: str | int | None
    """How dense weights are held: resident, streamed, or the bytes that may stay; null before pruning."""
    rank_bytes: list[int]
    """Measured bytes of every rank; the numbers above are of all stages together on the first rank, of
    each alone on the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountedAgain(Accounted):
    """The same after the first step of a resumed run; for displays, and in no file, which has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled(Event):
    """Blocks were compiled in this step: the first of a phase, or one after masks have changed."""

    seconds: float
    """Time it took, which is not in that of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiling(Event):
    """Blocks begin to be compiled in the next step; for displays, and in no file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged(Event):
    """What a rank has sent since the run was started or resumed; on many ranks only."""

    rank: int
    """Which one."""
    stage: int
    """Its place on the axis pipe."""
    replica: int
    """Its place on the axis data."""
    gradient_bytes: int
    """Bytes of gradients that this rank has added up with other replicas, in the type they are sent in."""
    activation_bytes: int
    """Bytes sent to neighbouring stages; torch's own schedules do not count them."""
    memory_bytes: int
    """As of a step, of this rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved(Event):
    """A checkpoint was written."""

    path: str
    """Where, in the run folder."""
    bytes: int
    """Size of its files."""
    seconds: float
    """Time it took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotSaved(Event):
    """A checkpoint could not be written; the last good one stands."""

    reason: str
    """What was wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled(Event):
    """The model wrote something."""

    text: str
    """Prompt and continuation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended(Event):
    """The run is over, or this part of it."""

    reason: Literal["done", "interrupted", "failed"]
    """Why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticked(Event):
    """An optimizer step, every one of them; for displays, and in no file."""


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


class Listener(Protocol):
    """Somebody who is told what happens."""

    def on(self, event: Event) -> None:
        """Take notice of an event."""


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
