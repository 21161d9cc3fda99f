"""8-bit optimizer state, in plain torch operations.

Each kept entry has one byte of the first moment m, and one of the second, v, stored as its root u.
Neighbouring entries of the dense tensor share two fp32 scales, the largest |m| and u of the group
(0 where nothing is kept):

    m = sign * (code / 127)**4 * scale      code -127 to 127, int8
    u = (code / 255)**4 * scale             code 0 to 255, uint8

    m = -0.02, scale 0.5     x = 127 * 0.04**(1/4) = 56.8     code -56 or -57

Fourth powers give small entries a finer grid: the largest is 3 % from the next (u: 1.6 %), and the
smallest nonzero m is 4e-9 of it. Fourth roots are two square roots, which round alike everywhere.

**Codes are dithered**: x becomes floor(x + d) with a random d between 0 and 1, so its mean is x.
Rounded to nearest, an average that decays by less than half a code per step would never decay. d
depends only on the entry and the step count, so equal runs give equal bits. The code of u is 0 only
if v is: a second moment rounded to 0 would divide by epsilon.

Scales are fp32 for the same reason: without a gradient the largest u of a group decays by 0.05 %
per step (beta2 0.999), a tenth of bfloat16's precision. Decision 0012 has the numbers.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from samo.mask import bitmap
from samo.mask.mask import Mask

GROUP: Final = 1024
UNPRUNED_GROUP: Final = 256
"""Entries of the dense tensor in a group, of a pruned and of an unpruned weight."""

LARGEST_ROOT: Final = 18446742974197923840.0
"""The largest fp32 number whose square is finite."""

SMALLEST: Final = 2.0**-126
"""The smallest normal fp32 number; the inverse of a smaller one may overflow."""


class Moments(NamedTuple):
    """Both moments of AdamW in 8 bits."""

    exp_avg_Z: Tensor
    exp_avg_sq_Z: Tensor
    exp_avg_scale_G: Tensor
    exp_avg_sq_scale_G: Tensor


def num_groups(numel: int, mask: Mask | None) -> int:
    """Return how many groups a weight of ``numel`` entries has."""
    return -(-numel // (UNPRUNED_GROUP if mask is None else GROUP))


def quantise(
    exp_avg_Z: Tensor,
    exp_avg_sq_Z: Tensor,
    group_Z: Tensor,
    groups: int,
    dither_Z: Tensor | None = None,
) -> Moments:
    """Return fp32 moments in 8 bits: dithered by `random_bits`, or else rounded to nearest.

    Example:
        >>> exp_avg, exp_avg_sq = torch.tensor([0.5, -0.02]), torch.tensor([4.0, 0.01])
        >>> codes = quantise(exp_avg, exp_avg_sq, torch.tensor([0, 0]), 1)
        >>> codes.exp_avg_Z, codes.exp_avg_sq_Z, codes.exp_avg_scale_G, codes.exp_avg_sq_scale_G
        (tensor([127, -57], dtype=torch.int8), tensor([255, 121], dtype=torch.uint8),
         tensor([0.5000]), tensor([2.]))
    """
    root = _root(exp_avg_sq_Z)
    # Above fp32's range the second moment is clipped, and the first must not outlive its size. NaNs
    # count as infinite: a cast to a code would be undefined.
    is_finite = root <= LARGEST_ROOT
    exp_avg = torch.where(is_finite, exp_avg_Z, 0.0)
    root = torch.where(is_finite, root, LARGEST_ROOT)
    codes, scales = [], []
    for size, most, shift in ((exp_avg.abs(), 127, 8), (root, 255, 20)):
        largest = size.new_zeros(groups).scatter_reduce_(0, group_Z, size, "amax")
        scale = torch.where(largest < SMALLEST, 0.0, largest)
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        x = _root(_root(size * inverse[group_Z])) * most
        dither: Tensor | float = 0.5
        if dither_Z is not None:
            dither = ((dither_Z >> shift) & 0xFFF).to(torch.float32) * 2**-12 + 2**-13
        codes.append(torch.floor(x + dither).clamp_max_(most))
        scales.append(scale)
    signed = torch.where(exp_avg < 0, -codes[0], codes[0])
    unsigned = torch.where((codes[1] == 0) & (root > 0), 1.0, codes[1])
    return Moments(signed.to(torch.int8), unsigned.to(torch.uint8), scales[0], scales[1])


def quantise_weight(
    exp_avg_Z: Tensor, exp_avg_sq_Z: Tensor, numel: int, mask: Mask | None
) -> Moments:
    """Return the fp32 moments of a whole weight in 8 bits, rounded to nearest."""
    groups = num_groups(numel, mask)
    made = Moments(
        torch.empty_like(exp_avg_Z, dtype=torch.int8),
        torch.empty_like(exp_avg_sq_Z, dtype=torch.uint8),
        *(torch.empty(groups, device=exp_avg_Z.device) for _ in range(2)),
    )
    for numbers, piece_Z, piece_G in grouped_pieces(numel, mask, exp_avg_Z.device):
        codes = quantise(
            exp_avg_Z[piece_Z], exp_avg_sq_Z[piece_Z], numbers, piece_G.stop - piece_G.start
        )
        for target, source, part in zip(made, codes, (piece_Z, piece_Z, piece_G, piece_G)):
            target[part] = source
    return made


def dequantise(moments: Moments, group_Z: Tensor) -> tuple[Tensor, Tensor]:
    """Return moments in fp32."""
    # 127 and 255 times their rounded inverses are exactly 1: the largest entry is the scale.
    part = moments.exp_avg_Z.to(torch.float32) * (1 / 127)
    square = part * part
    size = square * square * moments.exp_avg_scale_G[group_Z]
    exp_avg = torch.where(part < 0, -size, size)
    part = moments.exp_avg_sq_Z.to(torch.float32) * (1 / 255)
    square = part * part
    root = square * square * moments.exp_avg_sq_scale_G[group_Z]
    return exp_avg, root * root


def random_bits(start: int, stop: int, step: Tensor) -> Tensor:
    """Return 32 pseudo-random bits for each entry from ``start`` to ``stop``, as int64.

    Two rounds of multiply and fold; products may overflow, since only their lower half counts.
    """
    index = torch.arange(start, stop, device=step.device)
    bits = (index * 0x9E3779B1) ^ (step.to(torch.int64) * 0x85EBCA77)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = bits & 0xFFFFFFFF
        bits = (bits ^ (bits >> shift)) * factor
    bits = bits & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def group_numbers(numel: int, keep: Tensor | None, device: torch.device) -> Tensor:
    """Return the group of each kept entry, of ``numel`` entries that start at a group's start."""
    if keep is None:
        return torch.arange(numel, device=device) // UNPRUNED_GROUP
    return keep.nonzero().view(-1) // GROUP


def grouped_pieces(
    numel: int, mask: Mask | None, device: torch.device
) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yield, for each piece of a weight, its entries' groups, and the slices of both."""
    size = UNPRUNED_GROUP if mask is None else GROUP
    whole = ((slice(*span), None, slice(*span)) for span in bitmap.chunks(numel))
    for piece_N, keep, piece_Z in whole if mask is None else mask.pieces():
        numbers = group_numbers(piece_N.stop - piece_N.start, keep, device)
        yield numbers, piece_Z, slice(piece_N.start // size, -(-piece_N.stop // size))


def _root(values: Tensor) -> Tensor:
    """Return correctly rounded square roots; torch's fp32 ones may be 1 ulp off."""
    return values.to(torch.float64).sqrt_().to(torch.float32)


assert bitmap.BLOCK_BITS % GROUP == 0  # no group spans two blocks or pieces
