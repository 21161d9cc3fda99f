"""`Examples`: texts, completions and conversations as tokens, some of which are learned.

A file of examples becomes one array of 32-bit integers. A token to learn stands for itself, a token
only to read is stored as its complement, and `END` follows each example:

    user: 2 + 2?  assistant: 4     ~21 ~2 ~13 ~2 ~30 ~22 4 1 END
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from samo.data import files
from samo.data.packing import pack
from samo.data.rows import Example, check_readable, num_chars, read_examples
from samo.data.tokenizers import Tokenizer
from samo.data.tokens import Tokens
from samo.errors import DataError
from samo.utils.formatting import counted

END: Final = np.iinfo(np.int32).min
"""Follows each example in its file; the complement of no token."""

_EXAMPLES_AT_ONCE: Final = 256
_CHARS_AT_ONCE: Final = 2**21
_TOKENS_AT_ONCE: Final = 2**20
_log: Final = logging.getLogger(__name__)

Rows = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Examples row by row, and where each row starts and the last ends."""


class ExampleTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows how its model reads documents, completions and conversations."""

    def encode_examples(
        self, examples: Sequence[tuple[str, Example]]
    ) -> Iterable[NDArray[np.int32]]:
        """Return the tokens of examples, complemented where they are only read.

        Each example comes with its place, for messages.
        """


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples in memory-mapped files; of a document longer than a row, its parts.

    Example:
        >>> array = np.array([~5, 7, 1, END, ~5, ~6, 8, 1, END], dtype=np.int32)
        >>> examples = Examples([array], np.array([[0, 0, 3, 2], [0, 4, 8, 2]]), vocab_size=10)
        >>> len(examples), examples.num_tokens
        (2, 7)
    """

    segments: Sequence[NDArray[np.int32]]  # the encoded files
    spans_N4: NDArray[np.int64]
    """Of each example: its segment, its first token, the one after its last, and its targets."""
    vocab_size: int  # all tokens are less than this
    is_packed: bool = True  # whether a row of a batch may have several examples
    _rows: dict[tuple[int, int], Rows] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self.spans_N4)

    @property
    def num_tokens(self) -> int:
        """Tokens in all examples."""
        return int((self.spans_N4[:, 2] - self.spans_N4[:, 1]).sum())

    def fingerprint(self) -> str:
        """Return a SHA-256 of the examples, of many as `Tokens.fingerprint` does."""
        content = Tokens(self.segments, self.vocab_size).fingerprint()
        spans = self.spans_N4.astype("<i8").tobytes()
        return hashlib.sha256(content.encode() + spans).hexdigest()

    def split(self, valid_fraction: float) -> tuple["Examples", "Examples"]:
        """Split off a fraction of the examples for validation, at least one, drawn at random."""
        whole = _numbers(self.spans_N4)  # the parts of a document stay together
        count = int(whole[-1]) + 1
        num_valid = max(round(count * valid_fraction), 1)
        if num_valid >= count:
            raise DataError(
                f"with {counted(count, 'example')} the data is too small to hold back "
                f"{num_valid:,} for validation and train on the others; use more, or --valid FILE"
            )
        # The same examples whatever the seed of a run, so that the losses of runs compare.
        is_valid = np.zeros(count, dtype=bool)
        is_valid[np.random.default_rng(0).permutation(count)[:num_valid]] = True
        train, valid = (self.spans_N4[is_valid[whole] == held] for held in (False, True))
        return replace(self, spans_N4=train), replace(self, spans_N4=valid)

    def prompt(self) -> NDArray[np.int32] | None:
        """Return what comes before the first token to learn of the first example that has it.

        A conversation up to the assistant's turn, or a prompt; None if there are documents only.
        """
        for owner, start, stop, _ in self.spans_N4.tolist():
            tokens = self.segments[owner][start:stop]
            num_read = int(np.argmax(tokens >= 0))
            if num_read > 1:  # of a document, at most the token that marks its beginning
                return ~tokens[:num_read]
        return None

    def last_tokens(self, most: int = 1000) -> list[int]:
        """Return the last token to learn of the first examples."""
        spans = self.spans_N4[:most].tolist()
        examples = (self.segments[owner][start:stop] for owner, start, stop, _ in spans)
        return [int(tokens[tokens >= 0][-1]) for tokens in examples]

    def rows(self, context: int, seed: int) -> Rows:
        """Return the examples of rows with ``context`` tokens to read, as `pack` does."""
        if (context, seed) not in self._rows:
            sizes = self.spans_N4[:, 2] - self.spans_N4[:, 1] - 1
            assert sizes.max() <= context  # as they were opened
            alone = np.arange(len(self)), np.arange(len(self) + 1)
            self._rows[context, seed] = pack(sizes, context, seed) if self.is_packed else alone
        return self._rows[context, seed]


