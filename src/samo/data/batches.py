"""Shuffled batches of a text or of examples; the position in their order is one integer.

A window has ``context + 1`` tokens: the model reads all but the last and predicts all but the
first. Each epoch predicts every token but the first of a segment once. Window borders shift from
epoch to epoch, as far as the last window of a segment has room:

    segment    t0 t1 t2 t3 t4 t5 t6 t7 t8 t9                    context 4
    epoch 0    [t0 .. .. t3] [t3 .. .. .. t7] [t7 .. t9]        shifted by 1
    epoch 1    [t0 t1] [t1 .. .. .. t5] [t5 .. .. .. t9]        shifted by 3

Of examples a window has one, or with packing several, one after the other, whole; which ones is
drawn from the seed, once.

Every epoch has the same number of windows, so ``divmod(position, num_windows)`` is the epoch and
the index in its permutation. A permutation is drawn from (seed, epoch) and takes 4 bytes a window.

Shapes: B sequences in a batch, T tokens in a sequence.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samo.data.examples import Examples
from samo.data.tokens import Tokens
from samo.errors import DataError

__all__ = ["IGNORE", "Batch", "Batches", "part_of", "validation_batches"]

IGNORE: Final = -100
"""Target of padding and of tokens only to read, which torch's cross entropy ignores."""


class Batch(NamedTuple):
    """Sequences of tokens, and for each token the one that follows."""

    inputs_BT: Tensor
    """Tokens to read, int64; short windows are padded with 0."""
    targets_BT: Tensor
    """Tokens to predict, int64; `IGNORE` where there is none, as in the padding."""
    num_tokens: int
    """Targets in the batch of all ranks, without `IGNORE`; this may be the part of one rank."""
    num_read: int
    """Inputs in the batch of all ranks, without padding: what a model has to work on."""
    positions_BT: Tensor | None = None
    """Positions of packed examples, int64: each starts at 0, and so does the padding. None if every
    row is one sequence."""


