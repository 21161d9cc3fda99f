"""A checkpoint's folder: replaced atomically, verified, copied. Without torch.

    1  data-3f2a91c4/ ...   new tensors in a new folder, each file fsynced
    2  manifest.json        written aside, fsynced, renamed over the old one
    3  data-77b0e512/       the old tensors, removed

Killed before 2, the folder has the old checkpoint; after it, the new one. The next save removes
leftovers.
"""

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from samo.checkpoint.manifest import (
    DATA_FILE,
    DATA_FOLDER,
    FORMAT,
    MAX_BYTES,
    NAME,
    Manifest,
    damaged,
    encode_manifest,
    read_manifest,
)
from samo.errors import CheckpointError
from samo.utils import atomic_io, untrusted


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Compare every byte of a checkpoint with its checksums, and return its manifest."""
    manifest = read_manifest(path)
    for name, entry in manifest.files.items():
        check_file(manifest.data / name, entry)
    return manifest


def copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a checkpoint, with hard links where the file system has them.

    Data files are never written again, so both can share them; otherwise bytes are copied and
    checked. A checkpoint in ``target`` is replaced atomically.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise ValueError(f"cannot copy checkpoint '{source}' onto itself; give another folder")
    manifest = read_manifest(source)
    with draft(target) as data:
        for name, entry in manifest.files.items():
            file = manifest.data / name
            check_file(file, entry, size_only=True)
            try:
                os.link(file, data / name)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise
                check_file(file, entry)
                with open(file, "rb") as stream:
                    atomic_io.write_new(data / name, _chunks(stream))
        publish(data, encode_manifest(manifest.content | {"data": data.name}))


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, but nothing in its folder that samo did not write."""
    folder = Path(path)
    with save_errors(folder), atomic_io.locked(folder):
        _current_data(folder)  # refuses another program's manifest
        (folder / NAME).unlink(missing_ok=True)  # first: what is left is no checkpoint
        _remove_data(folder, keep=None)
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """Lock a folder and yield a new data folder in it, which is removed if the body fails."""
    with save_errors(path):
        atomic_io.make_folders(path)
        with atomic_io.locked(path):
            current = _current_data(path)
            # A damaged manifest does not say which data is its own: all of it is kept.
            if current is not None or not os.path.lexists(path / NAME):
                _remove_data(path, keep=current)
            data = path / f"data-{secrets.token_hex(4)}"
            data.mkdir()
            try:
                yield data
            except BaseException:
                # If the rename was done, and only the fsync after it failed, it stays.
                if _current_data(path) != data.name:
                    _remove(data)
                raise
            _remove_data(path, keep=data.name)


def publish(data: Path, manifest: bytes) -> None:
    """Make a data folder, in which all files are fsynced, the checkpoint of its parent."""
    with save_errors(data.parent):
        atomic_io.sync_folder(data)
        atomic_io.sync_folder(data.parent)
        atomic_io.write_bytes(data.parent / NAME, manifest)


@contextmanager
def save_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system into `CheckpointError`."""
    try:
        yield
    except BlockingIOError as error:
        raise CheckpointError(
            f"cannot save to '{path}': another process or thread is saving there; give each its "
            "own folder"
        ) from error
    except OSError as error:
        intact = ". The previous checkpoint is intact" * os.path.lexists(path / NAME)
        raise CheckpointError(
            f"cannot save to '{path}': '{error.filename or path}': {error.strerror or error}; free "
            f"some space, or choose another folder{intact}"
        ) from error


def _current_data(path: Path) -> str | None:
    """Return the name of the current data folder; None if the manifest is missing or damaged."""
    try:
        return read_manifest(path).data.name
    except CheckpointError:
        try:
            found = untrusted.read_file(path / NAME, MAX_BYTES)
        except FileNotFoundError:
            return None
        except ValueError:  # such as a link, through which samo does not write
            found = b"?"
        if found and FORMAT.encode() not in found:  # an empty one has nothing to lose
            raise CheckpointError(
                f"cannot save to '{path}': its '{NAME}' is not one of samo; choose another folder"
            ) from None
        return None


def _remove_data(path: Path, *, keep: str | None) -> None:
    """Remove the tensors of older saves and leftovers of killed ones; a failure is harmless."""
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


def check_file(
    file: Path,
    entry: dict[str, Any],
    *,
    size_only: bool = False,
    on_chunk: Callable[[], None] = lambda: None,
) -> None:
    """Compare a file with its size and checksum."""
    digest = hashlib.sha256()
    try:
        if stat.S_ISLNK(os.lstat(file.parent).st_mode):
            raise damaged(file.parent, "it is a link")
        found = untrusted.check_file(file)
        if found.st_size != entry["bytes"]:
            raise damaged(file, f"it has {found.st_size:,} bytes instead of {entry['bytes']:,}")
        if size_only:
            return
        with open(file, "rb") as stream:
            for chunk in _chunks(stream):
                digest.update(chunk)
                on_chunk()
    except FileNotFoundError:
        raise damaged(file, "it is missing") from None
    except OSError as error:
        raise CheckpointError(f"'{file}' cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise damaged(file, str(error)) from None
    if digest.hexdigest() != entry["sha256"]:
        raise damaged(file, "its bytes do not match their checksum")


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    return iter(partial(stream.read, 2**24), b"")
