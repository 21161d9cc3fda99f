"""The loop of an AdamW step on 8-bit state, compiled by numba: `samo.kernels.lean` on a CPU.

A block has whole groups, so it is widened to fp32, updated as exact state is, and narrowed again,
while it is in the cache.
"""

import numpy as np
from numba import prange, types

from samo.kernels.cpu_loops import (
    _SLACK,
    BLOCK_BITS,
    BLOCK_PAIRS,
    DENSE,
    EXP_AVG,
    EXP_AVG_SQ,
    GRAD,
    KEPT,
    NUMEL,
    OFFSETS,
    PAIR_BITS,
    PAIRS,
    PARAM,
    REMAINDER,
    _array_at,
    _bits_of,
    _chosen_by_type,
    _count_bits,
    _float_of,
    _jit,
    _jit_parallel,
    _refresh,
    _update,
)
from samo.kernels.lean import GROUP, LARGEST_ROOT, SMALLEST, UNPRUNED_GROUP

__all__ = []

EXP_AVG_SCALE, EXP_AVG_SQ_SCALE, GROUPS = range(12, 15)
"""Further columns of a row: the addresses of scales, and how many each has."""

_127TH, _255TH = np.float32(1 / 127), np.float32(1 / 255)
_LARGEST_ROOT, _SMALLEST = np.float32(LARGEST_ROOT), np.float32(SMALLEST)
_ZERO, _ONE = np.float32(0), np.float32(1)
_MOST, _MOST_ROOT = np.float32(127), np.float32(255)
_STEP, _HALF_STEP = np.float32(2**-12), np.float32(2**-13)


@_jit
def _random_bits(index, seed):
    """Return 32 bits for an entry: `samo.kernels.lean.random_bits`."""
    bits = np.uint32(np.uint64(index) * np.uint64(0x9E3779B1)) ^ seed
    bits = np.uint32((bits ^ (bits >> np.uint32(16))) * np.uint64(0x7FEB352D))
    bits = np.uint32((bits ^ (bits >> np.uint32(15))) * np.uint64(0x846CA68B))
    return np.uint32(bits ^ (bits >> np.uint32(16)))


@_jit
def _dither(bits, shift):
    return np.float32((bits >> np.uint32(shift)) & np.uint32(0xFFF)) * _STEP + _HALF_STEP


@_jit
def _widen(code, root_code, scale, root_scale, exp_avg, exp_avg_sq):
    """Write a group's moments in fp32."""
    for k in range(code.size):
        part = np.float32(code[k]) * _127TH
        square = part * part
        size = square * square * scale
        exp_avg[k] = -size if part < _ZERO else size
        part = np.float32(root_code[k]) * _255TH
        square = part * part
        root = square * square * root_scale
        exp_avg_sq[k] = root * root


@_jit
def _narrow(exp_avg, exp_avg_sq, code, root_code, first, seed):
    """Write a group's codes, of which ``first`` is the first entry, and return both scales."""
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


@_chosen_by_type
def _join(param, correction, wide):
    """Return masters: parameters, or bfloat16 ones joined with their corrections in ``wide``."""

    def with_correction(param, correction, wide):
        for k in range(param.size):
            upper = np.int32(np.uint32(param[k]) << np.uint32(16))
            wide[k] = _float_of(np.uint32(upper + (np.int32(correction[k]) << np.int32(8))))
        return wide[: param.size]

    if param.dtype == types.uint16:
        return with_correction
    return lambda param, correction, wide: param


@_chosen_by_type
def _split(master, param, correction, first, seed):
    """Write masters back to where `_join` took them from."""

    def with_correction(master, param, correction, first, seed):
        for k in range(param.size):
            bits = np.int32(_bits_of(master[k]))
            if np.isnan(master[k]):  # its bits may all be set, and rounding would overflow
                bits = np.int32(0x7FC00000)
            rounded = np.int32((bits + np.int32(0x8000)) >> np.int32(16))
            rest = np.int32(bits - np.int32(rounded << np.int32(16)))
            dither = np.int32(_random_bits(first + k, seed) & np.uint32(0xFF))
            correction[k] = np.int8(min((rest + dither) >> np.int32(8), np.int32(0x7F)))
            param[k] = np.uint16(rounded)

    if param.dtype == types.uint16:
        return with_correction
    return lambda master, param, correction, first, seed: None


