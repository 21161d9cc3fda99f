"""A text that every machine has: the source code of Python's standard library."""

import os
from contextlib import suppress
from pathlib import Path

from samo.errors import DataError
from samo.utils import atomic_io


def write_library_text(folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write ``train.txt`` and, from every tenth source file, ``valid.txt``; return their paths."""
    library, folder = Path(os.__file__).parent, Path(folder)
    texts: list[bytes] = []
    for path in sorted(library.glob("*.py")):
        with suppress(OSError, UnicodeDecodeError):
            texts.append(path.read_text(encoding="utf-8").encode())
    texts = [text for text in texts if text]
    if len(texts) < 2:
        raise DataError(f"this Python has no source files in '{library}'; use a text of your own")
    train, valid = folder / "train.txt", folder / "valid.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Replaced, not overwritten: a run may have them mapped.
        atomic_io.write_bytes(train, b"".join(t for i, t in enumerate(texts) if i % 10))
        atomic_io.write_bytes(valid, b"".join(texts[::10]))
    except OSError as error:
        raise DataError(f"cannot write to '{folder}': {error.strerror}") from None
    return train, valid
