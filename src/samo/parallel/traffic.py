"""What a rank sent and how long that took, counted from the arguments of collective operations.

Sent bytes follow the usual algorithms over R ranks, for an argument of n bytes:

    all-reduce        2 (R - 1) / R * n     ring: reduce-scatter, then all-gather
    reduce-scatter      (R - 1) / R * n     n is the whole input
    all-gather          (R - 1) / R * n     n is the whole output
    broadcast                         n     a chain: each rank but the last passes it on

A rank receives as much as it sends. Packet headers and a backend's own messages are not in it.
"""

import threading
from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["Traffic", "TrafficOf"]

Kind = Literal["gradients", "values", "flags", "norm", "start"]

KINDS: Final[tuple[Kind, ...]] = ("gradients", "values", "flags", "norm", "start")

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficOf:
    """What was sent for one purpose.

    Example:
        >>> import samo
        >>> samo.TrafficOf(calls=2, argument_bytes=80, pruned_bytes=60, sent_bytes=40).calls
        2
    """

    calls: int = 0
    """Collective operations."""
    argument_bytes: int = 0
    """Bytes of the tensors they were given, as dense training's would be counted."""
    pruned_bytes: int = 0
    """Those of them that belong to pruned parameters."""
    sent_bytes: int = 0
    """Bytes this rank sent, and received, by the usual algorithms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What a rank sent since `samo.replicate`, by purpose, and how long that took. Printing shows a table.

    Example:
        >>> import samo
        >>> print(samo.Traffic(gradients=samo.TrafficOf(calls=2, argument_bytes=80, sent_bytes=40)))
        bytes              calls           arguments                sent
        gradients              2                  80                  40
        all                                                           40
        reductions: 0; under way for 0.000 s, of which this rank only waited for 0.000 s
    """

    gradients: TrafficOf = TrafficOf()
    """Compressed gradients, reduced."""
    values: TrafficOf = TrafficOf()
    """New values of the kept weights, where state is sharded."""
    flags: TrafficOf = TrafficOf()
    """Which parameters were used, and whether a step is skipped: a few bytes a step."""
    norm: TrafficOf = TrafficOf()
    """Norms of gradients, where state is sharded: a few bytes a step."""
    start: TrafficOf = TrafficOf()
    """Weights, buffers and fingerprints of masks, once."""
    reductions: int = 0
    """Backward passes that ended in a reduction."""
    in_flight_s: float = 0.0
    """Seconds in which at least one operation was under way, as the host sees it."""
    exposed_s: float = 0.0
    """Seconds in which this rank did nothing but wait for them."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of all purposes together."""
        return sum(getattr(self, kind).sent_bytes for kind in KINDS)

    def __str__(self) -> str:
        lines = [f"{'bytes':<12}{'calls':>12}{'arguments':>20}{'sent':>20}"]
        for kind in KINDS:
            found: TrafficOf = getattr(self, kind)
            if found.calls:
                amounts = f"{found.argument_bytes:>20,}{found.sent_bytes:>20,}"
                lines.append(f"{kind:<12}{found.calls:>12,}{amounts}")
        lines.append(f"{'all':<12}{'':>32}{self.sent_bytes:>20,}")
        lines.append(
            f"reductions: {self.reductions:,}; under way for {self.in_flight_s:.3f} s, of which this rank "
            f"only waited for {self.exposed_s:.3f} s"
        )
        return "\n".join(lines)


@dataclass(slots=True)
class TrafficMeter:
    """Counts operations and times them; operations end in threads of their own."""

    num_ranks: int
    reductions: int = 0
    exposed_s: float = 0.0
    _counts: dict[Kind, list[int]] = field(
        default_factory=lambda: {kind: [0, 0, 0, 0] for kind in KINDS}
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _under_way: int = 0
    _since: float = 0.0
    _in_flight_s: float = 0.0

    def count(self, kind: Kind, operation: Operation, size: int, pruned: int = 0) -> None:
        """Count an operation on ``size`` bytes, of which ``pruned`` are pruned parameters'."""
        for i, amount in enumerate((1, size, pruned, sent_bytes(operation, size, self.num_ranks))):
            self._counts[kind][i] += amount

    def begin(self, now: float) -> None:
        """Note that an operation starts."""
        with self._lock:
            if self._under_way == 0:
                self._since = now
            self._under_way += 1

    def end(self, now: float) -> None:
        """Note that one has ended."""
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._in_flight_s += now - self._since

    def restart_clock(self) -> None:
        """Forget the times so far, those of the start."""
        with self._lock:
            self._in_flight_s = self.exposed_s = 0.0

    def read(self) -> Traffic:
        """Return what was counted so far."""
        counts = {
            kind: TrafficOf(calls=c[0], argument_bytes=c[1], pruned_bytes=c[2], sent_bytes=c[3])
            for kind, c in self._counts.items()
        }
        return Traffic(
            **counts,
            reductions=self.reductions,
            in_flight_s=self._in_flight_s,
            exposed_s=self.exposed_s,
        )


def sent_bytes(operation: Operation, size: int, num_ranks: int) -> int:
    """Return what a rank sends for an operation on ``size`` bytes.

    Example: an all-reduce of 100 bytes over 4 ranks sends 150.
    """
    if num_ranks == 1:
        return 0
    if operation == "broadcast":
        return size
    share = size * (num_ranks - 1) // num_ranks
    return 2 * share if operation == "all_reduce" else share
