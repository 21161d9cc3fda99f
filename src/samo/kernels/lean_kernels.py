"""AdamW with 8-bit state for the CUDA path, compiled by Triton; ``cuda_lean.py`` launches the kernels.

A program takes a block of a pruned weight, one group after the other, or 1,024 entries of a parameter
without a mask, four groups: nobody else writes their scales. The values of a group stay in registers
from the old codes to the new ones, unless they are unusually many.

What the codes mean, and how they are dithered: ``lean.py``, which does the same in the same order. Roots
and quotients are the GPU's fast ones here, which may be 2 in the last place of fp32 off: a code
changes by that once in ten thousand, and dithering moves it more.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from samo.kernels import lean
from samo.kernels.lean_numbers import invert, random_bits, to_code, to_float, to_signed_float
from samo.kernels.triton_parts import (
    BLOCK_PAIRS,
    DENSE,
    EXP_AVG,
    EXP_AVG_SQ,
    GRAD,
    PARAM,
    REST,
    SCALARS,
    SIZE,
    STEP,
    address_in,
    convert,
    find_block,
    find_part,
    load_entries,
    load_master,
    store_entries,
    store_master,
    widen,
)
from samo.mask import bitmap

__all__ = []

UNPRUNED_GROUP = tl.constexpr(lean.UNPRUNED_GROUP)
GROUP_PAIRS = tl.constexpr(lean.GROUP // 64)
BLOCK_GROUPS = tl.constexpr(bitmap.BLOCK_BITS // lean.GROUP)
LARGEST_ROOT = tl.constexpr(lean.LARGEST_ROOT)

REST_KINDS: Final = {
    torch.bfloat16: tl.int8,
    torch.float16: tl.float32,
    torch.float32: tl.float32,  # none; any type will do
}
"""How the kernels see the rest beside a parameter of a type."""

EXP_AVG_SCALE = tl.constexpr(0)
EXP_AVG_SQ_SCALE = tl.constexpr(1)
SCALE_COLUMNS = tl.constexpr(2)
"""Columns of a parameter's row in the table of scales."""


