"""samo launch and torchrun: ranks that end together, whatever ends one of them."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from samo.cli.commands import Launch
from samo.cli.launch import run as launch
from samo.cli.main import main, parse
from samo.errors import ConfigError, PeerError
from samo.train.launch_env import (
    RESTARTS,
    command_line,
    end_with_launcher,
    restarted_dir,
    resume_command,
)

FLAGS = (
    "--batch-size 4 --num-layers 2 --width 32 --num-heads 2 --context 32 --log-every 1 "
    "--eval-every 1000 --eval-batches 1 --dense-steps 2 --save-every 3 --sample-tokens 0 "
    "--timeout-s 8 --device cpu"
)
TIMEOUT_S = 8
SLOW = pytest.mark.slow


def children(pid: int) -> dict[int, int]:
    """Return the ranks among the children of a process, to their process numbers."""
    found = {}
    with contextlib.suppress(psutil.Error):  # it has ended
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):
                if "RANK" in (environment := child.environ()):
                    found[int(environment["RANK"])] = child.pid
    return found


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def started(*command: str, cwd: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"},
    )
    try:
        yield process
    finally:
        for pid in (*children(process.pid).values(), process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_for(process: "subprocess.Popen[str]", is_done: Callable[[], bool]) -> dict[int, int]:
    """Wait for something that the ranks do, and return the ranks."""
    deadline = time.monotonic() + 120
    while not is_done():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return children(process.pid)


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the addresses and ports on which a process listens."""
    found = psutil.Process(pid).net_connections("inet")
    return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        pytest.param("samo launch -n 2 --logs logs --max-restarts 1", "--pipe 2", marks=SLOW),
        pytest.param(
            "torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 -m samo",
            "--data 2",
            marks=pytest.mark.long,
        ),
    ],
)
def test_all_ranks_restart_from_the_last_checkpoint_when_one_is_killed(
    tmp_path: Path, text: Path, launcher: str, flags: str
) -> None:
    run = tmp_path / "runs" / "notes"
    command = f"{launcher} train notes.txt {flags} --steps 40 {FLAGS}"
    is_ours = launcher.startswith("samo")
    with started(*command.split(), cwd=tmp_path) as process:
        manifest = run / "checkpoints" / "last" / "manifest.json"
        ranks = wait_for(process, manifest.exists)
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[1], signal.SIGKILL)
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 0, said
    if is_ours:
        assert "samo: rank 1 (stage 1 of 2) was killed by signal 9, the first rank to exit" in said
        assert "samo: all ranks restart from the last checkpoint (restart 1 of 1)" in said
        assert "Traceback" not in said
        assert {path.parent.name for path in (tmp_path / "logs").rglob("std*.log")} == {"1"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["notes"]
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] >= 2 for line in found if line["event"] == "resume"] == [True]
    assert [e["step"] for e in found if e["event"] == "step"] == list(range(1, 41))


@pytest.mark.slow
def test_a_mistake_of_the_command_is_told_once_and_no_rank_is_blamed(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("It rains.")
    for name, why in (("none.txt", "does not exist"), ("short.txt", "--context")):
        command = f"samo launch -n 2 --max-restarts 1 train {name} --steps 4 {FLAGS}"
        with started(*command.split(), cwd=tmp_path) as process:
            said = process.communicate(timeout=120)[0]
        assert process.returncode == 2, said
        (line,) = said.splitlines()
        assert line.startswith("samo: ")
        assert why in line


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.slow
def test_a_launch_lets_nobody_in_and_no_rank_outlives_it(tmp_path: Path, text: Path) -> None:
    manifest = tmp_path / "run" / "checkpoints" / "last" / "manifest.json"
    command = f"samo launch -n 2 train notes.txt --out run --pipe 2 --steps 100000 {FLAGS}"
    with started(*command.split(), cwd=tmp_path) as process:
        ranks = wait_for(process, manifest.exists)
        found = {address for pid in (process.pid, *ranks.values()) for address in listening(pid)}
        assert {host for host, _ in found} == {"127.0.0.1"}
        # torch's c10d rendezvous would unpickle this key every few seconds.
        attack = b64encode(pickle.dumps(Touch(tmp_path / "unpickled")))
        ports = [port for _, port in listening(process.pid)]
        assert len(ports) == 1
        store = dist.TCPStore("127.0.0.1", ports[0], is_master=False, wait_for_workers=False)
        for key in (f"torch.rendezvous.samo-{process.pid}", "torch.rendezvous."):
            store.set(key, attack)
        size = manifest.stat().st_mtime_ns
        wait_for(process, lambda: manifest.stat().st_mtime_ns > size)  # it trains on
        time.sleep(6)
        assert not (tmp_path / "unpickled").exists()
        process.kill()
        process.wait()
        deadline = time.monotonic() + 5
        while not all(map(is_gone, ranks.values())):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_rank_whose_launcher_has_ended_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with mock.patch("ctypes.CDLL") as library:
        end_with_launcher()
        assert not library.called
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"samo-{os.getppid()}")
        end_with_launcher()
        assert library().prctl.call_args[0] == (1, signal.SIGKILL)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "samo-1000000000")
        with pytest.raises(PeerError, match="the launcher has ended before this rank was ready"):
            end_with_launcher()


