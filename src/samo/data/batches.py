"""Batches of windows from a stream of tokens, in an order that is one integer long.

A window is ``context + 1`` tokens: each is read, and the one after it is to be predicted. Windows
overlap by one token, so that in every epoch each token but the first of a segment is predicted once.
Where they begin differs from epoch to epoch; the first and the last window of a segment are short then:

    segment    t0 t1 t2 t3 t4 t5 t6 t7 t8 t9                    context 4
    epoch 0    [t0 .. .. t3] [t3 .. .. .. t7] [t7 .. t9]        shifted by 1
    epoch 1    [t0 t1] [t1 .. .. .. t5] [t5 .. .. .. t9]        shifted by 3

The number of windows is the same in every epoch, so the position (windows drawn so far) says which epoch
it is and which place in its shuffled order comes next.

Shapes: B sequences in a batch, T tokens in a sequence.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samo.data.order import key_of, shuffled
from samo.data.tokens import Tokens
from samo.errors import DataError

__all__ = ["IGNORE", "Batch", "Batches", "part_of", "validation_batches"]

IGNORE: Final = -100
"""A target that does not count; torch's cross entropy leaves it out."""

_MANY: Final = 4
"""A segment of so many windows may get one more, if it can hardly be shifted otherwise."""


class Batch(NamedTuple):
    """Sequences of tokens, and for each token the one that follows.

    Example:
        >>> tokens = Tokens([np.arange(10)], vocab_size=10)
        >>> next(validation_batches(tokens, context=6, batch_size=2, max_batches=1))
        Batch(inputs_BT=tensor([[0, 1, 2, 3, 4, 5],
                [6, 7, 8, 0, 0, 0]]), targets_BT=tensor([[   1,    2,    3,    4,    5,    6],
                [   7,    8,    9, -100, -100, -100]]), whole_tokens=9)
    """

    inputs_BT: Tensor
    """What the model reads, int64; 0 after the end of a short window."""
    targets_BT: Tensor
    """What it should predict, int64; `IGNORE` after the end of a short window."""
    whole_tokens: int | None = None
    """Where this is one rank's part of a batch: how many targets of the whole batch count."""

    @property
    def num_tokens(self) -> int:
        """How many targets count, in all parts of the batch together."""
        if self.whole_tokens is not None:
            return self.whole_tokens
        return int((self.targets_BT != IGNORE).sum())


class Batches(Iterator[Batch]):
    """Shuffled batches without end; the position is all there is to store and to set.

    Example:
        >>> tokens = Tokens([np.arange(1000) % 50], vocab_size=50)
        >>> batches = Batches(tokens, context=16, batch_size=4, seed=0)
        >>> next(batches).inputs_BT.shape
        torch.Size([4, 16])
        >>> batches.position, batches.num_windows
        (4, 63)
        >>> resumed = Batches(tokens, context=16, batch_size=4, seed=0)
        >>> resumed.position = 4
        >>> torch.equal(next(resumed).inputs_BT, next(batches).inputs_BT)
        True

    Args:
        tokens: What to draw from.
        context: Length of a sequence.
        batch_size: Sequences in a batch.
        seed: Chooses the order and the shifts of every epoch.
        part: Which part of every batch to return, and of how many: what one of several ranks learns from.
            The order does not depend on it.

    Raises:
        ValueError: A size is less than 1.
        DataError: There are fewer tokens than one sequence needs.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        context: int,
        batch_size: int,
        seed: int,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        _check_sizes(context=context, batch_size=batch_size)
        self._windows: Final = _Windows(tokens, context, is_shifted=True)
        self._batch_size: Final = batch_size
        self._seed: Final = seed
        self._part: Final = part
        self._position = 0

    @property
    def num_windows(self) -> int:
        """Windows in an epoch."""
        return self._windows.count

    @property
    def position(self) -> int:
        """Windows drawn so far. Set it to go on from there, exactly."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        if position < 0:
            raise ValueError(f"a position is a number of windows, 0 or more, got {position:,}")
        self._position = position

    @property
    def epoch(self) -> float:
        """How often the tokens have been gone through."""
        return self._position / self.num_windows

    def __next__(self) -> Batch:
        places = []
        position, end = self._position, self._position + self._batch_size
        while position < end:  # a batch may take the end of one epoch and the start of the next
            epoch, first = divmod(position, self.num_windows)
            last = min(self.num_windows, first + end - position)
            order = shuffled(np.arange(first, last), self.num_windows, key_of(self._seed, epoch))
            places += self._windows.places(order, key_of(self._seed, epoch, 1))
            position += last - first
        self._position = end
        return self._windows.read(places, self._part)


