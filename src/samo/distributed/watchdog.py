"""The last resort against a hang: a rank whose neighbour gives no sign of life for too long ends.

Operations have limits of their own, and whoever meets one says what it waited for. But some wait for two or
three limits by design, and some inside of torch for half an hour. So a thread of every rank looks after the
next one, in a ring. When that has been silent for the limit, it writes so to the store, which all of them
read. Who is not gone a little later is ended: nothing else ends a thread that waits inside of a backend.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from samo.distributed.peers import Peers

__all__ = []

PATIENCE_S: Final = 3.0
"""So long a rank may try to end by itself, and to say what it waited for, once another is given up."""

_NAMED: Final = 3
"""So many functions say where a rank waits."""


class Watch:
    """Looks after the other ranks from a thread.

    Args:
        store: A torch.distributed store.
        rank: This rank.
        num_ranks: Number of ranks; each of them makes a watch.
        timeout_s: Seconds of silence after which a rank is given up.
        interval_s: Seconds between two signs of life.
        give_up: Called with the rank that was given up, or None if the store does not answer, and the
            seconds of its silence. It ends the process.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        num_ranks: int,
        *,
        timeout_s: float,
        interval_s: float,
        give_up: Callable[[int | None, float], None],
    ) -> None:
        self.peers: Final = Peers(store, "samo/watch", rank, range(num_ranks), interval_s)
        self._rank: Final = rank
        self._num_ranks: Final = num_ranks
        self._timeout_s: Final = timeout_s
        self._interval_s: Final = interval_s
        self._give_up: Final = give_up
        self._stop: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="samo-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the others, who do not miss this rank from now on."""
        self._stop.set()
        self._thread.join(2.0)  # the store may be gone
        self.peers.close()

    def blame(self, rank: int) -> None:
        """Tell the others for whose sake this rank ends; who was blamed first, stays blamed."""
        store = self.peers.connection()
        if not store.check(["samo/watch/blamed"]):
            store.set("samo/watch/blamed", str(rank))

    def blamed(self) -> int | None:
        """Return the rank that another has blamed, if any has."""
        store = self.peers.connection()
        is_known = store.check(["samo/watch/blamed"])
        return int(store.get("samo/watch/blamed")) if is_known else None

    def _run(self) -> None:
        course = _Course(self._rank, self._num_ranks, self._timeout_s)
        store = self.peers.connection()
        while not self._stop.wait(self._interval_s):
            try:
                self._look(store, course)
            except RuntimeError:
                course.is_deaf(time.monotonic())
            found = course.verdict(time.monotonic())
            if found is not None and not self._stop.is_set():
                self._give_up(*found)
                return
        with suppress(RuntimeError):
            store.set(f"samo/watch/left/{self._rank}", "")

    def _look(self, store: Any, course: "_Course") -> None:
        beats = self.peers.beats(store, course.next)
        has_left = store.check([f"samo/watch/left/{course.next}"])
        silent = course.see(time.monotonic(), beats, has_left=has_left)
        if silent is not None:
            store.set("samo/watch/given-up", f"{silent} {self._timeout_s}")
        if store.check(["samo/watch/given-up"]):
            listed, waited = store.get("samo/watch/given-up").decode().split()
            course.hear(time.monotonic(), int(listed), float(waited))


class _Course:
    """What a watch has seen so far, and what follows from it; knows no store and no clock."""

    def __init__(self, rank: int, num_ranks: int, timeout_s: float) -> None:
        self.next = (rank + 1) % num_ranks
        self._num_ranks: Final = num_ranks
        self._timeout_s: Final = timeout_s
        self._beats = -1
        self._seen_s: float | None = None
        self._answered_s: float | None = None
        self._given_up: tuple[int | None, float, float] | None = None

    def see(self, now_s: float, beats: int, *, has_left: bool) -> int | None:
        """Take in how often the next rank has beaten; return it if it is to be given up."""
        self._answered_s = now_s
        if self._seen_s is None or beats != self._beats:
            self._beats, self._seen_s = beats, now_s
        if has_left:
            self.next, self._seen_s = (self.next + 1) % self._num_ranks, None
            return None
        return self.next if now_s - self._seen_s >= self._timeout_s else None

    def hear(self, now_s: float, rank: int, silent_s: float) -> None:
        """Learn that a rank was given up."""
        if self._given_up is None:
            self._given_up = rank, silent_s, now_s

    def is_deaf(self, now_s: float) -> None:
        """Learn that the store did not answer."""
        if self._answered_s is None:
            self._answered_s = now_s
        if now_s - self._answered_s >= self._timeout_s:
            self.hear(now_s, -1, now_s - self._answered_s)

    def verdict(self, now_s: float) -> tuple[int | None, float] | None:
        """Return who was given up so long ago that this rank should be gone, and their silence."""
        if self._given_up is None:
            return None
        rank, silent_s, heard_s = self._given_up
        if now_s - heard_s < PATIENCE_S:
            return None
        return None if rank == -1 else rank, silent_s + now_s - heard_s


def place_in_code() -> str:
    """Return what the main thread does: the innermost functions of samo that it is in.

    Example:
        >>> from samo.distributed.watchdog import place_in_code
        >>> isinstance(place_in_code(), str)
        True
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    names: list[str] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if (
            module.startswith("samo.") and module != Peers.__module__
        ):  # which only asks who is there
            names.insert(0, f"{module}.{frame.f_code.co_name}")
        frame = frame.f_back
    return " > ".join(names[-_NAMED:]) or "something in another library"
