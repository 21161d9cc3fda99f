"""Loops of an AdamW step on a CPU, compiled by numba, and of the search for nonfinite values.

Many parameters come in one call, as rows of addresses: an array costs some 10 us to hand over.

Lean state, in 8 bits, is defined by ``lean.py``. A block has whole groups, so it is widened to
fp32, updated as exact state is, and narrowed again, while it is in the cache.
"""

from functools import partial

import numpy as np
from numba import carray, prange, types
from numba.extending import intrinsic

from samo.kernels.cpu_masks import (
    BLOCK_BITS,
    BLOCK_PAIRS,
    PAIR_BITS,
    SLACK,
    bits_of,
    block_of,
    chosen_by_type,
    convert,
    count_bits,
    float_of,
    jit,
    jit_parallel,
    move_kept,
    read,
)
from samo.kernels.lean import GROUP, LARGEST_ROOT, SMALLEST, UNPRUNED_GROUP

PARAM, REMAINDER, GRAD, EXP_AVG, EXP_AVG_SQ, AGE, TABLE = range(7)
DENSE, PAIRS, OFFSETS, EXP_AVG_SCALE, EXP_AVG_SQ_SCALE, KEPT, NUMEL = range(7, 14)
"""The columns of a row: addresses, and the entries of the parameter and of the dense weight."""

_LARGEST_ROOT, _SMALLEST = np.float32(LARGEST_ROOT), np.float32(SMALLEST)
_ZERO, _ONE = np.float32(0), np.float32(1)
_MOST, _MOST_ROOT = np.float32(127), np.float32(255)
_127TH, _255TH = np.float32(1 / 127), np.float32(1 / 255)
_STEP, _HALF_STEP = np.float32(2**-12), np.float32(2**-13)


@intrinsic
def _fma(typing_context, a, b, c):
    """Return a * b + c rounded once, as torch's vector code does it."""
    return c(a, b, c), lambda _, builder, __, arguments: builder.fma(*arguments)


@jit
def _random_bits(index, seed):
    """Return 32 bits for an entry: `samo.kernels.lean.random_bits`."""
    bits = np.uint32(np.uint64(index) * np.uint64(0x9E3779B1)) ^ seed
    bits = np.uint32((bits ^ (bits >> np.uint32(16))) * np.uint64(0x7FEB352D))
    bits = np.uint32((bits ^ (bits >> np.uint32(15))) * np.uint64(0x846CA68B))
    return np.uint32(bits ^ (bits >> np.uint32(16)))


# Parameters and their remainders -----------------------------------------------------------------


@chosen_by_type
def _join(param, remainder, wide):
    """Return masters: parameters, or bfloat16 ones joined with their remainders in ``wide``."""
    shift = 8 if remainder.dtype == types.int8 else 0

    def with_remainder(param, remainder, wide):
        # Slices that start at 0: numba checks whether an index like `at + k` is negative, which
        # keeps the loop from being vectorized.
        for k in range(param.size):
            upper = np.int32(np.uint32(param[k]) << np.uint32(16))
            wide[k] = float_of(np.uint32(upper + (np.int32(remainder[k]) << np.int32(shift))))
        return wide[: param.size]

    return with_remainder if param.dtype == types.uint16 else lambda param, remainder, wide: param


@chosen_by_type
def _split(master, param, remainder, first, seed):
    """Write masters back to where `_join` took them from; ``first`` is the number of the first."""

    def with_remainder(master, param, remainder, first, seed):
        for k in range(param.size):
            bits = np.int32(bits_of(master[k]))
            if np.isnan(master[k]):  # its bits may all be set, and rounding would overflow
                bits = np.int32(0x7FC00000)
            rounded = np.int32((bits + np.int32(0x8000)) >> np.int32(16))
            rest = np.int32(bits - np.int32(rounded << np.int32(16)))
            _put_remainder(remainder, k, rest, first + k, seed)
            param[k] = np.uint16(rounded)

    if param.dtype == types.uint16:
        return with_remainder
    return lambda master, param, remainder, first, seed: None


@chosen_by_type
def _put_remainder(remainder, k, rest, index, seed):
    def whole(remainder, k, rest, index, seed):
        remainder[k] = np.int16(rest)

    def dithered(remainder, k, rest, index, seed):
        dither = np.int32(_random_bits(index, seed) & np.uint32(0xFF))
        remainder[k] = np.int8(min((rest + dither) >> np.int32(8), np.int32(0x7F)))

    return dithered if remainder.dtype == types.int8 else whole


# 8-bit moments -----------------------------------------------------------------------------------


@chosen_by_type
def _widen(exp_avg, exp_avg_sq, scales, pairs, block, buffers):
    """Return a block's moments: themselves or, of 8-bit codes, in fp32 in the buffers."""

    def codes(exp_avg, exp_avg_sq, scales, pairs, block, buffers):
        size, start = exp_avg.size, 0
        for group in _groups_of(pairs, block, scales[0].size):
            end = _group_end(pairs, block, group, size)
            _widen_group(
                *(exp_avg[start:end], exp_avg_sq[start:end], scales[0][group], scales[1][group]),
                *(buffers[0][start:end], buffers[1][start:end]),
            )
            start = end
        return buffers[0][:size], buffers[1][:size]

    if exp_avg.dtype == types.int8:
        return codes
    return lambda exp_avg, exp_avg_sq, scales, pairs, block, buffers: (exp_avg, exp_avg_sq)


