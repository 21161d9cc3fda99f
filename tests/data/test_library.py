"""The text of the standard library: whole files, split by file, the same every time."""

import os
from pathlib import Path

import pytest

from samo.data.library import write_library_text
from samo.errors import DataError


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a Python of 25 source files: 00.py to 24.py."""
    folder = tmp_path / "python"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "inner.py").write_text("inner\n")
    (folder / "notes.txt").write_text("notes\n")
    for number in range(25):
        (folder / f"{number:02}.py").write_text(f"text {number} \u00e9\n", encoding="utf-8")
    monkeypatch.setattr(os, "__file__", str(folder / "os.py"))
    return folder


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_every_tenth_file_is_for_validation(library: Path, tmp_path: Path) -> None:
    train, valid = write_library_text(tmp_path / "deep" / "out")
    assert (train, valid) == (tmp_path / "deep/out/train.txt", tmp_path / "deep/out/valid.txt")
    assert lines(valid) == [f"text {number} \u00e9" for number in (0, 10, 20)]
    assert lines(train) == [f"text {number} \u00e9" for number in range(25) if number % 10]
    assert sorted(path.name for path in train.parent.iterdir()) == ["train.txt", "valid.txt"]


def test_files_that_cannot_be_read_are_left_out(library: Path, tmp_path: Path) -> None:
    (library / "03.py").write_bytes(b"# latin-1: \xe9\n")
    (library / "04.py").unlink()
    (library / "04.py").mkdir()
    train, valid = write_library_text(tmp_path)
    kept = [number for number in range(25) if number not in (3, 4)]
    assert lines(valid) == [f"text {number} \u00e9" for number in kept[::10]]
    assert len(lines(train)) == 20


def test_what_is_right_is_left_alone_and_what_is_not_is_replaced(
    library: Path, tmp_path: Path
) -> None:
    train, valid = write_library_text(tmp_path)
    content = valid.read_bytes()
    for path in (train, valid):
        os.utime(path, ns=(1, 1))
    valid.write_text("other")
    with valid.open("rb") as opened:  # as a run that has it mapped would
        write_library_text(tmp_path)
        assert opened.read() == b"other"
    assert train.stat().st_mtime_ns == 1
    assert valid.read_bytes() == content


@pytest.mark.parametrize("num_files", [0, 1])
def test_a_python_without_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_files: int
) -> None:
    for number in range(num_files):
        (tmp_path / f"{number}.py").write_text("text\n")
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.pyc"))
    message = rf"in '{tmp_path}' \(found {num_files}, two are needed\); give a text"
    with pytest.raises(DataError, match=message):
        write_library_text(tmp_path / "out")


def test_a_failed_write_is_an_error_and_leaves_nothing_behind(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"written to '.*file': File exists; name another folder"):
        write_library_text(tmp_path / "file")

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(DataError, match="No space left on device; name another folder"):
        write_library_text(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
