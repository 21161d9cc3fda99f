"""From one mask to another: move vectors of kept entries, narrow a mask to some of what it keeps.

Tensors are walked in pieces of 2**20 entries. Where the entries of a piece lie is on the host before
the first of them (the masks' running counts), so that nothing waits for a device in between.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from samo import bitmap
from samo.mask import Mask

__all__ = []


def move(
    vectors: Mapping[str, Tensor], old: Mask, new: Mask, added: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return vectors of ``old``'s kept entries as those of ``new``'s, and what of them is dropped.

    Example:
        >>> old = Mask.from_bool(torch.tensor([True, True, False, True, False]))
        >>> new = Mask.from_bool(torch.tensor([True, False, True, True, False]))
        >>> move({"x": torch.tensor([1, 2, 4])}, old, new, {"x": torch.tensor([3])})
        ({'x': tensor([1, 3, 4])}, {'x': tensor([2])})

    Args:
        vectors: Some vectors with an entry for each one that ``old`` keeps.
        old: Which entries they have.
        new: Which entries they are to have.
        added: Values for the entries that only ``new`` keeps, in flat order; 0 where there are none.
    """
    common = old & new
    moved = {name: vector.new_zeros(new.kept) for name, vector in vectors.items()}
    dropped = {name: vector.new_empty(old.kept - common.kept) for name, vector in vectors.items()}
    spans = zip(_spans(old), _spans(new), _spans(common))
    gone = fresh = 0
    for (start, stop, old_at, num_old), (_, _, new_at, num_new), (_, _, _, num_common) in spans:
        old_bits = bitmap.unpack(old.words, start, stop)
        new_bits = bitmap.unpack(new.words, start, stop)
        old_place = old_bits.cumsum(0).add_(old_at - 1)
        new_place = new_bits.cumsum(0).add_(new_at - 1)
        stays = _places(old_bits & new_bits, num_common)
        source, target = old_place[stays], new_place[stays]
        leaves = old_place[_places(old_bits & ~new_bits, num_old - num_common)]
        comes = new_place[_places(new_bits & ~old_bits, num_new - num_common)]
        leaving = slice(gone, gone + leaves.numel())
        coming = slice(fresh, fresh + comes.numel())
        gone, fresh = leaving.stop, coming.stop
        for name, vector in vectors.items():
            moved[name][target] = vector[source]
            dropped[name][leaving] = vector[leaves]
            if name in added:
                moved[name][comes] = added[name][coming]
    return moved, dropped


def narrow(mask: Mask, words: Tensor) -> Mask:
    """Return a mask that keeps some of what ``mask`` keeps: those whose bits are set in ``words``.

    Example:
        >>> mask = Mask.from_bool(torch.tensor([True, False, True, True]))
        >>> narrow(mask, torch.tensor([0b101, 0], dtype=torch.int32)).to_bool()
        tensor([ True, False, False,  True])

    Args:
        mask: The kept entries.
        words: Packed bits, one for each kept entry.
    """
    made = torch.empty_like(mask.words)
    for start, stop, at, count in _spans(mask):
        bits = bitmap.unpack(mask.words, start, stop)
        first = at // bitmap.WORD_BITS * bitmap.WORD_BITS
        stay = bitmap.unpack(words, first, at + count)[at - first :]
        bits[_places(bits, count)] = stay
        bitmap.pack(bits, made, start)
    return Mask(mask.shape, made)


class _Span(NamedTuple):
    start: int
    stop: int
    at: int
    """Place of its first kept entry in compressed vectors."""
    kept: int
    """How many kept entries it has."""


def _spans(mask: Mask) -> Iterator[_Span]:
    """Cut a mask into pieces, with one copy to the host for all of them."""
    ranges = list(bitmap.chunks(mask.numel))
    first_blocks = [start // bitmap.BLOCK_BITS for start, _ in ranges]
    begins = [*mask.offsets[first_blocks].tolist(), mask.kept]
    for (start, stop), begin, end in zip(ranges, begins, begins[1:]):
        yield _Span(start, stop, begin, end - begin)


def _places(bits: Tensor, count: int) -> Tensor:
    """Return where the ``count`` set bits are; a device is not asked for their number."""
    return torch.nonzero_static(bits, size=count).view(-1)
