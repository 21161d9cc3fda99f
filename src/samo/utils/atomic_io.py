"""Atomic file writes: after a kill or a full disk, the old file or the new one is there, whole.

    write aside  ->  fsync the file  ->  rename over the old one  ->  fsync the folder

Without the first fsync a rename may reach the disk before the bytes do; without the second it may
not reach the disk at all. Errors are plain ``OSError`` with the file's name.
"""

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_IS_POSIX: Final = hasattr(os, "O_DIRECTORY")
"""Elsewhere folders can be neither synced nor locked."""

_UNSUPPORTED: Final = {errno.EINVAL, errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS}
"""Errors of file systems that lack an operation, as against those that failed at it."""


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write or replace a file atomically. A link is replaced, and what it leads to stays.

    After an OSError the old file is unchanged, unless the last fsync failed, that of the folder:
    then the new file is already in place.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        write_new(temporary, [data])
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def write_new(path: str | os.PathLike[str], pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file that does not exist yet, piece by piece, and fsync it, but not the folder.

    After an OSError half of it may be there.
    """
    with _naming(path):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    left = left[os.write(file, left) :]
                del piece, left  # frees its memory before the next piece is made
            os.fsync(file)
        finally:
            os.close(file)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Wait until the names in a folder are on the disk."""
    if not _IS_POSIX:
        return
    with _naming(path), _opened(path) as folder:
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise


def make_folders(path: Path) -> None:
    """Create a folder and its parents, and wait until their names are on the disk."""
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


@contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[int | None]:
    """Lock a folder against other processes and threads, or raise BlockingIOError.

    Yields the descriptor of the open folder, if the system has such.
    """
    if not _IS_POSIX:
        yield None
        return
    import fcntl

    with _opened(folder) as file:
        with _naming(folder):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
        try:
            yield file
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # or a child forked meanwhile would hold it too


@contextmanager
def _opened(folder: str | os.PathLike[str]) -> Iterator[int]:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file's name to errors that lack it, such as those of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise
