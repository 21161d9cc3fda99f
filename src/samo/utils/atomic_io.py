"""Files that survive a kill or a full disk at any moment: the old one is there or the new one, whole.

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

__all__ = ["locked", "make_folders", "remove_empty", "sync_folder", "write_bytes", "write_new"]

_IS_POSIX: Final = hasattr(os, "O_DIRECTORY")
"""Elsewhere folders can be neither synced nor locked: files are whole there, but not for good."""

_UNSUPPORTED: Final = {errno.EINVAL, errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS}
"""What file systems answer that cannot do what is asked, as against those that failed at it."""


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, or replace it, so that a crash leaves the old one or the new one.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from samo.utils import atomic_io
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     atomic_io.write_bytes(f"{folder}/notes.txt", b"new")
        ...     Path(folder, "notes.txt").read_bytes()
        b'new'

    Raises:
        OSError: The file could not be written; what was there is as it was. Only where the last
            fsync fails, that of the folder, the new file is in place already.
    """
    target = Path(os.path.realpath(path))  # through a link, which stays
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        write_new(temporary, data)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def write_new(path: str | os.PathLike[str], data: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file that does not exist yet, whole or piece by piece, and wait for the disk.

    Its name is there for good only after `sync_folder`.

    Example:
        >>> import tempfile
        >>> from samo.utils import atomic_io
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     atomic_io.write_new(f"{folder}/a", b"first")
        ...     atomic_io.write_new(f"{folder}/a", b"second")
        Traceback (most recent call last):
        FileExistsError: ...

    Raises:
        OSError: The file exists, or could not be written; half of it may be there.
    """
    with _naming(path):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for piece in [data] if isinstance(data, bytes) else data:
                left = memoryview(piece)
                while left:
                    left = left[os.write(file, left) :]
                del piece, left  # so that its memory is free before the next one is made
            os.fsync(file)
        finally:
            os.close(file)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Wait until the names in a folder are on the disk.

    Example:
        >>> from samo.utils import atomic_io
        >>> atomic_io.sync_folder(".")

    Raises:
        OSError: The folder cannot be opened or written.
    """
    if not _IS_POSIX:
        return
    with _naming(path):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        finally:
            os.close(folder)


def make_folders(path: str | os.PathLike[str]) -> list[Path]:
    """Create a folder and those above it, for good, and return the ones that are new, outermost first.

    Example:
        >>> import tempfile
        >>> from samo.utils import atomic_io
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [new.name for new in atomic_io.make_folders(f"{folder}/runs/first")]
        ['runs', 'first']

    Raises:
        OSError: A folder cannot be made, or the path is a file.
    """
    path = Path(path)
    missing = []
    while not path.is_dir() and path != path.parent:
        missing.append(path)
        path = path.parent
    made: list[Path] = []
    try:
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            made.append(folder)
            sync_folder(folder.parent)
    except BaseException:
        remove_empty(made)
        raise
    return made


def remove_empty(folders: list[Path]) -> None:
    """Remove folders that `make_folders` made, innermost first, as far as they are empty.

    Example:
        >>> from samo.utils import atomic_io
        >>> atomic_io.remove_empty([])
    """
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other processes and threads out that ask for the same folder; a killed one lets go.

    Example:
        >>> from samo.utils import atomic_io
        >>> with atomic_io.locked("."):
        ...     with atomic_io.locked("."):
        ...         pass
        Traceback (most recent call last):
        BlockingIOError: ...

    Raises:
        BlockingIOError: Somebody else holds the lock.
        OSError: The folder cannot be opened.
    """
    if not _IS_POSIX:
        yield
        return
    import fcntl

    with _naming(folder):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _naming(folder):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile would hold it too
        os.close(file)


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the file's name into errors that come without one, such as those of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise
