"""A rank that is killed, stopped or late is named by the others, in time."""

import datetime
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import samo
from samo.distributed.peers import Peers
from tests.ranks import run_ranks

TIMEOUT_S = 1.0
HEARTBEAT_S = 0.2


class Group:
    """All ranks, which add up a tensor and name whoever does not come."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
        self._peers = Peers(_get_default_store(), "key", rank, range(num_ranks), HEARTBEAT_S)

    def all_reduce(self) -> None:
        self._peers.operations.add()
        begun = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1000), group=self._group)
        except RuntimeError as error:
            raise self._peers.error("the sum", time.monotonic() - begun, error) from error


def add_up_until_somebody_falls(
    rank: int, num_ranks: int, victim: int, how: int, after_s: float
) -> tuple[float, tuple[int, ...], str]:
    group = Group(rank, num_ranks)
    if rank == victim:  # from a thread of the system's, at whatever the rank does then
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), how))
        signal.setitimer(signal.ITIMER_REAL, after_s)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        begun = time.monotonic()
        try:
            group.all_reduce()
        except samo.PeerError as error:
            return time.monotonic() - begun, error.ranks, str(error)
    raise AssertionError("nobody fell")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_falls_is_named_by_all_others(how: signal.Signals) -> None:
    victim = random.randrange(3)  # of another seed in every run
    after_s = random.uniform(0.05, 0.3)
    results = run_ranks(
        3, add_up_until_somebody_falls, victim, how, after_s, lost={victim}, timeout_s=25
    )
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        took_s, blamed, message = result
        assert took_s < TIMEOUT_S + 4
        assert blamed == (victim,), message
        assert f"rank {victim} stopped (no heartbeat for 1 s)" in message
        assert f"rank {rank} waited" in message
        assert "start again from the last checkpoint" in message


class Deaf:
    """A store that does not answer."""

    def set(self, name: str, value: str) -> None:
        raise RuntimeError("connection reset")

    def check(self, names: list[str]) -> bool:
        raise RuntimeError("connection reset")


def test_where_nobody_stopped_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    ours, theirs = (Peers(store, "key", rank, (0, 1), HEARTBEAT_S) for rank in range(2))
    assert theirs.operations is not ours.operations
    error = ours.error("the sum", 1.5, RuntimeError("wrong size\nat line 3"))
    assert error.ranks == ()
    assert str(error).startswith(
        "rank 0 waited 1.5 s for the sum: all ranks are alive and have come"
    )
    assert str(error).endswith("The backend said: wrong size")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    error = Peers(Deaf(), "key", 0, (0, 1), HEARTBEAT_S).error("the sum", 1.5, RuntimeError())
    assert error.ranks == ()
    assert "the launcher's store does not answer" in str(error)
    assert str(error).endswith("The backend said: RuntimeError")


def come_late(rank: int, num_ranks: int) -> tuple[tuple[int, ...], str]:
    group = Group(rank, num_ranks)
    if rank == 1:
        time.sleep(TIMEOUT_S + 3)
    with pytest.raises(samo.PeerError) as found:
        group.all_reduce()
    return found.value.ranks, str(found.value)


@pytest.mark.slow
def test_a_rank_that_is_alive_but_does_not_come_is_named() -> None:
    blamed, message = run_ranks(2, come_late, lost={1})[0]
    assert blamed == (1,)
    assert "rank 1 did not come, but is alive" in message
    assert "s for the sum" in message


def leave_without_the_store(rank: int, num_ranks: int, path: str) -> tuple[int, ...]:
    """Ranks that rank 0 itself holds the store of."""
    dist.destroy_process_group()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with open(f"{path}.new", "w") as file:
            file.write(str(store.port))
        os.rename(f"{path}.new", path)
    else:
        while not os.path.exists(path):
            time.sleep(0.01)
        with open(path) as file:
            store = dist.TCPStore("127.0.0.1", int(file.read()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    group = Group(rank, num_ranks)
    group.all_reduce()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(
        samo.PeerError, match="rank 0, which holds the ranks' common store"
    ) as found:
        group.all_reduce()
    return found.value.ranks


@pytest.mark.slow
def test_a_stopped_store_is_not_waited_for(tmp_path: Path) -> None:
    results = run_ranks(2, leave_without_the_store, str(tmp_path / "port"), lost={0}, timeout_s=20)
    assert results[1] == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.environ.get("SAMO_TEST_FALLS", "1"))))
def test_ranks_fall_at_random_moments(number: int) -> None:
    """More of them: SAMO_TEST_FALLS=100."""
    draw = random.Random(number)
    victim, after_s = draw.randrange(4), draw.uniform(0.01, 0.6)
    how = draw.choice([signal.SIGKILL, signal.SIGSTOP])
    results = run_ranks(
        4, add_up_until_somebody_falls, victim, how, after_s, lost={victim}, timeout_s=30
    )
    assert {result[1] for result in results if result is not None} == {(victim,)}