@pytest.mark.long
def test_a_stopped_rank_ends_all_in_time_and_ctrl_c_saves(tmp_path: Path, text: Path) -> None:
    manifest = tmp_path / "run" / "checkpoints" / "last" / "manifest.json"
    command = f"samo launch -n 2 train notes.txt --out run --pipe 2 --steps 100000 {FLAGS}"
    with started(*command.split(), cwd=tmp_path) as process:
        ranks = wait_for(process, manifest.exists)
        os.kill(ranks[1], signal.SIGSTOP)
        began = time.monotonic()
        said = process.communicate(timeout=120)[0]
        # The watchdog, its patience, and 30 s that torch waits before it kills.
        assert time.monotonic() - began < TIMEOUT_S + 5 + 30 + 15
        assert process.returncode == 1, said
        assert "rank 1 (stage 1 of 2)" in said or "rank 1 is stage 1 of 2" in said
        assert "Traceback" not in said
        assert all(map(is_gone, ranks.values()))
    metrics = tmp_path / "run" / "metrics.jsonl"
    with started("samo", "launch", "-n", "2", "train", "--resume", "run", cwd=tmp_path) as process:
        ranks = wait_for(
            process, lambda: '"event": "step"' in metrics.read_text().partition('"resume"')[2]
        )
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 130, said
        assert "and saved. To resume:\n  samo launch -n 2 train --resume run\n" in said
        assert all(map(is_gone, ranks.values()))


def test_flags_after_train_are_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    command = parse(["launch", "-n", "4", "train", "a.txt", "--out", "9"])
    assert isinstance(command, Launch)
    assert (command.num_ranks, command.command) == (4, ("train", "a.txt", "--out", "9"))
    for flag, code in (("--frobnicate", 2), ("--help", 0)):
        with pytest.raises(SystemExit) as ended:
            main(["launch", "-n", "2", "train", "a.txt", flag])
        assert ended.value.code == code
        shown = "".join(capfd.readouterr())
        assert shown.count("Unrecognized options: --frobnicate") == (code == 2)
        assert shown.count("usage: samo train") == (code == 0)
    for flags in (["-n", "2"], ["--max-restarts=2"]):
        with pytest.raises(ConfigError, match=r"(-n|--max-restarts) goes before the word train"):
            parse(["launch", "train", "a.txt", *flags])


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("-n 0 train a.txt", "--num-ranks must be 1 or more, got 0"),
        ("bench", "samo launch can start train and finetune only: samo launch -n 4 train"),
        ("", "samo launch can start train and finetune only"),
        ("-n 2 notes.txt train a.txt", "unexpected 'notes.txt' before train"),
        ("train a.txt --steps 0", "steps must be 1 or more"),
        ("finetune m --data a --sparsity 0", "0 prunes nothing"),
    ],
)
def test_a_launch_that_cannot_work_is_refused(typed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(parse(["launch", *typed.split()]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codes", "code", "message"),
    [
        ({1: 2, 0: -15}, 2, ""),  # wrong usage, which rank 0 has reported
        ({0: 138, 1: 138}, 138, ""),  # a signal to one of them: all have saved
        ({0: 1, 1: -9}, 137, "rank 1 (stage 1 of 2) was killed by signal 9, the first rank to ex"),
        ({0: 3, 1: -15}, 3, "rank 0 (stage 0 of 2) failed with exit code 3, the first rank to ex"),
        ({}, 130, ""),
    ],
)
def test_the_launcher_names_the_rank_that_failed(
    codes: dict[int, int],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=number, error_file="")
        for rank, number in codes.items()
    }
    error = ChildFailedError("samo", failures) if codes else SignalException("", signal.SIGINT)
    start = mock.Mock(return_value=mock.Mock(side_effect=error))
    monkeypatch.setattr("samo.cli.launch.elastic_launch", start)
    monkeypatch.setattr("logging.disable", lambda level: None)
    for name in (
        "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        RESTARTS,
    ):
        monkeypatch.setenv(name, "1")  # which are set for the ranks
    words = ("train", "a.txt", "--pipe", "2", "--device", "cpu")
    assert launch(Launch(command=words, num_ranks=2, max_restarts=1)) == code
    config = start.call_args[0][0]
    assert (config.nproc_per_node, config.max_restarts) == (2, 0)
    assert start.call_count == (2 if message else 1)
    said = capsys.readouterr().err
    assert said.startswith(f"samo: {message}") if message else said == ""


def test_a_restart_finds_the_folder_of_its_own_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    for name, launcher in (("notes", "6/1"), ("notes-2", f"7/{os.getppid()}")):
        folder = tmp_path / name
        folder.mkdir()
        record = {"format": "samo-run", "version": 1, "launcher": launcher}
        (folder / "run.json").write_text(json.dumps(record))
    assert restarted_dir(None, tmp_path, "notes") == tmp_path / "notes-2"
    assert restarted_dir(tmp_path / "notes", tmp_path, "notes") is None
    assert restarted_dir(tmp_path / "none", tmp_path, "notes") is None


@pytest.mark.parametrize(
    ("launch", "ranks", "start", "note"),
    [
        (None, "1", "samo", ""),
        ("samo-77", "2", "samo launch -n 2", ""),
        ("none", "8", "torchrun ... -m samo", "   # on 8 ranks"),
    ],
)
def test_a_run_is_named_as_it_was_launched(
    launch: str | None, ranks: str, start: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/lib/samo/__main__.py", "train", "a.txt"])
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launch is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
    assert command_line() == f"{start} train a.txt"
    assert resume_command(Path("runs/a")) == f"{start} train --resume runs/a{note}"
