"""What a rank does next: a pure state machine, messages in and passes out.

Nothing is planned ahead. A stage computes whatever its messages allow, up to its limit of
micro-batches in flight. If both passes are possible, the rank takes the backward pass, which frees
memory; but not twice in a row, since later stages wait for what it sends forward. Of several stages
on a rank, the last one that can compute does. Each directed link delivers in order, so
micro-batches pass every stage in the order 0, 1, 2, ..., forward and backward: gradients are added
up in the same order in every run, whatever the delays are.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

MessageKind = Literal["activation", "gradient"]


class Action(NamedTuple):
    """What to do now: compute a pass and send its result on, or wait; "step" ends the batch."""

    kind: Literal["forward", "backward", "receive", "step"]
    micro_batch: int = -1
    stage: int = -1


class Progress:
    """How far one stage has come in a batch.

    At most ``in_flight`` micro-batches are between their forward and their backward pass.
    """

    def __init__(self, stage: int, num_stages: int, num_micro_batches: int, in_flight: int) -> None:
        self.stage: Final = stage
        self.is_last: Final = stage == num_stages - 1
        self.num_micro_batches: Final = num_micro_batches
        self.in_flight: Final = in_flight
        # Messages received so far. The first stage has all inputs.
        self.activations = num_micro_batches if stage == 0 else 0
        self.gradients = 0
        self.forwards = self.backwards = 0

    @property
    def can_go_forward(self) -> bool:
        """Whether the next forward pass has its input and is within the limit."""
        is_within = self.forwards - self.backwards < self.in_flight
        return is_within and self.forwards < self.activations

    @property
    def can_go_backward(self) -> bool:
        """Whether the next backward pass has its input."""
        return self.backwards < (self.forwards if self.is_last else self.gradients)

    def receive(self, kind: MessageKind, micro_batch: int) -> None:
        """Take in a message; raise ValueError if it is not the next one of its link."""
        count = self.num_micro_batches
        due: int | None = None
        if kind == "activation" and self.activations < count:
            due, self.activations = self.activations, self.activations + 1
        elif kind == "gradient" and not self.is_last and self.gradients < self.forwards:
            due, self.gradients = self.gradients, self.gradients + 1
        if micro_batch != due:
            wanted = f"no {kind}" if due is None else f"{kind} {due}"
            raise ValueError(
                f"sent {kind} {micro_batch} of {count} micro-batches to stage {self.stage}, "
                f"where {wanted} was due; do all ranks run the same program?"
            )

    def forward(self) -> Action:
        """Count the next forward pass as done."""
        self.forwards += 1
        return Action("forward", self.forwards - 1, self.stage)

    def backward(self) -> Action:
        """Count the next backward pass as done."""
        self.backwards += 1
        return Action("backward", self.backwards - 1, self.stage)


class Engine:
    """The decisions of one rank for one batch.

    Example:
        >>> last = Engine([Progress(stage=1, num_stages=2, num_micro_batches=1, in_flight=2)])
        >>> last.stages[1].receive("activation", 0)
        >>> [last.next().kind for _ in range(3)]
        ['forward', 'backward', 'step']
    """

    def __init__(self, stages: Iterable[Progress]) -> None:
        self.stages: Final = {progress.stage: progress for progress in stages}
        self._was_backward = False

    def senders(self) -> set[int]:
        """Return the stages that have more to send to those of this rank."""
        own = self.stages.values()
        before = {one.stage - 1 for one in own if one.activations < one.num_micro_batches}
        return before | {
            one.stage + 1
            for one in own
            if one.gradients < one.num_micro_batches and not one.is_last
        }

    def next(self) -> Action:
        """Decide what to do now, and count it as done."""
        forward = backward = None
        for stage in self.stages.values():  # the last one that can
            forward = stage if stage.can_go_forward else forward
            backward = stage if stage.can_go_backward else backward
        is_turn = forward is not None and self._was_backward
        if backward is not None and not is_turn:
            self._was_backward = True
            return backward.backward()
        if forward is not None:
            self._was_backward = False
            return forward.forward()
        is_done = all(one.backwards == one.num_micro_batches for one in self.stages.values())
        return Action("step" if is_done else "receive")


def in_flight_limits(in_flight: int | Sequence[int] | None, num_stages: int) -> tuple[int, ...]:
    """Return the limit of each stage, by default the number of stages."""
    if in_flight is None:
        in_flight = num_stages
    limits = (in_flight,) * num_stages if isinstance(in_flight, int) else tuple(in_flight)
    if len(limits) != num_stages or not all(limit >= 1 for limit in limits):
        raise ValueError(
            f"in_flight must be 1 or more, one number or one for each of {num_stages} stages, "
            f"got {in_flight}"
        )
    return limits
