"""Triton kernels of AdamW, exact and lean, and of the search for nonfinite values.

A launch works on many parameters: ``triton_tables.py``. Divisions, roots and multiply-adds of exact
state round where torch's do.

Lean state, in 8 bits, is defined by ``lean.py``, and updated in the same order. A program handles a
block of a pruned weight, group by group, or 1,024 entries of a parameter without a mask, four
groups: no other program writes their scales. A group's values stay in registers from the old codes
to the new ones, unless there are unusually many. Roots and quotients are the GPU's fast ones, up to
2 ulp off: that changes one code in ten thousand, and dithering changes more.
"""

import triton
import triton.language as tl

from samo.kernels import lean
from samo.kernels.triton_masks import (
    BLOCK_BITS,
    BLOCK_PAIRS,
    BLOCK_WORDS,
    convert,
    ranks_of,
    read_block,
    widen,
)
from samo.mask import bitmap

# Columns of a parameter's row in a table, all int64: addresses, 0 if missing; then entries, words
# of the mask, and the first item in the list. Gradients move from step to step: their addresses
# are an array of their own, ``grads``.
PARAM, REMAINDER, EXP_AVG, EXP_AVG_SQ, DENSE = map(tl.constexpr, range(5))
BITMAP, OFFSETS, STEP, AGE, EXP_AVG_SCALE, EXP_AVG_SQ_SCALE = map(tl.constexpr, range(5, 11))
SIZE, NUM_WORDS, FIRST, COLUMNS = map(tl.constexpr, range(11, 15))

SCALARS = tl.constexpr(4)
"""Per parameter, in fp64: minus the step size, the denominator, the decay, the rate."""

STEP_BITS = tl.constexpr(25)
"""A float32 count stops at 2**24."""

