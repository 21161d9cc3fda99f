"""The parts that Triton kernels share: types, columns of tables, the bits of a block, numbers.

Two ways lead from a mask's bits to its kept entries:

    by slot     for the k-th kept entry of a block, search the place of the k-th set bit: some 60
                instructions for each kept entry, none for a pruned one, and neighbours in a
                compressed vector are read and written by neighbours in a warp
    by entry    for each entry of a block, kept or not, count the set bits below it: some 12
                instructions for each entry of the dense tensor

A program takes one block of 2,048 weights. By slot it is one warp, whose 32 lanes hold the block's
32 pairs of words, so that every look at the bits of another lane is a shuffle and nothing waits for
shared memory.

bfloat16 comes as int16 and is widened and rounded by its bits: exact, and the same under Triton's
interpreter, which truncates.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from samo.mask import bitmap

__all__ = []

# Constants of kernels have no annotations: Inductor copies them into files that do not import
# `Final`.
IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

BLOCK_BITS = tl.constexpr(bitmap.BLOCK_BITS)
BLOCK_WORDS = tl.constexpr(bitmap.BLOCK_WORDS)
BLOCK_PAIRS = tl.constexpr(bitmap.BLOCK_WORDS // 2)

KINDS: Final = {
    torch.bfloat16: tl.int16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
"""How the kernels that compute see entries of a type."""

INTS: Final = {2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Integers by their bytes."""

# Columns of a parameter's row in a table of addresses and sizes, all int64; 0 for what is not
# there.
PARAM = tl.constexpr(0)
REMAINDER = tl.constexpr(1)
GRAD = tl.constexpr(2)
EXP_AVG = tl.constexpr(3)
EXP_AVG_SQ = tl.constexpr(4)
DENSE = tl.constexpr(5)
BITMAP = tl.constexpr(6)
OFFSETS = tl.constexpr(7)
STEP = tl.constexpr(8)
RATE = tl.constexpr(9)
AGE = tl.constexpr(10)
EXP_AVG_SCALE = tl.constexpr(11)
EXP_AVG_SQ_SCALE = tl.constexpr(12)
SIZE = tl.constexpr(13)
NUM_WORDS = tl.constexpr(14)
FIRST = tl.constexpr(15)
COLUMNS = tl.constexpr(16)
"""Addresses; then entries, words of the mask, and the parameter's first item in the list."""

SCALARS = tl.constexpr(4)
"""What a step gives each parameter, in fp64: minus the step size, the denominator, the decay, the rate."""

STEP_BITS = tl.constexpr(25)
"""A float32 count stops at 2**24."""


# Numbers -----------------------------------------------------------------------------------------


