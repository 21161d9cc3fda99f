"""Lean state that was sharded over ranks: each part has groups of its own, with a scale for each.

A whole weight has a scale for 1,024 entries of the dense tensor; a rank's part of it, which is a vector
of its own, one for 256 of its entries. So codes of one kind mean nothing with scales of the other. A
checkpoint has them as they are, and where the parts begin:

    exp_avg        a a a a a b b b       codes of all parts
    exp_avg_scale  A       A' B          scales of all parts
    parts          [0, 5, 8]

Loaded into the same parts, training goes on exactly. Into others, or a whole weight, moments are
rounded once more.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from samo.checkpoints.shards import Place
from samo.kernels.lean import Moments, dequantise_weight, num_groups, quantise_weight
from samo.weights import Weight

__all__ = []

PARTS: Final = "parts"
"""Name, in the saved state of a weight, of the list of where its parts begin and the last one ends."""

SCALES: Final = ("/exp_avg_scale", "/exp_avg_sq_scale")

_KEYS: Final = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")


def parts_of(weight: Weight) -> tuple[int, ...]:
    """Return where the parts of a sharded weight that are not empty begin, and where the last one ends."""
    assert weight.replica is not None, "a weight that is sharded has replicas"
    return tuple(sorted(set(weight.replica.bounds)))


def scale_place(weight: Weight) -> Place:
    """Return where the scales of this rank's part lie among those of all parts."""
    assert weight.replica is not None
    assert weight.replica.owned is not None
    start, stop = weight.replica.owned
    parts = parts_of(weight)
    before = [part for part in parts if part <= start] if stop > start else [0]
    return Place(_num_scales(before), _num_scales(parts))


def are_parts(parts: object, kept: int) -> bool:
    """Return whether a list from a file says where the parts of so many kept entries begin."""
    if not isinstance(parts, list) or not all(type(part) is int for part in parts):
        return False
    return parts == sorted(set(parts)) and parts[:1] == [0] and parts[-1] == kept


def layout_of_parts(
    layout: dict[str, tuple[torch.dtype, int]], parts: Sequence[int]
) -> dict[str, tuple[torch.dtype, int]]:
    """Return type and size of the state of a weight that was sharded so."""
    return {
        key: (dtype, _num_scales(parts) if key.endswith("_scale") else size)
        for key, (dtype, size) in layout.items()
    }


def own_state(weight: Weight, state: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's state of a weight from that of a checkpoint, exact where parts are the same."""
    saved = state.pop(PARTS, None)
    is_sharded = weight.part is not weight
    if saved is None and not is_sharded:
        return state
    moments = Moments(*(state[key] for key in _KEYS))
    owned = weight.replica.owned if is_sharded and weight.replica is not None else None
    if owned is not None and saved is not None and tuple(saved) == parts_of(weight):
        place = scale_place(weight)
        own = num_groups(owned[1] - owned[0], None)
        scales = slice(place.start, place.start + own)
        cuts = (slice(*owned), slice(*owned), scales, scales)
        found = Moments(*(tensor[cut].clone() for tensor, cut in zip(moments, cuts)))
    else:
        exp_avg, exp_avg_sq = _dequantised(weight, moments, saved)
        if owned is not None:
            exp_avg, exp_avg_sq = exp_avg[slice(*owned)], exp_avg_sq[slice(*owned)]
        part = weight.part
        found = quantise_weight(exp_avg, exp_avg_sq, part.param.numel(), part.mask)
    return state | dict(zip(_KEYS, found))


def _dequantised(
    weight: Weight, moments: Moments, parts: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    if parts is None:
        return dequantise_weight(moments, weight.param.numel(), weight.mask)
    pieces, first = [], 0
    for start, stop in pairwise(parts):
        last = first + num_groups(stop - start, None)
        cuts = (slice(start, stop), slice(start, stop), slice(first, last), slice(first, last))
        part = Moments(*(tensor[cut] for tensor, cut in zip(moments, cuts)))
        pieces.append(dequantise_weight(part, stop - start, None))
        first = last
    return torch.cat([a for a, _ in pieces]), torch.cat([b for _, b in pieces])


def _num_scales(parts: Sequence[int]) -> int:
    return sum(num_groups(stop - start, None) for start, stop in pairwise(parts))
