"""The watchdog: a rank that is stopped, late or silent is named by the others, in time."""

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from samo.distributed import watchdog as watching
from samo.distributed.watchdog import Watchdog


class Silenced(Watchdog):
    """A watchdog whose process can die without a word."""

    def die(self) -> None:
        self._stop.set()
        self._key = "another"


class Raising:
    """A store whose connection was closed."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("connection reset")


class Hanging:
    """A store whose process was stopped."""

    def __getattr__(self, name: str) -> Any:
        time.sleep(60)


def test_a_rank_that_is_late_or_has_stopped_is_named_and_without_one_none() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    ours, theirs = (Silenced(store, rank, 2, timeout_s=9, interval_s=0.1) for rank in range(2))
    ours._pause_s = 0.5  # type: ignore[misc]
    for happens, ranks, text in (
        (lambda: None, (), "all ranks are alive and have come as far as this one"),
        (ours.count_collective, (1,), "rank 1 did not join, but is alive and does something else"),
        (theirs.die, (1,), "rank 1 stopped (no heartbeat for 0.5 s)"),
    ):
        happens()
        error = ours.error("the sum", 1.5, RuntimeError("wrong size\nat line 3"))
        assert (error.ranks, error.is_diagnosed) == (ranks, True)
        assert str(error).startswith(f"rank 0 waited 1.5 s for the sum: {text}. See the log of")
        assert str(error).endswith("The backend said: wrong size")
    ours.close()


@pytest.mark.parametrize(
    ("kind", "is_agent", "ranks", "text"),
    [
        (Raising, True, (), "the launcher's store does not answer"),
        (Hanging, False, (0,), "rank 0, which holds the store of the ranks, does not answer"),
    ],
)
def test_a_store_that_does_not_answer_is_not_waited_for(
    kind: Any, is_agent: bool, ranks: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watchdog, "_run", lambda self: None)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(is_agent))
    error = Watchdog(kind(), 1, 2, timeout_s=9).error("the sum", 1.5, RuntimeError())
    assert error.ranks == ranks
    assert text in str(error)


def test_a_silent_rank_is_the_root_cause_and_one_that_has_left_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "PATIENCE_S", 0.1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    lost: dict[int, tuple[tuple[int, ...], float]] = {}

    def watch(rank: int) -> Silenced:
        note = lambda *found: lost.update({rank: found})  # noqa: E731
        return Silenced(store, rank, 4, timeout_s=0.5, interval_s=0.05, on_lost=note)

    first, second, third, fourth = map(watch, range(4))
    fourth.close()
    time.sleep(0.8)
    assert not lost
    second.die()
    deadline = time.monotonic() + 10
    while len(lost) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert {rank: ranks for rank, (ranks, _) in lost.items()} == {0: (1,), 2: (1,)}
    assert lost[0][1] >= 0.5
    third.record_root_cause((0,))  # which has left because of rank 1
    assert first.root_cause() == third.root_cause() == (1,)
    assert third.stopped() == third.stopped((1,)) == (1,)
    first.close()
    third.close()


def test_a_store_that_does_not_answer_ends_the_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PATIENCE_S", 0.1)
    store, lost = dist.HashStore(), threading.Event()  # type: ignore[attr-defined]
    watchdog = Watchdog(
        store, 0, 1, timeout_s=0.3, interval_s=0.05, on_lost=lambda *found: lost.set()
    )
    assert not lost.wait(0.5)
    monkeypatch.setattr(watchdog, "_read", lambda *args: Raising().get)
    assert lost.wait(10)
