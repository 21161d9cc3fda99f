"""The kernels of the CUDA path, compiled by Triton; ``triton_launch.py`` launches them.

``triton_common.py`` explains how they find kept entries. Divisions, roots and multiply-adds round
where torch's do.
"""

import triton
import triton.language as tl

from samo.kernels.triton_common import (
    AGE,
    BITMAP,
    BLOCK_BITS,
    BLOCK_WORDS,
    COLUMNS,
    DENSE,
    NUM_WORDS,
    OFFSETS,
    PARAM,
    RATE,
    SCALARS,
    SIZE,
    STEP,
    address_in,
    average,
    convert,
    corrections_of,
    find_item,
    load_entries,
    load_master,
    offset,
    places_of,
    ranks_of,
    read_block,
    read_scalars,
    state_at,
    store_entries,
    store_master,
    widen,
)

__all__ = []

# compress and expand -----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_pairs"])
def compress_by_slot_kernel(dense, words, offsets, out, num_pairs, SLOTS: tl.constexpr):
    """Gather the kept entries of a block. Example: [5, 6, 7, 8] with bits 1, 0, 0, 1 gives [5, 8]."""
    block = tl.program_id(0).to(tl.int64)
    pairs = words.to(tl.pointer_type(tl.int64))
    offsets = offsets.to(tl.pointer_type(tl.int64))  # operators give it as int32
    low, high, ends, count, begin = read_block(pairs, offsets, block, num_pairs)
    first = 0
    while first < count:  # not range(): numpy no longer lets the interpreter take a tensor there
        slots = first + tl.arange(0, SLOTS)
        places = places_of(low, high, ends, slots, SLOTS)
        is_kept = slots < count
        entries = tl.load(dense + block * BLOCK_BITS + places, mask=is_kept, other=0)
        tl.store(out + begin + slots, convert(entries, out.dtype.element_ty), mask=is_kept)
        first += SLOTS


