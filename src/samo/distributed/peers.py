"""Who is alive: every rank writes heartbeats to the store that the ranks found each other with.

A backend says at best that a connection closed or that it waited too long, not for whom. So, where an
operation fails, a rank reads all heartbeats twice, a few beats apart. A rank whose count stands still was
killed or stopped; one that beats but has begun fewer operations than this one has not come yet. The first
to find out writes its verdict to the store, since ranks that give up stop beating too.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from samo.errors import PeerError, first_words

__all__ = []

_BEATS: Final = 3
_AT_LEAST_S: Final = 1.0
"""So many beats, and so long, lie between the two readings; a living rank surely makes one of them."""


class _Beat(NamedTuple):
    beats: int
    operations: int


class Peers:
    """The heartbeats of the ranks of a group.

    Args:
        store: A torch.distributed store.
        key: What sets this group's entries apart in the store.
        rank: This rank; ``ranks`` lists all of the group.
        ranks: Global ranks of the group.
        interval_s: Seconds from one beat to the next.
    """

    def __init__(
        self, store: Any, key: str, rank: int, ranks: Sequence[int], interval_s: float
    ) -> None:
        self.operations = _Counter()
        self._key: Final = key
        self._rank: Final = rank
        self._ranks: Final = tuple(ranks)
        self._pause_s: Final = max(_BEATS * interval_s, _AT_LEAST_S)
        self._store: Final = store
        self._stop: Final = threading.Event()
        if len(ranks) > 1:
            threading.Thread(
                target=_beat,
                args=(
                    _own_connection(self._store),
                    self._name(rank),
                    self.operations,
                    interval_s,
                    self._stop,
                ),
                name="samo-heartbeat",
                daemon=True,
            ).start()
        weakref.finalize(self, self._stop.set)  # the thread knows nothing of this object

    def error(self, what: str, waited_s: float, cause: BaseException) -> PeerError:
        """Return the error of an operation that failed, with the ranks that are to blame."""
        found = _in_time(self._find, self._pause_s + 2.0)
        if found is not None and found[0]:
            ranks, how = found
        elif found is not None:
            ranks, how = (), "all ranks are alive and have come as far as this one"
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            ranks, how = (), "the launcher's store does not answer, so nobody can be named"
        else:
            ranks, how = (0,), "rank 0, which holds the ranks' common store, does not answer"
        return PeerError(
            f"rank {self._rank} waited {waited_s:.1f} s for {what}: {how}. Look at the log of that "
            f"rank, and start again from the last checkpoint. The backend said: {first_words(cause)}",
            ranks,
        )

    def stopped(self) -> tuple[tuple[int, ...], str] | None:
        """Return the ranks that were killed or stopped, and how that is known; None if all are alive."""
        found = _in_time(self._find, self._pause_s + 2.0)
        return found if found is not None and " stopped (" in found[1] else None

    def connection(self) -> Any:
        """Return a connection to the store that no other thread waits on."""
        return _own_connection(self._store)

    def beats(self, store: Any, rank: int) -> int:
        """Return how often a rank has beaten; 0 if it has not come yet."""
        return self._read(store, rank).beats

    def close(self) -> None:
        """Beat no more."""
        self._stop.set()

    def _name(self, rank: int) -> str:
        return f"{self._key}/beat/{rank}"

    def _find(self) -> tuple[tuple[int, ...], str]:
        store = _own_connection(self._store)
        verdict = f"{self._key}/verdict"
        before = [self._read(store, rank) for rank in self._ranks]
        time.sleep(self._pause_s)
        if store.check([verdict]):
            listed, _, how = store.get(verdict).decode().partition(" ")
            return tuple(map(int, listed.split(","))), how
        after = [self._read(store, rank) for rank in self._ranks]
        others = [i for i, rank in enumerate(self._ranks) if rank != self._rank]
        stopped = tuple(self._ranks[i] for i in others if before[i].beats == after[i].beats)
        if stopped:
            how = f"{_listed(stopped)} stopped (no heartbeat for {self._pause_s:g} s)"
            store.set(verdict, f"{','.join(map(str, stopped))} {how}")
            return stopped, how
        here = int(self.operations)
        late = tuple(self._ranks[i] for i in others if after[i].operations < here)
        return late, f"{_listed(late)} did not come, but is alive and does something else"

    def _read(self, store: Any, rank: int) -> _Beat:
        name = self._name(rank)
        if not store.check([name]):
            return _Beat(0, 0)
        count, operations = store.get(name).decode().split()
        return _Beat(int(count), int(operations))


class _Counter:
    """A number that one thread raises and another reads."""

    def __init__(self) -> None:
        self._value = 0

    def __int__(self) -> int:
        return self._value

    def add(self) -> None:
        self._value += 1


def _beat(
    store: Any, name: str, operations: _Counter, interval_s: float, stop: threading.Event
) -> None:
    count = 0
    while True:
        count += 1
        try:
            store.set(name, f"{count} {int(operations)}")
        except Exception:
            return  # the store is gone; whoever waits for an operation says so
        if stop.wait(interval_s):
            return


def _in_time(find: Callable[[], Any], seconds: float) -> Any:
    """Return what ``find`` returns, or None if it raises or takes too long: a store may be stopped too."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(find())
        except Exception:
            return

    thread = threading.Thread(target=run, name="samo-find-peers", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _own_connection(store: Any) -> Any:
    """Return a store that no other thread waits on."""
    return store.clone() if hasattr(store, "clone") else store


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
