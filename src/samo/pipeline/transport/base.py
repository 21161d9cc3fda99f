"""What a pipeline needs of a network."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from samo.errors import PeerError, first_words
from samo.pipeline.transport.wire import Packet

__all__ = ["Arrival", "Transport"]


@dataclass(frozen=True)
class Arrival:
    """A packet from a neighbour, or the error that ended the link to it.

    Attributes:
        stage: The neighbour.
        packet: What it sent.
        error: A `PeerError` if it sent something invalid, a `TimeoutError` or `ConnectionError` if
            the link is broken.
    """

    stage: int
    packet: Packet | None = None
    error: PeerError | TimeoutError | ConnectionError | None = None


class Transport:
    """The links of one stage to its neighbours. The base class is a pipeline of one stage.

    Packets of a directed link arrive in the order of sending. Packets are received from `begin`
    until the packet "end" of each neighbour, so no link is waited on between two batches.

    Args:
        stage: This stage.
        ranks: Global rank of each stage.
    """

    def __init__(self, stage: int = 0, ranks: Sequence[int] = (0,)) -> None:
        self.stage: Final = stage
        self.ranks: Final = tuple(ranks)
        self.num_stages: Final = len(self.ranks)
        self.neighbours: Final = [s for s in (stage - 1, stage + 1) if 0 <= s < self.num_stages]

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


def collective_error(error: RuntimeError) -> PeerError:
    """Return the `PeerError` for a collective that failed in the backend."""
    return PeerError(
        f"another rank did not join a collective ({first_words(error)}); start the ranks again from "
        "the last checkpoint"
    )
