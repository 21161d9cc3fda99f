"""Triton kernels that compress and expand, and how they find kept entries.

There are two ways from a mask's bits to its kept entries:

    by slot     for the k-th kept entry of a block, search the position of the k-th set bit: some 60
                instructions for each kept entry, none for a pruned one, and neighbours in a
                compressed vector are read and written by neighbours in a warp
    by entry    for each entry of a block, kept or not, count the set bits below it: some 12
                instructions for each entry of the dense tensor

A program handles one block of 2,048 weights. By slot it is one warp, whose 32 lanes hold the
block's 32 pairs of words: reading another lane's bits is a shuffle, without shared memory.

bfloat16 is passed as int16, and widened and rounded by its bits: exact, also under Triton's
interpreter, which truncates.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from samo.mask import bitmap

# No annotations: Inductor copies constants of kernels into files that do not import `Final`.
IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
BLOCK_BITS = tl.constexpr(bitmap.BLOCK_BITS)
BLOCK_WORDS = tl.constexpr(bitmap.BLOCK_WORDS)
BLOCK_PAIRS = tl.constexpr(bitmap.BLOCK_WORDS // 2)

KINDS: Final = {
    torch.bfloat16: tl.int16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
"""The Triton type in which the kernels get each type."""


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
        # A NaN may have all bits set, and rounding would turn it into a number.
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


# The bits of a block -----------------------------------------------------------------------------


@triton.jit
def read_block(pairs, block, num_pairs):
    """Return a block's low and high words, and its kept entries up to each pair and in all.

    A block past the last one is empty. Example, with 2 pairs of 4-bit words: pairs 0001 0010 and
    0000 0110 give low [2, 6], high [1, 0], ends [2, 4] and 4.
    """
    pair = block * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    words = tl.load(pairs + pair, mask=pair < num_pairs, other=0)
    low = words.to(tl.uint32)
    high = (words >> 32).to(tl.uint32)
    counts = popcount(low) + popcount(high)
    return low, high, tl.cumsum(counts, 0), tl.sum(counts, 0)


@triton.jit
def places_of(low, high, ends, slots, SLOTS: tl.constexpr):
    """Return the positions in a block of the kept entries with these numbers.

    Example: bits 1, 0, 0, 1 and slots [0, 1] give [0, 3]. Two binary searches: among the pairs, by
    the kept entries up to each, then in one word, by the bits set below a position. A slot past the
    last one gets some position in the block.
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
    return place.to(tl.uint32)  # unsigned saves an instruction per address


@triton.jit
def ranks_of(words, block, num_words):
    """Return for each entry of a block whether it is kept, and how many kept ones precede it.

    Example: bits 1, 0, 0, 1 give ranks 0, 0, 0, 1; those of pruned entries have no meaning.
    """
    index = block * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    word = tl.load(words + index, mask=index < num_words, other=0).to(tl.uint32, bitcast=True)
    counts = popcount(word)
    before = tl.cumsum(counts, 0) - counts
    entry = tl.arange(0, BLOCK_BITS)
    # The entry's own bit on top, and the bits below it under that.
    under = tl.gather(word, entry // 32, 0) << (31 - entry % 32).to(tl.uint32)
    rank = tl.gather(before, entry // 32, 0) + popcount(under) - 1
    return (under >> 31) != 0, rank.to(tl.uint32)


# compress and expand -----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first_offset", "num_pairs"])
def compress_by_slot_kernel(
    dense, words, offsets, first_offset, out, num_pairs, SLOTS: tl.constexpr
):
    """Gather the kept entries of a block: [5, 6, 7, 8] with bits 1, 0, 0, 1 gives [5, 8].

    ``first_offset`` is the index of the first block's: operators give a `Mask.packed` twice, since
    a view of its offsets would cost the host time in each call.
    """
    block = tl.program_id(0).to(tl.int64)
    pairs = words.to(tl.pointer_type(tl.int64))
    offsets = offsets.to(tl.pointer_type(tl.int64))  # operators give it as int32
    low, high, ends, count = read_block(pairs, block, num_pairs)
    # Not in read_block: torch.compile would take all that a function reads for what is written to
    # an address that comes from it, and copy the mask before and after.
    begin = tl.load(offsets + first_offset + block)
    start = 0
    while start < count:  # not range(): numpy no longer lets the interpreter take a tensor there
        slots = start + tl.arange(0, SLOTS)
        places = places_of(low, high, ends, slots, SLOTS)
        is_kept = slots < count
        entries = tl.load(dense + block * BLOCK_BITS + places, mask=is_kept, other=0)
        tl.store(out + begin + slots, convert(entries, out.dtype.element_ty), mask=is_kept)
        start += SLOTS


@triton.jit
def compress_by_entry_kernel(dense, words, offsets, out, numel, num_words):
    """Read all entries of a block and write the kept ones to their ranks."""
    block = tl.program_id(0).to(tl.int64)
    is_kept, ranks = ranks_of(words, block, num_words)
    begin = tl.load(offsets + block)
    entry = block * BLOCK_BITS + tl.arange(0, BLOCK_BITS)
    entries = tl.load(dense + entry, mask=entry < numel, other=0)
    tl.store(out + begin + ranks, convert(entries, out.dtype.element_ty), mask=is_kept)


@triton.jit(do_not_specialize=["first_offset"])
def expand_kernel(values, words, offsets, first_offset, after, dense, numel, num_words):
    """Write values to the kept entries of a block, and 0 to the others.

    Example: [5, 8] with bits 1, 0, 0, 1 gives [5, 0, 0, 8]. ``first_offset`` is as for
    `compress_by_slot_kernel`; ``after`` is not read: see ``operators.py``.
    """
    block = tl.program_id(0).to(tl.int64)
    is_kept, ranks = ranks_of(words, block, num_words)
    offsets = offsets.to(tl.pointer_type(tl.int64))  # operators give it as int32
    begin = tl.load(offsets + first_offset + block)
    entry = block * BLOCK_BITS + tl.arange(0, BLOCK_BITS)
    entries = tl.load(values + begin + ranks, mask=is_kept, other=0)
    tl.store(dense + entry, convert(entries, dense.dtype.element_ty), mask=entry < numel)
