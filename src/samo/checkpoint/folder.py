"""A checkpoint's folder: replaced atomically, verified, copied. Without torch.

    1  data-3f2a91c4/ ...   new tensors, in a folder with a new name, each file fsynced
    2  manifest.json        written aside, fsynced, renamed over the old one
    3  data-77b0e512/       the tensors before, removed

Killed before 2, the old manifest and its tensors stand; after it, the new ones. The next save
removes what is left over.
"""

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from samo.checkpoint.manifest import (
    DATA_FILE,
    DATA_FOLDER,
    FORMAT,
    MAX_BYTES,
    NAME,
    DataFile,
    Manifest,
    damaged,
    encode_manifest,
    parse,
    read_content,
    read_manifest,
    unreadable,
)
from samo.errors import CheckpointError
from samo.utils import atomic_io

__all__ = ["copy", "verify"]


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Compare every byte of a checkpoint with its checksums, and return its manifest.

    Example:
        >>> import tempfile, torch, samo
        >>> from samo.checkpoint import verify
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     samo.save(folder, torch.nn.Linear(8, 8))
        ...     verify(folder).num_params
        72

    Raises:
        CheckpointError: There is no checkpoint, or a file of it is missing or damaged.
    """
    manifest = read_manifest(path)
    for name, entry in manifest.files.items():
        check_file(Path(path) / manifest.data / name, entry)
    return manifest


def copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Make ``target`` the same checkpoint as ``source``, with hard links where the file system has them.

    Data files are never written again, so both can share them; where they cannot, bytes are copied
    and checked. A checkpoint in ``target`` is replaced atomically.

    Example:
        >>> import tempfile, torch, samo
        >>> from samo import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     samo.save(f"{folder}/last", torch.nn.Linear(8, 8), extra={"step": 100})
        ...     checkpoint.copy(f"{folder}/last", f"{folder}/best")
        ...     samo.save(f"{folder}/last", torch.nn.Linear(8, 8), extra={"step": 200})
        ...     checkpoint.read_manifest(f"{folder}/best").extra
        {'step': 100}

    Raises:
        ValueError: Both are the same folder.
        CheckpointError: ``source`` is not a checkpoint, or ``target`` cannot be written.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise ValueError(f"cannot copy checkpoint '{source}' onto itself; give another folder")
    content = read_content(source)
    manifest = parse(content, source / NAME)
    with draft(target) as new:
        for name, entry in manifest.files.items():
            file = source / manifest.data / name
            check_file(file, entry, size_only=True)
            try:
                os.link(file, new.data / name)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise
                check_file(file, entry)
                with open(file, "rb") as stream:
                    pieces = iter(partial(stream.read, 2**24), b"")
                    atomic_io.write_new(new.data / name, pieces)
        new.publish(encode_manifest({**content, "data": new.data.name}))


class Draft(NamedTuple):
    """A checkpoint that is being written beside the one that its folder holds."""

    folder: Path
    data: Path
    """Folder for the new tensors."""

    def publish(self, manifest: bytes) -> None:
        """Make this the checkpoint of its folder."""
        with save_errors(self.folder):
            atomic_io.sync_folder(self.data)
            atomic_io.sync_folder(self.folder)
            atomic_io.write_bytes(self.folder / NAME, manifest)


@contextmanager
def draft(path: Path) -> Iterator[Draft]:
    """Lock a folder, made if it does not exist, and remove what the body wrote if that fails.

    Raises:
        CheckpointError: A file cannot be written, another save is under way, or the folder has a
            manifest of another program.
    """
    made: list[Path] = []
    try:
        with save_errors(path):
            made = atomic_io.make_folders(path)
            with atomic_io.locked(path):
                _check_own(path)
                # Which data belongs to a damaged manifest is unknown: all of it stays until the
                # end.
                with suppress(CheckpointError):
                    is_there = (path / NAME).exists()
                    _remove_data(path, keep=read_manifest(path).data if is_there else None)
                data = _new_data_folder(path)
                try:
                    yield Draft(path, data)
                except BaseException:
                    if not _is_published(path, data):
                        _remove(data)
                    raise
                _remove_data(path, keep=data.name)
    except BaseException as error:
        # A folder that another process has locked is its own, even if this one made it.
        if not isinstance(error.__cause__, BlockingIOError):
            atomic_io.remove_empty(made)
        raise


@contextmanager
def save_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system into a `CheckpointError` that says what failed."""
    try:
        yield
    except BlockingIOError as error:
        raise CheckpointError(
            f"cannot save to '{path}': another process or thread is saving there; give each its own "
            "folder"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot save to '{path}': '{error.filename or path}': {error.strerror or error}; what was "
            "saved there before is unharmed. Make room, or choose another folder"
        ) from error


def _new_data_folder(path: Path) -> Path:
    while True:
        data = path / f"data-{secrets.token_hex(4)}"
        with suppress(FileExistsError):
            data.mkdir()
            return data


def _is_published(path: Path, data: Path) -> bool:
    """Return whether the rename was done, and only the fsync after it failed or was interrupted."""
    with suppress(CheckpointError):
        return read_manifest(path).data == data.name
    return False


def _check_own(path: Path) -> None:
    """Refuse to write over the manifest of another program."""
    file = path / NAME
    try:
        with open(file, "rb") as stream:
            found = stream.read(MAX_BYTES)
    except FileNotFoundError:
        return
    if found and FORMAT.encode() not in found:  # an empty one holds nothing to lose
        raise CheckpointError(
            f"cannot save to '{path}': its '{NAME}' is not one of samo; choose another folder, or "
            "remove that file"
        )


def _remove_data(path: Path, *, keep: str | None) -> None:
    """Remove the tensors of older saves and leftovers of killed ones; a failure here is harmless."""
    with suppress(OSError):
        for entry in list(os.scandir(path)):
            if entry.name.startswith(f".{NAME}."):
                with suppress(OSError):
                    os.unlink(entry)
            elif DATA_FOLDER.fullmatch(entry.name) and entry.name != keep:
                _remove(path / entry.name)


def _remove(data: Path) -> None:
    """Remove a data folder, but nothing in it that samo did not write."""
    with suppress(OSError):
        if data.is_symlink():
            return
        for entry in list(os.scandir(data)):
            if DATA_FILE.fullmatch(entry.name):
                os.unlink(entry)
        data.rmdir()


def check_file(file: Path, entry: DataFile, *, size_only: bool = False) -> None:
    """Compare a file with its size and checksum.

    Raises:
        CheckpointError: It is missing, cannot be read, or differs.
    """
    try:
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode):
            raise damaged(file, "it is not a file")
        if found.st_size != entry.num_bytes:
            raise damaged(file, f"it has {found.st_size:,} bytes instead of {entry.num_bytes:,}")
        if size_only:
            return
        with open(file, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        raise CheckpointError(
            f"'{file}' is missing; take another copy of the checkpoint, with all its files"
        ) from None
    except OSError as error:
        raise unreadable(file, error) from error
    if digest != entry.sha256:
        raise damaged(file, "its bytes do not match their checksum")
