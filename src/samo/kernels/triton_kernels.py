"""The kernels of the CUDA path, compiled by Triton; ``cuda.py`` launches them.

Two ways lead from a mask's bits to its kept entries:

    by slot     for the k-th kept entry of a block, search the place of the k-th set bit: some 60
                instructions for each kept entry, none for a pruned one, and neighbours in a
                compressed vector are read and written by neighbours in a warp
    by entry    for each entry of a block, kept or not, count the set bits below it: some 12
                instructions for each entry of the dense tensor

A program takes one block of 2,048 weights. By slot it is one warp, whose 32 lanes hold the block's 32
pairs of words, so that every look at the bits of another lane is a shuffle and nothing waits for
shared memory.

bfloat16 comes as int16 and is widened and rounded by its bits: exact, and the same under Triton's
interpreter, which truncates. Divisions, roots and multiply-adds round where torch's do.

This module and ``lean_kernels`` alone import triton.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from samo import bitmap

__all__ = []

IS_INTERPRETED: Final = tl.constexpr(bool(triton.knobs.runtime.interpret))

BLOCK_BITS: Final = tl.constexpr(bitmap.BLOCK_BITS)
BLOCK_WORDS: Final = tl.constexpr(bitmap.BLOCK_WORDS)
BLOCK_PAIRS: Final = tl.constexpr(bitmap.BLOCK_WORDS // 2)

KINDS: Final = {
    torch.bfloat16: tl.int16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
"""How the kernels that compute see entries of a type."""

INTS: Final = {2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Integers by their bytes."""

# Columns of a weight's row in the table of an AdamW step, all int64.
DENSE: Final = tl.constexpr(0)
PAIRS: Final = tl.constexpr(1)
OFFSETS: Final = tl.constexpr(2)
REST: Final = tl.constexpr(3)
GRAD: Final = tl.constexpr(4)
EXP_AVG: Final = tl.constexpr(5)
EXP_AVG_SQ: Final = tl.constexpr(6)
STEP: Final = tl.constexpr(7)
SIZE: Final = tl.constexpr(8)
FIRST: Final = tl.constexpr(9)
COLUMNS: Final = tl.constexpr(10)
"""Addresses, then pairs of words (or entries, without a mask), then the first of its items."""

SCALARS: Final = tl.constexpr(3)
"""What a step gives each weight: minus the step size, the denominator, the decay."""

STEP_BITS: Final = tl.constexpr(25)
"""A float32 count stops at 2**24."""


# Numbers -----------------------------------------------------------------------------------------


@triton.jit
def _popcount(bits):
    """Count the set bits of uint32 words. Example: 0b1011 gives 3."""
    if IS_INTERPRETED:
        bits = bits - ((bits >> 1) & 0x55555555)
        bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
        bits = (bits + (bits >> 4)) & 0x0F0F0F0F
        count = ((bits * 0x01010101) >> 24).to(tl.int32)
    else:
        count = tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1
        )
    return count


