"""What a pipeline needs of a network."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from samo.pipeline.transport.wire import Packet

__all__ = ["Arrival", "Transport"]


class Arrival(NamedTuple):
    """A packet from a neighbour, or the error that ended the link to it.

    The error is a ValueError for an invalid packet, else a ConnectionError.
    """

    stage: int
    packet: Packet | None = None
    error: Exception | None = None


class Transport:
    """The links of one rank to its neighbours. The base class has none: one rank.

    A rank is named by its place in the pipeline, which is its stage, or the first of its stages;
    ``ranks`` are the global ranks. With several stages on a rank, the places are a ring.
    Packets of a directed link arrive in the order of sending. Nothing runs in the background that
    the caller could wait for: it polls, at every action and while it waits.
    """

    def __init__(
        self, stage: int = 0, ranks: Sequence[int] = (0,), *, is_ring: bool = False
    ) -> None:
        self.stage: Final = stage
        self.ranks: Final = tuple(ranks)
        self.num_stages: Final = len(self.ranks)
        self.neighbours: Final = neighbours_of(stage, self.num_stages, is_ring)
        self.inbox: Final[deque[Arrival]] = deque()

    def send(self, stage: int, packet: Packet) -> None:
        """Send to a neighbour without waiting for it."""

    def poll(self, timeout_s: float = 0.0) -> None:
        """Advance all transfers; wait up to ``timeout_s`` for something to happen."""

    def is_sent(self, stage: int) -> bool:
        """Return whether everything is sent to a neighbour, or never will be."""
        return True

    def close(self) -> None:
        """Close the links; the transport is not used again."""

    def receive(self, timeout_s: float) -> Arrival | None:
        """Return the first arrival from any neighbour, or None after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while not self.inbox:
            left = deadline - time.monotonic()
            self.poll(max(left, 0.0))
            if left <= 0 and not self.inbox:
                return None
        return self.inbox.popleft()

    def flush(self, timeout_s: float, stages: Iterable[int]) -> int | None:
        """Wait until everything is sent to ``stages``; return one that did not take it in time."""
        deadline = time.monotonic() + timeout_s
        while late := [stage for stage in stages if not self.is_sent(stage)]:
            left = deadline - time.monotonic()
            if left <= 0:
                return late[0]
            self.poll(min(left, 1e-3))
        return None


def neighbours_of(stage: int, num_stages: int, is_ring: bool) -> list[int]:
    """Return the places that a rank exchanges packets with."""
    around = {stage - 1, stage + 1}
    if is_ring:
        around = {place % num_stages for place in around} - {stage}
    return sorted(around & set(range(num_stages)))
