"""The kernels of the CUDA path, compiled by Triton; ``cuda.py`` launches them.

``triton_parts.py`` explains how they find kept entries. Divisions, roots and multiply-adds round where
torch's do.
"""

import triton
import triton.language as tl

from samo.kernels.triton_parts import (
    BLOCK_BITS,
    BLOCK_WORDS,
    COLUMNS,
    DENSE,
    EXP_AVG,
    EXP_AVG_SQ,
    GRAD,
    REST,
    SCALARS,
    SIZE,
    STEP,
    address_in,
    corrections_of,
    find_block,
    find_part,
    load_entries,
    load_master,
    narrow,
    places_of,
    ranks_of,
    read_block,
    read_rate,
    store_entries,
    store_master,
    widen,
)

__all__ = []

# compress and expand -----------------------------------------------------------------------------


@triton.jit
def _put(target, values, factor, mask, ADD: tl.constexpr, HAS_FACTOR: tl.constexpr):
    """Write or add values, times a factor, with one rounding."""
    kind: tl.constexpr = target.dtype.element_ty
    if values.dtype == kind and not ADD and not HAS_FACTOR:
        tl.store(target, values, mask=mask)
    else:
        wide = widen(values)
        if HAS_FACTOR:
            wide = wide * tl.load(factor)
        if ADD:
            wide = widen(tl.load(target, mask=mask, other=0)) + wide
        tl.store(target, narrow(wide, kind), mask=mask)


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
    low, high, ends, count, begin = read_block(pairs, offsets, block, num_pairs)
    first = 0
    while first < count:  # not range(): numpy no longer lets the interpreter take a tensor there
        slots = first + tl.arange(0, SLOTS)
        places = places_of(low, high, ends, slots, SLOTS)
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
    is_kept, ranks = ranks_of(words, index * WORDS, num_words, WORDS)
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
    is_kept, ranks = ranks_of(words, index * WORDS, num_words, WORDS)
    begin = tl.load(offsets + index * (WORDS // BLOCK_WORDS))
    entry = index * WORDS * 32 + tl.arange(0, WORDS * 32)
    entries = tl.load(values + begin + ranks, mask=is_kept, other=0)
    tl.store(dense + entry, entries, mask=entry < numel)


# AdamW, many weights in one launch ---------------------------------------------------------------


@triton.jit(do_not_specialize=["num_weights"])
def adamw_scalars_kernel(
    rows,
    scalars,
    skip,
    scales,
    lr_at,
    lr: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    weight_decay: tl.float64,
    num_weights,
    HAS_SKIP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_LR_AT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Count the step of every weight and work out what its entries share, in fp64.

    Example: a first step with lr 0.1, betas 0.9 and 0.99 gives -1 (lr / (1 - 0.9), negative) and
    0.1 (the square root of 1 - 0.99). With ``skip`` no step is counted; ``scales`` has a factor on the
    rate of each weight, not on its decay.
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
    rate = read_rate(lr_at, lr, HAS_LR_AT, SIZE)
    decay = 1.0 - rate * weight_decay
    if HAS_SCALES:
        rate *= tl.load(scales + index, mask=is_inside, other=1.0)
    step_size, denominator = corrections_of(steps.to(tl.int32), rate, beta1, beta2, SIZE)
    target = scalars + index * SCALARS
    tl.store(target, step_size.to(tl.float32), mask=is_inside)
    tl.store(target + 1, denominator.to(tl.float32), mask=is_inside)
    tl.store(target + 2, decay.to(tl.float32), mask=is_inside)


@triton.jit
def read_scalars(scalars, weight):
    """Return what all entries of a weight share: minus the step size, the denominator, the decay."""
    at = scalars + weight * SCALARS
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def update_entries(
    weight_at,
    rest_at,
    grad_at,
    exp_avg_at,
    exp_avg_sq_at,
    mask,
    step_size,
    denominator,
    decay,
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
    param = load_master(weight_at, rest_at, mask, IS_FULL)
    grad = widen(load_entries(grad_at, mask, IS_FULL))
    exp_avg = load_entries(exp_avg_at, mask, IS_FULL)
    exp_avg_sq = load_entries(exp_avg_sq_at, mask, IS_FULL)
    if IS_SMALL:  # torch's lerp starts from the nearer end
        exp_avg = tl.fma(grad - exp_avg, tl.zeros_like(grad) + lerp, exp_avg)
    else:
        exp_avg = tl.fma(grad - exp_avg, tl.zeros_like(grad) + (lerp - 1.0), grad)
    exp_avg_sq = tl.fma(grad * rest2, grad, exp_avg_sq * beta2)
    under = tl.div_rn(tl.sqrt_rn(exp_avg_sq), tl.zeros_like(grad) + denominator) + eps
    param = param * decay + tl.div_rn(exp_avg * step_size, under)

    store_entries(exp_avg_at, exp_avg, mask, IS_FULL)
    store_entries(exp_avg_sq_at, exp_avg_sq, mask, IS_FULL)
    store_master(weight_at, rest_at, param, 0, mask, IS_FULL)


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
    row, weight, block, low, high, ends, count, begin = find_block(rows, items, BLOCKS)
    if HAS_SKIP:
        count = tl.where(tl.load(skip) == 0, count, 0)
    dense = address_in(row, DENSE, WEIGHT) + block * BLOCK_BITS
    rest = address_in(row, REST, WHOLE) + begin
    grad = address_in(row, GRAD, GRADIENT) + begin
    exp_avg = address_in(row, EXP_AVG, tl.float32) + begin
    exp_avg_sq = address_in(row, EXP_AVG_SQ, tl.float32) + begin
    step_size, denominator, decay = read_scalars(scalars, weight)
    first = 0
    while first < count:
        slots = first + tl.arange(0, SLOTS)
        places = places_of(low, high, ends, slots, SLOTS)
        update_entries(
            dense + places,
            rest + slots,
            grad + slots,
            exp_avg + slots,
            exp_avg_sq + slots,
            slots < count,
            step_size,
            denominator,
            decay,
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
    row, weight, start = find_part(rows, items, PARTS, PART)
    size = tl.load(row + SIZE)
    if HAS_SKIP:
        size = tl.where(tl.load(skip) == 0, size, 0)
    dense = address_in(row, DENSE, WEIGHT, IS_ALIGNED)
    rest = address_in(row, REST, WHOLE, IS_ALIGNED)
    grad = address_in(row, GRAD, GRADIENT, IS_ALIGNED)
    exp_avg = address_in(row, EXP_AVG, tl.float32, IS_ALIGNED)
    exp_avg_sq = address_in(row, EXP_AVG_SQ, tl.float32, IS_ALIGNED)
    entry = start + tl.arange(0, PART)
    step_size, denominator, decay = read_scalars(scalars, weight)
    if start + PART <= size:
        update_entries(
            dense + entry,
            rest + entry,
            grad + entry,
            exp_avg + entry,
            exp_avg_sq + entry,
            entry < size,
            step_size,
            denominator,
            decay,
            lerp,
            beta2,
            rest2,
            eps,
            IS_SMALL,
            True,
        )
    elif start < size:
        update_entries(
            dense + entry,
            rest + entry,
            grad + entry,
            exp_avg + entry,
            exp_avg_sq + entry,
            entry < size,
            step_size,
            denominator,
            decay,
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
