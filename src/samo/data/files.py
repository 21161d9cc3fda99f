"""Memory-map data files: ``.npy`` and ``.bin`` as tokens, text as bytes or encoded in a cache.

name.npy        a 1-D array of integers, as numpy.save writes it
name.bin        16-bit tokens, little endian, no header (nanoGPT's format)
anything else   text

The name of a cache file, ``notes.txt-1f3a5c7e9b2d-8a01f6c2.tokens``, has a hash of the path, size
and time of the source and of the tokenizer, and the CRC-32 of its content: a damaged one is encoded
again. It is renamed into place when complete.
"""

import glob
import hashlib
import io
import logging
import os
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from samo.data.tokenizers import Tokenizer
from samo.errors import DataError, nearest
from samo.utils import atomic_io

_COMPRESSED: Final = (b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")
"""How files of gzip, xz and zstd begin."""

TOKEN_SUFFIXES: Final = (".npy", ".bin")

_HEAD_BYTES: Final = 2**24
_PIECE: Final = 2**20  # characters that are encoded at once
_log: Final = logging.getLogger(__name__)


def check_readable(path: Path) -> None:
    """Raise DataError unless ``path`` is a regular file with content."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        names = os.listdir(path.parent) if path.parent.is_dir() else []
        # Names with the same suffix are half equal already.
        raise DataError(
            f"data file '{path}' does not exist{nearest(path.name, names, likeness=0.7)}"
        ) from None
    except OSError as error:
        raise DataError(f"data file '{path}' cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(found.st_mode):
        raise DataError(f"data file '{path}' is a folder; pass its files, such as {path}/*.txt")
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would block
        raise DataError(
            f"data file '{path}' is not a regular file and cannot be memory-mapped; copy it to one"
        )
    if not found.st_size:
        raise DataError(f"data file '{path}' is empty")


def map_token_file(path: Path) -> NDArray[Any]:
    """Map a ``.npy`` or ``.bin`` file; DataError unless it is a 1-D array of integers."""
    if path.suffix == ".bin":
        num_bytes = path.stat().st_size
        if num_bytes % 2:
            raise DataError(
                f"data file '{path}' has {num_bytes:,} bytes, an odd number; "
                "a .bin file has 2 bytes per token, save other types as .npy"
            )
        return np.asarray(np.memmap(path, dtype="<u2", mode="r"))
    try:
        # Unlike numpy.load, this reads neither pickles nor archives.
        array = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except Exception as error:  # a damaged header can raise nearly anything
        raise DataError(
            f"data file '{path}' cannot be read as .npy: {error}; "
            "write a 1-D array of integers with numpy.save"
        ) from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise DataError(
            f"data file '{path}' has shape {array.shape} and type {array.dtype}; "
            "tokens must be a non-empty 1-D array of integers"
        )
    return array


def map_text(path: Path) -> NDArray[np.uint8]:
    """Map the bytes of a text file; DataError if it is binary."""
    mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    # Binary files have a NUL early. Searching all of a large text would delay the first step.
    head = mapped[:_HEAD_BYTES].tobytes()
    if head.startswith(_COMPRESSED):
        raise DataError(f"data file '{path}' is compressed; unpack it first")
    if (position := head.find(0)) >= 0:
        raise DataError(
            f"data file '{path}' is not text: byte {position:,} is NUL; "
            "name token files .npy (integers) or .bin (16-bit, little endian)"
        )
    return mapped


def encoded(path: Path, tokenizer: Tokenizer, cache: Path) -> NDArray[Any]:
    """Map the tokens of a text file, and encode it first if the cache does not have them."""
    map_text(path)  # refuses binary files
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    arrays = (tokenizer.encode(text) for text in pieces(path, _PIECE))
    return cached(path, tokenizer, dtype, arrays, cache)


def cached(
    path: Path, tokenizer: Tokenizer, dtype: str, arrays: Iterable[NDArray[Any]], cache: Path
) -> NDArray[Any]:
    """Map what a file is encoded to; ``arrays`` are drawn, joined and written if it is not cached.

    ``path`` is a file, or a folder of files.
    """
    source = path.resolve()
    within = sorted(source.iterdir()) if source.is_dir() else [source]
    stats = [(each.name, each.lstat()) for each in within]
    versions = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    facts = (str(source), versions, tokenizer.fingerprint, dtype)
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    prefix = f"{path.name[:80]}-{digest[:12]}-"
    for found in cache.glob(f"{glob.escape(prefix)}*.tokens"):
        if found.stat().st_size:  # an empty file cannot be mapped
            mapped = np.asarray(np.memmap(found, dtype=np.uint8, mode="r"))
            if found.name == f"{prefix}{zlib.crc32(mapped.data):08x}.tokens":
                return mapped.view(dtype)
        _log.warning("'%s' is damaged, and is encoded again", found)
        found.unlink()
    _log.info("encoding '%s' with tokenizer '%s' into '%s'", path, tokenizer.name, cache)
    checksum = 0

    def chunks() -> Iterator[bytes]:
        nonlocal checksum
        for array in arrays:
            chunk = array.astype(dtype, copy=False).tobytes()
            checksum = zlib.crc32(chunk, checksum)
            yield chunk

    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".") as folder:
            temporary = Path(folder, "tokens")
            atomic_io.write_new(temporary, chunks())
            if not temporary.stat().st_size:
                raise DataError(f"tokenizer '{tokenizer.name}' finds no tokens in '{path}'")
            target = cache / f"{prefix}{checksum:08x}.tokens"
            os.replace(temporary, target)
    except OSError as error:
        raise DataError(
            f"cannot write the tokens of '{path}' to '{cache}': {error.strerror}"
        ) from None
    return np.asarray(np.memmap(target, dtype=dtype, mode="r"))


def pieces(path: Path, least: int) -> Iterator[str]:
    """Yield a text in pieces of 1 to 2 times ``least`` characters, up to the end of a line."""
    lines: list[str] = []
    size = 0
    with path.open("rb") as raw, io.TextIOWrapper(raw, "utf-8", newline="\n") as file:
        try:
            while line := file.readline(least):
                # Tokenizers merge whitespace with the text after it: a cut before a line that
                # starts with text changes no token.
                if size >= 2 * least or (size >= least and not line[0].isspace()):
                    yield "".join(lines)
                    lines, size = [], 0
                lines.append(line)
                size += len(line)
        except UnicodeDecodeError as error:
            # The decoder saw all bytes up to the position of the binary file below.
            start = raw.tell() - len(error.object) + error.start
            raise DataError(
                f"data file '{path}' is not UTF-8: byte {start:,} is "
                f"0x{error.object[error.start]:02x}; convert it, for example "
                "with iconv -f latin1 -t utf-8"
            ) from None
    if lines:
        yield "".join(lines)


def largest_token(path: Path, tokens: NDArray[Any], vocab_size: int) -> int:
    """Return the largest token; DataError if one is outside the vocabulary."""
    largest = int(tokens.max())
    if int(tokens.min()) < 0 or largest >= vocab_size:
        index = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
        raise DataError(
            f"data file '{path}': token {index:,} is {int(tokens[index]):,}, but the vocabulary "
            f"has {vocab_size:,} tokens; check the file, or of samo train raise --vocab-size"
        )
    return largest
