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

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samo.data.examples import Examples
from samo.data.tokens import Tokens
from samo.errors import DataError

IGNORE: Final = -100
"""Target of padding and of tokens only to read, which torch's cross entropy ignores."""


class Batch(NamedTuple):
    """Sequences of tokens, and for each token the one that follows."""

    inputs_BT: Tensor  # int64; short windows are padded with 0
    targets_BT: Tensor  # int64; `IGNORE` where there is nothing to predict, as in the padding
    num_tokens: int  # targets in the batch of all ranks; this may be the part of one rank
    num_read: int  # inputs in the batch of all ranks, without padding
    positions_BT: Tensor | None = None
    """Of packed examples, int64: each starts at 0, and so does the padding."""

    def trimmed(self) -> "Batch":
        """Leave out the columns after the last target, which examples that are not packed have."""
        used = int((self.targets_BT != IGNORE).any(0).nonzero().max()) + 1
        inputs_BT, targets_BT, num_tokens, num_read, positions_BT = self
        if positions_BT is not None:
            positions_BT = positions_BT[:, :used]
        return Batch(inputs_BT[:, :used], targets_BT[:, :used], num_tokens, num_read, positions_BT)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        inputs_BT, targets_BT, num_tokens, num_read, positions_BT = self
        if positions_BT is not None:
            positions_BT = positions_BT.to(device, non_blocking=True)
        return Batch(
            inputs_BT.to(device, non_blocking=True),
            targets_BT.to(device, non_blocking=True),
            num_tokens,
            num_read,
            positions_BT,
        )


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
        return self._windows.num_windows

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.position / self.num_windows

    def __next__(self) -> Batch:
        rows: list[NDArray[np.int64]] = []
        position, end = self.position, self.position + self._batch_size
        while position < end:  # a batch may continue into the next epoch
            epoch, first = divmod(position, self.num_windows)
            last = min(self.num_windows, first + end - position)
            order, shifts = self._draw(epoch)
            rows += self._windows.rows(order[first:last], shifts)
            position += last - first
        self.position = end
        return _read(self._windows, rows, self._part)

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
    total = min(windows.num_windows, max_batches * batch_size)
    chosen = np.arange(total) * windows.num_windows // total
    return (
        _read(windows, windows.rows(chosen[start : start + batch_size], no_shifts), part)
        for start in range(0, total, batch_size)
    )


class _Windows(NamedTuple):
    """Numbered windows of some data."""

    segments: Sequence[NDArray[Any]]
    context: int
    num_windows: int
    max_shifts: NDArray[np.int64]  # of each segment
    rows: Callable[[NDArray[Any], NDArray[Any]], list[NDArray[np.int64]]]
    """Returns the spans of each of some windows, as `Examples` has them, given the shifts."""
    has_positions: bool = False


def _windows(data: Tokens | Examples, context: int, seed: int) -> _Windows:
    if isinstance(data, Tokens):
        return _text_windows(data, context)
    return _example_windows(data, context, seed)


def _text_windows(tokens: Tokens, context: int) -> _Windows:
    """Return the windows of a token stream, numbered across its segments."""
    segments = [segment for segment in tokens.segments if len(segment) >= 2]
    sizes = np.array([len(segment) for segment in segments or tokens.segments], dtype=np.int64)
    if sizes.sum() <= context:
        raise DataError(
            f"{sizes.sum():,} tokens are too few for a sequence of {context:,} and the token "
            "after it; use more text or a smaller --context"
        )
    counts = -(-(sizes - 1) // context)
    ends = np.cumsum(counts)

    def rows(numbers: NDArray[Any], shifts: NDArray[Any]) -> list[NDArray[np.int64]]:
        owners = np.searchsorted(ends, numbers, side="right")
        starts = (numbers - (ends - counts)[owners]) * context - shifts[owners]
        lasts = np.minimum(starts + context, sizes[owners] - 1)
        starts = np.maximum(starts, 0)
        return list(np.stack([owners, starts, lasts + 1, lasts - starts], axis=1)[:, None])

    # All windows of a segment may shift left by the room that its last one has to spare.
    max_shifts = counts * context - (sizes - 1)
    return _Windows(segments, context, int(ends[-1]), max_shifts, rows)


def _example_windows(examples: Examples, context: int, seed: int) -> _Windows:
    """Return the rows of examples, numbered; nothing shifts."""
    order, starts = examples.rows(context, seed)

    def rows(numbers: NDArray[Any], _: NDArray[Any]) -> list[NDArray[np.int64]]:
        return [examples.spans_N4[order[starts[n] : starts[n + 1]]] for n in numbers.tolist()]

    no_shifts = np.zeros(0, dtype=np.int64)
    count = len(starts) - 1
    return _Windows(examples.segments, context, count, no_shifts, rows, examples.is_packed)


def _read(windows: _Windows, rows: list[NDArray[np.int64]], part: tuple[int, int]) -> Batch:
    """Read a part of some rows into a batch. Only this touches tokens."""
    _, starts, stops, targets = np.concatenate(rows).T
    rows = rows[part_of(len(rows), part)]
    inputs_BT = np.zeros((len(rows), windows.context), dtype=np.int64)
    targets_BT = np.full_like(inputs_BT, IGNORE)
    positions_BT = np.zeros_like(inputs_BT)
    for row, spans in enumerate(rows):
        first = 0
        for owner, start, stop, _ in spans.tolist():
            tokens = windows.segments[owner][start:stop].astype(np.int64)
            last = first + len(tokens) - 1
            # The complement of a token is only read.
            inputs_BT[row, first:last] = np.maximum(tokens, ~tokens)[:-1]
            targets_BT[row, first:last] = np.where(tokens < 0, IGNORE, tokens)[1:]
            positions_BT[row, first:last] = np.arange(last - first)
            first = last
        positions_BT[row, first:] = np.arange(windows.context - first)
    return Batch(
        torch.from_numpy(inputs_BT),
        torch.from_numpy(targets_BT),
        int(targets.sum()),
        int((stops - starts - 1).sum()),
        torch.from_numpy(positions_BT) if windows.has_positions else None,
    )
