"""Encode text files once, into a cache of tokens that is memory-mapped from then on.

The name of a cache file, ``notes.txt-1f3a5c7e9b2d.tokens``, has a hash of the source file's path,
size and time and of the tokenizer, and it is renamed into place when complete: a file with the
right name has the right tokens.
"""

import hashlib
import io
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from samo.data.files import map_text
from samo.data.tokenizers import Tokenizer
from samo.errors import DataError
from samo.utils import atomic_io

__all__ = []

_PIECE: Final = 2**20
_log: Final = logging.getLogger(__name__)


def encoded(path: Path, tokenizer: Tokenizer, cache: Path) -> NDArray[Any]:
    """Map the tokens of a text file, and encode it first if the cache does not have them.

    Raises:
        DataError: The text is binary, not UTF-8 or has no tokens, or the cache cannot be written.
    """
    map_text(path)  # refuses binary files
    source = path.resolve()
    stat = source.stat()
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    facts = (str(source), stat.st_size, stat.st_mtime_ns, tokenizer.fingerprint, dtype)
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    target = cache / f"{path.name}-{digest[:12]}.tokens"
    if not target.exists():
        _log.info("encoding '%s' with tokenizer '%s' into '%s'", path, tokenizer.name, target)
        chunks = (tokenizer.encode(text).astype(dtype).tobytes() for text in pieces(path))
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".") as folder:
                temporary = Path(folder, "tokens")
                atomic_io.write_new(temporary, chunks)
                if not temporary.stat().st_size:
                    raise DataError(f"tokenizer '{tokenizer.name}' finds no tokens in '{path}'")
                os.replace(temporary, target)
        except OSError as error:
            raise DataError(
                f"cannot write the tokens of '{path}' to '{target}': {error.strerror}"
            ) from None
    return np.asarray(np.memmap(target, dtype=dtype, mode="r"))


def pieces(path: Path) -> Iterator[str]:
    """Yield a text in pieces of 1 to 2 million characters, each up to the end of a line."""
    lines: list[str] = []
    size = 0
    with path.open("rb") as raw, io.TextIOWrapper(raw, "utf-8", newline="\n") as file:
        try:
            while line := file.readline(_PIECE):
                # Tokenizers merge whitespace with the text after it: a cut before a line that
                # starts with text changes no token.
                if size >= 2 * _PIECE or (size >= _PIECE and not line[0].isspace()):
                    yield "".join(lines)
                    lines, size = [], 0
                lines.append(line)
                size += len(line)
        except UnicodeDecodeError as error:
            # The decoder saw all bytes up to the position of the binary file below.
            start = raw.tell() - len(error.object) + error.start
            raise DataError(
                f"data file '{path}' is not UTF-8: byte {start:,} is "
                f"0x{error.object[error.start]:02x}; convert it (iconv -t utf-8), "
                "or use --tokenizer bytes"
            ) from None
    if lines:
        yield "".join(lines)
