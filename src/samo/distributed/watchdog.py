"""Watchdog: find the rank that failed, and end the ranks that wait for it.

Each rank has one thread. It writes a heartbeat to the store of the ranks, reads that of the next
rank in a ring, and looks for a root cause that some rank has recorded:

    heartbeat/R   beats and collectives of rank R so far
    left/R        rank R has ended its run and is not missed
    root_cause    the ranks that failed; the first writer wins

A backend says at best that a connection was closed or that it waited too long, not for which rank.
So, when a collective fails, `Watchdog.error` reads all heartbeats twice, a few beats apart. A rank
whose count does not change was killed or stopped; a rank that beats but has started fewer
collectives is late.

A rank whose heartbeat stops for ``timeout_s`` becomes the root cause too. A process that has not
left a few seconds after a root cause was recorded is ended: a thread blocked in a backend cannot be
interrupted.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from samo.errors import PeerError, first_words

__all__ = []

HEARTBEAT_S: Final = 0.5
"""Seconds between heartbeats; a rank without one for three of them has failed."""
PATIENCE_S: Final = 5.0
"""Seconds for a rank to report and leave by itself after a root cause was recorded."""

OnLost = Callable[[tuple[int, ...], float], None]
"""Ends a process that waits for failed ranks; called with them, or () if the store does not answer, and with
the seconds since their last sign of life."""


class Watchdog:
    """Heartbeats of this rank, and what those of the others tell.

    Args:
        store: A torch.distributed store that all ranks share.
        rank: This rank.
        num_ranks: Number of ranks.
        timeout_s: Seconds without a heartbeat after which a rank has failed.
        key: Prefix of the entries in the store.
        interval_s: Seconds between heartbeats.
        on_lost: Ends this process if it does not leave by itself. By default nothing is ended.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        num_ranks: int,
        *,
        timeout_s: float,
        key: str = "samo/watchdog",
        interval_s: float = HEARTBEAT_S,
        on_lost: OnLost | None = None,
    ) -> None:
        self._state: Final = _State(store, key, rank, num_ranks, timeout_s, interval_s)
        self._thread: Final = threading.Thread(
            target=self._state.run, args=(on_lost,), name="samo-watchdog", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._state.stop.set)  # the thread does not hold this object

    def count_collective(self) -> None:
        """Count a collective that this rank starts."""
        self._state.collectives += 1

    def error(self, what: str, waited_s: float, cause: BaseException) -> PeerError:
        """Return the error of a collective that failed, with the ranks at fault."""
        found, rank = self._in_time(self._state.diagnose), self._state.rank
        ranks, how = () if found is None else found.stopped or found.late, ""
        if found is None:
            how = "the launcher's store does not answer, so the rank at fault is unknown"
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                ranks, how = (0,), "rank 0, which holds the store of the ranks, does not answer"
        elif found.stopped:
            how = f"{listed(ranks)} stopped (no heartbeat for {self._state.pause_s:g} s)"
        elif found.late:
            how = f"{listed(ranks)} did not come, but is alive and does something else"
        else:
            how = "all ranks are alive and have come as far as this one"
        return PeerError(
            f"rank {rank} waited {waited_s:.1f} s for {what}: {how}. Look at the log of that rank, and start "
            f"again from the last checkpoint. The backend said: {first_words(cause)}",
            ranks,
            is_diagnosed=True,
        )

    def stopped(self) -> tuple[int, ...]:
        """Return the ranks that were killed or stopped, after a look at all heartbeats."""
        found = self._in_time(self._state.diagnose)
        return () if found is None else found.stopped

    def root_cause(self) -> tuple[int, ...]:
        """Return the ranks that were recorded as the root cause, if there are any."""
        return self._in_time(lambda: self._state.read_root_cause(self._state.connect())) or ()

    def record_root_cause(self, ranks: Sequence[int]) -> None:
        """Record ranks as the root cause. The first writer wins."""
        self._in_time(lambda: self._state.write_root_cause(self._state.connect(), ranks))

    def close(self) -> None:
        """Stop, and deregister this rank: the others do not miss it."""
        self._state.stop.set()
        self._thread.join(2.0)  # the store may not answer any more

    def _in_time(self, ask: Callable[[], Any]) -> Any:
        """Return what ``ask`` returns, or None if it fails or takes too long: the store may be stopped."""
        found: list[Any] = []

        def run() -> None:
            with suppress(Exception):
                found.append(ask())

        thread = threading.Thread(target=run, name="samo-ask-store", daemon=True)
        thread.start()
        thread.join(self._state.pause_s + 2.0)
        return found[0] if found else None


