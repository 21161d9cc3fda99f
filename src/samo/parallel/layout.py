"""Which weight lies in which bucket, and which rank owns which part of it: imports no torch.

A bucket is a flat vector of the kept entries of some weights, one after the other. Gradients come in the
reverse order of a forward pass, so the last weight of the model is the first of the first bucket. With
sharded state each rank owns one of equal ranges of every bucket, whose size is padded for that:

    entries   a a a a a b b | c c c c c -      bucket of 12 entries, 3 ranks, 1 entry of padding
    rank      0 0 0 0 1 1 1 | 1 2 2 2 2        rank 1 owns the last of a, all of b, the first of c
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = []


class Tensor1D(NamedTuple):
    """A compressed vector that is to lie in a bucket."""

    name: str
    size: int
    """Its entries."""
    item_bytes: int
    kind: Hashable
    """What only lies together with its like: its types."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The weights of a bucket, and where they lie."""

    names: tuple[str, ...]
    starts: tuple[int, ...]
    """First entry of each weight, and behind the last one the number of entries."""
    size: int
    """Entries with padding."""
    num_ranks: int
    """Ranks that share it; 1 if each holds all of it."""

    @property
    def chunk(self) -> int:
        """Entries that a rank owns."""
        return self.size // self.num_ranks

    def range_of(self, index: int) -> tuple[int, int]:
        """Return where a weight begins and ends."""
        return self.starts[index], self.starts[index + 1]

    def owned(self, index: int, rank: int) -> tuple[int, int]:
        """Return where the part of a weight that ``rank`` owns begins and ends, in the weight.

        Example: in the drawing above rank 1 owns entries 4 to 5 of a, 0 to 2 of b and 0 to 1 of c.
        """
        start, stop = self.range_of(index)
        first = min(max(rank * self.chunk, start), stop)
        last = min(max((rank + 1) * self.chunk, start), stop)
        return first - start, last - start


def plan_buckets(
    tensors: Sequence[Tensor1D], *, bucket_bytes: float, num_ranks: int = 1
) -> list[BucketPlan]:
    """Return the buckets in the order in which their gradients will be complete.

    Example: with room for two tensors each, a, b, c, d lie in buckets (d, c) and (b, a).
    """
    done: list[list[Tensor1D]] = []
    is_open: dict[Hashable, list[Tensor1D]] = {}
    for tensor in reversed(tensors):
        bucket = is_open.get(tensor.kind)
        if bucket is not None and _bytes(bucket) + _bytes([tensor]) > bucket_bytes:
            bucket = None
        if bucket is None:
            bucket = is_open[tensor.kind] = []
            done.append(bucket)
        bucket.append(tensor)
    return [_plan(bucket, num_ranks) for bucket in done]


def _plan(tensors: list[Tensor1D], num_ranks: int) -> BucketPlan:
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + tensor.size)
    size = -(-starts[-1] // num_ranks) * num_ranks
    names = tuple(tensor.name for tensor in tensors)
    return BucketPlan(names, tuple(starts), size, num_ranks)


def _bytes(tensors: list[Tensor1D]) -> int:
    return sum(tensor.size * tensor.item_bytes for tensor in tensors)
