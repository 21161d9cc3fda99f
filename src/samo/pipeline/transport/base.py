"""What a pipeline needs of a network, whichever it is."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from samo.errors import PeerError, first_words
from samo.pipeline.transport.wire import Packet

__all__ = ["Alone", "Arrival", "Transport"]


def not_come(error: RuntimeError) -> PeerError:
    """Return what an error of a backend means that came while ranks did something together."""
    said = first_words(error)
    return PeerError(
        f"another rank did not come ({said}); start the ranks again from the last checkpoint"
    )


@dataclass(frozen=True)
class Arrival:
    """A packet, or the error that ended the link, and the stage at its other end."""

    stage: int
    packet: Packet | None = None
    error: Exception | None = None


class Transport(Protocol):
    """The links of one stage to the stage before and the one after.

    Packets of a directed link arrive in the order of sending. A batch is received from `begin` to the
    packet "end" of each neighbour, so that nobody waits on a link while no batch is computed.
    """

    stage: int
    num_stages: int
    ranks: Sequence[int]
    """Global rank of each stage."""

    def begin(self) -> None:
        """Start to receive a batch from each neighbour."""

    def send(self, stage: int, packet: Packet) -> None:
        """Send to a neighbour, without waiting for it."""

    def receive(self, timeout_s: float) -> Arrival | None:
        """Return whatever came first, from any neighbour, or None after ``timeout_s`` seconds."""

    def flush(self, timeout_s: float, stages: Iterable[int]) -> int | None:
        """Wait until all is sent to some stages; return the one that did not take it in time."""

    def close(self) -> None:
        """Stop receiving; the transport is not used again."""


class Alone:
    """The transport of a pipeline of one stage, which has no neighbours."""

    stage = 0
    num_stages = 1
    ranks: Sequence[int] = (0,)

    def begin(self) -> None:
        """Nobody sends."""

    def send(self, stage: int, packet: Packet) -> None:
        """Refuse: there is nobody to send to."""
        raise AssertionError(f"{packet.kind} to stage {stage} of a pipeline of one stage")

    def receive(self, timeout_s: float) -> Arrival | None:
        """Wait in vain."""
        time.sleep(timeout_s)
        return None

    def flush(self, timeout_s: float, stages: Iterable[int]) -> int | None:
        """Nothing was sent."""
        return None

    def close(self) -> None:
        """Nothing was opened."""