class Batches(Iterator[Batch]):
    """Endless shuffled batches. Save and restore ``position``, windows so far, to resume exactly.

    ``part`` is ``(index, count)``: one of several ranks gets only its part of each batch.
    """

    def __init__(
        self,
        data: Tokens | Examples,
        *,
        context: int,
        batch_size: int,
        seed: int,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.position = 0
        self._windows: Final = _windows(data, context, seed)
        self._batch_size: Final = batch_size
        self._seed: Final = seed
        self._part: Final = part
        self._drawn: tuple[int, NDArray[Any], NDArray[Any]] | None = None

    @property
    def num_windows(self) -> int:
        """Windows in an epoch."""
        return self._windows.count

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.position / self.num_windows

    def __next__(self) -> Batch:
        spans: list[Any] = []
        position, end = self.position, self.position + self._batch_size
        while position < end:  # a batch may continue into the next epoch
            epoch, first = divmod(position, self.num_windows)
            last = min(self.num_windows, first + end - position)
            order, shifts = self._draw(epoch)
            spans += self._windows.spans(order[first:last], shifts)
            position += last - first
        self.position = end
        return self._windows.read(spans, self._part)

    def _draw(self, epoch: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the window order and the segment shifts of an epoch; caches the last one."""
        if self._drawn is None or self._drawn[0] != epoch:
            rng = np.random.default_rng((self._seed, epoch))
            shifts = rng.integers(self._windows.max_shifts, endpoint=True)
            dtype = np.uint32 if self.num_windows <= 2**32 else np.int64
            order = np.arange(self.num_windows, dtype=dtype)
            rng.shuffle(order)
            self._drawn = epoch, order, shifts
        return self._drawn[1:]


def part_of(count: int, part: tuple[int, int]) -> slice:
    """Return the rows of part ``(index, parts)``; 16 rows in 3 parts are 6, 5 and 5."""
    index, parts = part
    size, larger = divmod(count, parts)
    start = index * size + min(index, larger)
    return slice(start, start + size + (index < larger))


def validation_batches(
    data: Tokens | Examples,
    *,
    context: int,
    batch_size: int,
    max_batches: int,
    part: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Return up to ``max_batches`` batches, spread evenly over the data, the same at every call.

    The last batch may have fewer sequences, and a ``part`` of it none.
    """
    windows = _windows(data, context, seed=0)
    no_shifts = np.zeros_like(windows.max_shifts)
    total = min(windows.count, max_batches * batch_size)
    chosen = np.arange(total) * windows.count // total
    return (
        windows.read(windows.spans(chosen[start : start + batch_size], no_shifts), part)
        for start in range(0, total, batch_size)
    )


class _Source(Protocol):
    """What batches are drawn from: numbered windows."""

    @property
    def count(self) -> int: ...
    @property
    def max_shifts(self) -> NDArray[Any]: ...
    def spans(self, numbers: NDArray[Any], shifts: NDArray[Any], /) -> list[Any]: ...
    def read(self, spans: list[Any], part: tuple[int, int], /) -> Batch: ...


def _windows(data: Tokens | Examples, context: int, seed: int) -> _Source:
    return _Windows(data, context) if isinstance(data, Tokens) else _Rows(data, context, seed)


_Span = tuple[NDArray[Any], int, int]
"""A window: a segment, and the first and the last of its tokens."""


class _Windows:
    """The windows of a token stream, numbered across its segments."""

    def __init__(self, tokens: Tokens, context: int) -> None:
        self._segments: Final = [segment for segment in tokens.segments if len(segment) >= 2]
        self._context: Final = context
        sizes = np.array([len(segment) for segment in self._segments], dtype=np.int64)
        if sizes.sum() <= context:
            raise DataError(
                f"{sizes.sum():,} tokens are too few for a sequence of {context:,} and the one "
                "after it; use more text or a smaller --context"
            )
        counts = -(-(sizes - 1) // context)
        # All windows of a segment may shift left by the room that its last one has to spare.
        self.max_shifts: Final = counts * context - (sizes - 1)
        self._ends: Final = np.cumsum(counts)
        self._starts: Final = self._ends - counts
        self.count: Final = int(self._ends[-1])

    def spans(self, numbers: NDArray[Any], shifts: NDArray[Any]) -> list[_Span]:
        """Return where windows lie when each segment is shifted to the left by its shift."""
        owners = np.searchsorted(self._ends, numbers, side="right")
        starts = (numbers - self._starts[owners]) * self._context - shifts[owners]
        return [
            (segment, max(start, 0), min(start + self._context, len(segment) - 1))
            for owner, start in zip(owners.tolist(), starts.tolist())
            for segment in [self._segments[owner]]
        ]

    def read(self, spans: list[_Span], part: tuple[int, int]) -> Batch:
        """Read a part of the windows into a batch. Only this touches tokens."""
        num_tokens = sum(stop - start for _, start, stop in spans)
        spans = spans[part_of(len(spans), part)]
        inputs = np.zeros((len(spans), self._context), dtype=np.int64)
        targets = np.full_like(inputs, IGNORE)
        for row, (segment, start, stop) in enumerate(spans):
            inputs[row, : stop - start] = segment[start:stop]
            targets[row, : stop - start] = segment[start + 1 : stop + 1]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), num_tokens, num_tokens)


class _Rows:
    """The rows of examples, numbered, read like windows."""

    def __init__(self, examples: Examples, context: int, seed: int) -> None:
        self._examples: Final = examples
        self._context: Final = context
        self._order, self._starts = examples.rows(context, seed)
        self.max_shifts: Final = np.zeros(0, dtype=np.int64)  # nothing shifts
        self.count: Final = len(self._starts) - 1

    def spans(self, numbers: NDArray[Any], _: NDArray[Any]) -> list[NDArray[np.int64]]:
        """Return the spans of the examples of each row."""
        return [
            self._examples.spans_N4[self._order[self._starts[number] : self._starts[number + 1]]]
            for number in numbers.tolist()
        ]

    def read(self, rows: list[NDArray[np.int64]], part: tuple[int, int]) -> Batch:
        """Read a part of the rows into a batch. Only this touches tokens."""
        num_tokens = sum(int(spans[:, 3].sum()) for spans in rows)
        num_read = sum(int((spans[:, 2] - spans[:, 1] - 1).sum()) for spans in rows)
        rows = rows[part_of(len(rows), part)]
        inputs = np.zeros((len(rows), self._context), dtype=np.int64)
        targets = np.full_like(inputs, IGNORE)
        positions = np.zeros_like(inputs)
        for row, spans in enumerate(rows):
            first = 0
            for owner, start, stop, _ in spans.tolist():
                tokens = self._examples.segments[owner][start:stop]
                last = first + len(tokens) - 1
                # The complement of a token is only read.
                inputs[row, first:last] = np.maximum(tokens, ~tokens)[:-1]
                targets[row, first:last] = np.where(tokens < 0, IGNORE, tokens)[1:]
                positions[row, first:last] = np.arange(last - first)
                first = last
            positions[row, first:] = np.arange(self._context - first)
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            num_tokens,
            num_read,
            torch.from_numpy(positions) if self._examples.is_packed else None,
        )