@triton.jit
def _advance(
    param_at,
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
    param = load_master(param_at, rest_at, mask, IS_FULL)
    grad = widen(load_entries(grad_at, mask, IS_FULL))
    part = to_signed_float(load_entries(exp_avg_at, mask, IS_FULL)) * (1 / 127)
    square = part * part
    exp_avg = square * square * exp_avg_scale
    exp_avg = tl.where(part < 0, -exp_avg, exp_avg)
    part = to_float(load_entries(exp_avg_sq_at, mask, IS_FULL)) * (1 / 255)
    square = part * part
    root = square * square * exp_avg_sq_scale
    step_size = tl.load(scalars).to(tl.float32)
    denominator = tl.load(scalars + 1).to(tl.float32)
    decay = tl.load(scalars + 2).to(tl.float32)

    if IS_SMALL:  # torch's lerp starts from the nearer end
        exp_avg = tl.fma(grad - exp_avg, tl.zeros_like(grad) + lerp, exp_avg)
    else:
        exp_avg = tl.fma(grad - exp_avg, tl.zeros_like(grad) + (lerp - 1.0), grad)
    exp_avg_sq = tl.fma(grad * rest2, grad, root * root * beta2)
    root = tl.sqrt_rn(exp_avg_sq)  # right for the smallest numbers too, which must not become 0
    under = root * (1.0 / denominator) + eps
    param = param * decay + exp_avg * step_size / under
    # Past fp32 the second moment loses its size, and the first must not stay without it.
    exp_avg = tl.where(root > LARGEST_ROOT, 0.0, exp_avg)
    return param, exp_avg, tl.minimum(root, LARGEST_ROOT)


@triton.jit
def _write(
    param_at,
    rest_at,
    exp_avg_at,
    exp_avg_sq_at,
    copy_at,
    mask,
    param,
    exp_avg,
    root,
    exp_avg_inverse,
    root_inverse,
    bits,
    COPY: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Write entries in their stored form, and their copies."""
    x = tl.sqrt(tl.sqrt(tl.abs(exp_avg) * exp_avg_inverse)) * 127.0
    code = to_code(x, bits, 8, 127)
    store_entries(exp_avg_at, tl.where(exp_avg < 0, -code, code).to(tl.int8), mask, IS_FULL)
    x = tl.sqrt(tl.sqrt(root * root_inverse)) * 255.0
    code = to_code(x, bits, 20, 255)
    code = tl.where((code == 0) & (root > 0), 1, code)
    store_entries(exp_avg_sq_at, code.to(tl.uint8), mask, IS_FULL)
    dither = (bits & 0xFF).to(tl.int32)
    stored = store_master(param_at, rest_at, param, dither, mask, IS_FULL)
    if COPY is not None:
        store_entries(copy_at, convert(stored, COPY), mask, IS_FULL)


@triton.jit
def _update_group(
    param_at,
    rest_at,
    grad_at,
    exp_avg_at,
    exp_avg_sq_at,
    exp_avg_scale_at,
    root_scale_at,
    begin,
    first,
    stop,
    step,
    shared,
    lerp,
    beta2,
    rest2,
    eps,
    IS_SMALL: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Update the kept entries ``first`` to ``stop`` of a block, which are a group.

    If they are more than ``SLOTS``, they are updated twice: once for the new scales, once to be written.
    """
    exp_avg_scale = tl.load(exp_avg_scale_at)
    root_scale = tl.load(root_scale_at)
    slots = first + tl.arange(0, SLOTS)
    param, exp_avg, root = _advance(
        param_at + slots,
        rest_at + slots,
        grad_at + slots,
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
        slots = second + tl.arange(0, SLOTS)
        param, exp_avg, root = _advance(
            param_at + slots,
            rest_at + slots,
            grad_at + slots,
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
        exp_avg_size = tl.maximum(exp_avg_size, tl.max(tl.abs(exp_avg), 0))
        root_size = tl.maximum(root_size, tl.max(root, 0))
        second += SLOTS

    new_exp_avg_scale, exp_avg_inverse = invert(exp_avg_size)
    new_root_scale, root_inverse = invert(root_size)
    tl.store(exp_avg_scale_at, new_exp_avg_scale)
    tl.store(root_scale_at, new_root_scale)
    # Those in registers now are the last ones; the others come after them, from the first on.
    _write(
        param_at + slots,
        rest_at + slots,
        exp_avg_at + slots,
        exp_avg_sq_at + slots,
        param_at + slots,
        slots < stop,
        param,
        exp_avg,
        root,
        exp_avg_inverse,
        root_inverse,
        random_bits(begin + slots, step),
        None,
        False,
    )
    second = first + SLOTS
    while second < stop:
        slots = second - SLOTS + tl.arange(0, SLOTS)
        param, exp_avg, root = _advance(
            param_at + slots,
            rest_at + slots,
            grad_at + slots,
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
        _write(
            param_at + slots,
            rest_at + slots,
            exp_avg_at + slots,
            exp_avg_sq_at + slots,
            param_at + slots,
            slots < stop,
            param,
            exp_avg,
            root,
            exp_avg_inverse,
            root_inverse,
            random_bits(begin + slots, step),
            None,
            False,
        )
        second += SLOTS


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
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Update the values of a block of a pruned weight; an item is ``BLOCKS`` blocks."""
    row, weight, block, ends, count, begin = find_block(rows, items, BLOCKS)
    if HAS_SKIP:
        count = tl.where(tl.load(skip) == 0, count, 0)
    param = address_in(row, PARAM, WEIGHT) + begin
    rest = address_in(row, REST, WHOLE) + begin
    grad = address_in(row, GRAD, GRADIENT) + begin
    exp_avg = address_in(row, EXP_AVG, tl.int8) + begin
    exp_avg_sq = address_in(row, EXP_AVG_SQ, tl.uint8) + begin
    scale_row = scales + weight * SCALE_COLUMNS
    exp_avg_scale = address_in(scale_row, EXP_AVG_SCALE, tl.float32) + block * BLOCK_GROUPS
    root_scale = address_in(scale_row, EXP_AVG_SQ_SCALE, tl.float32) + block * BLOCK_GROUPS
    step = tl.load(address_in(row, STEP, tl.float32)).to(tl.int32)
    pair = tl.arange(0, BLOCK_PAIRS)
    first = 0
    for group in tl.static_range(BLOCK_GROUPS):
        upto = tl.max(tl.where(pair < (group + 1) * GROUP_PAIRS, ends, 0), 0)
        stop = tl.minimum(upto, count)
        if first < stop:
            _update_group(
                param,
                rest,
                grad,
                exp_avg,
                exp_avg_sq,
                exp_avg_scale + group,
                root_scale + group,
                begin,
                first,
                stop,
                step,
                scalars + weight * SCALARS,
                lerp,
                beta2,
                rest2,
                eps,
                IS_SMALL,
                SLOTS,
            )
        first = stop


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
    COPY: tl.constexpr,
    IS_SMALL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_FULL: tl.constexpr,
    PART: tl.constexpr,
):
    """Update a part of a parameter, a row of entries for each of its groups."""
    param_at = address_in(row, PARAM, WEIGHT, IS_ALIGNED)
    copy_at = param_at
    if COPY is not None:
        copy_at = address_in(row, DENSE, COPY, IS_ALIGNED)
    rest = address_in(row, REST, WHOLE, IS_ALIGNED)
    grad = address_in(row, GRAD, GRADIENT, IS_ALIGNED)
    exp_avg_at = address_in(row, EXP_AVG, tl.int8, IS_ALIGNED)
    exp_avg_sq_at = address_in(row, EXP_AVG_SQ, tl.uint8, IS_ALIGNED)
    group = start // UNPRUNED_GROUP + tl.arange(0, PART // UNPRUNED_GROUP)
    exp_avg_scale_at = address_in(scale_row, EXP_AVG_SCALE, tl.float32) + group
    root_scale_at = address_in(scale_row, EXP_AVG_SQ_SCALE, tl.float32) + group
    is_group = group * UNPRUNED_GROUP < size
    exp_avg_scale = tl.load(exp_avg_scale_at, mask=is_group, other=0.0)
    root_scale = tl.load(root_scale_at, mask=is_group, other=0.0)
    entry = group[:, None] * UNPRUNED_GROUP + tl.arange(0, UNPRUNED_GROUP)[None, :]
    param, exp_avg, root = _advance(
        param_at + entry,
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
    exp_avg_scale, exp_avg_inverse = invert(tl.max(tl.abs(exp_avg), 1))
    root_scale, root_inverse = invert(tl.max(root, 1))
    tl.store(exp_avg_scale_at, exp_avg_scale, mask=is_group)
    tl.store(root_scale_at, root_scale, mask=is_group)
    step = tl.load(address_in(row, STEP, tl.float32)).to(tl.int32)
    _write(
        param_at + entry,
        rest + entry,
        exp_avg_at + entry,
        exp_avg_sq_at + entry,
        copy_at + entry,
        entry < size,
        param,
        exp_avg,
        root,
        exp_avg_inverse[:, None],
        root_inverse[:, None],
        random_bits(entry, step),
        COPY,
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
    COPY: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    IS_SMALL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Update a part of a parameter without a mask; an item is ``PARTS`` parts of ``PART`` entries."""
    row, weight, start = find_part(rows, items, PARTS, PART)
    scale_row = scales + weight * SCALE_COLUMNS
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
            COPY,
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
            COPY,
            IS_SMALL,
            IS_ALIGNED,
            False,
            PART,
        )
