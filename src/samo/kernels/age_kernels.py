"""The kernels of AdamW with ages on an NVIDIA GPU, compiled by Triton; ``cuda_ages.py`` launches them."""

import triton
import triton.language as tl

from samo.kernels import ages
from samo.kernels.triton_kernels import read_scalars, update_entries
from samo.kernels.triton_parts import (
    BLOCK_BITS,
    DENSE,
    EXP_AVG,
    EXP_AVG_SQ,
    GRAD,
    REST,
    address_in,
    corrections_of,
    find_block,
    places_of,
    read_rate,
)

__all__ = []

OLDEST = tl.constexpr(ages.OLDEST)


@triton.jit
def age_corrections_kernel(
    step_sizes,
    denominators,
    lr_at,
    lr: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    HAS_LR_AT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Write what entries of each age under `OLDEST` share, as `adamw_scalars_kernel` works it out.

    Step sizes stay in fp64: a weight's own factor comes before they are rounded.
    """
    age = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    rate = read_rate(lr_at, lr, HAS_LR_AT, SIZE)
    # Age 0, before any update, is never looked up.
    step_size, denominator = corrections_of(tl.maximum(age, 1), rate, beta1, beta2, SIZE)
    tl.store(step_sizes + age, step_size)
    tl.store(denominators + age, denominator.to(tl.float32))


@triton.jit
def adamw_aged_kernel(
    rows,
    items,
    scalars,
    skip,
    scales,
    age_rows,
    step_sizes,
    denominators,
    lerp,
    beta2,
    rest2,
    eps,
    WEIGHT: tl.constexpr,
    WHOLE: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_SMALL: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Update the kept entries of a block as `adamw_kept_kernel` does, each corrected for its age.

    Example: ages 0 and 99 become 1 and 100, and look up the corrections of a first and a 100th step.
    """
    row, weight, block, low, high, ends, count, begin = find_block(rows, items, BLOCKS)
    if HAS_SKIP:
        count = tl.where(tl.load(skip) == 0, count, 0)
    dense = address_in(row, DENSE, WEIGHT) + block * BLOCK_BITS
    rest = address_in(row, REST, WHOLE) + begin
    grad = address_in(row, GRAD, GRADIENT) + begin
    exp_avg = address_in(row, EXP_AVG, tl.float32) + begin
    exp_avg_sq = address_in(row, EXP_AVG_SQ, tl.float32) + begin
    ages_at = address_in(age_rows + weight, 0, tl.int16) + begin
    oldest_step_size, oldest_denominator, decay = read_scalars(scalars, weight)
    if HAS_SCALES:
        scale = tl.load(scales + weight)
    first = 0
    while first < count:
        slots = first + tl.arange(0, SLOTS)
        is_kept = slots < count
        places = places_of(low, high, ends, slots, SLOTS)
        age = tl.load(ages_at + slots, mask=is_kept, other=0).to(tl.int32)
        age = tl.minimum(age + 1, OLDEST)
        tl.store(ages_at + slots, age.to(tl.int16), mask=is_kept)
        is_oldest = age == OLDEST
        step_size = tl.load(step_sizes + age)
        if HAS_SCALES:
            step_size *= scale
        step_size = tl.where(is_oldest, oldest_step_size, step_size.to(tl.float32))
        denominator = tl.where(is_oldest, oldest_denominator, tl.load(denominators + age))
        update_entries(
            dense + places,
            rest + slots,
            grad + slots,
            exp_avg + slots,
            exp_avg_sq + slots,
            is_kept,
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
