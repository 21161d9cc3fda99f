"""Move vectors of kept entries from one mask to another; narrow a mask.

Works in pieces of 2**20 entries. The host knows where each piece starts from the masks' running
counts, so nothing waits for a device.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from samo.kernels.pieces import kept_pieces
from samo.mask import bitmap
from samo.mask.mask import Mask

__all__ = []


def move(
    vectors: Mapping[str, Tensor], old: Mask, new: Mask, added: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return vectors of ``old``'s kept entries as those of ``new``'s, and the dropped entries.

    Example:
        >>> old = Mask.from_bool(torch.tensor([True, True, False, True, False]))
        >>> new = Mask.from_bool(torch.tensor([True, False, True, True, False]))
        >>> move({"x": torch.tensor([1, 2, 4])}, old, new, {"x": torch.tensor([3])})
        ({'x': tensor([1, 3, 4])}, {'x': tensor([2])})

    Args:
        vectors: Vectors with an entry for each one that ``old`` keeps.
        old: The mask before.
        new: The mask afterwards.
        added: Values for entries that only ``new`` keeps, in flat order; by default 0.
    """
    common = old & new
    moved = {name: vector.new_zeros(new.kept) for name, vector in vectors.items()}
    dropped = {name: vector.new_empty(old.kept - common.kept) for name, vector in vectors.items()}
    gone = fresh = 0
    for (_, old_bits, olds), (_, new_bits, news), (_, both, commons) in zip(
        kept_pieces(old), kept_pieces(new), kept_pieces(common)
    ):
        old_place = old_bits.cumsum(0).add_(olds.start - 1)
        new_place = new_bits.cumsum(0).add_(news.start - 1)
        num_common = _length(commons)
        stays = _places(both, num_common)
        source, target = old_place[stays], new_place[stays]
        leaves = old_place[_places(old_bits & ~both, _length(olds) - num_common)]
        comes = new_place[_places(new_bits & ~both, _length(news) - num_common)]
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
    """Return a mask with those kept entries of ``mask`` whose bits are set in ``words``.

    Example:
        >>> mask = Mask.from_bool(torch.tensor([True, False, True, True]))
        >>> narrow(mask, torch.tensor([0b101, 0], dtype=torch.int32)).to_bool()
        tensor([ True, False, False,  True])
    """
    made = torch.empty_like(mask.words)
    for piece, bits, kept in kept_pieces(mask):
        first = kept.start // bitmap.WORD_BITS * bitmap.WORD_BITS
        stay = bitmap.unpack(words, first, kept.stop)[kept.start - first :]
        bits[_places(bits, _length(kept))] = stay
        bitmap.pack(bits, made, piece.start)
    return Mask(mask.shape, made)


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def _places(bits: Tensor, count: int) -> Tensor:
    """Return where the ``count`` set bits are, without asking a device for their number."""
    return torch.nonzero_static(bits, size=count).view(-1)
