"""Watchdog: find the rank that failed, and end the ranks that wait for it.

Each rank has one thread. It writes a heartbeat to the store of the ranks, reads that of the next
rank in a ring, and looks for a root cause that some rank has recorded:

    heartbeat/R   beats and collectives of rank R so far
    left/R        rank R has ended its run and is not missed
    root_cause    the ranks that failed; the first writer wins

A backend does not say for which rank it waited. So, when a collective fails, `Watchdog.error` reads
all heartbeats twice, a few beats apart. A rank whose count does not change was killed or stopped; a
rank that beats but has started fewer collectives is late.

A rank whose heartbeat stops for ``timeout_s`` becomes the root cause too. A process that has not
exited a few seconds after that is ended: a thread blocked in a backend cannot be interrupted.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from samo.distributed.store import in_time, own_connection
from samo.errors import PeerError, first_words

HEARTBEAT_S: Final = 0.5
"""Seconds between heartbeats; a rank without one for three of them has failed."""
PATIENCE_S: Final = 5.0
"""Seconds for a rank to report and exit by itself after a root cause was recorded."""

Ranks = tuple[int, ...]
OnLost = Callable[[Ranks, float], None]
"""Ends a process that waits for failed ranks; called with them, or () if the store does not answer,
and with the seconds since their last sign of life."""


class Watchdog:
    """Heartbeats of this rank in a store that all ranks share, and what those of others tell.

    A process that does not exit by itself is ended by ``on_lost``, if it is given.
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
        self._store, self._key, self._rank, self._num_ranks = store, key, rank, num_ranks
        self._timeout_s, self._interval_s, self._on_lost = timeout_s, interval_s, on_lost
        self._pause_s: Final = max(3 * interval_s, 1.0)
        self._collectives = 0
        self._stop: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="samo-watchdog", daemon=True)
        self._thread.start()

    def count_collective(self) -> None:
        """Count a collective that this rank starts."""
        self._collectives += 1

    def error(self, what: str, waited_s: float, cause: BaseException) -> PeerError:
        """Return the error of a collective that failed, with the ranks at fault."""
        found: tuple[Ranks, Ranks] | None = self._in_time(self._diagnose)
        stopped, late = found or ((), ())
        ranks, how = stopped or late, "all ranks are alive and have come as far as this one"
        if stopped:
            how = f"{listed(ranks)} stopped (no heartbeat for {self._pause_s:g} s)"
        elif late:
            how = f"{listed(ranks)} did not join, but is alive and does something else"
        elif found is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            how = "the launcher's store does not answer, so the rank at fault is unknown"
        elif found is None:
            ranks, how = (0,), "rank 0, which holds the store of the ranks, does not answer"
        return PeerError(
            f"rank {self._rank} waited {waited_s:.1f} s for {what}: {how}. See the log of that "
            f"rank, and restart from the last checkpoint. The backend said: {first_words(cause)}",
            ranks,
            is_diagnosed=True,
        )

    def stopped(self, ranks: Ranks | None = None) -> Ranks:
        """Return the ranks, of these or of all, that were killed or stopped."""
        found: tuple[Ranks, Ranks] | None = self._in_time(lambda s: self._diagnose(s, ranks))
        return () if found is None else found[0]

    def root_cause(self) -> Ranks:
        """Return the ranks that were recorded as the root cause, if there are any."""
        return self._in_time(self._read_root_cause) or ()

    def record_root_cause(self, ranks: Sequence[int]) -> None:
        """Record ranks as the root cause. The first writer wins."""
        self._in_time(lambda store: self._write_root_cause(store, ranks))

    def close(self) -> None:
        """Stop, and deregister this rank: the others do not miss it."""
        self._stop.set()
        self._thread.join(2.0)  # the store may not answer any more

    def _in_time(self, ask: Callable[[Any], Any]) -> Any:
        """Return what ``ask`` says of the store, or None if it fails or takes too long."""
        return in_time(lambda: ask(own_connection(self._store)), self._pause_s + 2.0)

    def _run(self) -> None:
        """Beat, and watch the next rank, until this one leaves."""
        store, count = own_connection(self._store), 0
        watched, beats = (self._rank + 1) % self._num_ranks, -1
        seen_s = answered_s = time.monotonic()
        lost: tuple[Ranks, float, float] | None = None  # ranks, last sign, heard of it
        while not self._stop.is_set():
            count += 1
            try:
                store.set(f"{self._key}/heartbeat/{self._rank}", f"{count} {self._collectives}")
                found, _ = self._read(store, watched)
                now_s = answered_s = time.monotonic()
                if found != beats:
                    beats, seen_s = found, now_s
                if store.check([f"{self._key}/left/{watched}"]):
                    watched, beats, seen_s = (watched + 1) % self._num_ranks, -1, now_s
                elif now_s - seen_s >= self._timeout_s and watched != self._rank:
                    self._write_root_cause(store, [watched])
                cause = self._read_root_cause(store)
                if cause and lost is None:
                    lost = cause, seen_s if watched in cause else now_s, now_s
            except RuntimeError:
                now_s = time.monotonic()
                if now_s - answered_s >= self._timeout_s and lost is None:
                    lost = (), answered_s, now_s
            if lost is not None and now_s - lost[2] >= PATIENCE_S and self._on_lost is not None:
                self._on_lost(lost[0], now_s - lost[1])
                return
            self._stop.wait(self._interval_s)
        with suppress(RuntimeError):
            store.set(f"{self._key}/left/{self._rank}", "")

    def _diagnose(self, store: Any, ranks: Ranks | None = None) -> tuple[Ranks, Ranks]:
        """Return ranks that stopped, recorded as the root cause, and ranks that are late."""
        among = range(self._num_ranks) if ranks is None else ranks
        others = [rank for rank in among if rank != self._rank]
        before = {rank: self._read(store, rank)[0] for rank in others}
        time.sleep(self._pause_s)
        cause = tuple(rank for rank in self._read_root_cause(store) if rank != self._rank)
        if cause:  # ranks that gave up because of it have stopped too
            return cause, ()
        after = {rank: self._read(store, rank) for rank in others}
        stopped = tuple(rank for rank in others if before[rank] == after[rank][0])
        if stopped:
            self._write_root_cause(store, stopped)
        return stopped, tuple(rank for rank in others if after[rank][1] < self._collectives)

    def _read_root_cause(self, store: Any) -> Ranks:
        name = f"{self._key}/root_cause"
        return tuple(map(int, store.get(name).decode().split(","))) if store.check([name]) else ()

    def _write_root_cause(self, store: Any, ranks: Sequence[int]) -> None:
        store.compare_set(f"{self._key}/root_cause", "", ",".join(map(str, ranks)))

    def _read(self, store: Any, rank: int) -> tuple[int, int]:
        """Return the beats and the collectives of a rank."""
        name = f"{self._key}/heartbeat/{rank}"
        beats, collectives = store.get(name).decode().split() if store.check([name]) else (0, 0)
        return int(beats), int(collectives)


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as a sentence names them: "rank 3", "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
