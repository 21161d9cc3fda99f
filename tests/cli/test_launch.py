"""samo launch and torchrun: ranks that end together, whatever ends one of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samo.cli import Launch, _split_launch, main, parse
from samo.cli.launch import run as launch
from samo.errors import ConfigError, PeerError
from samo.train import events
from samo.train.config import TrainConfig
from samo.train.events import Event
from samo.train.launches import restarted_folder
from samo.train.loop import train
from samo.train.typed import command_line, go_on_line
from tests.ranks import run_ranks
from tests.train.test_ranks import small, text

__all__ = ["text"]  # the fixture

SMALL = "--batch-size 4 --num-layers 2 --width 32 --num-heads 2 --context 32 --log-every 1 --eval-every 1000 --eval-batches 1 --dense-steps 2 --save-every 3 --sample-tokens 0 --timeout-s 8 --device cpu".split()  # fmt: skip  # noqa: SIM905
TIMEOUT_S = 8


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
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        for pid in (*children(process.pid).values(), process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_for(path: Path, process: "subprocess.Popen[str]", seconds: float = 120) -> dict[int, int]:
    """Wait until a file is there, and return the ranks."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no {path} after {seconds} s"
        time.sleep(0.05)
    return children(process.pid)


def wait_for_steps(metrics: Path, process: "subprocess.Popen[str]", since: float) -> dict[int, int]:
    """Wait until a run has started or gone on since a time, and taken a step; return the ranks."""
    deadline = time.monotonic() + 120
    while True:
        text = metrics.read_text() if metrics.exists() else ""
        found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        begun = [place for place, line in enumerate(found) if line.get("time", 0) > since]
        if begun and any(line["event"] == "step" for line in found[begun[-1] :]):
            return children(process.pid)
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_a_killed_and_a_stopped_rank_end_all_in_time_and_ctrl_c_saves(
    tmp_path: Path, text: Path
) -> None:
    manifest = tmp_path / "run" / "checkpoints" / "last" / "manifest.json"
    metrics = tmp_path / "run" / "metrics.jsonl"
    command = ["samo", "launch", "-n", "2", "--max-restarts", "1"]
    command += ["train", "notes.txt", "--out", "run", "--pipe", "2", "--steps", "100000", *SMALL]
    with started(*command, cwd=tmp_path) as process:
        before = wait_for(manifest, process)
        assert sorted(before) == [0, 1]
        fell = time.time()
        os.kill(before[1], signal.SIGKILL)
        ranks = wait_for_steps(metrics, process, fell)  # again, from its last checkpoint
        os.kill(ranks[1], signal.SIGSTOP)
        began = time.monotonic()
        said = process.communicate(timeout=120)[0]
        assert time.monotonic() - began < TIMEOUT_S + 10
        assert process.returncode == 128 + signal.SIGKILL, said
        assert "samo: rank 1 (stage 1 of 2) was killed by signal 9, the first of the ranks" in said
        assert "samo: all ranks start again, from the last checkpoint (restart 1 of 1)" in said
        assert "samo: rank 0: rank 1 (stage 1 of 2)" in said or "rank 1 is stage 1 of 2" in said
        assert "samo: rank 1 (stage 1 of 2) was stopped by signal 19" in said
        assert "Traceback" not in said
        assert all(map(is_gone, [*before.values(), *ranks.values()]))

    ended = time.time()
    with started("samo", "launch", "-n", "2", "train", "--resume", "run", cwd=tmp_path) as process:
        ranks = wait_for_steps(metrics, process, ended)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 130, said
        assert "and saved. To go on:\n  samo launch -n 2 train --resume run\n" in said
        assert all(map(is_gone, ranks.values()))


@pytest.mark.slow
def test_a_restarted_run_comes_back_from_its_last_checkpoint(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "runs" / "notes"
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "1", "-m", "samo", "train", "notes.txt"]
    with started(*command, "--steps", "40", *SMALL, cwd=tmp_path) as process:
        ranks = wait_for(run / "checkpoints" / "last" / "manifest.json", process)
        os.kill(ranks[1], signal.SIGKILL)
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 0, said
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["notes"]
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    resumes = [line for line in found if line["event"] == "resume"]
    assert len(resumes) == 1
    assert resumes[0]["step"] >= 2
    steps = [line["step"] for line in found if line["event"] == "step"]
    assert steps == list(range(1, 41))


