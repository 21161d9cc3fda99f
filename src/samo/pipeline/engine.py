"""What one stage does next: a pure state machine, messages in and actions out.

Nothing is planned ahead. A stage computes whatever its messages allow, up to its limit of
micro-batches in flight. If both passes are possible, it takes the backward pass, which frees
memory; but not twice in a row (``prefer="alternate"``), since later stages wait for what it sends
forward. Each directed link delivers in the order of sending, so micro-batches pass every stage in
the order 0, 1, 2, ..., forward and backward: gradients are added up in the same order in every run,
whatever the delays are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from samo.errors import PeerError

__all__ = ["Action", "Engine", "Message", "in_flight_limits"]

MessageKind = Literal["activation", "gradient", "loss"]
Prefer = Literal["alternate", "backward"]
ActionKind = Literal[
    "receive", "forward", "backward", "send_activation", "send_gradient", "send_loss", "step"
]


@dataclass(frozen=True, slots=True)
class Message:
    """A message from a neighbour."""

    kind: MessageKind
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Action:
    """What to do now: "receive" waits for a message, "step" means that all gradients are complete."""

    kind: ActionKind
    micro_batch: int = -1


class Engine:
    """The decisions of one stage for one batch.

    Example:
        >>> from samo.pipeline.engine import Engine, Message
        >>> last = Engine(stage=1, num_stages=2, num_micro_batches=1, in_flight=2)
        >>> last.next().kind
        'receive'
        >>> last.receive(Message("activation", 0))
        >>> [last.next().kind for _ in range(5)]
        ['forward', 'backward', 'send_gradient', 'send_loss', 'step']

    Args:
        stage: This stage, counted from 0.
        num_stages: Number of stages.
        num_micro_batches: Micro-batches of the batch.
        in_flight: Limit of micro-batches between their forward and their backward pass here.
        prefer: Which of two possible passes to take: "backward", or "alternate" for a backward pass
            that does not follow a backward pass.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        num_micro_batches: int,
        in_flight: int,
        *,
        prefer: Prefer = "alternate",
    ) -> None:
        if not 0 <= stage < num_stages:
            raise ValueError(f"stage must be in 0..{num_stages - 1}, got {stage}")
        if num_micro_batches < 1:
            raise ValueError(f"micro-batches must be 1 or more, got {num_micro_batches}")
        if in_flight < 1:
            raise ValueError(f"in_flight must be 1 or more, got {in_flight}; 1 already computes")
        self.stage: Final = stage
        self.is_first: Final = stage == 0
        self.is_last: Final = stage == num_stages - 1
        self.num_micro_batches: Final = num_micro_batches
        self.in_flight: Final = in_flight
        self.prefer: Final = prefer
        # Micro-batches that have come in from the stage before; the first stage has all of them.
        self.activations: int = num_micro_batches if self.is_first else 0
        self.gradients = 0
        self.forwards = 0
        self.backwards = 0
        self._has_loss = False
        self._was_backward = False
        self._due: list[Action] = []
        self._is_loss_sent = False

    @property
    def num_held(self) -> int:
        """Micro-batches that occupy memory here: waiting for their forward pass, or in flight."""
        waiting = 0 if self.is_first else self.activations - self.forwards
        return waiting + self.forwards - self.backwards

    def senders(self) -> list[int]:
        """Return the neighbours that have more to send in this batch."""
        before = [] if self.activations == self.num_micro_batches else [self.stage - 1]
        after = [] if self.is_last or self._has_loss else [self.stage + 1]
        return before + after

    def receive(self, message: Message) -> None:
        """Take in a message.

        Raises:
            PeerError: It is not the one that is due on its link.
        """
        n = self.num_micro_batches
        if message.kind == "activation":
            self._check(message, self.activations, not self.is_first, sender=self.stage - 1)
            self.activations += 1
        elif message.kind == "gradient":
            is_due = not self.is_last and self.gradients < self.forwards
            self._check(message, self.gradients, is_due, sender=self.stage + 1)
            self.gradients += 1
        else:
            is_due = not self.is_last and self.gradients == n and not self._has_loss
            self._check(message, n - 1, is_due, sender=self.stage + 1)
            self._has_loss = True

    def next(self) -> Action:
        """Decide what to do now, and count it as done."""
        if self._due:
            return self._due.pop(0)
        is_forward = self.can_go_forward and self.forwards - self.backwards < self.in_flight
        is_turn = self._was_backward and self.prefer == "alternate" and not self.is_last
        if self.can_go_backward and not (is_forward and is_turn):
            return self.backward()
        if is_forward:
            return self.forward()
        if self.backwards == self.num_micro_batches and (self.is_last or self._has_loss):
            if not self.is_first and not self._is_loss_sent:
                self._is_loss_sent = True
                return Action("send_loss", self.num_micro_batches - 1)
            return Action("step")
        return Action("receive")

    @property
    def can_go_backward(self) -> bool:
        """Whether the input of the next backward pass has arrived."""
        return self.backwards < (self.forwards if self.is_last else self.gradients)

    @property
    def can_go_forward(self) -> bool:
        """Whether the input of the next forward pass has arrived, whatever the limit is."""
        return self.forwards < self.activations

    @property
    def has_due(self) -> bool:
        """Whether a send comes before the next pass."""
        return bool(self._due)

    def forward(self) -> Action:
        """Count the next forward pass as done."""
        micro_batch, self.forwards = self.forwards, self.forwards + 1
        self._was_backward = False
        if not self.is_last:
            self._due.append(Action("send_activation", micro_batch))
        return Action("forward", micro_batch)

    def backward(self) -> Action:
        """Count the next backward pass as done."""
        micro_batch, self.backwards = self.backwards, self.backwards + 1
        self._was_backward = True
        if not self.is_first:
            self._due.append(Action("send_gradient", micro_batch))
        return Action("backward", micro_batch)

    def _check(self, message: Message, due: int, is_due: bool, *, sender: int) -> None:
        if is_due and message.micro_batch == due < self.num_micro_batches:
            return
        wanted = f"{message.kind} {due} was due" if is_due else f"no {message.kind} was due"
        raise PeerError(
            f"stage {sender} sent {message.kind} {message.micro_batch} of "
            f"{self.num_micro_batches} micro-batches to stage {self.stage}, where {wanted}; do all ranks "
            "run the same program with the same settings?",
            stage=sender,
        )


def in_flight_limits(in_flight: int | Sequence[int] | None, num_stages: int) -> tuple[int, ...]:
    """Return the limit of each stage, by default the number of stages.

    Example:
        >>> from samo.pipeline.engine import in_flight_limits
        >>> in_flight_limits(None, 4), in_flight_limits([4, 3, 2, 1], 4)
        ((4, 4, 4, 4), (4, 3, 2, 1))
    """
    if in_flight is None:
        in_flight = num_stages
    limits = (in_flight,) * num_stages if isinstance(in_flight, int) else tuple(in_flight)
    if len(limits) != num_stages or not all(limit >= 1 for limit in limits):
        raise ValueError(
            f"in_flight must be 1 or more, for all stages or for each of {num_stages}, got {in_flight}"
        )
    return limits