def part_of(count: int, part: tuple[int, int]) -> slice:
    """Return which of ``count`` rows a part has: contiguous, as even as can be, the first ones larger.

    Example:
        >>> [part_of(16, (rank, 3)) for rank in range(3)]
        [slice(0, 6, None), slice(6, 11, None), slice(11, 16, None)]
    """
    index, parts = part
    size, larger = divmod(count, parts)
    start = index * size + min(index, larger)
    return slice(start, start + size + (index < larger))


def validation_batches(
    tokens: Tokens,
    *,
    context: int,
    batch_size: int,
    max_batches: int,
    part: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Return batches spread evenly over the tokens, the same ones every time, and then end.

    Example:
        >>> tokens = Tokens([np.arange(1000)], vocab_size=1000)
        >>> batches = validation_batches(tokens, context=10, batch_size=3, max_batches=2)
        >>> [batch.inputs_BT[:, 0].tolist() for batch in batches]
        [[0, 160, 330], [500, 660, 830]]

    Args:
        tokens: What to validate on.
        context: Length of a sequence.
        batch_size: Sequences in a batch; the last batch may have fewer.
        max_batches: The most there are; few tokens make fewer.
        part: Which part of every batch to return, and of how many; it may be empty.

    Raises:
        ValueError: A size is less than 1.
        DataError: There are fewer tokens than one sequence needs.
    """
    _check_sizes(context=context, batch_size=batch_size, max_batches=max_batches)
    windows = _Windows(tokens, context, is_shifted=False)
    total = min(windows.count, max_batches * batch_size)
    chosen = np.arange(total) * windows.count // total
    return (
        windows.read(windows.places(chosen[start : start + batch_size], key=0), part)
        for start in range(0, total, batch_size)
    )


class _Place(NamedTuple):
    """A window: the tokens ``start`` to ``stop``, the last one included, of a segment."""

    segment: NDArray[Any]
    start: int
    stop: int


class _Windows:
    """Where the windows of some tokens are: numbered through all segments, none across two."""

    def __init__(self, tokens: Tokens, context: int, *, is_shifted: bool) -> None:
        self._segments: Final = [segment for segment in tokens.segments if len(segment) >= 2]
        self._context: Final = context
        sizes = np.array([len(segment) for segment in self._segments], dtype=np.int64)
        if sizes.sum() <= context:
            raise DataError(
                f"{sizes.sum():,} tokens are fewer than one sequence needs, {context + 1:,} (a context of "
                f"{context:,}, and the token after it); give more text or a smaller --context"
            )
        counts = -(-(sizes - 1) // context)
        # The windows have room for more tokens than there are. They can be shifted to the left by as
        # much; by more, and the last tokens would need one window more.
        lowest, highest = np.zeros_like(sizes), counts * context - (sizes - 1)
        if is_shifted:
            is_added = (highest < context // 2) & (counts >= _MANY)
            counts = counts + is_added
            lowest = np.where(is_added, highest + 1, 0)
            highest = np.where(is_added, context - 1, highest)
        self._lowest_shifts: Final = lowest
        self._num_shifts: Final = highest - lowest + 1 if is_shifted else np.ones_like(sizes)
        self._ends: Final = np.cumsum(counts)
        self._starts: Final = self._ends - counts
        self.count: Final = int(self._ends[-1])

    def places(self, numbers: NDArray[np.int64], key: int) -> list[_Place]:
        """Return where some windows are, in the epoch that ``key`` stands for."""
        owners = np.searchsorted(self._ends, numbers, side="right")
        within = numbers - self._starts[owners]
        return [self._place(*pair, key) for pair in zip(owners.tolist(), within.tolist())]

    def _place(self, owner: int, number: int, key: int) -> _Place:
        segment = self._segments[owner]
        shift = int(self._lowest_shifts[owner]) + key_of(key, owner) % int(self._num_shifts[owner])
        start = number * self._context - shift
        return _Place(segment, max(start, 0), min(start + self._context, len(segment) - 1))

    def read(self, places: list[_Place], part: tuple[int, int]) -> Batch:
        """Read a part of the windows into a batch. This is the only step that touches tokens."""
        num_tokens = sum(place.stop - place.start for place in places)
        places = places[part_of(len(places), part)]
        inputs = np.zeros((len(places), self._context), dtype=np.int64)
        targets = np.full_like(inputs, IGNORE)
        for row, (segment, start, stop) in enumerate(places):
            inputs[row, : stop - start] = segment[start:stop]
            targets[row, : stop - start] = segment[start + 1 : stop + 1]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), num_tokens)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size:,}")
