"""What a pipeline needs of a network."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from samo.pipeline.transport.wire import Packet

__all__ = ["Arrival", "Transport"]


class Arrival(NamedTuple):
    """A packet from a neighbour, or the error that ended the link to it.

    The error is a ValueError for an invalid packet, else a TimeoutError or a ConnectionError.
    """

    stage: int
    packet: Packet | None = None
    error: Exception | None = None


class Transport:
    """The links of one rank to its neighbours. The base class has none: one rank.

    A rank is named by its place in the pipeline, which is its stage, or the first of its stages;
    ``ranks`` are the global ranks. With several stages on a rank, the places are a ring.
    Packets of a directed link arrive in the order of sending. They are received from `begin` until
    the packet "end" of each neighbour, so no link is waited on between two batches.
    """

    def __init__(
        self, stage: int = 0, ranks: Sequence[int] = (0,), *, is_ring: bool = False
    ) -> None:
        self.stage: Final = stage
        self.ranks: Final = tuple(ranks)
        self.num_stages: Final = len(self.ranks)
        around = {stage - 1, stage + 1}
        if is_ring:
            around = {place % self.num_stages for place in around} - {stage}
        self.neighbours: Final = sorted(around & set(range(self.num_stages)))

    def begin(self) -> None:
        """Start to receive from each neighbour."""

    def send(self, stage: int, packet: Packet) -> None:
        """Send to a neighbour without waiting for it."""

    def receive(self, timeout_s: float) -> Arrival | None:
        """Return the first arrival from any neighbour, or None after ``timeout_s`` seconds."""

    def flush(self, timeout_s: float, stages: Iterable[int]) -> int | None:
        """Wait until everything is sent to ``stages``; return one that did not take it in time."""

    def close(self) -> None:
        """Stop receiving; the transport is not used again."""
