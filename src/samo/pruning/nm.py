"""Keep n of every m neighbours along a weight's inputs, in chunks and in the order of `topk`.

With the inputs in dimension ``d`` a weight is (before, inputs, after) in flat order, and m rows of
``after`` entries hold whole groups, so chunks of such rows are independent:

    2:4, (out, in)     [ 3 -1  0  2 | -5 ...     keeps  [ 1  0  0  1 | ...
    2:4, (in, out)     4 rows of `out` entries, a group in each column
"""

import math
from typing import Final

import torch
from torch import Tensor

from samo.mask import bitmap
from samo.pruning.pattern import Pattern
from samo.pruning.topk import Entries

__all__ = []

_MOST_COMPARED: Final = 8
"""Largest group compared pair by pair: 2**20 scores on a CPU core take 5 ms for 2:4, 11 ms for 4:8
and 27 ms for 4:16; sorting them takes 24, 19 and 22 ms."""


def keep_pattern(entries: Entries, pattern: Pattern, input_dim: int) -> Tensor:
    """Return the words of a mask that keeps ``pattern.kept`` of every group along ``input_dim``."""
    numel, after = entries.dense.numel(), math.prod(entries.dense.shape[input_dim + 1 :])
    # Whole groups, and whole pairs of words.
    unit = math.lcm(pattern.group * after, 2 * bitmap.WORD_BITS)
    words = torch.empty(bitmap.num_words(numel), dtype=torch.int32, device=entries.dense.device)
    for start, stop in bitmap.chunks(numel, unit):
        scores = scores_of(entries, start, stop, (-1, pattern.group, after))
        bitmap.pack(largest_of(scores, pattern.kept).view(-1), words, start)
    return words


def scores_of(entries: Entries, start: int, stop: int, shape: tuple[int, ...]) -> Tensor:
    """Return (groups, neighbours, after) with the keys above the hashes, in 62 bits."""
    index = torch.arange(start, stop, device=entries.dense.device)
    hashes = entries.hashes(index).to(torch.int64).view(shape)
    if entries.method == "random":
        return hashes
    keys = entries.keys(start, stop).to(torch.int64).view(shape)
    if entries.bits > 31:  # float64: the rank within a group takes the place of a key of 63 bits
        keys = _ranks(keys)
    return (keys << 31).bitwise_or_(hashes)


def _ranks(keys: Tensor) -> Tensor:
    """Return the rank of each key along dimension 1; equal keys have equal ranks."""
    ordered, order = keys.sort(dim=1)
    is_new = torch.zeros_like(keys)
    is_new[:, 1:] = ordered.diff(dim=1) != 0
    return torch.empty_like(keys).scatter_(1, order, is_new.cumsum(1))


def largest_of(scores: Tensor, kept: int) -> Tensor:
    """Return which of (groups, neighbours, after) are among the ``kept`` largest of their group."""
    if scores.shape[1] > _MOST_COMPARED:
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :kept]
        keep = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        return keep.scatter_(1, order, True)
    num_larger = torch.zeros(scores.shape, dtype=torch.uint8, device=scores.device)
    for i in range(scores.shape[1]):
        for j in range(i + 1, scores.shape[1]):
            is_larger = scores[:, j] > scores[:, i]
            num_larger[:, i] += is_larger
            num_larger[:, j] += ~is_larger  # of equal scores the first counts as larger
    return num_larger < kept
