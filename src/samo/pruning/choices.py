"""Which entries of a weight to drop and which to grow: magnitudes, scores and a seed in, bits out.

Nothing here knows of models, steps or ranks: equal arguments give equal masks on any device. Entries
with equal magnitudes or scores are told apart by a hash of name, place and seed.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from samo.core.transfer import narrow
from samo.mask import bitmap
from samo.mask.mask import Mask
from samo.pruning.topk import Entries, Method, keep_largest

__all__ = []

_LARGEST_KEY: Final = 0x7FFFFFFE


def largest(name: str, values: Tensor, count: int, seed: int) -> Tensor:
    """Return the words of packed bits that are set for the ``count`` largest magnitudes.

    Example:
        >>> words = largest("a", torch.tensor([0.1, -3.0, 2.0, 0.0]), 2, seed=0)
        >>> bitmap.unpack(words, 0, 4)
        tensor([False,  True,  True, False])
    """
    if count == 0:
        return torch.zeros(
            bitmap.num_words(values.numel()), dtype=torch.int32, device=values.device
        )
    (words,) = keep_largest([Entries(name, values, "magnitude", torch.float32, seed)], count)
    return words


def prune_to(name: str, mask: Mask, values: Tensor, kept: int, seed: int) -> Mask:
    """Return a mask that keeps the ``kept`` largest of what ``mask`` keeps.

    Example:
        >>> mask = Mask.from_bool(torch.tensor([True, False, True, True]))
        >>> prune_to("a", mask, torch.tensor([1.0, -3.0, 2.0]), 2, seed=0).to_bool()
        tensor([False, False,  True,  True])
    """
    return narrow(mask, largest(name, values, kept, seed))


def grow_random(name: str, survivors: Mask, count: int, seed: int) -> Mask:
    """Return a mask of ``count`` entries drawn from those that ``survivors`` does not keep.

    Example:
        >>> survivors = Mask.from_bool(torch.tensor([True, False, True, False, False]))
        >>> grown = grow_random("a", survivors, 2, seed=0)
        >>> grown.kept, (grown & survivors).kept
        (2, 0)
    """
    dense = torch.empty((), device=survivors.words.device).expand(survivors.shape)
    return _grow(name, dense, "random", survivors, count, seed)


def grow_largest(name: str, scores: Tensor, survivors: Mask, count: int, seed: int) -> Mask:
    """Return a mask of the ``count`` largest of dense scores where ``survivors`` keeps nothing.

    Example:
        >>> survivors = Mask.from_bool(torch.tensor([True, False, False, False]))
        >>> grow_largest("a", torch.tensor([9.0, 1.0, -2.0, 0.0]), survivors, 2, seed=0).to_bool()
        tensor([False,  True,  True, False])
    """
    return _grow(name, scores, "magnitude", survivors, count, seed)


def _grow(name: str, dense: Tensor, method: Method, survivors: Mask, count: int, seed: int) -> Mask:
    if count == 0:
        return Mask(survivors.shape, torch.zeros_like(survivors.words))
    entries = _FreeEntries(name, dense, method, torch.float32, seed, survivors)
    (words,) = keep_largest([entries], count)
    return Mask(survivors.shape, words)


@dataclass(frozen=True, slots=True)
class _FreeEntries(Entries):
    """The entries of a tensor, of which those that ``taken`` keeps rank below all others."""

    taken: Mask

    @property
    def bits(self) -> int:
        """Return the width of the keys: all but the sign of an int32."""
        return 31

    def keys(self, start: int, stop: int) -> Tensor:
        """Return 0 for entries that are taken, and more for all others, whatever their score."""
        keys = Entries.keys(self, start, stop).clamp(max=_LARGEST_KEY).add_(1)
        return keys.masked_fill_(bitmap.unpack(self.taken.words, start, stop), 0)
