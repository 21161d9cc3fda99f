"""Memory-map one data file: text as bytes, ``.npy`` and ``.bin`` as tokens.

    name.npy        a 1-D array of integers, as numpy.save writes it
    name.bin        16-bit tokens, little endian, no header (as nanoGPT writes them)
    anything else   text

Opening costs nothing, and only what is read comes into memory.
"""

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from samo.errors import DataError, nearest

__all__ = []

MAX_VOCAB_SIZE: Final = 2**31
"""Larger numbers are not tokens: the file holds something else."""

_CHUNK: Final = 2**22
_HEAD_BYTES: Final = 2**24


def check_readable(path: Path) -> None:
    """Raise DataError unless a path is a regular file that can be read and is not empty."""
    if path.is_dir():
        raise DataError(
            f"data file '{path}' is a folder; name the files in it, for example {path}/*.txt"
        )
    if not path.exists():
        raise DataError(f"data file '{path}' does not exist{_hint(path)}")
    if not path.is_file():
        raise DataError(
            f"data file '{path}' is not a regular file, and only those can be memory-mapped; "
            "write its contents to a file first"
        )
    try:
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise DataError(
            f"data file '{path}' cannot be read: {error.strerror}; check its owner and permissions"
        ) from None
    if is_empty:
        raise DataError(f"data file '{path}' is empty; check how it was written")


def check_vocab_size(vocab_size: int) -> None:
    """Raise ValueError for a vocabulary size out of range."""
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be 1 to {MAX_VOCAB_SIZE:,}, got {vocab_size:,}")


def is_token_file(path: Path) -> bool:
    """Return whether the name says that a file holds tokens."""
    return path.suffix in {".npy", ".bin"}


def map_token_file(path: Path) -> NDArray[Any]:
    """Map a ``.npy`` or ``.bin`` file; DataError if it does not hold a 1-D array of integers."""
    if path.suffix == ".bin":
        num_bytes = path.stat().st_size
        if num_bytes % 2:
            raise DataError(
                f"data file '{path}' has {num_bytes:,} bytes, an odd number; a .bin file holds "
                "tokens of 2 bytes each, save others as .npy"
            )
        return np.asarray(np.memmap(path, dtype="<u2", mode="r"))
    try:
        # Unlike numpy.load, this reads neither pickles nor archives.
        array = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except Exception as error:  # a damaged header can raise nearly anything
        raise DataError(
            f"data file '{path}' cannot be read as .npy: {error}; write a 1-D array of integers "
            "with numpy.save"
        ) from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"data file '{path}' holds an array of shape {array.shape} and type {array.dtype}; "
            "tokens are a 1-D array of integers, for example array.ravel().astype('uint16')"
        )
    if not array.size:
        raise DataError(f"data file '{path}' is empty: its array has no tokens")
    return array


def map_text(path: Path) -> NDArray[np.uint8]:
    """Map the bytes of a text file; DataError if it is binary."""
    mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    # Binary files have a NUL early. Searching all of a large text would delay the first step.
    position = mapped[:_HEAD_BYTES].tobytes().find(0)
    if position >= 0:
        raise DataError(
            f"data file '{path}' is not text: byte {position:,} is NUL; text is UTF-8, and files of "
            "tokens are named .npy (a 1-D array of integers) or .bin (16-bit, little endian)"
        )
    return mapped


def largest_token(path: Path, tokens: NDArray[Any], vocab_size: int) -> int:
    """Read all tokens, and return the largest; DataError if one is not in the vocabulary."""
    largest = 0
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high >= vocab_size:
            index = int(np.flatnonzero((chunk < 0) | (chunk >= vocab_size))[0])
            raise DataError(
                f"data file '{path}': token {start + index:,} is {int(chunk[index]):,}; tokens are 0 "
                f"to {vocab_size - 1:,}, so the vocabulary (--vocab-size) is too small or the file "
                "holds something else"
            )
        largest = max(largest, high)
    return largest


def _hint(path: Path) -> str:
    """Suggest the nearest file name for one that is missing."""
    try:
        names = os.listdir(path.parent)
    except OSError as error:
        return f", and folder '{path.parent}' cannot be listed: {error.strerror}; check the path"
    # Names with the same suffix are half equal already.
    near = nearest(path.name, names, likeness=0.7)
    return near or f"; folder '{path.parent}' has no file of a similar name"
