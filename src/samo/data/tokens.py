"""`Tokens`: what there is to learn, as numbers that stay on disk until they are read."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from samo.data.encoding import encoded
from samo.data.files import (
    MAX_VOCAB_SIZE,
    check_readable,
    is_token_file,
    largest_token,
    map_text,
    map_token_file,
)
from samo.data.tokenizers import ByteTokenizer, Tokenizer
from samo.errors import DataError

__all__ = ["Tokens", "open_tokens"]

StrPath = str | os.PathLike[str]

_READ_IN_FULL: Final = 2**26
_NUM_BLOCKS: Final = 64
_BLOCK_TOKENS: Final = 2**14  # 64 kB as 4-byte numbers


class Tokens:
    """A stream of tokens in segments, one for each file. Nothing in it changes.

    Example:
        >>> tokens = Tokens([np.arange(600) % 7, np.arange(400) % 7], vocab_size=7)
        >>> tokens
        Tokens(1,000 in 2 segments, vocabulary of 7)
        >>> train, valid = tokens.split(valid_fraction=0.1, min_tokens=65)
        >>> train, valid
        (Tokens(900 in 2 segments, vocabulary of 7), Tokens(100 in 1 segments, vocabulary of 7))

    Args:
        segments: 1-D arrays of integers; memory-mapped ones stay so.
        vocab_size: Tokens are less than this. Not checked here, since that reads all of them.

    Raises:
        ValueError: A segment is not a 1-D array of integers, or the vocabulary is empty.
    """

    __slots__ = ("num_tokens", "segments", "vocab_size")

    def __init__(self, segments: Sequence[NDArray[Any]], vocab_size: int) -> None:
        for array in segments:
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise ValueError(
                    f"a segment has shape {array.shape} and type {array.dtype}; segments are 1-D "
                    "arrays of integers"
                )
        _check_vocab_size(vocab_size)
        self.segments: Final = tuple(map(_read_only, segments))
        self.vocab_size: Final = vocab_size
        self.num_tokens: Final = sum(map(len, segments))

    def __repr__(self) -> str:
        return (
            f"Tokens({self.num_tokens:,} in {len(self.segments)} segments, "
            f"vocabulary of {self.vocab_size:,})"
        )

    def fingerprint(self) -> str:
        """Return a SHA-256 of the sizes of all segments and of their tokens.

        It does not depend on the integer type. Up to 64 million tokens are read in full, within a
        second; of more than that 64 blocks, spread over all of them.

        Example:
            >>> narrow, wide = (np.arange(9, dtype=dtype) for dtype in (np.uint8, np.int64))
            >>> Tokens([narrow], 9).fingerprint() == Tokens([wide], 9).fingerprint()
            True
        """
        digest = hashlib.sha256(repr([len(segment) for segment in self.segments]).encode())
        last = max(self.num_tokens - _BLOCK_TOKENS, 0)
        starts = [last * number // (_NUM_BLOCKS - 1) for number in range(_NUM_BLOCKS)]
        if self.num_tokens <= _READ_IN_FULL:
            starts = list(range(0, self.num_tokens, _BLOCK_TOKENS))
        for start in starts:
            for piece in self._between(start, start + _BLOCK_TOKENS):
                digest.update(piece.astype("<u4").tobytes())
        return digest.hexdigest()

    def split(self, valid_fraction: float, min_tokens: int) -> tuple["Tokens", "Tokens"]:
        """Cut the stream at one place: what is before it to train on, what is after it to validate.

        Example:
            >>> tokens = Tokens([np.arange(100)], vocab_size=100)
            >>> [part.num_tokens for part in tokens.split(valid_fraction=0.05, min_tokens=17)]
            [83, 17]

        Args:
            valid_fraction: Share of the tokens that is held back to validate, above 0 and below 1.
            min_tokens: The least that either part must have; a smaller share is raised to it.

        Raises:
            ValueError: ``valid_fraction`` is out of range.
            DataError: There are not enough tokens for two parts.
        """
        if not 0 < valid_fraction < 1:
            raise ValueError(f"valid_fraction must be above 0 and below 1, got {valid_fraction}")
        num_valid = max(round(self.num_tokens * valid_fraction), min_tokens, 1)
        num_train = self.num_tokens - num_valid
        if num_train < max(min_tokens, 1):
            raise DataError(
                f"{self.num_tokens:,} tokens are too few to hold back {num_valid:,} of them and to "
                f"train on at least {max(min_tokens, 1):,}; give more text, a smaller --context or "
                "files to validate on (--valid)"
            )
        return (
            Tokens(self._between(0, num_train), self.vocab_size),
            Tokens(self._between(num_train, self.num_tokens), self.vocab_size),
        )

    def _between(self, start: int, stop: int) -> list[NDArray[Any]]:
        """Return the parts of the segments from one place of the stream to another."""
        parts = []
        for segment in self.segments:
            part = segment[max(start, 0) : max(stop, 0)]
            if part.size:
                parts.append(part)
            start, stop = start - len(segment), stop - len(segment)
        return parts


def open_tokens(
    paths: StrPath | Iterable[StrPath],
    *,
    tokenizer: Tokenizer,
    cache: StrPath,
    vocab_size: int | None = None,
) -> Tokens:
    """Open text and token files as one stream, a segment for each file.

    Text is mapped as it is by the byte tokenizer, and encoded once into ``cache`` by any other.
    Files named ``.npy`` (a 1-D array of integers) or ``.bin`` (16-bit, little endian) hold tokens
    already; they are read once to check that every token is in the vocabulary.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.txt").write_text("to be or not to be")
        ...     tokens = open_tokens(f"{folder}/a.txt", tokenizer=ByteTokenizer(), cache=folder)
        >>> tokens
        Tokens(18 in 1 segments, vocabulary of 256)

    Args:
        paths: A file, or several in the order of the stream.
        tokenizer: Encodes the text files; see `open_tokenizer`.
        cache: Folder for what is encoded; made when it is needed.
        vocab_size: Tokens are less than this. Without it, as many as the tokenizer has; for token
            files alone under the byte tokenizer, the largest token + 1.

    Raises:
        DataError: A file is missing, empty, unreadable, of another kind than its name says, not
            UTF-8, or has tokens outside of the vocabulary; or there is no file, or too many.
        ValueError: ``vocab_size`` is out of range.
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not files:
        raise DataError("no data files are given; name at least one file of text or tokens")
    if vocab_size is not None:
        _check_vocab_size(vocab_size)
    for file in files:
        check_readable(file)
    is_bytes = tokenizer.fingerprint == ByteTokenizer.fingerprint
    if vocab_size is None and not (is_bytes and all(map(is_token_file, files))):
        vocab_size = tokenizer.vocab_size

    segments: list[NDArray[Any]] = []
    largest, limit = 0, vocab_size or MAX_VOCAB_SIZE
    for file in files:
        try:
            if is_token_file(file):
                segment = map_token_file(file)
            else:
                segment = map_text(file) if is_bytes else encoded(file, tokenizer, Path(cache))
        except OSError as error:  # each mapped file counts as an open one
            raise DataError(
                f"data file '{file}', number {len(segments) + 1:,} of {len(files):,}, cannot be mapped: "
                f"{error.strerror}; join small files into one, or allow more open files (ulimit -n)"
            ) from None
        bounds = np.iinfo(segment.dtype)
        if vocab_size is None or bounds.min < 0 or bounds.max >= limit:
            largest = max(largest, largest_token(file, segment, limit))
        segments.append(segment)
    return Tokens(segments, vocab_size or largest + 1)


def _check_vocab_size(vocab_size: int) -> None:
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be 1 to {MAX_VOCAB_SIZE:,}, got {vocab_size:,}")


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