def open_examples(
    paths: Iterable[str | os.PathLike[str]],
    *,
    tokenizer: ExampleTokenizer,
    context: int,
    cache: Path,
    vocab_size: int | None = None,
    is_packed: bool = True,
) -> Examples:
    """Open files of examples, and encode into ``cache`` those that it does not have.

    A document longer than a row of ``context`` tokens to read becomes several examples, without a
    loss. Any other is cut, and one without anything to learn left out; a warning counts both.

    Paths are files of JSON lines, parquet files, and folders written by ``Dataset.save_to_disk``.
    The vocabulary is that of the model, by default the tokenizer's.
    """
    given = [Path(path) for path in paths]
    for path in given:
        check_readable(path)
    limit = tokenizer.vocab_size if vocab_size is None else vocab_size
    segments, spans, num_cut = [], [], 0
    for number, path in enumerate(given):
        segment = files.cached(path, tokenizer, "<i4", _encoded(path, tokenizer), cache)
        _check_tokens(path, segment, tokenizer, limit)
        found, cut = _spans(segment, number, context)
        segments.append(segment)
        spans.append(found)
        num_cut += cut
    spans_N4 = np.concatenate(spans)
    count = int(_numbers(spans_N4)[-1]) + 1
    if num_cut:
        _log.warning(
            "%s of %s examples are longer than --context %s, and are cut; a larger one keeps them "
            "whole",
            *(f"{value:,}" for value in (num_cut, count, context)),
        )
    is_learned = spans_N4[:, 3] > 0
    names = ", ".join(f"'{path}'" for path in given)
    if not is_learned.any():
        raise DataError(
            f"none of the {count:,} examples in {names} has a token to learn; a conversation needs "
            "a message of the assistant, and that or a completion may follow at most "
            f"{context:,} tokens (--context)"
        )
    if num_out := int(np.count_nonzero(~is_learned)):
        is_full = spans_N4[:, 2] - spans_N4[:, 1] > context
        num_long = int(np.count_nonzero(is_full & ~is_learned))
        first = int(_numbers(spans_N4)[np.argmin(is_learned)]) + 1
        num_empty = num_out - num_long
        long = f"{num_long:,} with no token to learn among the first {context:,} (--context)"
        empty = f"{num_empty:,} with none at all: no message of the assistant, say"
        _log.warning(
            "%s of %s examples in %s left out, the first of them example %s: %s",
            *(f"{num_out:,}", f"{count:,}", names, f"{first:,}"),
            ", and ".join([long] * (num_long > 0) + [empty] * (num_empty > 0)),
        )
    return Examples(segments, spans_N4[is_learned], limit, is_packed)


def _encoded(path: Path, tokenizer: ExampleTokenizer) -> Iterator[NDArray[np.int32]]:
    """Yield the encoded examples of a file, some at a time."""
    end = np.array([END], dtype=np.int32)
    for examples in _some(read_examples(path)):
        arrays = tokenizer.encode_examples(examples)
        yield np.concatenate([part for array in arrays for part in (array, end)])


def _some(examples: Iterable[tuple[str, Example]]) -> Iterator[list[tuple[str, Example]]]:
    """Yield lists of examples, limited in number and text."""
    some: list[tuple[str, Example]] = []
    size = 0
    for place, example in examples:
        some.append((place, example))
        size += num_chars(example)
        if len(some) == _EXAMPLES_AT_ONCE or size >= _CHARS_AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def _check_tokens(
    path: Path, segment: NDArray[np.int32], tokenizer: Tokenizer, vocab_size: int
) -> None:
    """Raise DataError if a token is outside the model's vocabulary."""
    largest = 0
    for start in range(0, len(segment), _TOKENS_AT_ONCE):
        part = segment[start : start + _TOKENS_AT_ONCE]
        tokens = np.maximum(part, ~part)
        largest = max(largest, int(tokens.max(where=part != END, initial=0)))
    if largest >= vocab_size:
        raise DataError(
            f"tokenizer '{tokenizer.name}' makes token {largest:,} of '{path}', but the model has "
            f"only {vocab_size:,} tokens, up to {vocab_size - 1:,}; use the tokenizer of the model"
        )


def _numbers(spans_N4: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number examples from 0, the parts of a document alike."""
    owners, starts, stops, _ = spans_N4.T
    # A part begins with the last token of the part before.
    is_part = (owners[1:] == owners[:-1]) & (starts[1:] == stops[:-1] - 1)
    return np.concatenate([[0], np.cumsum(~is_part)])


def _spans(segment: NDArray[np.int32], number: int, context: int) -> tuple[NDArray[np.int64], int]:
    """Return the spans of a segment's examples, none longer than a row, and how many were cut."""
    ends = np.concatenate(
        [
            np.flatnonzero(segment[start : start + _TOKENS_AT_ONCE] == END) + start
            for start in range(0, len(segment), _TOKENS_AT_ONCE)
        ]
    )
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - starts - 1  # nothing stands before the first token to predict it
    is_document = _num_learned(segment, starts, ends) == sizes  # any part is as good as the first
    num_parts = np.where(is_document, np.maximum(-(-sizes // context), 1), 1)
    whole = np.repeat(np.arange(len(ends)), num_parts)
    numbers = np.arange(len(whole)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    starts_N = starts[whole] + numbers * context
    stops_N = np.minimum(ends[whole], starts_N + context + 1)
    targets_N = _num_learned(segment, starts_N, stops_N)
    spans_N4 = np.stack([np.full_like(starts_N, number), starts_N, stops_N, targets_N], axis=1)
    return spans_N4, int(np.count_nonzero((sizes > context) & ~is_document))


def _num_learned(
    segment: NDArray[np.int32], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Count the tokens to learn in ranges that come in order, but for the first of each."""
    firsts = np.minimum(starts + 1, stops)
    counts = np.empty_like(stops)
    for start in range(0, len(counts), _EXAMPLES_AT_ONCE):
        some = slice(start, start + _EXAMPLES_AT_ONCE)
        base = firsts[start]
        before = np.concatenate([[0], np.cumsum(segment[base : stops[some][-1]] >= 0)])
        counts[some] = before[stops[some] - base] - before[firsts[some] - base]
    return counts