@triton.jit
def _widen(values):
    """Return values as fp32. Example: bfloat16 bits 0x3F80 give 0x3F800000, 1.0."""
    if values.dtype == tl.int16:
        wide = (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def _narrow(values, kind: tl.constexpr):
    """Round fp32 half to even, as torch does. Example: 0x3F808000 gives bfloat16 bits 0x3F80."""
    if kind == tl.int16:
        bits = values.to(tl.int32, bitcast=True)
        # A NaN may have all bits set, and rounding would carry it over into a number.
        bits = tl.where(values != values, 0x7FC00000, bits)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        rounded = values.to(kind)
    return rounded


@triton.jit
def _power(base, exponents, SIZE: tl.constexpr):
    """Return base ** exponents in fp64 by squaring. Example: 0.5 and [1, 3] give [0.5, 0.125]."""
    result = tl.full([SIZE], 1.0, tl.float64)
    square = tl.full([SIZE], base, tl.float64)
    for _ in tl.static_range(STEP_BITS):
        result = tl.where((exponents & 1) != 0, result * square, result)
        square = square * square
        exponents = exponents >> 1
    return result


# The bits of a block -----------------------------------------------------------------------------


@triton.jit
def _read_block(pairs, offsets, block, num_pairs):
    """Return a block's low and high words, the kept entries up to each pair, all, and those before.

    A block past the last one has none. Example, with 2 pairs of 4-bit words: pairs 0001 0010 and 0000
    0110, offsets[block] 7, give low [2, 6], high [1, 0], ends [2, 4], 4 and 7.
    """
    pair = block * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    words = tl.load(pairs + pair, mask=pair < num_pairs, other=0)
    low = words.to(tl.uint32)
    high = (words >> 32).to(tl.uint32)
    counts = _popcount(low) + _popcount(high)
    begin = tl.load(offsets + block, mask=block * BLOCK_PAIRS < num_pairs, other=0)
    return low, high, tl.cumsum(counts, 0), tl.sum(counts, 0), begin


@triton.jit
def _places(low, high, ends, slots, SLOTS: tl.constexpr):
    """Return where in a block the kept entries with these numbers lie.

    Example: bits 1, 0, 0, 1 and slots [0, 1] give [0, 3].

    Both searches halve what is left: first the pairs, by the kept entries up to each, then the bits of
    one word, by the bits set under a place. A slot past the last one gets some place in the block.
    """
    probe = tl.full([SLOTS], BLOCK_PAIRS // 2 - 1, tl.int32)
    for level in tl.static_range(4):
        half = 8 >> level
        probe += tl.where(tl.gather(ends, probe, 0) <= slots, half, -half)
    pair = probe + (tl.gather(ends, probe, 0) <= slots).to(tl.int32)
    high = tl.gather(high, pair, 0)
    low = tl.gather(low, pair, 0)
    rank = slots - tl.gather(ends, pair, 0) + _popcount(high)
    is_low = rank < 0
    word = tl.where(is_low, low, high)
    rank = tl.where(is_low, rank + _popcount(low), rank)
    shift = tl.full([SLOTS], 16, tl.int32)  # 32 less the number of bits that are counted
    for level in tl.static_range(4):
        half = 8 >> level
        shift -= tl.where(_popcount(word << shift.to(tl.uint32)) <= rank, half, -half)
    is_next = (_popcount(word << shift.to(tl.uint32)) <= rank).to(tl.int32)
    place = pair * 64 + tl.where(is_low, 31, 63) - shift + is_next
    return place.to(tl.uint32)  # unsigned: one instruction less for each address


@triton.jit
def _ranks(words, first, num_words, WORDS: tl.constexpr):
    """Return, for each entry of some words, whether it is kept and how many kept ones precede it.

    Example: bits 1, 0, 0, 1 give ranks 0, 0, 0, 1; those of pruned entries mean nothing.
    """
    index = first + tl.arange(0, WORDS)
    word = tl.load(words + index, mask=index < num_words, other=0).to(tl.uint32, bitcast=True)
    counts = _popcount(word)
    before = tl.cumsum(counts, 0) - counts
    entry = tl.arange(0, WORDS * 32)
    # The entry's own bit on top, and the bits below it under that.
    under = tl.gather(word, entry // 32, 0) << (31 - entry % 32).to(tl.uint32)
    rank = tl.gather(before, entry // 32, 0) + _popcount(under) - 1
    return (under >> 31) != 0, rank.to(tl.uint32)


# compress and expand -----------------------------------------------------------------------------


@triton.jit
def _put(target, values, factor, mask, ADD: tl.constexpr, HAS_FACTOR: tl.constexpr):
    """Write or add values, times a factor, with one rounding."""
    kind: tl.constexpr = target.dtype.element_ty
    if values.dtype == kind and not ADD and not HAS_FACTOR:
        tl.store(target, values, mask=mask)
    else:
        wide = _widen(values)
        if HAS_FACTOR:
            wide = wide * tl.load(factor)
        if ADD:
            wide = _widen(tl.load(target, mask=mask, other=0)) + wide
        tl.store(target, _narrow(wide, kind), mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def compress_by_slot_kernel(
    dense,
    pairs,
    offsets,
    out,
    factor,
    num_pairs,
    ADD: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Gather the kept entries of a block. Example: [5, 6, 7, 8] with bits 1, 0, 0, 1 gives [5, 8]."""
    block = tl.program_id(0).to(tl.int64)
    low, high, ends, count, begin = _read_block(pairs, offsets, block, num_pairs)
    first = 0
    while first < count:  # not range(): numpy no longer lets the interpreter take a tensor there
        slots = first + tl.arange(0, SLOTS)
        places = _places(low, high, ends, slots, SLOTS)
        is_kept = slots < count
        values = tl.load(dense + block * BLOCK_BITS + places, mask=is_kept, other=0)
        _put(out + begin + slots, values, factor, is_kept, ADD, HAS_FACTOR)
        first += SLOTS


@triton.jit
def compress_by_entry_kernel(
    dense,
    words,
    offsets,
    out,
    factor,
    numel,
    num_words,
    ADD: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Read all entries of some blocks and write the kept ones to their ranks."""
    index = tl.program_id(0).to(tl.int64)
    is_kept, ranks = _ranks(words, index * WORDS, num_words, WORDS)
    begin = tl.load(offsets + index * (WORDS // BLOCK_WORDS))
    entry = index * WORDS * 32 + tl.arange(0, WORDS * 32)
    values = tl.load(dense + entry, mask=entry < numel, other=0)
    _put(out + begin + ranks, values, factor, is_kept, ADD, HAS_FACTOR)


@triton.jit
def compress_all_kernel(
    dense, out, factor, numel, ADD: tl.constexpr, HAS_FACTOR: tl.constexpr, SIZE: tl.constexpr
):
    """Write or add all entries: there is no mask."""
    entry = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    is_inside = entry < numel
    values = tl.load(dense + entry, mask=is_inside, other=0)
    _put(out + entry, values, factor, is_inside, ADD, HAS_FACTOR)


@triton.jit
def expand_kernel(values, words, offsets, dense, numel, num_words, WORDS: tl.constexpr):
    """Write values to the kept entries of some blocks, and 0 to the others.

    Example: [5, 8] with bits 1, 0, 0, 1 gives [5, 0, 0, 8].
    """
    index = tl.program_id(0).to(tl.int64)
    is_kept, ranks = _ranks(words, index * WORDS, num_words, WORDS)
    begin = tl.load(offsets + index * (WORDS // BLOCK_WORDS))
    entry = index * WORDS * 32 + tl.arange(0, WORDS * 32)
    entries = tl.load(values + begin + ranks, mask=is_kept, other=0)
    tl.store(dense + entry, entries, mask=entry < numel)


# AdamW, many weights in one launch ---------------------------------------------------------------


@triton.jit
def _address(row, column: tl.constexpr, kind: tl.constexpr, IS_ALIGNED: tl.constexpr = False):
    """Return the address in a column of a weight's row as a pointer to entries of a kind."""
    address = tl.load(row + column).to(tl.pointer_type(kind))
    if IS_ALIGNED:  # said here, since a hint on what a function returned is lost
        address = tl.multiple_of(address, 16)
    return address


@triton.jit(do_not_specialize=["num_weights"])
def adamw_scalars_kernel(
    rows,
    scalars,
    skip,
    lr_at,
    lr: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    weight_decay: tl.float64,
    num_weights,
    HAS_SKIP: tl.constexpr,
    HAS_LR_AT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Count the step of every weight and work out what its entries share, in fp64.

    Example: a first step with lr 0.1, betas 0.9 and 0.99 gives -1 (lr / (1 - 0.9), negative) and
    0.1 (the square root of 1 - 0.99). With ``skip`` no step is counted.
    """
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_inside = index < num_weights
    row = rows + index * COLUMNS
    step_at = tl.load(row + STEP, mask=is_inside, other=0).to(tl.pointer_type(tl.float32))
    steps = tl.load(step_at, mask=is_inside, other=0) + 1
    if HAS_SKIP:
        tl.store(step_at, steps, mask=is_inside & (tl.load(skip) == 0))
    else:
        tl.store(step_at, steps, mask=is_inside)
    rate = tl.full([SIZE], 0.0, tl.float64)
    if HAS_LR_AT:
        rate += tl.load(lr_at).to(tl.float64)
    else:
        rate += lr
    counts = steps.to(tl.int32)
    step_size = rate / (1.0 - _power(beta1, counts, SIZE))
    denominator = tl.sqrt(1.0 - _power(beta2, counts, SIZE))
    decay = 1.0 - rate * weight_decay
    target = scalars + index * SCALARS
    tl.store(target, (-step_size).to(tl.float32), mask=is_inside)
    tl.store(target + 1, denominator.to(tl.float32), mask=is_inside)
    tl.store(target + 2, decay.to(tl.float32), mask=is_inside)


@triton.jit
def _load(at, mask, IS_FULL: tl.constexpr):
    """Read entries, with a mask only if it is needed: with one there are no vector loads."""
    return tl.load(at) if IS_FULL else tl.load(at, mask=mask, other=0)


@triton.jit
def _store(at, entries, mask, IS_FULL: tl.constexpr):
    """Write entries, with a mask only if it is needed."""
    if IS_FULL:
        tl.store(at, entries)
    else:
        tl.store(at, entries, mask=mask)


@triton.jit
def _update(
    weight_at,
    rest_at,
    grad_at,
    exp_avg_at,
    exp_avg_sq_at,
    mask,
    scalars,
    lerp,
    beta2,
    rest2,
    eps,
    IS_SMALL: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Update entries, rounding where torch's unfused AdamW rounds.

    Example, first step with lr 0.1 and no decay: weight 1.0 and gradient 2.0 give weight 0.9, moments
    0.2 and 0.004. A bfloat16 weight is joined with its remainder first, and split again.
    """
    kind: tl.constexpr = weight_at.dtype.element_ty
    if kind == tl.int16:
        upper = _load(weight_at, mask, IS_FULL).to(tl.int32) << 16
        rest = _load(rest_at, mask, IS_FULL).to(tl.int32)
        param = (upper + rest).to(tl.float32, bitcast=True)
    elif kind == tl.float16:
        param = _load(rest_at, mask, IS_FULL)
    else:
        param = _load(weight_at, mask, IS_FULL)
    grad = _widen(_load(grad_at, mask, IS_FULL))
    exp_avg = _load(exp_avg_at, mask, IS_FULL)
    exp_avg_sq = _load(exp_avg_sq_at, mask, IS_FULL)
    step_size = tl.load(scalars)
    denominator = tl.load(scalars + 1)
    decay = tl.load(scalars + 2)

    if IS_SMALL:  # torch's lerp starts from the nearer end
        exp_avg = tl.fma(grad - exp_avg, tl.zeros_like(grad) + lerp, exp_avg)
    else:
        exp_avg = tl.fma(grad - exp_avg, tl.zeros_like(grad) + (lerp - 1.0), grad)
    exp_avg_sq = tl.fma(grad * rest2, grad, exp_avg_sq * beta2)
    under = tl.div_rn(tl.sqrt_rn(exp_avg_sq), tl.zeros_like(grad) + denominator) + eps
    param = param * decay + tl.div_rn(exp_avg * step_size, under)

    _store(exp_avg_at, exp_avg, mask, IS_FULL)
    _store(exp_avg_sq_at, exp_avg_sq, mask, IS_FULL)
    if kind == tl.int16:
        bits = param.to(tl.int32, bitcast=True)
        bits = tl.where(param != param, 0x7FC00000, bits)
        rounded = (bits + 0x8000) >> 16  # half away from zero: see kernels/rounding.py
        _store(rest_at, (bits - (rounded << 16)).to(tl.int16), mask, IS_FULL)
        _store(weight_at, rounded.to(tl.int16), mask, IS_FULL)
    elif kind == tl.float16:
        _store(rest_at, param, mask, IS_FULL)
        _store(weight_at, param.to(tl.float16), mask, IS_FULL)
    else:
        _store(weight_at, param, mask, IS_FULL)


@triton.jit
def adamw_kept_kernel(
    rows,
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
    """Update the kept entries of a block of a pruned weight where they lie in the dense tensor.

    An item is ``BLOCKS`` blocks of one weight, a block for each program. Pruned entries are 0 before
    and after, and are not written.
    """
    item = tl.program_id(0) // BLOCKS
    weight = tl.load(items + item)
    row = rows + weight * COLUMNS
    block = (item - tl.load(row + FIRST)) * BLOCKS + tl.program_id(0) % BLOCKS
    low, high, ends, count, begin = _read_block(
        _address(row, PAIRS, tl.int64),
        _address(row, OFFSETS, tl.int64),
        block,
        tl.load(row + SIZE),
    )
    if HAS_SKIP:
        count = tl.where(tl.load(skip) == 0, count, 0)
    dense = _address(row, DENSE, WEIGHT) + block * BLOCK_BITS
    rest = _address(row, REST, WHOLE) + begin
    grad = _address(row, GRAD, GRADIENT) + begin
    exp_avg = _address(row, EXP_AVG, tl.float32) + begin
    exp_avg_sq = _address(row, EXP_AVG_SQ, tl.float32) + begin
    first = 0
    while first < count:
        slots = first + tl.arange(0, SLOTS)
        places = _places(low, high, ends, slots, SLOTS)
        _update(
            dense + places,
            rest + slots,
            grad + slots,
            exp_avg + slots,
            exp_avg_sq + slots,
            slots < count,
            scalars + weight * SCALARS,
            lerp,
            beta2,
            rest2,
            eps,
            IS_SMALL,
            False,
        )
        first += SLOTS


@triton.jit
def adamw_all_kernel(
    rows,
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
    start = ((item - tl.load(row + FIRST)) * PARTS + tl.program_id(0) % PARTS) * PART
    size = tl.load(row + SIZE)
    if HAS_SKIP:
        size = tl.where(tl.load(skip) == 0, size, 0)
    dense = _address(row, DENSE, WEIGHT, IS_ALIGNED)
    rest = _address(row, REST, WHOLE, IS_ALIGNED)
    grad = _address(row, GRAD, GRADIENT, IS_ALIGNED)
    exp_avg = _address(row, EXP_AVG, tl.float32, IS_ALIGNED)
    exp_avg_sq = _address(row, EXP_AVG_SQ, tl.float32, IS_ALIGNED)
    entry = start + tl.arange(0, PART)
    shared = scalars + weight * SCALARS
    if start + PART <= size:
        _update(
            dense + entry,
            rest + entry,
            grad + entry,
            exp_avg + entry,
            exp_avg_sq + entry,
            entry < size,
            shared,
            lerp,
            beta2,
            rest2,
            eps,
            IS_SMALL,
            True,
        )
    elif start < size:
        _update(
            dense + entry,
            rest + entry,
            grad + entry,
            exp_avg + entry,
            exp_avg_sq + entry,
            entry < size,
            shared,
            lerp,
            beta2,
            rest2,
            eps,
            IS_SMALL,
            False,
        )


# Values that are not finite ----------------------------------------------------------------------


@triton.jit
def find_exponent_kernel(
    rows,
    items,
    found,
    EXPONENT: tl.constexpr,
    KIND: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Set ``found`` if an entry of a part has all bits of ``EXPONENT``.

    Example: of fp32 1.0 and inf, 0x3F800000 and 0x7F800000, the second has those of 0x7F800000.
    """
    item = tl.program_id(0) // PARTS
    row = rows + tl.load(items + item) * 3
    start = ((item - tl.load(row + 2)) * PARTS + tl.program_id(0) % PARTS) * PART
    size = tl.load(row + 1)
    source = tl.load(row).to(tl.pointer_type(KIND))
    if IS_ALIGNED:
        source = tl.multiple_of(source, 16)
    entry = start + tl.arange(0, PART)
    if start + PART <= size:
        bits = tl.load(source + entry)
    else:
        bits = tl.load(source + entry, mask=entry < size, other=0)
    if tl.max(((bits & EXPONENT) == EXPONENT).to(tl.int32), 0) != 0:
        tl.store(found, tl.full((), 1, tl.int8))  # whoever comes first: all write the same