class Stopper:
    """Stops one rank after a step, without a word; notes when, on the other."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.time = 0.0

    def on(self, event: Event) -> None:
        if isinstance(event, events.Ticked) and event.step == 2:
            self.time = time.monotonic()
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)


def train_with_one_that_hangs(rank: int, num_ranks: int, config: TrainConfig, out: Path) -> Any:
    stopper = Stopper(rank)
    try:
        train(config, out, listeners=[stopper])
    except PeerError as error:
        return str(error), error.ranks, time.monotonic() - stopper.time
    return None


def test_a_rank_that_hangs_ends_the_others_in_time(tmp_path: Path, text: Path) -> None:
    config = small(text, {"timeout_s": 2.0})
    answers = run_ranks(
        2, train_with_one_that_hangs, config, tmp_path / "run", lost=[1], timeout_s=60
    )
    message, ranks, seconds = answers[0]
    assert ranks == (1,)
    assert "rank 1 stopped (no heartbeat" in message
    assert (
        seconds < 30
    )  # 2 s, 3 s to find out who it was, and what a busy machine takes for two steps


def test_flags_behind_the_command_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    ours, behind = _split_launch(["launch", "-n", "4", "train", "a.txt", "--steps", "9"])
    assert ours == ["launch", "-n", "4", "train"]
    assert behind == ("train", "a.txt", "--steps", "9")
    command = parse(["launch", "-n", "4", "train", "a.txt", "--max-restarts", "9"])
    assert isinstance(command, Launch)
    assert (command.num_ranks, command.max_restarts) == (4, 0)
    assert command.command[-2:] == ("--max-restarts", "9")
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--help"])
    assert ended.value.code == 0
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_ranks": 0}, r"--num-ranks \(-n\) must be 1 or more, got 0"),
        ({"max_restarts": -1}, "--max-restarts must be 0 or more, got -1"),
        ({"command": ("bench",)}, "samo launch starts one of: train; got 'bench': samo launch -n"),
        ({"command": ()}, "samo launch starts one of: train; nothing was named: samo launch -n"),
        (
            {"command": ("train", "a.txt", "-n", "2")},
            "-n is a flag of samo launch, and stands before the word train: samo launch -n ... train",
        ),
        ({"command": ("train", "a.txt", "--steps", "0")}, "steps must be 1 or more"),
    ],
)
def test_what_cannot_be_launched_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(Launch(**{"command": ("train", "a.txt"), **settings}))


def test_wrong_flags_and_help_of_a_launch_come_once(capfd: pytest.CaptureFixture[str]) -> None:
    for flag, code in (("--frobnicate", 2), ("--help", 0)):
        with pytest.raises(SystemExit) as ended:
            main(["launch", "-n", "2", "train", "a.txt", flag])
        assert ended.value.code == code
        shown = "".join(capfd.readouterr())
        assert shown.count("Unrecognized options: --frobnicate") == (code == 2)
        assert shown.count("usage: samo train") == (code == 0)
    assert main(["launch", "-n", "2", "demo", "--out", "x"]) == 2
    assert "starts one of: train; got 'demo'" in capfd.readouterr().err


def test_a_folder_of_logs_may_be_called_like_a_command() -> None:
    ours, behind = _split_launch(
        ["launch", "--logs", "train", "-n4", "--max-restarts=1", "train", "a"]
    )
    assert ours == ["launch", "--logs", "train", "-n4", "--max-restarts=1", "train"]
    assert behind == ("train", "a")


@pytest.mark.slow
def test_wrong_usage_is_the_fault_of_no_rank(tmp_path: Path, text: Path) -> None:
    command = ["samo", "launch", "-n", "2", "train", "notes.txt", "--data", "3", *SMALL]
    with started(*command, cwd=tmp_path) as process:
        said = process.communicate(timeout=120)[0]
    assert process.returncode == 2
    assert "data=3 does not make up 2 ranks" in said
    assert "the first of the ranks to fail" not in said


def test_a_restart_finds_the_folder_of_its_own_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    for name, launcher in (("notes", "6/1"), ("notes-2", f"7/{os.getppid()}")):
        folder = tmp_path / name
        folder.mkdir()
        record = {"format": "samo-run", "version": 1, "launcher": launcher}
        (folder / "run.json").write_text(json.dumps(record))
    assert restarted_folder(None, tmp_path, "notes") == tmp_path / "notes-2"
    assert restarted_folder(tmp_path / "notes", tmp_path, "notes") is None
    assert restarted_folder(tmp_path / "none", tmp_path, "notes") is None


@pytest.mark.parametrize(
    ("launch", "ranks", "started", "resumed"),
    [
        (None, "1", "samo train a.txt", "samo train --resume runs/a"),
        ("samo-77", "2", "samo launch -n 2 train a.txt", "samo launch -n 2 train --resume runs/a"),
        (
            "none",
            "8",
            "torchrun ... -m samo train a.txt",
            "torchrun ... -m samo train --resume runs/a   # on 8 ranks again",
        ),
    ],
)
def test_a_run_is_named_as_it_was_launched(
    launch: str | None,
    ranks: str,
    started: str,
    resumed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/lib/samo/__main__.py", "train", "a.txt"])
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launch is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
    assert command_line() == started
    assert go_on_line(Path("runs/a")) == resumed