@_jit
def _group_ends(pairs, block, size, ends):
    """Write where the groups of a block end among its ``size`` entries; return how many."""
    if not pairs.size:
        count = -(-size // UNPRUNED_GROUP)
        for group in range(count):
            ends[group] = min((group + 1) * UNPRUNED_GROUP, size)
        return count
    first, half, kept = block * BLOCK_PAIRS, GROUP // PAIR_BITS, 0
    for index in range(first, min(first + half, pairs.size)):
        kept += _count_bits(pairs[index])
    ends[0], ends[1] = kept, size
    return 2


@_jit
def lean_rows(rows, scalars, seeds, ends, like, start, stop):
    """Update the blocks from ``start`` to ``stop`` of all rows, as `cpu_loops.adamw_rows` does."""
    a_param, a_grad, a_dense = like
    a_code, a_root, a_scale = np.empty(0, np.int8), np.empty(0, np.uint8), np.empty(0, np.float32)
    wide, exp_avg = np.empty(BLOCK_BITS, np.float32), np.empty(BLOCK_BITS, np.float32)
    exp_avg_sq = np.empty(BLOCK_BITS, np.float32)
    buffer = np.empty(BLOCK_BITS + _SLACK, dtype=a_dense.dtype)
    no_ages, groups = np.empty(0, np.bool_), np.empty(BLOCK_BITS // UNPRUNED_GROUP, np.int64)
    begin = 0
    for index in range(ends.size):
        low, high = max(start, begin) - begin, min(stop, ends[index]) - begin
        begin = ends[index]
        if low >= high:
            continue
        row, seed = rows[index], seeds[index]
        kept, numel = row[KEPT], row[NUMEL]
        param = _array_at(row[PARAM], a_param, kept)
        correction = _array_at(row[REMAINDER], a_code, kept)
        grad = _array_at(row[GRAD], a_grad, kept)
        code = _array_at(row[EXP_AVG], a_code, kept)
        root_code = _array_at(row[EXP_AVG_SQ], a_root, kept)
        scale = _array_at(row[EXP_AVG_SCALE], a_scale, row[GROUPS])
        root_scale = _array_at(row[EXP_AVG_SQ_SCALE], a_scale, row[GROUPS])
        dense = _array_at(row[DENSE], a_dense, numel)
        pairs = _array_at(row[PAIRS], np.empty(0, np.uint64), -(-numel // PAIR_BITS))
        offsets = _array_at(row[OFFSETS], np.empty(0, np.int64), -(-numel // BLOCK_BITS))
        for block in range(low, high):
            at, to = block * BLOCK_BITS, min((block + 1) * BLOCK_BITS, kept)
            group = block * (BLOCK_BITS // UNPRUNED_GROUP)
            if pairs.size:
                at = offsets[block]
                to = offsets[block + 1] if block + 1 < offsets.size else kept
                group = block * (BLOCK_BITS // GROUP)
            span, size = slice(at, to), to - at
            count = min(_group_ends(pairs, block, size, groups), scale.size - group)
            values, corrections = param[span], correction[span]
            codes, root_codes = code[span], root_code[span]
            master = _join(values, corrections, wide)
            m, v = exp_avg[:size], exp_avg_sq[:size]
            first = 0
            for g in range(count):
                part = slice(first, groups[g])
                first = groups[g]
                scales = scale[group + g], root_scale[group + g]
                _widen(codes[part], root_codes[part], *scales, m[part], v[part])
            _update(master, grad[span], m, v, no_ages, a_scale, scalars[index])
            first = 0
            for g in range(count):
                part = slice(first, groups[g])
                scale[group + g], root_scale[group + g] = _narrow(
                    m[part], v[part], codes[part], root_codes[part], at + first, seed
                )
                first = groups[g]
            _split(master, values, corrections, at, seed)
            _refresh(values, pairs, block, span, dense, buffer)


@_jit_parallel
def lean_rows_shared(rows, scalars, seeds, ends, like, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        lean_rows(rows, scalars, seeds, ends, like, first, end)
