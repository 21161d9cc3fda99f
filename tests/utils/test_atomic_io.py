"""Files that survive: old or new after any failure, and nothing left beside them."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from samo.utils import atomic_io
from tests.utils.system import failing_at, record


def test_a_file_is_written_and_replaced_and_a_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))  # a few at a time
    path, link = tmp_path / "file", tmp_path / "link"
    atomic_io.write_bytes(path, b"old")
    link.symlink_to("file")
    atomic_io.write_bytes(str(link), bytes(range(100)))
    assert not link.is_symlink()
    assert (path.read_bytes(), link.read_bytes()) == (b"old", bytes(range(100)))
    atomic_io.write_new(tmp_path / "new", iter([b"a", b"", b"bc"]))
    assert (tmp_path / "new").read_bytes() == b"abc"
    with pytest.raises(FileExistsError):
        atomic_io.write_new(tmp_path / "new", [b"again"])
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "new"]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    call: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing_at(1, error, getattr(os, call)))
        with pytest.raises(type(error)) as caught:
            atomic_io.write_bytes(path, b"new")
    if call == "write" and isinstance(caught.value, OSError):
        assert "/.file." in str(caught.value)  # which the system does not say
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_synced_is_an_error_unless_the_system_knows_no_such_thing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown, broken = OSError(errno.EINVAL, "Invalid"), OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(os, "fsync", failing_at(1, unknown, os.fsync))
    atomic_io.sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", failing_at(1, broken, os.fsync))
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}'"):
        atomic_io.sync_folder(tmp_path)


def test_folders_are_made_and_each_parent_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = record(monkeypatch, "fsync")
    for _ in range(2):
        atomic_io.make_folders(tmp_path / "a" / "b")
    assert done == [tmp_path.name, "a"]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        atomic_io.make_folders(tmp_path / "file")


def test_a_file_system_without_locks_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", failing_at(1, error, fcntl.flock))
    with atomic_io.locked(tmp_path):
        (tmp_path / "file").touch()
    monkeypatch.setattr(fcntl, "flock", failing_at(1, OSError(errno.EIO, "broken"), fcntl.flock))
    with pytest.raises(OSError, match="broken"), atomic_io.locked(tmp_path):
        pass