@chosen_by_type
def _narrow(wide, exp_avg, exp_avg_sq, scales, pairs, block, first, seed):
    """Write moments back to where `_widen` took them from; ``first`` is the number of the first."""

    def codes(wide, exp_avg, exp_avg_sq, scales, pairs, block, first, seed):
        start = 0
        for group in _groups_of(pairs, block, scales[0].size):
            end = _group_end(pairs, block, group, exp_avg.size)
            scales[0][group], scales[1][group] = _narrow_group(
                *(wide[0][start:end], wide[1][start:end]),
                *(exp_avg[start:end], exp_avg_sq[start:end], first + start, seed),
            )
            start = end

    if exp_avg.dtype == types.int8:
        return codes
    return lambda wide, exp_avg, exp_avg_sq, scales, pairs, block, first, seed: None


@jit
def _groups_of(pairs, block, num_groups):
    """Return the numbers of a block's groups."""
    each = BLOCK_BITS // (GROUP if pairs.size else UNPRUNED_GROUP)
    return range(block * each, min((block + 1) * each, num_groups))


@jit
def _group_end(pairs, block, group, size):
    """Return where a group ends among the ``size`` entries of its block."""
    if not pairs.size:
        return min((group + 1) * UNPRUNED_GROUP - block * BLOCK_BITS, size)
    start, end = block * BLOCK_PAIRS, (group + 1) * (GROUP // PAIR_BITS)
    if end == start + BLOCK_PAIRS:
        return size
    kept = 0
    for index in range(start, min(end, pairs.size)):
        kept += count_bits(pairs[index])
    return kept


@jit
def _widen_group(code, root_code, scale, root_scale, exp_avg, exp_avg_sq):
    for k in range(code.size):
        part = np.float32(code[k]) * _127TH
        square = part * part
        size = square * square * scale
        exp_avg[k] = -size if part < _ZERO else size
        part = np.float32(root_code[k]) * _255TH
        square = part * part
        root = square * square * root_scale
        exp_avg_sq[k] = root * root


@jit
def _narrow_group(exp_avg, exp_avg_sq, code, root_code, first, seed):
    """Write a group's codes, and return both scales."""
    largest = largest_root = _ZERO
    for k in range(code.size):
        root = np.sqrt(exp_avg_sq[k])
        if not root <= _LARGEST_ROOT:  # or a NaN
            root, exp_avg[k] = _LARGEST_ROOT, _ZERO
        exp_avg_sq[k] = root
        largest = max(largest, abs(exp_avg[k]))
        largest_root = max(largest_root, root)
    scale = _ZERO if largest < _SMALLEST else largest
    root_scale = _ZERO if largest_root < _SMALLEST else largest_root
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    root_inverse = _ONE / root_scale if root_scale > _ZERO else _ZERO
    for k in range(code.size):
        bits = _random_bits(first + k, seed)
        m, root = exp_avg[k], exp_avg_sq[k]
        x = np.sqrt(np.sqrt(abs(m) * inverse)) * _MOST
        found = min(np.floor(x + _dither(bits, 8)), _MOST)
        code[k] = np.int8(-found if m < _ZERO else found)
        x = np.sqrt(np.sqrt(root * root_inverse)) * _MOST_ROOT
        found = min(np.floor(x + _dither(bits, 20)), _MOST_ROOT)
        root_code[k] = np.uint8(_ONE if found == _ZERO and root > _ZERO else found)
    return scale, root_scale


@jit
def _dither(bits, shift):
    return np.float32((bits >> np.uint32(shift)) & np.uint32(0xFFF)) * _STEP + _HALF_STEP


# The update --------------------------------------------------------------------------------------


@partial(chosen_by_type, inline="always")
def _corrections(age, k, table, scalars):
    """Return an entry's step size and denominator, by its age if there are ages."""

    def of_all(age, k, table, scalars):
        return scalars[5], scalars[6]

    def of_age(age, k, table, scalars):
        oldest = table.size // 2 - 1
        t = min(max(np.int64(age[k]) + 1, 1), oldest)
        age[k] = np.int16(t)
        if t == oldest:
            return scalars[5], scalars[6]
        # Unsigned, so that numba does not check for indices that count from the end.
        return table[np.uint64(t)], table[np.uint64(oldest + 1 + t)]

    return of_age if age.dtype == types.int16 else of_all


@jit
def _update(param, grad, exp_avg, exp_avg_sq, age, table, scalars):
    """Update contiguous vectors in place, rounding where torch's unfused AdamW rounds."""
    decay, lerp, beta2, lerp2, eps = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    is_small = lerp < 0.5
    one = scalars.dtype.type(1)
    for k in range(param.size):
        step, denominator = _corrections(age, k, table, scalars)
        g = scalars.dtype.type(read(grad[k]))
        m = exp_avg[k]
        m = _fma(lerp, g - m, m) if is_small else _fma(lerp - one, g - m, g)
        v = _fma(lerp2 * g, g, exp_avg_sq[k] * beta2)
        exp_avg[k] = m
        exp_avg_sq[k] = v
        param[k] = param[k] * decay + m * step / (np.sqrt(v) / denominator + eps)


@jit
def _refresh(values, pairs, block, span, dense, buffer):
    """Write a block's values to the dense copy, if there is one."""
    if not dense.size:
        return
    if pairs.size:
        convert(values, buffer)
        move_kept(block_of(dense, block), pairs, block, buffer, False)
    else:
        convert(values, dense[span])


@intrinsic
def _pointer(typing_context, address, like):
    """Return an address as a pointer to entries of the type of the array ``like``."""
    kind = types.CPointer(like.dtype)

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64, like), codegen


