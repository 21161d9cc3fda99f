"""AdamW with 8-bit state for the CUDA path, compiled by Triton; ``cuda_lean.py`` launches the kernels.

A program takes one group of a pruned weight, half a block, or 1,024 entries of an unpruned one, four
groups: nobody else writes their scales. Kept entries stay in registers from the old codes to the new
ones; only those past a program's slots are read and updated once for the new scales and once more to be
written.

What the codes mean, and how they are dithered: ``lean.py``, which does the same in the same order.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from samo import bitmap
from samo.kernels import lean
from samo.kernels.triton_kernels import (
    BLOCK_BITS,
    BLOCK_PAIRS,
    COLUMNS,
    DENSE,
    EXP_AVG,
    EXP_AVG_SQ,
    FIRST,
    GRAD,
    OFFSETS,
    PAIRS,
    REST,
    SCALARS,
    SIZE,
    STEP,
    _address,
    _load,
    _places,
    _read_block,
    _store,
    _widen,
)

__all__ = []

UNPRUNED_GROUP: Final = tl.constexpr(lean.UNPRUNED_GROUP)
GROUP_PAIRS: Final = tl.constexpr(lean.GROUP // 64)
BLOCK_GROUPS: Final = tl.constexpr(bitmap.BLOCK_BITS // lean.GROUP)
LARGEST_ROOT: Final = tl.constexpr(lean.LARGEST_ROOT)
SMALLEST: Final = tl.constexpr(lean.SMALLEST)

REST_KINDS: Final = {
    torch.bfloat16: tl.int8,
    torch.float16: tl.float32,
    torch.float32: tl.float32,  # none; any type will do
}
"""How the kernels see the rest beside a weight of a type."""

EXP_AVG_SCALE: Final = tl.constexpr(0)
EXP_AVG_SQ_SCALE: Final = tl.constexpr(1)
SCALE_COLUMNS: Final = tl.constexpr(2)
"""Columns of a weight's row in the table of scales."""


@triton.jit
def _random_bits(index, step):
    """Return 32 bits that look random for each entry in a step: `lean.random_bits`."""
    steps = (tl.zeros_like(index) + step).to(tl.uint32)
    bits = (index.to(tl.uint32) * 0x9E3779B1) ^ (steps * 0x85EBCA77)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _dither(bits, SHIFT: tl.constexpr):
    """Return 12 of 32 bits as a number between 0 and 1. Example: 0x800 in them gives 0.5 + 2**-13."""
    return ((bits >> SHIFT) & 0xFFF).to(tl.int32).to(tl.float32) * 2**-12 + 2**-13


@triton.jit
def _invert(largest):
    """Return a scale from the largest size in a group, and its inverse; 0 and 0 for next to nothing."""
    scale = tl.where(largest < SMALLEST, 0.0, largest)
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(scale > 0, scale, 1.0))
    return scale, tl.where(scale > 0, inverse, 0.0)


