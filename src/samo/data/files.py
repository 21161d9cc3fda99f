"""Memory-map data files: text as bytes, ``.npy`` and ``.bin`` as tokens.

name.npy        a 1-D array of integers, as numpy.save writes it
name.bin        16-bit tokens, little endian, no header (nanoGPT's format)
anything else   text
"""

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from samo.errors import DataError, nearest

__all__ = []

MAX_VOCAB_SIZE: Final = 2**31
TOKEN_SUFFIXES: Final = (".npy", ".bin")

_HEAD_BYTES: Final = 2**24


def check_readable(path: Path) -> None:
    """Raise DataError unless ``path`` is a regular file with content."""
    if path.is_dir():
        raise DataError(f"data file '{path}' is a folder; pass its files, such as {path}/*.txt")
    if not path.exists():
        names = os.listdir(path.parent) if path.parent.is_dir() else []
        # Names with the same suffix are half equal already.
        raise DataError(
            f"data file '{path}' does not exist{nearest(path.name, names, likeness=0.7)}"
        )
    if not path.is_file():  # opening a pipe would block
        raise DataError(
            f"data file '{path}' is not a regular file and cannot be memory-mapped; copy it to one"
        )
    if not path.stat().st_size:
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
    position = mapped[:_HEAD_BYTES].tobytes().find(0)
    if position >= 0:
        raise DataError(
            f"data file '{path}' is not text: byte {position:,} is NUL; "
            "name token files .npy (integers) or .bin (16-bit, little endian)"
        )
    return mapped


def largest_token(path: Path, tokens: NDArray[Any], vocab_size: int) -> int:
    """Return the largest token; DataError if one is outside the vocabulary."""
    largest = int(tokens.max())
    if int(tokens.min()) < 0 or largest >= vocab_size:
        index = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
        raise DataError(
            f"data file '{path}': token {index:,} is {int(tokens[index]):,}, but the vocabulary "
            f"has {vocab_size:,} tokens; raise --vocab-size, or check the file"
        )
    return largest
