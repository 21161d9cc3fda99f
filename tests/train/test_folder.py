"""Run folders, their record, their metrics, and what the loop is told by signals."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from samo.errors import RunError
from samo.train import events
from samo.train.config import DataConfig, TrainConfig, resolve
from samo.train.config_files import to_dict
from samo.train.folder import RunFolder, free_folder
from samo.train.interrupt import Interrupt
from samo.train.metrics import MetricsFile

CONFIG = resolve(TrainConfig(data=DataConfig(train=(Path("notes.txt"),))))


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "b")
    folder.write_run({"config": to_dict(CONFIG)})
    assert folder.config() == CONFIG
    folder.close()


def test_a_folder_with_a_run_is_refused_with_the_way_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunError, match=r"already holds a run; go on with it \(samo train --resume"):
        RunFolder.create(tmp_path)


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"is not empty .it holds 'thesis.tex'"):
        RunFolder.create(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        RunError, match=r"cannot write to '.*file.run': Not a directory; choose another"
    ):
        RunFolder.create(tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user whom permissions stop")
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match=r"cannot write to '.*': Permission denied"):
        RunFolder.create(tmp_path / "run")


def test_a_record_that_cannot_be_written_is_an_error_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path / "run")

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("samo.utils.atomic_io.write_bytes", full)
    with pytest.raises(RunError, match=r"cannot write to '.*run': No space left on device"):
        folder.write_run({})
    folder.close()


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    code = f"from pathlib import Path; from samo.train.folder import RunFolder; RunFolder(Path({str(tmp_path)!r})).lock()"
    locked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "another process is training in" in locked.stderr
    folder.close()
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is not the record of a run"),
        ('{"format": "samo-masks"}', "is not the record of a run"),
        ('{"format": "samo-run", "version": 9}', "has version 9, this samo reads version 1"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunError, match=message):
        RunFolder(tmp_path).read_run()


@pytest.mark.parametrize("name", ["", "nothing"])
def test_what_is_no_run_cannot_be_resumed(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match=r"is not a run folder: it (has no run.json|does not exist)"):
        RunFolder.find(tmp_path / name)


def test_a_run_is_found_by_its_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert RunFolder.find(tmp_path / "checkpoints" / "best").path == tmp_path
    assert RunFolder.find(tmp_path).path == tmp_path


def test_the_next_free_name_is_found(tmp_path: Path) -> None:
    for name in ("notes", "notes-2"):
        (tmp_path / name).mkdir()
    assert free_folder(tmp_path, "notes") == tmp_path / "notes-3"


# Metrics ------------------------------------------------------------------------------------------


def ended(step: int) -> events.Ended:
    return events.Ended(step=step, reason="done")


def test_events_become_lines_and_ticks_do_not(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m", size=0, on_error="stop")
    metrics.on(ended(1))
    metrics.on(events.Ticked(step=2))
    metrics.close()
    assert (tmp_path / "m").read_text() == '{"event": "end", "step": 1, "reason": "done"}\n'


def test_what_came_after_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    first = MetricsFile(tmp_path / "m", size=0, on_error="stop")
    first.on(ended(1))
    size = first.size
    first.on(ended(2))
    first.close()
    with open(tmp_path / "m", "ab") as file:
        file.write(b'{"event": "st')  # cut by a kill
    again = MetricsFile(tmp_path / "m", size=size, on_error="stop")
    again.on(ended(3))
    again.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "m").read_text().splitlines()]
    assert steps == [1, 3]


class FullDisk:
    """A file that takes a few bytes more, and then no others."""

    def __init__(self, file: object, room: int) -> None:
        self.file = file
        self.room = room

    def write(self, data: bytes) -> int:
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_full_disk_leaves_whole_lines(
    tmp_path: Path, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = MetricsFile(tmp_path / "m", size=0, on_error=on_error)  # type: ignore[arg-type]
    metrics.on(ended(1))
    disk = metrics._file
    metrics._file = FullDisk(disk, room=10)  # type: ignore[assignment]
    if on_error == "stop":
        with pytest.raises(
            RunError, match=r"cannot write metrics to .*: No space left on device; make"
        ):
            metrics.on(ended(2))
    else:
        metrics.on(ended(2))
        assert "No space left on device; the line is dropped" in caplog.text
    metrics._file = disk
    metrics.on(ended(3))
    metrics.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "m").read_text().splitlines()]
    assert steps == [1, 3]


def test_a_loss_that_is_no_number_is_null_in_the_file() -> None:
    event = events.Evaluated(
        step=1, valid_loss=float("nan"), perplexity=float("inf"), tokens=1, elapsed_s=0.0
    )
    assert json.loads(event.to_json())["valid_loss"] is None
    assert json.loads(event.to_json())["perplexity"] is None


# Signals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_acts(number: signal.Signals) -> None:
    taken = []
    before = signal.signal(number, lambda *_: taken.append("second"))
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(number)
            assert interrupt.signal == number
            assert not taken
            signal.raise_signal(number)
            assert taken == ["second"]
    finally:
        signal.signal(number, before)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