@triton.jit
def compress_by_entry_kernel(dense, words, offsets, out, numel, num_words, WORDS: tl.constexpr):
    """Read all entries of some blocks and write the kept ones to their ranks."""
    index = tl.program_id(0).to(tl.int64)
    is_kept, ranks = ranks_of(words, index * WORDS, num_words, WORDS)
    begin = tl.load(offsets + index * (WORDS // BLOCK_WORDS))
    entry = index * WORDS * 32 + tl.arange(0, WORDS * 32)
    entries = tl.load(dense + entry, mask=entry < numel, other=0)
    tl.store(out + begin + ranks, convert(entries, out.dtype.element_ty), mask=is_kept)


@triton.jit
def expand_kernel(values, words, offsets, after, dense, numel, num_words, WORDS: tl.constexpr):
    """Write values to the kept entries of some blocks, and 0 to the others.

    Example: [5, 8] with bits 1, 0, 0, 1 gives [5, 0, 0, 8]. ``after`` is not read: see
    ``operators.py``.
    """
    index = tl.program_id(0).to(tl.int64)
    is_kept, ranks = ranks_of(words, index * WORDS, num_words, WORDS)
    offsets = offsets.to(tl.pointer_type(tl.int64))  # operators give it as int32
    begin = tl.load(offsets + index * (WORDS // BLOCK_WORDS))
    entry = index * WORDS * 32 + tl.arange(0, WORDS * 32)
    entries = tl.load(values + begin + ranks, mask=is_kept, other=0)
    tl.store(dense + entry, convert(entries, dense.dtype.element_ty), mask=entry < numel)


@triton.jit
def expand_rows_kernel(
    rows,
    items,
    skip,
    VALUES: tl.constexpr,
    COPY: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Expand the values of many weights to their dense copies; an item is ``BLOCKS`` blocks of one."""
    row, _, block = find_item(rows, items, BLOCKS)
    words = address_in(row, BITMAP, tl.int32, IS_ALIGNED)
    num_words = tl.load(row + NUM_WORDS)
    is_kept, ranks = ranks_of(words, block * BLOCK_WORDS, num_words, BLOCK_WORDS)
    is_inside = block * BLOCK_WORDS < num_words
    begin = tl.load(address_in(row, OFFSETS, tl.int64) + block, mask=is_inside, other=0)
    entry = block * BLOCK_BITS + tl.arange(0, BLOCK_BITS)
    values = tl.load(address_in(row, PARAM, VALUES) + begin + ranks, mask=is_kept, other=0)
    dense = address_in(row, DENSE, COPY, IS_ALIGNED)
    numel = tl.load(row + SIZE)
    if HAS_SKIP:
        numel = tl.where(tl.load(skip) == 0, numel, 0)
    if block * BLOCK_BITS + BLOCK_BITS <= numel:  # without a mask there are vector stores
        tl.store(dense + entry, convert(values, COPY))
    else:
        tl.store(dense + entry, convert(values, COPY), mask=entry < numel)


# AdamW, many parameters in one launch ------------------------------------------------------------


@triton.jit(do_not_specialize=["num_params"])
def adamw_scalars_kernel(
    rows,
    scalars,
    skip,
    rates,
    decays,
    lr: tl.float64,
    weight_decay: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    num_params,
    RATE_TYPE: tl.constexpr,
    HAS_RATES: tl.constexpr,
    HAS_DECAYS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Count the step of every parameter and work out what its entries share, in fp64.

    Example: a first step with lr 0.1, betas 0.9 and 0.99 gives -1 (lr / (1 - 0.9), negative) and
    0.1 (the square root of 1 - 0.99). With ``skip`` no step is counted. Rates lie on the device at
    addresses in the table, or are in ``rates``, or are all ``lr``; so are weight decays.
    """
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_inside = index < num_params
    row = rows + index * COLUMNS
    step_at = tl.load(row + STEP, mask=is_inside, other=0).to(tl.pointer_type(tl.float32))
    steps = tl.load(step_at, mask=is_inside, other=0) + 1
    if HAS_SKIP:
        tl.store(step_at, steps, mask=is_inside & (tl.load(skip) == 0))
    else:
        tl.store(step_at, steps, mask=is_inside)
    if RATE_TYPE is not None:
        rate_at = tl.load(row + RATE, mask=is_inside, other=0).to(tl.pointer_type(RATE_TYPE))
        rate = tl.load(rate_at, mask=is_inside, other=0).to(tl.float64)
    elif HAS_RATES:
        rate = tl.load(rates + index, mask=is_inside, other=0)
    else:
        rate = tl.full([SIZE], 0.0, tl.float64) + lr
    if HAS_DECAYS:
        decay = 1.0 - rate * tl.load(decays + index, mask=is_inside, other=0)
    else:
        decay = 1.0 - rate * weight_decay
    step_size, denominator = corrections_of(steps.to(tl.int32), rate, beta1, beta2, SIZE)
    target = scalars + index * SCALARS
    tl.store(target, step_size, mask=is_inside)
    tl.store(target + 1, denominator, mask=is_inside)
    tl.store(target + 2, decay, mask=is_inside)
    tl.store(target + 3, rate, mask=is_inside)


@triton.jit
def _correct_by_age(
    by_age, entry, mask, shared, step_size, denominator, OLDEST: tl.constexpr, IS_FULL: tl.constexpr
):
    """Count ages and return the step size and the denominator of each entry.

    Example: ages 0 and 99 become 1 and 100, and look up the corrections of a first and a 100th
    step. Entries that were there at every step, or have the largest age, take the parameter's own.
    """
    ages, step, inverses, denominators = by_age
    age = load_entries(ages + entry, mask, IS_FULL).to(tl.int32)
    age = tl.minimum(tl.maximum(age, 0) + 1, OLDEST)  # whatever is stored: an index of the tables
    store_entries(ages + entry, age.to(tl.int16), mask, IS_FULL)
    is_whole = (age == OLDEST) | (age == tl.load(step).to(tl.int32))
    own = (tl.load(inverses + age) * -tl.load(shared + 3)).to(tl.float32)
    return (
        tl.where(is_whole, step_size, own),
        tl.where(is_whole, denominator, tl.load(denominators + age)),
    )


@triton.jit
def _update_part(
    state,
    by_age,
    entry,
    size,
    shared,
    settings,
    COPY: tl.constexpr,
    OLDEST: tl.constexpr,
    IS_SMALL: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Update entries and their copies, rounding where torch's unfused AdamW rounds.

    Example, first step with lr 0.1 and no decay: parameter 1.0 and gradient 2.0 give parameter 0.9,
    moments 0.2 and 0.004. A bfloat16 parameter is joined with its remainder first, and split again.
    """
    lerp, beta2, lerp2, eps = settings
    param_at, remainder_at, grad_at, exp_avg_at, exp_avg_sq_at, copy_at = offset(state, entry)
    mask = entry < size
    step_size, denominator, decay = read_scalars(shared)
    if OLDEST > 0:
        step_size, denominator = _correct_by_age(
            by_age, entry, mask, shared, step_size, denominator, OLDEST, IS_FULL
        )
    param = load_master(param_at, remainder_at, mask, IS_FULL)
    grad = widen(load_entries(grad_at, mask, IS_FULL))
    exp_avg = average(load_entries(exp_avg_at, mask, IS_FULL), grad, lerp, IS_SMALL)
    exp_avg_sq = load_entries(exp_avg_sq_at, mask, IS_FULL)
    exp_avg_sq = tl.fma(grad * lerp2, grad, exp_avg_sq * beta2)
    under = tl.div_rn(tl.sqrt_rn(exp_avg_sq), tl.zeros_like(grad) + denominator) + eps
    param = param * decay + tl.div_rn(exp_avg * step_size, under)

    store_entries(exp_avg_at, exp_avg, mask, IS_FULL)
    store_entries(exp_avg_sq_at, exp_avg_sq, mask, IS_FULL)
    stored = store_master(param_at, remainder_at, param, 0, mask, IS_FULL)
    if COPY is not None:
        store_entries(copy_at, convert(stored, COPY), mask, IS_FULL)


@triton.jit
def adamw_kernel(
    rows,
    items,
    scalars,
    skip,
    inverses,
    denominators,
    lerp,
    beta2,
    lerp2,
    eps,
    WEIGHT: tl.constexpr,
    REMAINDERS: tl.constexpr,
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,
    OLDEST: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    IS_SMALL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Update a part of a parameter, without a look at its mask.

    An item is ``PARTS`` parts of ``PART`` entries. ``OLDEST`` is 0 where entries have no ages.
    """
    row, param, part = find_item(rows, items, PARTS)
    start = part * PART
    size = tl.load(row + SIZE)
    if HAS_SKIP:
        size = tl.where(tl.load(skip) == 0, size, 0)
    state = state_at(row, WEIGHT, REMAINDERS, GRADIENT, tl.float32, tl.float32, COPY, IS_ALIGNED)
    by_age = (
        address_in(row, AGE, tl.int16),
        address_in(row, STEP, tl.float32),
        inverses,
        denominators,
    )
    settings = (lerp, beta2, lerp2, eps)
    shared = scalars + param * SCALARS
    entry = start + tl.arange(0, PART)
    if start + PART <= size:
        _update_part(state, by_age, entry, size, shared, settings, COPY, OLDEST, IS_SMALL, True)
    elif start < size:
        _update_part(state, by_age, entry, size, shared, settings, COPY, OLDEST, IS_SMALL, False)


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
        tl.store(found, tl.full((), 1, tl.int8))  # all that write, write the same