@jit
def _array_at(address, like, size):
    return carray(_pointer(address, like), size if address != 0 else 0)


@jit
def adamw_rows(rows, scalars, seeds, ends, oldest, like, start, stop):
    """Update the blocks from ``start`` to ``stop`` of all rows; ``ends`` counts blocks up to each.

    Blocks are those of a mask, if a row has one, or of the parameter itself. ``like`` has empty
    arrays of the types that addresses point to: parameters, remainders, gradients, both moments,
    ages, dense copies.
    """
    a_param, a_remainder, a_grad, a_moment, a_second, an_age, a_dense = like
    wide = np.empty(BLOCK_BITS, dtype=scalars.dtype)
    buffers = np.empty(BLOCK_BITS, np.float32), np.empty(BLOCK_BITS, np.float32)
    values_buffer = np.empty(BLOCK_BITS + SLACK, dtype=a_dense.dtype)
    begin = 0
    for index in range(ends.size):
        low, high = max(start, begin) - begin, min(stop, ends[index]) - begin
        begin = ends[index]
        if low >= high:
            continue
        row, seed = rows[index], seeds[index]
        kept, numel = row[KEPT], row[NUMEL]
        param = _array_at(row[PARAM], a_param, kept)
        remainder = _array_at(row[REMAINDER], a_remainder, kept)
        grad = _array_at(row[GRAD], a_grad, kept)
        exp_avg = _array_at(row[EXP_AVG], a_moment, kept)
        exp_avg_sq = _array_at(row[EXP_AVG_SQ], a_second, kept)
        age = _array_at(row[AGE], an_age, kept)
        table = _array_at(row[TABLE], wide, 2 * (oldest + 1))
        dense = _array_at(row[DENSE], a_dense, numel)
        pairs = _array_at(row[PAIRS], np.empty(0, np.uint64), -(-numel // PAIR_BITS))
        offsets = _array_at(row[OFFSETS], np.empty(0, np.int64), -(-numel // BLOCK_BITS))
        groups = -(-numel // (GROUP if pairs.size else UNPRUNED_GROUP))
        scales = (
            _array_at(row[EXP_AVG_SCALE], buffers[0], groups),
            _array_at(row[EXP_AVG_SQ_SCALE], buffers[0], groups),
        )
        for block in range(low, high):
            at, to = block * BLOCK_BITS, min((block + 1) * BLOCK_BITS, kept)
            if pairs.size:
                at = offsets[block]
                to = offsets[block + 1] if block + 1 < offsets.size else kept
            span = slice(at, to)
            values, remainders = param[span], remainder[span]
            held = exp_avg[span], exp_avg_sq[span]
            master = _join(values, remainders, wide)
            moments = _widen(*held, scales, pairs, block, buffers)
            _update(master, grad[span], *moments, age[span], table, scalars[index])
            _narrow(moments, *held, scales, pairs, block, at, seed)
            _split(master, values, remainders, at, seed)
            _refresh(values, pairs, block, span, dense, values_buffer)


@jit_parallel
def adamw_rows_shared(rows, scalars, seeds, ends, oldest, like, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        adamw_rows(rows, scalars, seeds, ends, oldest, like, first, end)


# Nonfinite values --------------------------------------------------------------------------------


@jit
def find_exponent_rows(rows, like, exponent, blocks, first, end):
    """Return whether a row's part from first to end of all blocks has an entry with all bits."""
    for index in range(rows.shape[0]):
        size = rows[index, 1]
        bits = _array_at(rows[index, 0], like, size)[size * first // blocks : size * end // blocks]
        found = False
        for k in range(bits.size):
            found |= (bits[k] & exponent) == exponent
        if found:
            return True
    return False


@jit_parallel
def find_exponent_rows_shared(rows, like, exponent, _, blocks, parts):
    found = np.zeros(parts, dtype=np.bool_)
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        found[part] = find_exponent_rows(rows, like, exponent, blocks, first, end)
    return found.any()
