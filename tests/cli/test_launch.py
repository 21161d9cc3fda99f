"""samo launch and torchrun: ranks that end together, whatever ends one of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from samo.cli.commands import Launch
from samo.cli.launch import run as launch
from samo.cli.main import main, parse
from samo.errors import ConfigError
from samo.train.launch_env import RESTARTS, command_line, restarted_dir, resume_command
from tests.train.test_many_ranks import text

__all__ = ["text"]  # the fixture

FLAGS = (
    "--batch-size 4 --num-layers 2 --width 32 --num-heads 2 --context 32 --log-every 1 "
    "--eval-every 1000 --eval-batches 1 --dense-steps 2 --save-every 3 --sample-tokens 0 "
    "--timeout-s 8 --device cpu"
)
TIMEOUT_S = 8
SLOW = pytest.mark.slow


def children(pid: int) -> dict[int, int]:
    """Return the ranks among the children of a process, to their process numbers."""
    found: dict[int, int] = {}
    try:
        numbers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return found  # it has ended
    for number in numbers:
        with contextlib.suppress(OSError):
            entries = Path(f"/proc/{number}/environ").read_bytes().decode().split("\0")
            ranks = [entry for entry in entries if entry.startswith("RANK=")]
            found.update({int(rank.removeprefix("RANK=")): int(number) for rank in ranks})
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
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


def listening(pid: int) -> set[str]:
    """Return the addresses on which a process listens, in hexadecimal."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(fields[1].partition(":")[0])
    return found


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
        for pid in (process.pid, *ranks.values()) if is_ours else ():
            assert listening(pid) <= {"0100007F"}  # 127.0.0.1
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_ranks": 0}, r"--num-ranks must be 1 or more .* got 0"),
        ({"command": ("bench",)}, "samo launch can start train only: samo launch -n 4 train"),
        ({"command": ()}, "samo launch can start train only"),
        ({"command": ("train", "a.txt", "--steps", "0")}, "steps must be 1 or more"),
    ],
)
def test_a_launch_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(Launch(**{"command": ("train", "a.txt"), **settings}))


@pytest.mark.parametrize(
    ("codes", "code", "message"),
    [
        ({1: 2, 0: -15}, 2, ""),  # wrong usage, which rank 0 has reported
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