@triton.jit
def _advance(
    weight_at,
    rest_at,
    grad_at,
    exp_avg_at,
    exp_avg_sq_at,
    mask,
    exp_avg_scale,
    exp_avg_sq_scale,
    scalars,
    lerp,
    beta2,
    rest2,
    eps,
    IS_SMALL: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Return new masters, first moments and roots of second moments, all fp32. Writes nothing.

    Entries outside of the mask are 0 in all moments.
    """
    kind: tl.constexpr = weight_at.dtype.element_ty
    if kind == tl.int16:
        upper = _load(weight_at, mask, IS_FULL).to(tl.int32) << 16
        rest = _load(rest_at, mask, IS_FULL).to(tl.int32) << 8
        param = (upper + rest).to(tl.float32, bitcast=True)
    elif kind == tl.float16:
        param = _load(rest_at, mask, IS_FULL)
    else:
        param = _load(weight_at, mask, IS_FULL)
    grad = _widen(_load(grad_at, mask, IS_FULL))
    part = _load(exp_avg_at, mask, IS_FULL).to(tl.float32) * (1 / 127)
    square = part * part
    exp_avg = square * square * exp_avg_scale
    exp_avg = tl.where(part < 0, -exp_avg, exp_avg)
    part = _load(exp_avg_sq_at, mask, IS_FULL).to(tl.float32) * (1 / 255)
    square = part * part
    root = square * square * exp_avg_sq_scale
    step_size = tl.load(scalars)
    denominator = tl.load(scalars + 1)
    decay = tl.load(scalars + 2)

    if IS_SMALL:  # torch's lerp starts from the nearer end
        exp_avg = tl.fma(grad - exp_avg, tl.zeros_like(grad) + lerp, exp_avg)
    else:
        exp_avg = tl.fma(grad - exp_avg, tl.zeros_like(grad) + (lerp - 1.0), grad)
    exp_avg_sq = tl.fma(grad * rest2, grad, root * root * beta2)
    root = tl.sqrt_rn(exp_avg_sq)
    under = tl.div_rn(root, tl.zeros_like(grad) + denominator) + eps
    param = param * decay + tl.div_rn(exp_avg * step_size, under)
    # Past fp32 the second moment loses its size, and the first must not stay without it.
    exp_avg = tl.where(root > LARGEST_ROOT, 0.0, exp_avg)
    return param, exp_avg, tl.minimum(root, LARGEST_ROOT)


@triton.jit
def _write(
    weight_at,
    rest_at,
    exp_avg_at,
    exp_avg_sq_at,
    mask,
    param,
    exp_avg,
    root,
    exp_avg_inverse,
    root_inverse,
    bits,
    IS_FULL: tl.constexpr,
):
    """Write entries in their stored form."""
    x = tl.sqrt_rn(tl.sqrt_rn(tl.abs(exp_avg) * exp_avg_inverse)) * 127.0
    code = tl.minimum((x + _dither(bits, 8)).to(tl.int32), 127)
    _store(exp_avg_at, tl.where(exp_avg < 0, -code, code).to(tl.int8), mask, IS_FULL)
    x = tl.sqrt_rn(tl.sqrt_rn(root * root_inverse)) * 255.0
    code = tl.minimum((x + _dither(bits, 20)).to(tl.int32), 255)
    code = tl.where((code == 0) & (root > 0), 1, code)
    _store(exp_avg_sq_at, code.to(tl.uint8), mask, IS_FULL)
    kind: tl.constexpr = weight_at.dtype.element_ty
    if kind == tl.int16:
        whole = param.to(tl.int32, bitcast=True)
        whole = tl.where(param != param, 0x7FC00000, whole)
        rounded = (whole + 0x8000) >> 16  # half away from zero: see kernels/rounding.py
        rest = (whole - (rounded << 16) + (bits & 0xFF).to(tl.int32)) >> 8
        _store(rest_at, tl.minimum(rest, 127).to(tl.int8), mask, IS_FULL)
        _store(weight_at, rounded.to(tl.int16), mask, IS_FULL)
    elif kind == tl.float16:
        _store(rest_at, param, mask, IS_FULL)
        _store(weight_at, param.to(tl.float16), mask, IS_FULL)
    else:
        _store(weight_at, param, mask, IS_FULL)


@triton.jit
def adamw_lean_kept_kernel(
    rows,
    scales,
    items,
    scalars,
    skip,
    lerp,
    beta2,
    rest2,
    eps,
    WEIGHT: tl.constexpr,
    WHOLE: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    IS_SMALL: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Update the kept entries of a group of a pruned weight; an item is ``GROUPS`` groups.

    The first ``SLOTS`` of them, mostly all, stay in registers. Further ones are updated twice: once for
    the new scales, once to be written.
    """
    item = tl.program_id(0) // GROUPS
    weight = tl.load(items + item)
    row = rows + weight * COLUMNS
    group = (item - tl.load(row + FIRST)) * GROUPS + tl.program_id(0) % GROUPS
    block = group // BLOCK_GROUPS
    low, high, ends, _count, begin = _read_block(
        _address(row, PAIRS, tl.int64),
        _address(row, OFFSETS, tl.int64),
        block,
        tl.load(row + SIZE),
    )
    pair = tl.arange(0, BLOCK_PAIRS) - group % BLOCK_GROUPS * GROUP_PAIRS
    first = tl.max(tl.where(pair < 0, ends, 0), 0)
    stop = tl.max(tl.where(pair < GROUP_PAIRS, ends, 0), 0)
    if HAS_SKIP:
        stop = tl.where(tl.load(skip) == 0, stop, first)
    if first < stop:
        dense = _address(row, DENSE, WEIGHT) + block * BLOCK_BITS
        rest = _address(row, REST, WHOLE) + begin
        grad = _address(row, GRAD, GRADIENT) + begin
        exp_avg_at = _address(row, EXP_AVG, tl.int8) + begin
        exp_avg_sq_at = _address(row, EXP_AVG_SQ, tl.uint8) + begin
        scale_row = scales + weight * SCALE_COLUMNS
        exp_avg_scale_at = _address(scale_row, EXP_AVG_SCALE, tl.float32) + group
        root_scale_at = _address(scale_row, EXP_AVG_SQ_SCALE, tl.float32) + group
        exp_avg_scale = tl.load(exp_avg_scale_at)
        root_scale = tl.load(root_scale_at)
        shared = scalars + weight * SCALARS
        step = tl.load(_address(row, STEP, tl.float32)).to(tl.int32)

        slots = first + tl.arange(0, SLOTS)
        places = _places(low, high, ends, slots, SLOTS)
        param, exp_avg, root = _advance(
            dense + places,
            rest + slots,
            grad + slots,
            exp_avg_at + slots,
            exp_avg_sq_at + slots,
            slots < stop,
            exp_avg_scale,
            root_scale,
            shared,
            lerp,
            beta2,
            rest2,
            eps,
            IS_SMALL,
            False,
        )
        exp_avg_size = tl.max(tl.abs(exp_avg), 0)
        root_size = tl.max(root, 0)
        second = first + SLOTS
        while second < stop:
            more = second + tl.arange(0, SLOTS)
            more_places = _places(low, high, ends, more, SLOTS)
            _param, more_exp_avg, more_root = _advance(
                dense + more_places,
                rest + more,
                grad + more,
                exp_avg_at + more,
                exp_avg_sq_at + more,
                more < stop,
                exp_avg_scale,
                root_scale,
                shared,
                lerp,
                beta2,
                rest2,
                eps,
                IS_SMALL,
                False,
            )
            exp_avg_size = tl.maximum(exp_avg_size, tl.max(tl.abs(more_exp_avg), 0))
            root_size = tl.maximum(root_size, tl.max(more_root, 0))
            second += SLOTS

        new_exp_avg_scale, exp_avg_inverse = _invert(exp_avg_size)
        new_root_scale, root_inverse = _invert(root_size)
        tl.store(exp_avg_scale_at, new_exp_avg_scale)
        tl.store(root_scale_at, new_root_scale)
        _write(
            dense + places,
            rest + slots,
            exp_avg_at + slots,
            exp_avg_sq_at + slots,
            slots < stop,
            param,
            exp_avg,
            root,
            exp_avg_inverse,
            root_inverse,
            _random_bits(begin + slots, step),
            False,
        )
        second = first + SLOTS
        while second < stop:
            more = second + tl.arange(0, SLOTS)
            more_places = _places(low, high, ends, more, SLOTS)
            more_param, more_exp_avg, more_root = _advance(
                dense + more_places,
                rest + more,
                grad + more,
                exp_avg_at + more,
                exp_avg_sq_at + more,
                more < stop,
                exp_avg_scale,
                root_scale,
                shared,
                lerp,
                beta2,
                rest2,
                eps,
                IS_SMALL,
                False,
            )
            _write(
                dense + more_places,
                rest + more,
                exp_avg_at + more,
                exp_avg_sq_at + more,
                more < stop,
                more_param,
                more_exp_avg,
                more_root,
                exp_avg_inverse,
                root_inverse,
                _random_bits(begin + more, step),
                False,
            )
            second += SLOTS


@triton.jit
def _update_part(
    row,
    scale_row,
    start,
    size,
    shared,
    lerp,
    beta2,
    rest2,
    eps,
    WEIGHT: tl.constexpr,
    WHOLE: tl.constexpr,
    GRADIENT: tl.constexpr,
    IS_SMALL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_FULL: tl.constexpr,
    PART: tl.constexpr,
):
    """Update a part of an unpruned weight, a row of entries for each of its groups."""
    dense = _address(row, DENSE, WEIGHT, IS_ALIGNED)
    rest = _address(row, REST, WHOLE, IS_ALIGNED)
    grad = _address(row, GRAD, GRADIENT, IS_ALIGNED)
    exp_avg_at = _address(row, EXP_AVG, tl.int8, IS_ALIGNED)
    exp_avg_sq_at = _address(row, EXP_AVG_SQ, tl.uint8, IS_ALIGNED)
    group = start // UNPRUNED_GROUP + tl.arange(0, PART // UNPRUNED_GROUP)
    exp_avg_scale_at = _address(scale_row, EXP_AVG_SCALE, tl.float32) + group
    root_scale_at = _address(scale_row, EXP_AVG_SQ_SCALE, tl.float32) + group
    is_group = group * UNPRUNED_GROUP < size
    exp_avg_scale = tl.load(exp_avg_scale_at, mask=is_group, other=0.0)
    root_scale = tl.load(root_scale_at, mask=is_group, other=0.0)
    entry = group[:, None] * UNPRUNED_GROUP + tl.arange(0, UNPRUNED_GROUP)[None, :]
    param, exp_avg, root = _advance(
        dense + entry,
        rest + entry,
        grad + entry,
        exp_avg_at + entry,
        exp_avg_sq_at + entry,
        entry < size,
        exp_avg_scale[:, None],
        root_scale[:, None],
        shared,
        lerp,
        beta2,
        rest2,
        eps,
        IS_SMALL,
        IS_FULL,
    )
    exp_avg_scale, exp_avg_inverse = _invert(tl.max(tl.abs(exp_avg), 1))
    root_scale, root_inverse = _invert(tl.max(root, 1))
    tl.store(exp_avg_scale_at, exp_avg_scale, mask=is_group)
    tl.store(root_scale_at, root_scale, mask=is_group)
    step = tl.load(_address(row, STEP, tl.float32)).to(tl.int32)
    _write(
        dense + entry,
        rest + entry,
        exp_avg_at + entry,
        exp_avg_sq_at + entry,
        entry < size,
        param,
        exp_avg,
        root,
        exp_avg_inverse[:, None],
        root_inverse[:, None],
        _random_bits(entry, step),
        IS_FULL,
    )


@triton.jit
def adamw_lean_all_kernel(
    rows,
    scales,
    items,
    scalars,
    skip,
    lerp,
    beta2,
    rest2,
    eps,
    WEIGHT: tl.constexpr,
    WHOLE: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    IS_SMALL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Update a part of an unpruned weight; an item is ``PARTS`` parts of ``PART`` entries."""
    item = tl.program_id(0) // PARTS
    weight = tl.load(items + item)
    row = rows + weight * COLUMNS
    scale_row = scales + weight * SCALE_COLUMNS
    start = ((item - tl.load(row + FIRST)) * PARTS + tl.program_id(0) % PARTS) * PART
    size = tl.load(row + SIZE)
    if HAS_SKIP:
        size = tl.where(tl.load(skip) == 0, size, 0)
    shared = scalars + weight * SCALARS
    if start + PART <= size:
        _update_part(
            row,
            scale_row,
            start,
            size,
            shared,
            lerp,
            beta2,
            rest2,
            eps,
            WEIGHT,
            WHOLE,
            GRADIENT,
            IS_SMALL,
            IS_ALIGNED,
            True,
            PART,
        )
    elif start < size:
        _update_part(
            row,
            scale_row,
            start,
            size,
            shared,
            lerp,
            beta2,
            rest2,
            eps,
            WEIGHT,
            WHOLE,
            GRADIENT,
            IS_SMALL,
            IS_ALIGNED,
            False,
            PART,
        )
