"""A watch gives up whoever is silent, in time, and nobody else; what the launcher makes of it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from samo.cli.agent import Fall, end
from samo.distributed import watchdog as watching
from samo.distributed.watchdog import PATIENCE_S, Watch, _Course, place_in_code
from samo.errors import PeerError
from samo.train import ranks as training_ranks
from samo.train.config_mesh import MeshConfig
from samo.train.ranks import Ranks
from tests.ranks import _processes, run_ranks


def test_a_rank_is_given_up_after_the_limit_and_this_one_ends_a_little_later() -> None:
    course = _Course(0, 3, 5.0)
    assert course.next == 1
    for second in range(4):
        assert course.see(float(second), second, has_left=False) is None  # it beats
    assert course.see(7.9, 3, has_left=False) is None
    assert course.see(8.0, 3, has_left=False) == 1
    assert course.verdict(8.0) is None
    course.hear(8.0, 1, 5.0)
    course.hear(9.0, 2, 5.0)  # a later word changes nothing
    assert course.verdict(8.0 + PATIENCE_S - 0.1) is None
    assert course.verdict(8.0 + PATIENCE_S) == (1, 5.0 + PATIENCE_S)


def test_a_rank_that_has_left_is_not_missed_and_the_one_behind_it_is_watched() -> None:
    course = _Course(1, 3, 5.0)
    assert course.see(0.0, 7, has_left=False) is None
    assert course.see(99.0, 7, has_left=True) is None
    assert course.next == 0
    assert course.see(100.0, 7, has_left=False) is None  # the silence of another is not its own
    assert course.see(105.0, 7, has_left=False) == 0


def test_a_store_that_does_not_answer_is_given_up_too() -> None:
    course = _Course(0, 2, 5.0)
    course.is_deaf(1.0)
    course.is_deaf(5.9)
    assert course.verdict(99.0) is None
    course.is_deaf(6.0)
    assert course.verdict(6.0 + PATIENCE_S) == (None, 5.0 + PATIENCE_S)


def test_the_silent_rank_is_named_to_all_and_a_closed_watch_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "PATIENCE_S", 0.1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    given_up: dict[int, Any] = {}

    def watch(rank: int) -> Watch:
        def give_up(other: int | None, silent_s: float) -> None:
            given_up[rank] = other

        return Watch(store, rank, 4, timeout_s=0.5, interval_s=0.05, give_up=give_up)

    first, second, third, fourth = map(watch, range(4))
    fourth.close()
    time.sleep(0.8)
    assert not given_up
    second.peers.close()  # rank 1 beats no more, and does not say that it leaves
    deadline = time.monotonic() + 10
    while len(given_up) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert given_up == {0: 1, 1: 1, 2: 1}  # it hears that of itself
    assert first.blamed() is None
    first.blame(1)
    third.blame(0)  # which has left since it missed rank 1
    assert third.blamed() == 1
    for one in (first, second, third):
        one.close()


def wait_for_nobody(said: str) -> None:
    """Wait for a rank that never comes."""
    watching.PATIENCE_S = 0.1  # type: ignore[misc]
    os.environ["RANK"] = "0"
    with open(said, "w") as sys.stderr:
        training_ranks._watch(dist.HashStore(), MeshConfig(pipe=2, timeout_s=0.3), 2)  # type: ignore[attr-defined]
        threading.Event().wait(60)


def test_a_process_that_waits_for_ever_ends_with_the_name_of_the_rank(tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    process = _processes.Process(target=wait_for_nobody, args=(str(said),), daemon=True)
    process.start()
    process.join(30)
    assert process.exitcode == 1
    assert said.read_text().startswith("samo: rank 0: rank 1 (stage 1 of 2) has given no sign of")
    assert "and --timeout-s is 0.3; this rank ends" in said.read_text()


def test_a_rank_that_gave_up_is_not_blamed_by_those_who_miss_it() -> None:
    ranks = Ranks()
    ranks.rank, ranks.num_stages, ranks.num_replicas = 1, 2, 2
    told: list[int] = []
    watch = SimpleNamespace(blamed=lambda: 3, blame=told.append, close=lambda: None)
    ranks._watch = watch  # type: ignore[assignment]
    with (
        pytest.raises(
            PeerError, match=r"^rank 3 fell, and because of it: .* stopped \(no"
        ) as found,
        ranks.watched(),
    ):
        raise PeerError("rank 1 waited 0.1 s for the loss: rank 0 stopped (no heartbeat)", (0,))
    assert (found.value.ranks, found.value.stage) == ((3,), 1)
    assert told == [3]
    watch.blamed = lambda: 1  # the others have given up this one: what it knows itself counts
    ranks._watch = watch  # type: ignore[assignment]
    error = PeerError("rank 0 stopped (no heartbeat)", (0,), stage=0)
    assert ranks.placed(error) is error


def test_where_a_rank_waits_is_told_by_functions_of_samo() -> None:
    seen: list[str] = []
    ranks = Ranks()

    def look() -> None:
        thread = threading.Thread(target=lambda: seen.append(place_in_code()))
        thread.start()
        thread.join()

    ranks.first("the text", look)
    where = "samo.train.ranks.first > samo.train.ranks.together"
    assert seen[0].startswith(where)


def meet_nobody(rank: int, num_ranks: int) -> tuple[tuple[int, ...], int | None, str]:
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    port = store.underlying_store.port
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0"}
    os.environ |= {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(PeerError) as found:
        Ranks.join(MeshConfig(pipe=2, timeout_s=1.0), "cpu")
    return found.value.ranks, found.value.stage, str(found.value)


def test_a_rank_that_does_not_come_to_the_start_is_named() -> None:
    (ranks, stage, message) = run_ranks(1, meet_nobody, lost={1})[0]
    assert (ranks, stage) == ((1,), 1)
    assert message.startswith(
        "the 2 ranks did not meet within 1 s: rank 1 (stage 1 of 2) did not come, or stopped. Look"
    )


# The launcher --------------------------------------------------------------------------------------


@contextmanager
def sleepers(*commands: str) -> Iterator[list["subprocess.Popen[str]"]]:
    started = [
        subprocess.Popen(["sh", "-c", command], start_new_session=True, stdout=-1, text=True)
        for command in commands
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
        yield started
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_after_a_failure_stopped_ranks_are_killed_at_once_and_others_have_some_seconds() -> None:
    deaf = "trap '' TERM; echo here; sleep 60"
    with sleepers("echo here; exit 3", "echo here; sleep 60", deaf, "echo here") as started:
        os.kill(started[1].pid, signal.SIGSTOP)
        started[3].wait()
        time.sleep(0.1)
        fall = Fall({0: 3})
        began = time.monotonic()
        end({rank: process.pid for rank, process in enumerate(started)}, None, 0.5, fall)
        assert 0.5 <= time.monotonic() - began < 5
        assert (fall.stopped, fall.stayed) == ({1: signal.SIGSTOP}, [2])
        codes = [process.wait() for process in started]
        assert codes == [3, -signal.SIGKILL, -signal.SIGKILL, 0]  # the exit code is still there


def test_after_ctrl_c_ranks_may_take_their_time() -> None:
    saving = "trap 'sleep 0.3; exit 7' INT; echo here; while :; do sleep 0.05; done"
    with sleepers(saving) as started:
        began = time.monotonic()
        end({0: started[0].pid, 1: None}, signal.SIGINT, 60)
        assert 0.3 <= time.monotonic() - began < 30
        assert started[0].wait() == 7


@pytest.mark.parametrize(
    ("fall", "said", "code"),
    [
        (Fall({0: 1, 2: -9}), "2 was killed by signal 9, the first of the ranks to fail", 137),
        (Fall({0: 1}, stopped={3: 19}), "3 was stopped by signal 19, which the others found", 137),
        (Fall({}, stopped={3: 19}, stayed=[1]), "3 was stopped by signal 19", 137),
        (Fall({1: 2, 3: 1}), "1 ended with code 2, the first of the ranks to fail", 2),
        (Fall({1: 1}, stayed=[0]), "killed, since it had not left 4 s later: 0", 1),
    ],
)
def test_the_rank_at_fault_is_named_before_those_that_missed_it(
    fall: Fall, said: str, code: int
) -> None:
    message, found = fall.blame(str)
    assert said in message
    assert found == code
