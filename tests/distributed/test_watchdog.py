"""The watchdog: a rank that is killed, stopped, late or silent is named by the others, in time."""

import datetime
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import samo
from samo.distributed import watchdog as watching
from samo.distributed.watchdog import Watchdog
from tests.ranks import run_ranks

TIMEOUT_S = 1.0
HEARTBEAT_S = 0.2


class Group:
    """All ranks, which sum a tensor and name the one that does not come."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
        store = _get_default_store()
        self._watchdog = Watchdog(store, rank, num_ranks, timeout_s=60, interval_s=HEARTBEAT_S)

    def all_reduce(self) -> None:
        self._watchdog.count_collective()
        started = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1000), group=self._group)
        except RuntimeError as error:
            raise self._watchdog.error("the sum", time.monotonic() - started, error) from error


def reduce_until_a_rank_fails(
    rank: int, num_ranks: int, victim: int, how: int, after_s: float
) -> tuple[float, tuple[int, ...], str]:
    group = Group(rank, num_ranks)
    if rank == victim:  # by a timer, whatever the rank does then
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), how))
        signal.setitimer(signal.ITIMER_REAL, after_s)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        started = time.monotonic()
        try:
            group.all_reduce()
        except samo.PeerError as error:
            return time.monotonic() - started, error.ranks, str(error)
    raise AssertionError("no rank failed")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.environ.get("SAMO_TEST_FALLS", "2"))))
def test_a_rank_that_fails_at_a_random_moment_is_named_by_all_others(number: int) -> None:
    """More of them: SAMO_TEST_FALLS=100."""
    how = (signal.SIGKILL, signal.SIGSTOP)[number % 2]
    victim, after_s = random.randrange(3), random.uniform(0.01, 0.5)  # of a new seed in every run
    results = run_ranks(
        3, reduce_until_a_rank_fails, victim, how, after_s, lost={victim}, timeout_s=30
    )
    for rank, result in enumerate(results):
        if rank != victim:
            took_s, ranks, message = result
            assert took_s < TIMEOUT_S + 4
            assert ranks == (victim,), message
            assert f"rank {victim} stopped (no heartbeat for 1 s)" in message
            assert f"rank {rank} waited" in message
            assert "restart from the last checkpoint" in message


def come_late(rank: int, num_ranks: int) -> tuple[tuple[int, ...], str]:
    group = Group(rank, num_ranks)
    if rank == 1:
        time.sleep(TIMEOUT_S + 3)
    with pytest.raises(samo.PeerError) as found:
        group.all_reduce()
    return found.value.ranks, str(found.value)


@pytest.mark.slow
def test_a_rank_that_is_alive_but_does_not_come_is_named() -> None:
    ranks, message = run_ranks(2, come_late, lost={1})[0]
    assert ranks == (1,)
    assert "rank 1 did not join, but is alive" in message
    assert "s for the sum" in message


class Raising:
    """A store whose connection was closed."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("connection reset")


class Hanging:
    """A store whose process was stopped."""

    def __getattr__(self, name: str) -> Any:
        time.sleep(60)


def test_without_a_failed_rank_none_is_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    ours, theirs = (Watchdog(store, rank, 2, timeout_s=9, interval_s=0.1) for rank in range(2))
    error = ours.error("the sum", 1.5, RuntimeError("wrong size\nat line 3"))
    assert (error.ranks, error.is_diagnosed) == ((), True)
    start = "rank 0 waited 1.5 s for the sum: all ranks are alive and have come"
    assert str(error).startswith(start)
    assert str(error).endswith("The backend said: wrong size")
    ours.close()
    theirs.close()


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


class Silenced(Watchdog):
    """A watchdog whose process can die without a word."""

    def die(self) -> None:
        self._stop.set()
        self._key = "another"


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
