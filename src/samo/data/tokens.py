"""`Tokens`: a stream of tokens in memory-mapped segments."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from samo.data import files
from samo.data.tokenizers import MAX_VOCAB_SIZE, ByteTokenizer, Tokenizer
from samo.errors import DataError

_READ_IN_FULL: Final = 2**26
_NUM_BLOCKS: Final = 64
_BLOCK_TOKENS: Final = 2**14


@dataclass(frozen=True, eq=False)
class Tokens:
    """A stream of tokens in segments, one per file.

    Example:
        >>> tokens = Tokens([np.arange(600) % 7, np.arange(400) % 7], vocab_size=7)
        >>> train, valid = tokens.split(valid_fraction=0.1, min_tokens=65)
        >>> train.num_tokens, valid.num_tokens
        (900, 100)
    """

    segments: Sequence[NDArray[Any]]  # 1-D arrays of integers
    vocab_size: int  # all tokens are less than this

    @property
    def num_tokens(self) -> int:
        """Tokens in all segments."""
        return sum(map(len, self.segments))

    def fingerprint(self) -> str:
        """Return a SHA-256 of segment sizes and tokens, whatever their integer type.

        Up to 64 million tokens are read in full; of a longer stream, 64 blocks spread over it.
        """
        digest = hashlib.sha256(repr([len(segment) for segment in self.segments]).encode())
        last = max(self.num_tokens - _BLOCK_TOKENS, 0)
        starts = [last * number // (_NUM_BLOCKS - 1) for number in range(_NUM_BLOCKS)]
        pieces = (each for start in starts for each in self._between(start, start + _BLOCK_TOKENS))
        if self.num_tokens <= _READ_IN_FULL:
            pieces = (
                segment[start : start + _BLOCK_TOKENS]
                for segment in self.segments
                for start in range(0, len(segment), _BLOCK_TOKENS)
            )
        for piece in pieces:
            digest.update(piece.astype("<u4").tobytes())
        return digest.hexdigest()

    def split(self, valid_fraction: float, min_tokens: int) -> tuple["Tokens", "Tokens"]:
        """Split off the last tokens for validation: a fraction, but at least ``min_tokens``."""
        num_valid = max(round(self.num_tokens * valid_fraction), min_tokens)
        num_train = self.num_tokens - num_valid
        if num_train < min_tokens:
            raise DataError(
                f"{self.num_tokens:,} tokens are too few to hold back {num_valid:,} for validation "
                f"and train on {min_tokens:,}; use more text, a smaller --context, or --valid FILE"
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
    paths: Iterable[str | os.PathLike[str]],
    *,
    tokenizer: Tokenizer,
    cache: Path,
    vocab_size: int | None = None,
) -> Tokens:
    """Open text and token files as one stream.

    The byte tokenizer maps text as it is; any other encodes it once, into ``cache``. All tokens of
    token files (``.npy``, ``.bin``) are checked against the vocabulary, by default the tokenizer's;
    for token files alone with the byte tokenizer, up to the largest token.
    """
    given = [Path(path) for path in paths]
    for path in given:
        files.check_readable(path)
    is_bytes = tokenizer.fingerprint == ByteTokenizer.fingerprint
    has_text = any(path.suffix not in files.TOKEN_SUFFIXES for path in given)
    if vocab_size is None and (has_text or not is_bytes):
        vocab_size = tokenizer.vocab_size

    segments: list[NDArray[Any]] = []
    largest, limit = 0, vocab_size or MAX_VOCAB_SIZE
    for path in given:
        try:
            if path.suffix in files.TOKEN_SUFFIXES:
                segment = files.map_token_file(path)
            elif is_bytes:
                segment = files.map_text(path)
            else:
                segment = files.encoded(path, tokenizer, cache)
        except OSError as error:
            raise DataError(
                f"data file '{path}' cannot be mapped: {error.strerror}; check its permissions, "
                "and for very many files the limit of open files (ulimit -n)"
            ) from None
        bounds = np.iinfo(segment.dtype)
        if vocab_size is None or bounds.min < 0 or bounds.max >= limit:
            largest = max(largest, files.largest_token(path, segment, limit))
        segments.append(segment)
    return Tokens(segments, largest + 1 if vocab_size is None else vocab_size)
