"""A checkpoint's folder: switched from one checkpoint to the next by one rename, checked, copied.

    1  data-3f2a91c4/ ...   new tensors, in a folder with a new name, each file fsynced
    2  manifest.json        written aside, fsynced, renamed over the old one
    3  data-77b0e512/       the tensors before, removed

Killed before 2, the old manifest and its tensors stand; after it, the new ones. What is left over is
removed by the next save.
"""

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

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

__all__ = ["copy", "publish", "verify"]


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
    """Make ``target`` the same checkpoint as ``source``, at no cost where files can be linked.

    Where it can, both share their files, which are never written again; otherwise the bytes are
    copied and checked. A checkpoint that ``target`` held is replaced, whole or not at all.

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
        CheckpointError: ``source`` is no checkpoint, or ``target`` cannot be written.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise ValueError(f"cannot copy checkpoint '{source}' onto itself; give another folder")
    content = read_content(source)
    manifest = parse(content, source / NAME)

    def write(data: Path) -> bytes:
        for name, entry in manifest.files.items():
            file = source / manifest.data / name
            check_size(file, entry)
            try:
                os.link(file, data / name)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise
                _copy_file(file, data / name, entry)
        return encode_manifest({**content, "data": data.name})

    publish(target, write)


def publish(path: Path, write: Callable[[Path], bytes]) -> None:
    """Switch a folder to a new checkpoint, or leave it as it is.

    Args:
        path: The folder, made if it does not exist.
        write: Writes the tensors into the empty folder it is given, and returns the manifest's bytes.

    Raises:
        CheckpointError: A file cannot be written, another save is under way, or the folder has a
            manifest of something else.
    """
    made: list[Path] = []
    try:
        made = atomic_io.make_folders(path)
        with atomic_io.locked(path):
            _publish(path, write)
    except BlockingIOError as error:
        raise CheckpointError(
            f"cannot save to '{path}': another process or thread is saving there; give each its own "
            "folder"
        ) from error
    except OSError as error:
        atomic_io.remove_empty(made)
        raise CheckpointError(
            f"cannot save to '{path}': '{error.filename or path}': {error.strerror or error}; what was "
            "saved there before is unharmed. Make room, or choose another folder"
        ) from error
    except BaseException:
        atomic_io.remove_empty(made)
        raise


def _publish(path: Path, write: Callable[[Path], bytes]) -> None:
    _check_own(path)
    with suppress(CheckpointError):  # a damaged one: which data is its own, nobody can say
        _remove_data(path, keep=read_manifest(path).data if (path / NAME).exists() else None)
    data = _new_data_folder(path)
    manifest = b""
    try:
        manifest = write(data)
        atomic_io.sync_folder(data)
        atomic_io.sync_folder(path)
        atomic_io.write_bytes(path / NAME, manifest)
    except BaseException:
        # The rename may have been done, and only the fsync after it failed or was interrupted.
        if not _holds(path / NAME, manifest):
            _remove(data)
        raise
    _remove_data(path, keep=data.name)


def _check_own(path: Path) -> None:
    """Refuse to write over a manifest of some other program."""
    file = path / NAME
    try:
        with open(file, "rb") as stream:
            found = stream.read(MAX_BYTES)
            is_own = not found or FORMAT.encode() in found  # an empty one holds nothing to lose
    except FileNotFoundError:
        return
    if not is_own:
        raise CheckpointError(
            f"cannot save to '{path}': its '{NAME}' is not one of samo; choose another folder, or "
            "remove that file"
        )


def _new_data_folder(path: Path) -> Path:
    while True:
        data = path / f"data-{secrets.token_hex(4)}"
        with suppress(FileExistsError):
            data.mkdir()
            return data


def _holds(file: Path, data: bytes) -> bool:
    try:
        return bool(data) and file.read_bytes() == data
    except OSError:
        return False


def _remove_data(path: Path, *, keep: str | None) -> None:
    """Remove the tensors of older saves, and what killed ones left; a failure here harms nothing."""
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


def check_file(file: Path, entry: DataFile) -> None:
    """Compare a file with its size and checksum.

    Raises:
        CheckpointError: It is missing, cannot be read, or differs.
    """
    check_size(file, entry)
    try:
        with open(file, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(file, error) from error
    if digest != entry.sha256:
        raise damaged(file, "its bytes do not match their checksum")


def check_size(file: Path, entry: DataFile) -> None:
    """Compare a file with its size alone.

    Raises:
        CheckpointError: It is missing, cannot be looked at, or differs.
    """
    try:
        found = os.stat(file)
    except FileNotFoundError:
        raise CheckpointError(
            f"'{file}' is missing; take another copy of the checkpoint, with all its files"
        ) from None
    except OSError as error:
        raise unreadable(file, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise damaged(file, "it is no file")
    if found.st_size != entry.num_bytes:
        raise damaged(file, f"it has {found.st_size:,} bytes instead of {entry.num_bytes:,}")


def _copy_file(source: Path, target: Path, entry: DataFile) -> None:
    """Copy the bytes of a file, where it cannot be linked, and check them on the way."""
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes]:
        with open(source, "rb") as stream:
            while piece := stream.read(2**24):
                digest.update(piece)
                yield piece

    atomic_io.write_new(target, pieces())
    if digest.hexdigest() != entry.sha256:
        raise damaged(source, "its bytes do not match their checksum")