UNPRUNED_GROUP = tl.constexpr(lean.UNPRUNED_GROUP)
GROUP_PAIRS = tl.constexpr(lean.GROUP // 64)
BLOCK_GROUPS = tl.constexpr(bitmap.BLOCK_BITS // lean.GROUP)
LARGEST_ROOT = tl.constexpr(lean.LARGEST_ROOT)
SMALLEST = tl.constexpr(lean.SMALLEST)


# The entries of a parameter ----------------------------------------------------------------------


@triton.jit
def address_in(row, column: tl.constexpr, kind: tl.constexpr, IS_ALIGNED: tl.constexpr = False):
    """Return a column of a parameter's row as a pointer to entries of a kind."""
    address = tl.load(row + column).to(tl.pointer_type(kind))
    if IS_ALIGNED:  # here, since a hint on a function's result is lost
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def load_entries(at, mask, IS_FULL: tl.constexpr):
    """Read entries, with a mask only if needed, since a mask prevents vector loads."""
    return tl.load(at) if IS_FULL else tl.load(at, mask=mask, other=0)


@triton.jit
def store_entries(at, entries, mask, IS_FULL: tl.constexpr):
    """Write entries, with a mask only if needed."""
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
    """Write fp32 masters as parameters and (dithered) remainders; return the parameters."""
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
    grad,
    WEIGHT: tl.constexpr,
    REMAINDERS: tl.constexpr,
    GRADIENT: tl.constexpr,
    IS_LEAN: tl.constexpr,
    COPY: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Return pointers to parameter, remainder, gradient, both moments and copy, if there is one."""
    param = address_in(row, PARAM, WEIGHT, IS_ALIGNED)
    copy = param
    if COPY is not None:
        copy = address_in(row, DENSE, COPY, IS_ALIGNED)
    return (
        param,
        address_in(row, REMAINDER, REMAINDERS, IS_ALIGNED),
        address_in(grad, 0, GRADIENT, IS_ALIGNED),
        address_in(row, EXP_AVG, tl.int8 if IS_LEAN else tl.float32, IS_ALIGNED),
        address_in(row, EXP_AVG_SQ, tl.uint8 if IS_LEAN else tl.float32, IS_ALIGNED),
        copy,
    )


@triton.jit
def offset(at, by):
    """Return the pointers of `state_at`, advanced by ``by`` entries."""
    return at[0] + by, at[1] + by, at[2] + by, at[3] + by, at[4] + by, at[5] + by


@triton.jit
def find_item(rows, items, UNITS: tl.constexpr):
    """Return the row of a program's parameter, its number, and the number of the program's unit.

    An item of the list is ``UNITS`` units (blocks, or parts) of one parameter, a program each.
    """
    item = tl.program_id(0) // UNITS
    param = tl.load(items + item)
    row = rows + param * COLUMNS
    return row, param, (item - tl.load(row + FIRST)) * UNITS + tl.program_id(0) % UNITS


@triton.jit
def read_scalars(shared):
    """Return minus the step size, the denominator and the decay."""
    return (
        tl.load(shared).to(tl.float32),
        tl.load(shared + 1).to(tl.float32),
        tl.load(shared + 2).to(tl.float32),
    )


@triton.jit
def average(exp_avg, grad, lerp, IS_SMALL: tl.constexpr):
    """Return the new first moment, as torch's lerp does: from the nearer end."""
    if IS_SMALL:
        moved = tl.fma(grad - exp_avg, tl.zeros_like(grad) + lerp, exp_avg)
    else:
        moved = tl.fma(grad - exp_avg, tl.zeros_like(grad) + (lerp - 1.0), grad)
    return moved


# Step counts and dense copies --------------------------------------------------------------------


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
    HAS_RATES: tl.constexpr,
    HAS_DECAYS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Count every parameter's step unless ``skip`` is set, and compute its scalars in fp64.

    Example: a first step with lr 0.1, betas 0.9 and 0.99 gives -1 (lr / (1 - 0.9), negative) and
    0.1 (the square root of 1 - 0.99). Rates are in ``rates``, or all ``lr``.
    """
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_inside = index < num_params
    row = rows + index * COLUMNS
    step_at = tl.load(row + STEP, mask=is_inside, other=0).to(tl.pointer_type(tl.float32))
    steps = tl.load(step_at, mask=is_inside, other=0) + 1
    tl.store(step_at, steps, mask=is_inside & (tl.load(skip) == 0))
    if HAS_RATES:
        rate = tl.load(rates + index, mask=is_inside, other=0)
    else:
        rate = tl.full([SIZE], 0.0, tl.float64) + lr
    if HAS_DECAYS:
        decay = 1.0 - rate * tl.load(decays + index, mask=is_inside, other=0)
    else:
        decay = 1.0 - rate * weight_decay
    counts = steps.to(tl.int32)
    target = scalars + index * SCALARS
    tl.store(target, -(rate / (1.0 - power_of(beta1, counts, SIZE))), mask=is_inside)
    tl.store(target + 1, tl.sqrt(1.0 - power_of(beta2, counts, SIZE)), mask=is_inside)
    tl.store(target + 2, decay, mask=is_inside)
    tl.store(target + 3, rate, mask=is_inside)


@triton.jit
def expand_rows_kernel(
    rows,
    items,
    skip,
    VALUES: tl.constexpr,
    COPY: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Expand the values of many weights to their dense copies."""
    row, _, block = find_item(rows, items, BLOCKS)
    words = address_in(row, BITMAP, tl.int32, IS_ALIGNED)
    num_words = tl.load(row + NUM_WORDS)
    is_kept, ranks = ranks_of(words, block, num_words)
    is_inside = block * BLOCK_WORDS < num_words
    begin = tl.load(address_in(row, OFFSETS, tl.int64) + block, mask=is_inside, other=0)
    entry = block * BLOCK_BITS + tl.arange(0, BLOCK_BITS)
    values = tl.load(address_in(row, PARAM, VALUES) + begin + ranks, mask=is_kept, other=0)
    dense = address_in(row, DENSE, COPY, IS_ALIGNED)
    numel = tl.where(tl.load(skip) == 0, tl.load(row + SIZE), 0)
    if block * BLOCK_BITS + BLOCK_BITS <= numel:  # without a mask, for vector stores
        tl.store(dense + entry, convert(values, COPY))
    else:
        tl.store(dense + entry, convert(values, COPY), mask=entry < numel)


# Exact state -------------------------------------------------------------------------------------


@triton.jit
def _correct_by_age(
    by_age, entry, mask, shared, step_size, denominator, OLDEST: tl.constexpr, IS_FULL: tl.constexpr
):
    """Count ages and return the step size and the denominator of each entry.

    Example: ages 0 and 99 become 1 and 100, and get the corrections of a first and a 100th step.
    Entries that were kept at every step, or have the largest age, get the parameter's own.
    """
    ages, step, inverses, denominators = by_age
    age = load_entries(ages + entry, mask, IS_FULL).to(tl.int32)
    age = tl.minimum(tl.maximum(age, 0) + 1, OLDEST)  # always an index of the tables
    store_entries(ages + entry, age.to(tl.int16), mask, IS_FULL)
    is_whole = (age == OLDEST) | (age == tl.load(step).to(tl.int32))
    own = (tl.load(inverses + age) * -tl.load(shared + 3)).to(tl.float32)
    return (
        tl.where(is_whole, step_size, own),
        tl.where(is_whole, denominator, tl.load(denominators + age)),
    )


@triton.jit
def _update(
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
    moments 0.2 and 0.004.
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


# Lean state --------------------------------------------------------------------------------------


@triton.jit
def random_bits(index, step):
    """Return 32 pseudo-random bits for each entry: `lean.random_bits`."""
    steps = (tl.zeros_like(index) + step).to(tl.uint32)
    bits = (index.to(tl.uint32) * 0x9E3779B1) ^ (steps * 0x85EBCA77)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


# Floats to small integers and back by their bits, since conversions run at a quarter of the speed
# of additions. The lowest bits of fp32 numbers from 2**23 on are integers.


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
    """Return floor(x + dither), at most ``MOST``; 12 of the bits are the dither, between 0 and 1.

    Example: x = 2.6 gives 3 for six of ten dithers, and 2 for the others.
    """
    part = ((bits >> SHIFT) & 0xFFF).to(tl.int32)
    dither = ((part << 11) | 0x3F800000).to(tl.float32, bitcast=True) - (1.5 - 2**-13)
    # Minus 0.5 and rounded to nearest is floor: no ties, the dither is an odd multiple of 2**-13.
    whole = (tl.minimum(x + dither, MOST) + 8388864.0).to(tl.int32, bitcast=True)
    return whole & 0xFF


@triton.jit
def invert(largest):
    """Return a scale from the largest size in a group, and its inverse; both 0 if it is tiny."""
    scale = tl.where(largest < SMALLEST, 0.0, largest)
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(scale > 0, scale, 1.0))
    return scale, tl.where(scale > 0, inverse, 0.0)


@triton.jit
def _advance(at, mask, scales, shared, settings, IS_SMALL: tl.constexpr, IS_FULL: tl.constexpr):
    """Return new fp32 masters, first moments and roots of second ones; moments are 0 outside."""
    lerp, beta2, lerp2, eps = settings
    param_at, remainder_at, grad_at, exp_avg_at, exp_avg_sq_at, _ = at
    param = load_master(param_at, remainder_at, mask, IS_FULL)
    grad = widen(load_entries(grad_at, mask, IS_FULL))
    part = to_signed_float(load_entries(exp_avg_at, mask, IS_FULL)) * (1 / 127)
    square = part * part
    exp_avg = square * square * scales[0]
    exp_avg = tl.where(part < 0, -exp_avg, exp_avg)
    part = to_float(load_entries(exp_avg_sq_at, mask, IS_FULL)) * (1 / 255)
    square = part * part
    root = square * square * scales[1]
    step_size, denominator, decay = read_scalars(shared)

    exp_avg = average(exp_avg, grad, lerp, IS_SMALL)
    exp_avg_sq = tl.fma(grad * lerp2, grad, root * root * beta2)
    root = tl.sqrt_rn(exp_avg_sq)  # also right for tiny numbers, which must not become 0
    under = root * (1.0 / denominator) + eps
    param = param * decay + exp_avg * step_size / under
    # Above fp32's range the second moment is clipped, and the first must not outlive its size.
    is_finite = root <= LARGEST_ROOT  # nor is a NaN
    return param, tl.where(is_finite, exp_avg, 0.0), tl.where(is_finite, root, LARGEST_ROOT)


@triton.jit
def _write(at, mask, new, inverses, bits, COPY: tl.constexpr, IS_FULL: tl.constexpr):
    """Store the results of `_advance`, and the copies."""
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
    scales_at,
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

    More than ``SLOTS`` are updated twice: once for the new scales, once to be written.
    """
    scales = (tl.load(scales_at[0]), tl.load(scales_at[1]))
    slots = first + tl.arange(0, SLOTS)
    param, exp_avg, root = _advance(
        offset(state, slots), slots < stop, scales, shared, settings, IS_SMALL, False
    )
    exp_avg_size = tl.max(tl.abs(exp_avg), 0)
    root_size = tl.max(root, 0)
    second = first + SLOTS
    while second < stop:
        slots = second + tl.arange(0, SLOTS)
        param, exp_avg, root = _advance(
            offset(state, slots), slots < stop, scales, shared, settings, IS_SMALL, False
        )
        exp_avg_size = tl.maximum(exp_avg_size, tl.max(tl.abs(exp_avg), 0))
        root_size = tl.maximum(root_size, tl.max(root, 0))
        second += SLOTS

    new_scale, inverse = invert(exp_avg_size)
    new_root_scale, root_inverse = invert(root_size)
    tl.store(scales_at[0], new_scale)
    tl.store(scales_at[1], new_root_scale)
    # Those in registers now are the last ones; the others follow, from the first on.
    bits = random_bits(begin + slots, step)
    new = (param, exp_avg, root)
    _write(offset(state, slots), slots < stop, new, (inverse, root_inverse), bits, None, False)
    second = first + SLOTS
    while second < stop:
        slots = second - SLOTS + tl.arange(0, SLOTS)
        new = _advance(
            offset(state, slots), slots < stop, scales, shared, settings, IS_SMALL, False
        )
        bits = random_bits(begin + slots, step)
        _write(offset(state, slots), slots < stop, new, (inverse, root_inverse), bits, None, False)
        second += SLOTS


@triton.jit
def adamw_lean_kept_kernel(
    rows,
    grads,
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
    IS_SMALL: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Update the values of a block of a pruned weight."""
    row, weight, block = find_item(rows, items, BLOCKS)
    words = address_in(row, BITMAP, tl.int64)
    offsets = address_in(row, OFFSETS, tl.int64)
    num_pairs = tl.load(row + NUM_WORDS) // 2
    _, _, ends, count = read_block(words, block, num_pairs)
    begin = tl.load(offsets + block, mask=block * BLOCK_PAIRS < num_pairs, other=0)
    count = tl.where(tl.load(skip) == 0, count, 0)
    grad = grads + weight
    state = state_at(row, grad, WEIGHT, REMAINDERS, GRADIENT, True, None, False)
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
            scales_at = (scale_at + group, root_scale_at + group)
            at, shared = offset(state, begin), scalars + weight * SCALARS
            _update_group(
                at, scales_at, begin, first, stop, step, shared, settings, IS_SMALL, SLOTS
            )
        first = stop


@triton.jit
def _update_lean(
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
    """Update a part of a parameter, with a row of entries for each of its groups."""
    group = start // UNPRUNED_GROUP + tl.arange(0, PART // UNPRUNED_GROUP)
    scale_at = address_in(row, EXP_AVG_SCALE, tl.float32) + group
    root_scale_at = address_in(row, EXP_AVG_SQ_SCALE, tl.float32) + group
    is_group = group * UNPRUNED_GROUP < size
    scale = tl.load(scale_at, mask=is_group, other=0.0)
    root_scale = tl.load(root_scale_at, mask=is_group, other=0.0)
    scales = (scale[:, None], root_scale[:, None])
    entry = group[:, None] * UNPRUNED_GROUP + tl.arange(0, UNPRUNED_GROUP)[None, :]
    at = offset(state, entry)
    param, exp_avg, root = _advance(at, entry < size, scales, shared, settings, IS_SMALL, IS_FULL)
    scale, inverse = invert(tl.max(tl.abs(exp_avg), 1))
    root_scale, root_inverse = invert(tl.max(root, 1))
    tl.store(scale_at, scale, mask=is_group)
    tl.store(root_scale_at, root_scale, mask=is_group)
    step = tl.load(address_in(row, STEP, tl.float32)).to(tl.int32)
    inverses = (inverse[:, None], root_inverse[:, None])
    bits = random_bits(entry, step)
    _write(at, entry < size, (param, exp_avg, root), inverses, bits, COPY, IS_FULL)


# Parameters without a mask, or exact state -------------------------------------------------------


@triton.jit
def adamw_kernel(
    rows,
    grads,
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
    IS_LEAN: tl.constexpr,
    OLDEST: tl.constexpr,
    IS_SMALL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Update a part of a parameter, without its mask; ``OLDEST`` is 0 without ages."""
    row, param, part = find_item(rows, items, PARTS)
    start = part * PART
    size = tl.where(tl.load(skip) == 0, tl.load(row + SIZE), 0)
    grad = grads + param
    state = state_at(row, grad, WEIGHT, REMAINDERS, GRADIENT, IS_LEAN, COPY, IS_ALIGNED)
    settings = (lerp, beta2, lerp2, eps)
    shared = scalars + param * SCALARS
    if IS_LEAN:
        if start + PART <= size:
            _update_lean(row, state, start, size, shared, settings, COPY, IS_SMALL, True, PART)
        elif start < size:
            _update_lean(row, state, start, size, shared, settings, COPY, IS_SMALL, False, PART)
    else:
        ages, step = address_in(row, AGE, tl.int16), address_in(row, STEP, tl.float32)
        by_age = (ages, step, inverses, denominators)
        entry = start + tl.arange(0, PART)
        if start + PART <= size:
            _update(state, by_age, entry, size, shared, settings, COPY, OLDEST, IS_SMALL, True)
        elif start < size:
            _update(state, by_age, entry, size, shared, settings, COPY, OLDEST, IS_SMALL, False)


# Nonfinite values --------------------------------------------------------------------------------


@triton.jit
def find_exponent_kernel(
    rows,
    grads,
    items,
    found,
    EXPONENT: tl.constexpr,
    KIND: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Set ``found`` if an entry of a part has all bits of ``EXPONENT``."""
    item = tl.program_id(0) // PARTS
    index = tl.load(items + item)
    row = rows + index * 2
    start = ((item - tl.load(row + 1)) * PARTS + tl.program_id(0) % PARTS) * PART
    size = tl.load(row)
    source = tl.load(grads + index).to(tl.pointer_type(KIND))
    if IS_ALIGNED:
        source = tl.multiple_of(source, 16)
    entry = start + tl.arange(0, PART)
    if start + PART <= size:
        bits = tl.load(source + entry)
    else:
        bits = tl.load(source + entry, mask=entry < size, other=0)
    if tl.max(((bits & EXPONENT) == EXPONENT).to(tl.int32), 0) != 0:
        tl.store(found, tl.full((), 1, tl.int8))  # all programs write the same