class _Diagnosis(NamedTuple):
    stopped: tuple[int, ...] = ()
    late: tuple[int, ...] = ()


class _State:
    """What the thread works on."""

    def __init__(
        self, store: Any, key: str, rank: int, num_ranks: int, timeout_s: float, interval_s: float
    ) -> None:
        self.rank, self.num_ranks, self.timeout_s = rank, num_ranks, timeout_s
        self.pause_s = max(3 * interval_s, 1.0)
        self.stop = threading.Event()
        self.collectives = 0
        self._store, self._key, self._interval_s = store, key, interval_s

    def run(self, on_lost: OnLost | None) -> None:
        """Beat, and watch the next rank, until this one leaves."""
        store, count = self.connect(), 0
        watched, beats = (self.rank + 1) % self.num_ranks, -1
        seen_s = answered_s = time.monotonic()
        lost: tuple[tuple[int, ...], float, float] | None = None  # ranks, last sign, heard of it
        while not self.stop.is_set():
            count += 1
            try:
                store.set(f"{self._key}/heartbeat/{self.rank}", f"{count} {self.collectives}")
                found, _ = self._read(store, watched)
                now_s = answered_s = time.monotonic()
                if found != beats:
                    beats, seen_s = found, now_s
                if store.check([f"{self._key}/left/{watched}"]):
                    watched, beats, seen_s = (watched + 1) % self.num_ranks, -1, now_s
                elif now_s - seen_s >= self.timeout_s and watched != self.rank:
                    self.write_root_cause(store, [watched])
                cause = self.read_root_cause(store)
                if cause and lost is None:
                    lost = cause, seen_s if watched in cause else now_s, now_s
            except RuntimeError:
                now_s = time.monotonic()
                if now_s - answered_s >= self.timeout_s and lost is None:
                    lost = (), answered_s, now_s
            if lost is not None and now_s - lost[2] >= PATIENCE_S and on_lost is not None:
                on_lost(lost[0], now_s - lost[1])
                return
            self.stop.wait(self._interval_s)
        with suppress(RuntimeError):
            store.set(f"{self._key}/left/{self.rank}", "")

    def diagnose(self) -> _Diagnosis:
        """Compare two readings of all heartbeats; record ranks that stopped as the root cause."""
        store = self.connect()
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        before = {rank: self._read(store, rank)[0] for rank in others}
        time.sleep(self.pause_s)
        cause = tuple(rank for rank in self.read_root_cause(store) if rank != self.rank)
        if cause:  # ranks that gave up because of it have stopped too
            return _Diagnosis(stopped=cause)
        after = {rank: self._read(store, rank) for rank in others}
        stopped = tuple(rank for rank in others if before[rank] == after[rank][0])
        if stopped:
            self.write_root_cause(store, stopped)
        return _Diagnosis(stopped, tuple(r for r in others if after[r][1] < self.collectives))

    def read_root_cause(self, store: Any) -> tuple[int, ...]:
        name = f"{self._key}/root_cause"
        return tuple(map(int, store.get(name).decode().split(","))) if store.check([name]) else ()

    def write_root_cause(self, store: Any, ranks: Sequence[int]) -> None:
        store.compare_set(f"{self._key}/root_cause", "", ",".join(map(str, ranks)))

    def connect(self) -> Any:
        """Return a connection that no other thread waits on."""
        return self._store.clone() if hasattr(self._store, "clone") else self._store

    def _read(self, store: Any, rank: int) -> tuple[int, int]:
        """Return the beats and the collectives of a rank."""
        name = f"{self._key}/heartbeat/{rank}"
        if not store.check([name]):
            return 0, 0
        beats, collectives = store.get(name).decode().split()
        return int(beats), int(collectives)


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as a sentence names them.

    Example:
        >>> from samo.distributed.watchdog import listed
        >>> listed((3,)), listed((0, 2))
        ('rank 3', 'ranks 0, 2')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
