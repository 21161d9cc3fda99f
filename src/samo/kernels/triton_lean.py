"""AdamW with 8-bit state for the CUDA path, compiled by Triton; ``triton_launch.py`` launches the kernels.

A program takes a block of a pruned weight, one group after the other, or 1,024 entries of a
parameter without a mask, four groups: no other program writes their scales. The values of a group
stay in registers from the old codes to the new ones, unless they are unusually many.

``lean.py`` says what the codes mean and how they are dithered, and does the same in the same order.
Roots and quotients are the GPU's fast ones here, which may be 2 in the last place of fp32 off: a
code changes by that once in ten thousand, and dithering moves it more.
"""

import triton
import triton.language as tl

from samo.kernels import lean
from samo.kernels.triton_common import (
    BITMAP,
    BLOCK_PAIRS,
    EXP_AVG_SCALE,
    EXP_AVG_SQ_SCALE,
    NUM_WORDS,
    OFFSETS,
    SCALARS,
    SIZE,
    STEP,
    address_in,
    average,
    convert,
    find_item,
    load_entries,
    load_master,
    offset,
    read_block,
    read_scalars,
    state_at,
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
SMALLEST = tl.constexpr(lean.SMALLEST)


# Numbers -----------------------------------------------------------------------------------------


@triton.jit
def random_bits(index, step):
    """Return 32 bits that look random for each entry in a step: `lean.random_bits`."""
    steps = (tl.zeros_like(index) + step).to(tl.uint32)
    bits = (index.to(tl.uint32) * 0x9E3779B1) ^ (steps * 0x85EBCA77)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


# Between floats and small integers by their bits: the instructions that convert run at a quarter of
# the speed of those that add. An fp32 number from 2**23 on has whole numbers as its lowest bits.


@triton.jit
def to_float(code):
    """Return codes from 0 to 255 as fp32."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def to_signed_float(code):
    """Return codes from -128 to 127 as fp32."""
    shifted = (code.to(tl.int32) & 0xFF) ^ (0x4B000000 | 0x80)
    return shifted.to(tl.float32, bitcast=True) - (8388608.0 + 128.0)


@triton.jit
def to_code(x, bits, SHIFT: tl.constexpr, MOST: tl.constexpr):
    """Return floor(x + dither), at most ``MOST``; 12 of the 32 bits are the dither, between 0 and 1.

    Example: x = 2.6 gives 3 for six of ten dithers, and 2 for the others.
    """
    part = ((bits >> SHIFT) & 0xFFF).to(tl.int32)
    dither = ((part << 11) | 0x3F800000).to(tl.float32, bitcast=True) - (1.5 - 2**-13)
    # Half less, and rounded to nearest, is down: no tie, since the dither is an odd multiple of
    # 2**-13.
    whole = (tl.minimum(x + dither, MOST) + 8388864.0).to(tl.int32, bitcast=True)
    return whole & 0xFF


@triton.jit
def invert(largest):
    """Return a scale from the largest size in a group, and its inverse; 0 and 0 for next to nothing."""
    scale = tl.where(largest < SMALLEST, 0.0, largest)
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(scale > 0, scale, 1.0))
    return scale, tl.where(scale > 0, inverse, 0.0)


# The update --------------------------------------------------------------------------------------


@triton.jit
def _advance(
    at,
    mask,
    exp_avg_scale,
    root_scale,
    shared,
    settings,
    IS_SMALL: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Return new masters, first moments and roots of second moments, all fp32. Writes nothing.

    Entries outside of the mask are 0 in all moments.
    """
    lerp, beta2, lerp2, eps = settings
    param_at, remainder_at, grad_at, exp_avg_at, exp_avg_sq_at, _ = at
    param = load_master(param_at, remainder_at, mask, IS_FULL)
    grad = widen(load_entries(grad_at, mask, IS_FULL))
    part = to_signed_float(load_entries(exp_avg_at, mask, IS_FULL)) * (1 / 127)
    square = part * part
    exp_avg = square * square * exp_avg_scale
    exp_avg = tl.where(part < 0, -exp_avg, exp_avg)
    part = to_float(load_entries(exp_avg_sq_at, mask, IS_FULL)) * (1 / 255)
    square = part * part
    root = square * square * root_scale
    step_size, denominator, decay = read_scalars(shared)

    exp_avg = average(exp_avg, grad, lerp, IS_SMALL)
    exp_avg_sq = tl.fma(grad * lerp2, grad, root * root * beta2)
    root = tl.sqrt_rn(exp_avg_sq)  # right for the smallest numbers too, which must not become 0
    under = root * (1.0 / denominator) + eps
    param = param * decay + exp_avg * step_size / under
    # Past fp32 the second moment loses its size, and the first must not stay without it.
    exp_avg = tl.where(root > LARGEST_ROOT, 0.0, exp_avg)
    return param, exp_avg, tl.minimum(root, LARGEST_ROOT)


@triton.jit
def _write(at, mask, new, inverses, bits, COPY: tl.constexpr, IS_FULL: tl.constexpr):
    """Write what `_advance` returned in its stored form, and the copies."""
    param_at, remainder_at, _, exp_avg_at, exp_avg_sq_at, copy_at = at
    param, exp_avg, root = new
    x = tl.sqrt(tl.sqrt(tl.abs(exp_avg) * inverses[0])) * 127.0
    code = to_code(x, bits, 8, 127)
    store_entries(exp_avg_at, tl.where(exp_avg < 0, -code, code).to(tl.int8), mask, IS_FULL)
    x = tl.sqrt(tl.sqrt(root * inverses[1])) * 255.0
    code = to_code(x, bits, 20, 255)
    code = tl.where((code == 0) & (root > 0), 1, code)
    store_entries(exp_avg_sq_at, code.to(tl.uint8), mask, IS_FULL)
    dither = (bits & 0xFF).to(tl.int32)
    stored = store_master(param_at, remainder_at, param, dither, mask, IS_FULL)
    if COPY is not None:
        store_entries(copy_at, convert(stored, COPY), mask, IS_FULL)


@triton.jit
def _update_group(
    state,
    exp_avg_scale_at,
    root_scale_at,
    begin,
    first,
    stop,
    step,
    shared,
    settings,
    IS_SMALL: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Update the kept entries ``first`` to ``stop`` of a block, which are a group.

    If they are more than ``SLOTS``, they are updated twice: once for the new scales, once to be
    written.
    """
    scale = tl.load(exp_avg_scale_at)
    root_scale = tl.load(root_scale_at)
    slots = first + tl.arange(0, SLOTS)
    param, exp_avg, root = _advance(
        offset(state, slots), slots < stop, scale, root_scale, shared, settings, IS_SMALL, False
    )
    exp_avg_size = tl.max(tl.abs(exp_avg), 0)
    root_size = tl.max(root, 0)
    second = first + SLOTS
    while second < stop:
        slots = second + tl.arange(0, SLOTS)
        param, exp_avg, root = _advance(
            offset(state, slots), slots < stop, scale, root_scale, shared, settings, IS_SMALL, False
        )
        exp_avg_size = tl.maximum(exp_avg_size, tl.max(tl.abs(exp_avg), 0))
        root_size = tl.maximum(root_size, tl.max(root, 0))
        second += SLOTS

    new_scale, inverse = invert(exp_avg_size)
    new_root_scale, root_inverse = invert(root_size)
    tl.store(exp_avg_scale_at, new_scale)
    tl.store(root_scale_at, new_root_scale)
    # Those in registers now are the last ones; the others come after them, from the first on.
    bits = random_bits(begin + slots, step)
    new = (param, exp_avg, root)
    _write(offset(state, slots), slots < stop, new, (inverse, root_inverse), bits, None, False)
    second = first + SLOTS
    while second < stop:
        slots = second - SLOTS + tl.arange(0, SLOTS)
        new = _advance(
            offset(state, slots), slots < stop, scale, root_scale, shared, settings, IS_SMALL, False
        )
        bits = random_bits(begin + slots, step)
        _write(offset(state, slots), slots < stop, new, (inverse, root_inverse), bits, None, False)
        second += SLOTS


@triton.jit
def adamw_lean_kept_kernel(
    rows,
    items,
    scalars,
    skip,
    lerp,
    beta2,
    lerp2,
    eps,
    WEIGHT: tl.constexpr,
    REMAINDERS: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    IS_SMALL: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Update the values of a block of a pruned weight; an item is ``BLOCKS`` blocks."""
    row, weight, block = find_item(rows, items, BLOCKS)
    words = address_in(row, BITMAP, tl.int64)
    offsets = address_in(row, OFFSETS, tl.int64)
    _, _, ends, count, begin = read_block(words, offsets, block, tl.load(row + NUM_WORDS) // 2)
    if HAS_SKIP:
        count = tl.where(tl.load(skip) == 0, count, 0)
    state = state_at(row, WEIGHT, REMAINDERS, GRADIENT, tl.int8, tl.uint8, None, False)
    scale_at = address_in(row, EXP_AVG_SCALE, tl.float32) + block * BLOCK_GROUPS
    root_scale_at = address_in(row, EXP_AVG_SQ_SCALE, tl.float32) + block * BLOCK_GROUPS
    step = tl.load(address_in(row, STEP, tl.float32)).to(tl.int32)
    settings = (lerp, beta2, lerp2, eps)
    pair = tl.arange(0, BLOCK_PAIRS)
    first = 0
    for group in tl.static_range(BLOCK_GROUPS):
        upto = tl.max(tl.where(pair < (group + 1) * GROUP_PAIRS, ends, 0), 0)
        stop = tl.minimum(upto, count)
        if first < stop:
            _update_group(
                offset(state, begin),
                scale_at + group,
                root_scale_at + group,
                begin,
                first,
                stop,
                step,
                scalars + weight * SCALARS,
                settings,
                IS_SMALL,
                SLOTS,
            )
        first = stop


@triton.jit
def _update_part(
    row,
    state,
    start,
    size,
    shared,
    settings,
    COPY: tl.constexpr,
    IS_SMALL: tl.constexpr,
    IS_FULL: tl.constexpr,
    PART: tl.constexpr,
):
    """Update a part of a parameter, a row of entries for each of its groups."""
    group = start // UNPRUNED_GROUP + tl.arange(0, PART // UNPRUNED_GROUP)
    scale_at = address_in(row, EXP_AVG_SCALE, tl.float32) + group
    root_scale_at = address_in(row, EXP_AVG_SQ_SCALE, tl.float32) + group
    is_group = group * UNPRUNED_GROUP < size
    scale = tl.load(scale_at, mask=is_group, other=0.0)
    root_scale = tl.load(root_scale_at, mask=is_group, other=0.0)
    entry = group[:, None] * UNPRUNED_GROUP + tl.arange(0, UNPRUNED_GROUP)[None, :]
    at = offset(state, entry)
    param, exp_avg, root = _advance(
        at, entry < size, scale[:, None], root_scale[:, None], shared, settings, IS_SMALL, IS_FULL
    )
    scale, inverse = invert(tl.max(tl.abs(exp_avg), 1))
    root_scale, root_inverse = invert(tl.max(root, 1))
    tl.store(scale_at, scale, mask=is_group)
    tl.store(root_scale_at, root_scale, mask=is_group)
    step = tl.load(address_in(row, STEP, tl.float32)).to(tl.int32)
    inverses = (inverse[:, None], root_inverse[:, None])
    bits = random_bits(entry, step)
    _write(at, entry < size, (param, exp_avg, root), inverses, bits, COPY, IS_FULL)


@triton.jit
def adamw_lean_kernel(
    rows,
    items,
    scalars,
    skip,
    lerp,
    beta2,
    lerp2,
    eps,
    WEIGHT: tl.constexpr,
    REMAINDERS: tl.constexpr,
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    IS_SMALL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Update a part of a parameter without a mask; an item is ``PARTS`` parts of ``PART`` entries."""
    row, weight, part = find_item(rows, items, PARTS)
    start = part * PART
    size = tl.load(row + SIZE)
    if HAS_SKIP:
        size = tl.where(tl.load(skip) == 0, size, 0)
    state = state_at(row, WEIGHT, REMAINDERS, GRADIENT, tl.int8, tl.uint8, COPY, IS_ALIGNED)
    settings = (lerp, beta2, lerp2, eps)
    shared = scalars + weight * SCALARS
    if start + PART <= size:
        _update_part(row, state, start, size, shared, settings, COPY, IS_SMALL, True, PART)
    elif start < size:
        _update_part(row, state, start, size, shared, settings, COPY, IS_SMALL, False, PART)
