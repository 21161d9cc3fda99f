"""Run folders, their record, their metrics; and signals."""

import json
import signal
from pathlib import Path

import pytest

from samo.errors import RunError
from samo.train import events, rank_group
from samo.train.config import DataConfig, TrainConfig
from samo.train.config_io import to_dict
from samo.train.metrics import MetricsFile
from samo.train.rank_group import Interrupt
from samo.train.resolve import resolve
from samo.train.run_dir import RunDir, free_dir


def test_a_new_folder_is_made_with_its_parents_and_locked(tmp_path: Path) -> None:
    config = resolve(TrainConfig(data=DataConfig(train=(Path("notes.txt"),))))
    folder = RunDir.create(tmp_path / "a" / "b")
    folder.write_run({"config": to_dict(config)})
    assert folder.config() == config
    with pytest.raises(RunError, match="another process is training in"):
        RunDir(folder.path).lock()  # locks belong to open files, also within a process
    folder.close()
    RunDir(folder.path).lock()


def test_what_a_killed_write_has_left_is_removed(tmp_path: Path) -> None:
    for name in (".run.json.0a1b2c3d", ".mine"):
        (tmp_path / name).touch()
    run = RunDir(tmp_path)
    run.lock()
    run.close()
    assert [path.name for path in tmp_path.iterdir()] == [".mine"]
    started = tmp_path / "started"
    started.mkdir()
    (started / ".run.json.0a1b2c3d").touch()
    RunDir.create(started).close()
    assert not [*started.iterdir()]


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


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(
            RunError, match=r"cannot write to '.*': Not a directory; choose another"
        ):
            RunDir.create(path)
    folder = RunDir.create(tmp_path / "run")

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("samo.utils.atomic_io.write_bytes", full)
    with pytest.raises(RunError, match=r"cannot write to '.*run': No space left on device"):
        folder.write_run({})
    folder.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "has format None"),
        ('{"format": "samo-masks"}', "has format 'samo-masks'"),
        (
            '{"format": "samo-run", "version": 9}',
            "version 9; this samo reads 'samo-run', version 1",
        ),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunError, match=message):
        RunDir(tmp_path).read_run()


def test_a_run_is_found_by_its_checkpoints_and_the_next_free_name_is_chosen(tmp_path: Path) -> None:
    for name in ("notes", "notes-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    run = tmp_path / "notes"
    assert RunDir.find(run / "checkpoints" / "best").path == run == RunDir.find(run).path
    assert free_dir(tmp_path, "notes") == tmp_path / "notes-3"
    for name in ("", "nothing"):
        with pytest.raises(RunError, match=r"is not a run folder: it (has no run.json|does not)"):
            RunDir.find(tmp_path / name)


# Metrics


def ended(step: int) -> events.Ended:
    return events.Ended(step=step, reason="done")


def steps_in(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_events_become_lines_and_those_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "m"
    first = MetricsFile(file, size=0)
    first.on(ended(1))
    first.on(events.Ticked(step=1))  # not written
    size = first.size
    first.on(ended(2))
    first.close()
    assert file.read_text().startswith('{"event": "end", "step": 1, "reason": "done"}\n')
    with open(file, "ab") as torn:
        torn.write(b'{"event": "st')  # cut by a kill
    again = MetricsFile(file, size=size + 5)  # never cut within a line
    again.on(ended(3))
    again.close()
    assert steps_in(file) == [1, 3]
    with pytest.raises(RunError, match=r"cannot write metrics to '.*': Is a directory"):
        MetricsFile(tmp_path, size=0)


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


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m", size=0)
    metrics.on(ended(1))
    disk = metrics._file
    metrics._file = FullDisk(disk, room=10)  # type: ignore[assignment]
    with pytest.raises(RunError, match=r"cannot write metrics to .*: No space left on device"):
        metrics.on(ended(2))
    metrics._file = disk
    metrics.on(ended(3))
    metrics.close()
    assert steps_in(tmp_path / "m") == [1, 3]


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_the_first_signal_is_recorded_and_a_later_one_acts(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    before = signal.signal(number, lambda *_: taken.append("second"))
    handler = signal.getsignal(number)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(number)
            assert interrupt.signal == number
            assert not taken
            signal.raise_signal(number)
            if number != signal.SIGINT:  # the same one, passed on by a launcher
                assert not taken
                monkeypatch.setattr(rank_group, "_SAME_S", 0.0)
                signal.raise_signal(number)
            assert taken == ["second"]
        with Interrupt():
            assert signal.getsignal(number) != handler
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)
