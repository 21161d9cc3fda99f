"""The text that every machine has: the source code of Python's own standard library."""

import os
from pathlib import Path

from samo.errors import DataError
from samo.utils import atomic_io

__all__ = ["write_library_text"]


def write_library_text(folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write a text to train on and, from every tenth source file, one to validate on.

    Files that have the right contents already are left alone. The text is the same for one version of
    Python, and another for the next.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train, valid = write_library_text(folder)
        ...     train.name, valid.name, train.stat().st_size > valid.stat().st_size > 10_000
        ('train.txt', 'valid.txt', True)

    Returns:
        The paths of ``train.txt`` and ``valid.txt``.

    Raises:
        DataError: This Python came without its sources, or the folder cannot be written.
    """
    library = Path(os.__file__).parent
    texts = list(filter(None, map(_read, sorted(library.glob("*.py")))))
    if len(texts) < 2:
        raise DataError(
            f"this Python has no source files in '{library}' (found {len(texts)}, two are needed); "
            "give a text file of your own"
        )
    folder = Path(folder)
    parts = {
        folder / "train.txt": [text for number, text in enumerate(texts) if number % 10],
        folder / "valid.txt": texts[::10],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, part in parts.items():
            _write(path, b"".join(part))
    except OSError as error:
        raise DataError(
            f"the library text cannot be written to '{folder}': {error.strerror}; name another folder"
        ) from None
    train, valid = parts
    return train, valid


def _read(path: Path) -> bytes:
    """Return a source file, or nothing if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8").encode()
    except (OSError, UnicodeDecodeError):
        return b""


def _write(path: Path, data: bytes) -> None:
    if path.is_file() and path.read_bytes() == data:
        return  # tokens made from it stay valid
    atomic_io.write_bytes(
        path, data
    )  # another run may have the old file mapped: it must not shrink
