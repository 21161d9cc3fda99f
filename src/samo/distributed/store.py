"""The store of the ranks: keys that all of them find, and answers that are not waited for."""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")

_counts: Final[Counter[str]] = Counter()
"""How often ranks have asked for a key: each counts for itself, and all count alike."""


def ranks_store() -> Any:
    """Return the store through which the ranks of torch.distributed have met."""
    return dist.group.WORLD.get_group_store()  # type: ignore[union-attr]


def own_connection(store: Any) -> Any:
    """Return a connection to a store that no other thread waits on."""
    return store.clone() if hasattr(store, "clone") else store


def next_key(what: str, ranks: Sequence[int]) -> str:
    """Return a key that these ranks alone find, each time another one."""
    key = f"{what}/{hashlib.sha256(str(tuple(ranks)).encode()).hexdigest()[:16]}"
    _counts[key] += 1
    return f"{key}/{_counts[key]}"


def in_time(ask: Callable[[], Answer], timeout_s: float) -> Answer | None:
    """Return the answer of a store, or None if it fails or does not come.

    torch would wait for ever for a store whose process is stopped.
    """
    found: list[Answer] = []

    def run() -> None:
        with suppress(Exception):
            found.append(ask())

    thread = threading.Thread(target=run, name="samo-ask-store", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return found[0] if found else None
