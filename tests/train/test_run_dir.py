"""Run folders, their record, their metrics; and signals."""

import json
import os
import signal
from pathlib import Path

import pytest

from samo.errors import RunError
from samo.train import events
from samo.train.config import DataConfig, TrainConfig
from samo.train.config_io import to_dict
from samo.train.metrics import MetricsFile
from samo.train.resolve import resolve
from samo.train.run_dir import RunDir, free_dir
from samo.train.signals import Interrupt

CONFIG = resolve(TrainConfig(data=DataConfig(train=(Path("notes.txt"),))))


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = RunDir.create(tmp_path / "a" / "b")
    folder.write_run({"config": to_dict(CONFIG)})
    assert folder.config() == CONFIG
    folder.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run.json", r"already holds a run; resume it \(samo train --resume .*\), or choose"),
        ("thesis.tex", "is not empty .it holds 'thesis.tex'"),
    ],
)
def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(RunError, match=message):
        RunDir.create(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write to '.*file.run': Not a directory; choose"):
        RunDir.create(tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user whom permissions stop")
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match=r"cannot write to '.*': Permission denied"):
        RunDir.create(tmp_path / "run")


def test_a_record_that_cannot_be_written_is_an_error_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunDir.create(tmp_path / "run")

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("samo.utils.atomic_io.write_bytes", full)
    with pytest.raises(RunError, match=r"cannot write to '.*run': No space left on device"):
        folder.write_run({})
    folder.close()


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    folder = RunDir.create(tmp_path)
    with pytest.raises(RunError, match="another process is training in"):
        RunDir(tmp_path).lock()  # locks belong to open files, also within a process
    folder.close()
    RunDir(tmp_path).lock()


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
        RunDir(tmp_path).read_run()


@pytest.mark.parametrize("name", ["", "nothing"])
def test_what_is_not_a_run_cannot_be_resumed(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match=r"is not a run folder: it (has no run.json|does not exist)"):
        RunDir.find(tmp_path / name)


def test_a_run_is_found_by_its_checkpoints_and_the_next_free_name_is_chosen(tmp_path: Path) -> None:
    for name in ("notes", "notes-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    run = tmp_path / "notes"
    assert RunDir.find(run / "checkpoints" / "best").path == run == RunDir.find(run).path
    assert free_dir(tmp_path, "notes") == tmp_path / "notes-3"


# Metrics ------------------------------------------------------------------------------------------


def ended(step: int) -> events.Ended:
    return events.Ended(step=step, reason="done")


def test_metrics_in_an_impossible_place_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write metrics to '.*': Is a directory"):
        MetricsFile(tmp_path, size=0, on_error="stop")


def test_metrics_are_never_cut_within_a_line(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"event": "a"}\n{"event": "b"}\n')
    MetricsFile(path, size=20, on_error="stop").close()
    assert path.read_bytes() == b'{"event": "a"}\n'


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_recorded_and_the_second_acts(number: signal.Signals) -> None:
    taken = []
    before = signal.signal(number, lambda *_: taken.append("second"))
    handler = signal.getsignal(number)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(number)
            assert interrupt.signal == number
            assert not taken
            signal.raise_signal(number)
            assert taken == ["second"]
        with Interrupt():
            assert signal.getsignal(number) != handler
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)
