"""`Tokens`: a stream of tokens in memory-mapped segments."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from samo.data import files
from samo.data.encoding import encoded
from samo.data.tokenizers import ByteTokenizer, Tokenizer
from samo.errors import DataError

__all__ = ["Tokens", "open_tokens"]

StrPath = str | os.PathLike[str]

_READ_IN_FULL: Final = 2**26
_NUM_BLOCKS: Final = 64
_BLOCK_TOKENS: Final = 2**14


class Tokens:
    """An immutable stream of tokens in segments, one for each file.

    Example:
        >>> tokens = Tokens([np.arange(600) % 7, np.arange(400) % 7], vocab_size=7)
        >>> tokens
        Tokens(1,000 in 2 segments, vocabulary of 7)
        >>> tokens.split(valid_fraction=0.1, min_tokens=65)
        (Tokens(900 in 2 segments, vocabulary of 7), Tokens(100 in 1 segments, vocabulary of 7))

    Args:
        segments: 1-D arrays of integers; memory-mapped ones stay so.
        vocab_size: Tokens are less than this; not checked, since that would read all of them.

    Raises:
        ValueError: A segment is not a 1-D array of integers, or the vocabulary size is out of
            range.
    """

    __slots__ = ("num_tokens", "segments", "vocab_size")

    def __init__(self, segments: Sequence[NDArray[Any]], vocab_size: int) -> None:
        views = [array.view() for array in segments]
        for view in views:
            if view.ndim != 1 or view.dtype.kind not in "iu":
                raise ValueError(
                    f"a segment has shape {view.shape} and type {view.dtype}; segments are 1-D "
                    "arrays of integers"
                )
            view.flags.writeable = False
        files.check_vocab_size(vocab_size)
        self.segments: Final = tuple(views)
        self.vocab_size: Final = vocab_size
        self.num_tokens: Final = sum(map(len, views))

    def __repr__(self) -> str:
        return (
            f"Tokens({self.num_tokens:,} in {len(self.segments)} segments, "
            f"vocabulary of {self.vocab_size:,})"
        )

    def fingerprint(self) -> str:
        """Return a SHA-256 of segment sizes and tokens, whatever their integer type.

        Up to 64 million tokens are read in full; of a longer stream, 64 blocks spread over it.
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
        """Cut the stream in two: the first part to train on, the second to validate on.

        Args:
            valid_fraction: Fraction of the tokens held back for validation, above 0 and below 1.
            min_tokens: Minimum for both parts; a smaller fraction is raised to it.

        Raises:
            ValueError: ``valid_fraction`` is out of range.
            DataError: There are not enough tokens for two parts.
        """
        if not 0 < valid_fraction < 1:
            raise ValueError(f"valid_fraction must be above 0 and below 1, got {valid_fraction}")
        least = max(min_tokens, 1)
        num_valid = max(round(self.num_tokens * valid_fraction), least)
        num_train = self.num_tokens - num_valid
        if num_train < least:
            raise DataError(
                f"{self.num_tokens:,} tokens are too few to hold back {num_valid:,} of them and to "
                f"train on at least {least:,}; give more text, a smaller --context or files to "
                "validate on (--valid)"
            )
        return (
            Tokens(self._between(0, num_train), self.vocab_size),
            Tokens(self._between(num_train, self.num_tokens), self.vocab_size),
        )

    def _between(self, start: int, stop: int) -> list[NDArray[Any]]:
        """Return the parts of the segments between two positions of the stream."""
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

    The byte tokenizer maps text as it is; any other encodes it once, into ``cache``. Files named
    ``.npy`` (a 1-D array of integers) or ``.bin`` (16-bit, little endian) hold tokens, and are read
    once to check that every token is in the vocabulary.

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
        cache: Folder for encoded text, created when needed.
        vocab_size: Tokens are less than this. By default the tokenizer's; for token files alone
            with the byte tokenizer, the largest token + 1.

    Raises:
        DataError: A file is missing, empty, unreadable, not what its name says, not UTF-8, or has
            tokens outside of the vocabulary; or there are no files, or too many.
        ValueError: ``vocab_size`` is out of range.
    """
    given = [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not given:
        raise DataError("no data files; name at least one file of text or tokens")
    if vocab_size is not None:
        files.check_vocab_size(vocab_size)
    for path in given:
        files.check_readable(path)
    is_bytes = tokenizer.fingerprint == ByteTokenizer.fingerprint
    if vocab_size is None and not (is_bytes and all(map(files.is_token_file, given))):
        vocab_size = tokenizer.vocab_size

    segments: list[NDArray[Any]] = []
    largest, limit = 0, vocab_size or files.MAX_VOCAB_SIZE
    for path in given:
        try:
            if files.is_token_file(path):
                segment = files.map_token_file(path)
            else:
                segment = (
                    files.map_text(path) if is_bytes else encoded(path, tokenizer, Path(cache))
                )
        except OSError as error:  # each mapped file counts as an open file
            raise DataError(
                f"data file '{path}', number {len(segments) + 1:,} of {len(given):,}, cannot be "
                f"mapped: {error.strerror}; join small files into one, or allow more open files "
                "(ulimit -n)"
            ) from None
        bounds = np.iinfo(segment.dtype)
        if vocab_size is None or bounds.min < 0 or bounds.max >= limit:
            largest = max(largest, files.largest_token(path, segment, limit))
        segments.append(segment)
    return Tokens(segments, largest + 1 if vocab_size is None else vocab_size)
