"""A text that every machine has: the source code of Python's standard library."""

import os
from pathlib import Path

from samo.errors import DataError
from samo.utils import atomic_io

__all__ = ["write_library_text"]


def write_library_text(folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write ``train.txt`` and, from every tenth source file, ``valid.txt``; return their paths.

    Files with the right contents are left alone. The text depends on the version of Python only.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train, valid = write_library_text(folder)
        ...     train.name, valid.name, train.stat().st_size > valid.stat().st_size > 10_000
        ('train.txt', 'valid.txt', True)

    Raises:
        DataError: This Python has no source files, or the folder cannot be written.
    """
    library, folder = Path(os.__file__).parent, Path(folder)
    texts = [text for path in sorted(library.glob("*.py")) if (text := _read(path))]
    if len(texts) < 2:
        raise DataError(
            f"this Python has no source files in '{library}' (found {len(texts)}, two are needed); "
            "give a text file of your own"
        )
    train, valid = folder / "train.txt", folder / "valid.txt"
    parts = {
        train: b"".join(text for number, text in enumerate(texts) if number % 10),
        valid: b"".join(texts[::10]),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in parts.items():
            # An equal file stays, and with it the tokens made from it. Others are replaced, not
            # overwritten: a run may have them mapped.
            if not path.is_file() or path.read_bytes() != data:
                atomic_io.write_bytes(path, data)
    except OSError as error:
        raise DataError(
            f"the library text cannot be written to '{folder}': {error.strerror}; name another "
            "folder"
        ) from None
    return train, valid


def _read(path: Path) -> bytes:
    """Return a source file, or nothing if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8").encode()
    except (OSError, UnicodeDecodeError):
        return b""