@triton.jit
def popcount(bits):
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
def widen(values):
    """Return values as fp32. Example: bfloat16 bits 0x3F80 give 0x3F800000, 1.0."""
    if values.dtype == tl.int16:
        wide = (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def narrow(values, kind: tl.constexpr):
    """Round fp32 half to even, as torch does. Example: 0x3F808000 gives bfloat16 bits 0x3F80."""
    if kind == tl.int16 and IS_INTERPRETED:
        bits = values.to(tl.int32, bitcast=True)
        # A NaN may have all bits set, and rounding would carry it over into a number.
        bits = tl.where(values != values, 0x7FC00000, bits)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif kind == tl.int16:  # one instruction, which the interpreter gets wrong
        rounded = values.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        rounded = values.to(kind)
    return rounded


@triton.jit
def convert(values, kind: tl.constexpr):
    """Return values in another type. Example: bfloat16 bits 0x3F80 give fp32 1.0."""
    if values.dtype != kind:
        values = narrow(widen(values), kind)
    return values


@triton.jit
def power_of(base, exponents, SIZE: tl.constexpr):
    """Return base ** exponents in fp64 by squaring. Example: 0.5 and [1, 3] give [0.5, 0.125]."""
    result = tl.full([SIZE], 1.0, tl.float64)
    square = tl.full([SIZE], base, tl.float64)
    for _ in tl.static_range(STEP_BITS):
        result = tl.where((exponents & 1) != 0, result * square, result)
        square = square * square
        exponents = exponents >> 1
    return result


@triton.jit
def corrections_of(counts, rate, beta1, beta2, SIZE: tl.constexpr):
    """Return minus the step size and the denominator after so many updates, in fp64.

    Example: lr 0.1, betas 0.9 and 0.99 give -1 (lr / (1 - 0.9), negative) and 0.1 (the square root
    of 1 - 0.99) after the first.
    """
    step_size = rate / (1.0 - power_of(beta1, counts, SIZE))
    denominator = tl.sqrt(1.0 - power_of(beta2, counts, SIZE))
    return -step_size, denominator


# The bits of a block -----------------------------------------------------------------------------


@triton.jit
def read_block(pairs, offsets, block, num_pairs):
    """Return a block's low and high words, the kept entries up to each pair, all, and those before.

    A block past the last one has none. Example, with 2 pairs of 4-bit words: pairs 0001 0010 and
    0000 0110, offsets[block] 7, give low [2, 6], high [1, 0], ends [2, 4], 4 and 7.
    """
    pair = block * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    words = tl.load(pairs + pair, mask=pair < num_pairs, other=0)
    low = words.to(tl.uint32)
    high = (words >> 32).to(tl.uint32)
    counts = popcount(low) + popcount(high)
    begin = tl.load(offsets + block, mask=block * BLOCK_PAIRS < num_pairs, other=0)
    return low, high, tl.cumsum(counts, 0), tl.sum(counts, 0), begin


@triton.jit
def places_of(low, high, ends, slots, SLOTS: tl.constexpr):
    """Return where in a block the kept entries with these numbers lie.

    Example: bits 1, 0, 0, 1 and slots [0, 1] give [0, 3].

    Both searches halve what is left: first the pairs, by the kept entries up to each, then the bits
    of one word, by the bits set under a place. A slot past the last one gets some place in the
    block.
    """
    probe = tl.full([SLOTS], BLOCK_PAIRS // 2 - 1, tl.int32)
    for level in tl.static_range(4):
        half = 8 >> level
        probe += tl.where(tl.gather(ends, probe, 0) <= slots, half, -half)
    pair = probe + (tl.gather(ends, probe, 0) <= slots).to(tl.int32)
    high = tl.gather(high, pair, 0)
    low = tl.gather(low, pair, 0)
    rank = slots - tl.gather(ends, pair, 0) + popcount(high)
    is_low = rank < 0
    word = tl.where(is_low, low, high)
    rank = tl.where(is_low, rank + popcount(low), rank)
    shift = tl.full([SLOTS], 16, tl.int32)  # 32 less the number of bits that are counted
    for level in tl.static_range(4):
        half = 8 >> level
        shift -= tl.where(popcount(word << shift.to(tl.uint32)) <= rank, half, -half)
    is_next = (popcount(word << shift.to(tl.uint32)) <= rank).to(tl.int32)
    place = pair * 64 + tl.where(is_low, 31, 63) - shift + is_next
    return place.to(tl.uint32)  # unsigned: one instruction less for each address


@triton.jit
def ranks_of(words, first, num_words, WORDS: tl.constexpr):
    """Return, for each entry of some words, whether it is kept and how many kept ones precede it.

    Example: bits 1, 0, 0, 1 give ranks 0, 0, 0, 1; those of pruned entries mean nothing.
    """
    index = first + tl.arange(0, WORDS)
    word = tl.load(words + index, mask=index < num_words, other=0).to(tl.uint32, bitcast=True)
    counts = popcount(word)
    before = tl.cumsum(counts, 0) - counts
    entry = tl.arange(0, WORDS * 32)
    # The entry's own bit on top, and the bits below it under that.
    under = tl.gather(word, entry // 32, 0) << (31 - entry % 32).to(tl.uint32)
    rank = tl.gather(before, entry // 32, 0) + popcount(under) - 1
    return (under >> 31) != 0, rank.to(tl.uint32)


# Entries of many parameters ----------------------------------------------------------------------


@triton.jit
def address_in(row, column: tl.constexpr, kind: tl.constexpr, IS_ALIGNED: tl.constexpr = False):
    """Return the address in a column of a parameter's row as a pointer to entries of a kind."""
    address = tl.load(row + column).to(tl.pointer_type(kind))
    if IS_ALIGNED:  # said here, since a hint on what a function returned is lost
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def load_entries(at, mask, IS_FULL: tl.constexpr):
    """Read entries, with a mask only if it is needed: with one there are no vector loads."""
    return tl.load(at) if IS_FULL else tl.load(at, mask=mask, other=0)


@triton.jit
def store_entries(at, entries, mask, IS_FULL: tl.constexpr):
    """Write entries, with a mask only if it is needed."""
    if IS_FULL:
        tl.store(at, entries)
    else:
        tl.store(at, entries, mask=mask)


@triton.jit
def load_master(param_at, remainder_at, mask, IS_FULL: tl.constexpr):
    """Read fp32 masters: a bfloat16 parameter is joined with its remainder or correction."""
    kind: tl.constexpr = param_at.dtype.element_ty
    if kind == tl.int16:
        upper = load_entries(param_at, mask, IS_FULL).to(tl.int32) << 16
        remainder = load_entries(remainder_at, mask, IS_FULL).to(tl.int32)
        if remainder_at.dtype.element_ty == tl.int8:
            remainder = remainder << 8
        master = (upper + remainder).to(tl.float32, bitcast=True)
    else:
        master = load_entries(param_at, mask, IS_FULL)
    return master


@triton.jit
def store_master(param_at, remainder_at, master, dither, mask, IS_FULL: tl.constexpr):
    """Write fp32 masters as parameters and what rounding left over, which ``dither`` rounds to 8 bits.

    Returns the parameters as they were written.
    """
    kind: tl.constexpr = param_at.dtype.element_ty
    if kind == tl.int16:
        bits = master.to(tl.int32, bitcast=True)
        bits = tl.where(master != master, 0x7FC00000, bits)
        rounded = (bits + 0x8000) >> 16  # half away from zero: see kernels/rounding.py
        remainder = bits - (rounded << 16)
        if remainder_at.dtype.element_ty == tl.int8:
            remainder = tl.minimum((remainder + dither) >> 8, 127)
        store_entries(remainder_at, remainder.to(remainder_at.dtype.element_ty), mask, IS_FULL)
        stored = rounded.to(tl.int16)
    else:
        stored = master
    store_entries(param_at, stored, mask, IS_FULL)
    return stored


@triton.jit
def state_at(
    row,
    WEIGHT: tl.constexpr,
    REMAINDERS: tl.constexpr,
    GRADIENT: tl.constexpr,
    FIRST_MOMENT: tl.constexpr,
    SECOND_MOMENT: tl.constexpr,
    COPY: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Return pointers to a parameter, remainder, gradient, both moments and the copy, if there is one."""
    param = address_in(row, PARAM, WEIGHT, IS_ALIGNED)
    copy = param
    if COPY is not None:
        copy = address_in(row, DENSE, COPY, IS_ALIGNED)
    return (
        param,
        address_in(row, REMAINDER, REMAINDERS, IS_ALIGNED),
        address_in(row, GRAD, GRADIENT, IS_ALIGNED),
        address_in(row, EXP_AVG, FIRST_MOMENT, IS_ALIGNED),
        address_in(row, EXP_AVG_SQ, SECOND_MOMENT, IS_ALIGNED),
        copy,
    )


@triton.jit
def offset(at, by):
    """Return the pointers of `state_at`, further on by ``by`` entries."""
    return at[0] + by, at[1] + by, at[2] + by, at[3] + by, at[4] + by, at[5] + by


@triton.jit
def find_item(rows, items, UNITS: tl.constexpr):
    """Return the row of a program's parameter, its number, and which of its units the program takes.

    An item of the list is ``UNITS`` units (blocks, or parts) of one parameter, one for each
    program.
    """
    item = tl.program_id(0) // UNITS
    param = tl.load(items + item)
    row = rows + param * COLUMNS
    return row, param, (item - tl.load(row + FIRST)) * UNITS + tl.program_id(0) % UNITS


@triton.jit
def read_scalars(shared):
    """Return what all entries of a parameter share: minus the step size, the denominator, the decay."""
    return (
        tl.load(shared).to(tl.float32),
        tl.load(shared + 1).to(tl.float32),
        tl.load(shared + 2).to(tl.float32),
    )


@triton.jit
def average(exp_avg, grad, lerp, IS_SMALL: tl.constexpr):
    """Return the new first moment, as torch's lerp: it starts from the nearer end."""
    if IS_SMALL:
        moved = tl.fma(grad - exp_avg, tl.zeros_like(grad) + lerp, exp_avg)
    else:
        moved = tl.fma(grad - exp_avg, tl.zeros_like(grad) + (lerp - 1.0), grad)
    return moved
