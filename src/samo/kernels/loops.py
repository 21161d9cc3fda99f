"""The loops behind the CPU kernels, compiled by numba; ``cpu.py`` calls them.

A kernel runs over a range of blocks. Blocks are independent, because each knows where its values
start, so that a call can be shared among threads. numba knows no bfloat16: those arrive as uint16 and
are widened by bit shifts.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.extending import intrinsic, overload

from samo import bitmap

__all__ = []

Kernel = Callable[..., Any]
Array = np.ndarray[Any, Any]

BLOCK_BITS: Final = bitmap.BLOCK_BITS
PAIR_BITS: Final = 2 * bitmap.WORD_BITS
BLOCK_PAIRS: Final = BLOCK_BITS // PAIR_BITS

# numpy's error model, since Python's check for a division by zero forbids vector instructions.
_jit = njit(nogil=True, cache=True, error_model="numpy")
_jit_parallel = njit(nogil=True, cache=True, error_model="numpy", parallel=True)


@intrinsic
def _lowest_bit(typing_context, bits):
    """Return the position of the lowest set bit, in one instruction."""

    def codegen(context, builder, signature, arguments):
        is_never_zero = ir.Constant(ir.IntType(1), 1)
        return builder.cttz(arguments[0], is_never_zero)

    return types.int64(types.uint64), codegen


@intrinsic
def _fma(typing_context, a, b, c):
    """Return a * b + c rounded once, as torch's vector code does it."""

    def codegen(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return c(a, b, c), codegen


# Note [Walking bits]
# Each kernel spells out the same walk over the set bits of a block, lowest first:
#
#     for pair in a block's 64-bit pairs of words:
#         while pair has a bit: use it, clear it
#
# Collecting the places first and looping over them afterwards reads better and is 1.8 times slower
# (25 M weights, 10 % kept, one thread: 8.5 ms against 4.6; with 32-bit words 10.7 and 6.8).


@_jit
def _pairs_of(block, pairs):
    """Return the range of 64-bit pairs that make up a block."""
    return range(block * BLOCK_PAIRS, min((block + 1) * BLOCK_PAIRS, pairs.size))


@_jit
def _widen(half):
    """Return the bits of a bfloat16 as those of the same float32."""
    return np.int32(np.uint32(half) << np.uint32(16))


@_jit
def move_blocks(dense, pairs, offsets, out, first, end):
    for block in range(first, end):
        at = offsets[block]
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                out[at] = dense[index * PAIR_BITS + _lowest_bit(bits)]
                at += 1
                bits &= bits - np.uint64(1)


@_jit
def add_blocks(dense, pairs, offsets, out, first, end):
    for block in range(first, end):
        at = offsets[block]
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                out[at] += dense[index * PAIR_BITS + _lowest_bit(bits)]
                at += 1
                bits &= bits - np.uint64(1)


@_jit
def move_wider_blocks(dense, pairs, offsets, out, first, end):
    out_bits = out.view(np.int32)
    for block in range(first, end):
        at = offsets[block]
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                out_bits[at] = _widen(dense[index * PAIR_BITS + _lowest_bit(bits)])
                at += 1
                bits &= bits - np.uint64(1)


@_jit
def add_wider_blocks(dense, pairs, offsets, out, first, end):
    value_bits = np.empty(1, dtype=np.int32)
    value = value_bits.view(np.float32)
    for block in range(first, end):
        at = offsets[block]
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                value_bits[0] = _widen(dense[index * PAIR_BITS + _lowest_bit(bits)])
                out[at] += value[0]
                at += 1
                bits &= bits - np.uint64(1)


@_jit
def add_bf16_blocks(dense, pairs, offsets, out, first, end):
    value_bits = np.empty(2, dtype=np.int32)
    value = value_bits.view(np.float32)
    for block in range(first, end):
        at = offsets[block]
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                value_bits[0] = _widen(out[at])
                value_bits[1] = _widen(dense[index * PAIR_BITS + _lowest_bit(bits)])
                value[0] += value[1]
                if np.isnan(value[0]):
                    out[at] = np.uint16(0x7FC0)
                else:  # half to even, as torch rounds a sum
                    odd = (value_bits[0] >> 16) & 1
                    out[at] = np.uint16((value_bits[0] + 0x7FFF + odd) >> 16)
                at += 1
                bits &= bits - np.uint64(1)


@_jit
def expand_blocks(values, pairs, offsets, dense, first, end):
    for block in range(first, end):
        at = offsets[block]
        dense[block * BLOCK_BITS : (block + 1) * BLOCK_BITS] = 0
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                dense[index * PAIR_BITS + _lowest_bit(bits)] = values[at]
                at += 1
                bits &= bits - np.uint64(1)


@_jit
def _gather(part, pairs, block, kept, places):
    """Copy a block's kept entries to ``kept``, note where they were, and return how many they are.

    Example: part [5, 6, 7, 8] with kept bits 1, 0, 0, 1 gives kept [5, 8] and places [0, 3].
    """
    count = 0
    first = block * BLOCK_PAIRS
    for index in _pairs_of(block, pairs):
        bits = pairs[index]
        while bits != 0:
            place = (index - first) * PAIR_BITS + _lowest_bit(bits)
            kept[count] = part[place]
            places[count] = place
            count += 1
            bits &= bits - np.uint64(1)
    return count


@_jit
def _update(param, grad, exp_avg, exp_avg_sq, scalars):
    """Update contiguous vectors in place, rounding where torch's unfused AdamW rounds."""
    decay, lerp, beta2, rest2 = scalars[0], scalars[1], scalars[2], scalars[3]
    eps, step, denominator = scalars[4], scalars[5], scalars[6]
    is_small = lerp < 0.5
    one = scalars.dtype.type(1)
    for k in range(param.size):
        g = grad[k]
        m = exp_avg[k]
        m = _fma(lerp, g - m, m) if is_small else _fma(lerp - one, g - m, g)
        v = _fma(rest2 * g, g, exp_avg_sq[k] * beta2)
        exp_avg[k] = m
        exp_avg_sq[k] = v
        param[k] = param[k] * decay + m * step / (np.sqrt(v) / denominator + eps)


@_jit
def _adamw_blocks(dense, pairs, offsets, rest, grad, exp_avg, exp_avg_sq, scalars, first, end):
    kept = np.empty(BLOCK_BITS, dtype=dense.dtype)
    places = np.empty(BLOCK_BITS, dtype=np.uint16)
    for block in range(first, end):
        start = block * BLOCK_BITS
        if pairs.size == 0:
            to = min(start + BLOCK_BITS, dense.size)
            _update(
                dense[start:to], grad[start:to], exp_avg[start:to], exp_avg_sq[start:to], scalars
            )
            continue
        at = offsets[block]
        part = dense[start : start + BLOCK_BITS]
        count = _gather(part, pairs, block, kept, places)
        to = at + count
        _update(kept[:count], grad[at:to], exp_avg[at:to], exp_avg_sq[at:to], scalars)
        for k in range(count):
            part[places[k]] = kept[k]


@_jit
def _adamw_bf16_blocks(dense, pairs, offsets, rest, grad, exp_avg, exp_avg_sq, scalars, first, end):
    upper = np.empty(BLOCK_BITS, dtype=np.uint16)
    places = np.empty(BLOCK_BITS, dtype=np.uint16)
    param_bits = np.empty(BLOCK_BITS, dtype=np.int32)
    grad_bits = np.empty(BLOCK_BITS, dtype=np.int32)
    param, wide_grad = param_bits.view(np.float32), grad_bits.view(np.float32)
    for block in range(first, end):
        start = block * BLOCK_BITS
        part = dense[start : start + BLOCK_BITS]
        if pairs.size == 0:
            at = start
            count = part.size
            upper[:count] = part
        else:
            at = offsets[block]
            count = _gather(part, pairs, block, upper, places)
        to = at + count
        # Slices counted from 0: an index like `at + k` might be negative for all numba knows, and
        # the check for it keeps the loop from vector instructions.
        rests = rest[at:to]
        for k in range(count):
            param_bits[k] = _widen(upper[k]) + rests[k]
        _read_grad(grad[at:to], grad_bits, wide_grad)
        _update(param[:count], wide_grad[:count], exp_avg[at:to], exp_avg_sq[at:to], scalars)
        for k in range(count):
            rounded = (param_bits[k] + np.int32(0x8000)) >> np.int32(16)
            rests[k] = np.int16(param_bits[k] - (rounded << np.int32(16)))
            upper[k] = np.uint16(rounded)
        if pairs.size == 0:
            part[:] = upper[:count]
        else:
            for k in range(count):
                part[places[k]] = upper[k]


def _read_grad(grad: Array, bits: Array, wide: Array) -> None:
    """Copy gradients to ``wide``, whose bits are ``bits``; the overload picks by their type."""
    raise AssertionError("only ever called from compiled code")


@overload(_read_grad)
def _read_grad_overload(grad, bits, wide):
    if grad.dtype == types.uint16:

        def read_bf16(grad, bits, wide):
            for k in range(grad.size):
                bits[k] = _widen(grad[k])

        return read_bf16

    def read_fp32(grad, bits, wide):
        wide[: grad.size] = grad

    return read_fp32


# Many weights in one call: rows of addresses instead of arrays, which cost some 10 us a weight to
# hand over. The columns of a row:
DENSE, PAIRS, OFFSETS, REST, GRAD, EXP_AVG, EXP_AVG_SQ, NUMEL, KEPT = range(9)


def _pointer_to(element: Any) -> Any:
    """Return a function that turns an address into a pointer to ``element``."""

    @intrinsic
    def pointer(typing_context, address):
        kind = types.CPointer(element)

        def codegen(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), codegen

    return pointer


_uint64_at, _int64_at = _pointer_to(types.uint64), _pointer_to(types.int64)
_int16_at, _uint16_at = _pointer_to(types.int16), _pointer_to(types.uint16)
_float32_at, _float64_at = _pointer_to(types.float32), _pointer_to(types.float64)


def _over_rows(
    kernel: Kernel, dense_at: Any, grad_at: Any, moment_at: Any
) -> tuple[Kernel, Kernel]:
    """Return an AdamW over rows of addresses of weights of one type, and the same shared.

    Both take the rows, the scalars of each and the running count of their blocks. The first also
    takes the range of blocks it is to run over, the second the number of threads.
    """

    @_jit
    def run(rows, scalars, ends, first, end):
        begin = 0
        for index in range(ends.size):
            low, high = max(first, begin) - begin, min(end, ends[index]) - begin
            begin = ends[index]
            if low >= high:
                continue
            row = rows[index]
            numel, kept = row[NUMEL], row[KEPT]
            is_pruned = row[PAIRS] != 0
            kernel(
                carray(dense_at(row[DENSE]), numel),
                carray(_uint64_at(row[PAIRS]), -(-numel // PAIR_BITS) if is_pruned else 0),
                carray(_int64_at(row[OFFSETS]), -(-numel // BLOCK_BITS) if is_pruned else 0),
                carray(_int16_at(row[REST]), kept if row[REST] != 0 else 0),
                carray(grad_at(row[GRAD]), kept),
                carray(moment_at(row[EXP_AVG]), kept),
                carray(moment_at(row[EXP_AVG_SQ]), kept),
                scalars[index],
                low,
                high,
            )

    @_jit_parallel
    def run_shared(rows, scalars, ends, parts):
        blocks = ends[-1]
        for part in prange(parts):
            run(rows, scalars, ends, blocks * part // parts, blocks * (part + 1) // parts)

    return run, run_shared


def _shared(kernel: Kernel) -> Kernel:
    """Return ``kernel``, which takes four arrays, with its blocks shared among threads."""

    @_jit_parallel
    def run(a, b, c, d, blocks, parts):
        for part in prange(parts):
            kernel(a, b, c, d, blocks * part // parts, blocks * (part + 1) // parts)

    return run


@_jit
def _find_exponent(bits, exponent):
    """Return whether all bits of ``exponent`` are set in some entry."""
    found = False
    for k in range(bits.size):
        found |= (bits[k] & exponent) == exponent
    return found


def _find_exponent_over_rows(integer_at: Any, exponent: Any) -> Kernel:
    """Return a search over rows of address and size."""

    @_jit
    def find(rows):
        for index in range(rows.shape[0]):
            if _find_exponent(carray(integer_at(rows[index, 0]), rows[index, 1]), exponent):
                return True
        return False

    return find


SHARED: Final[dict[Kernel, Kernel]] = {
    kernel: _shared(kernel)
    for kernel in (
        move_blocks,
        add_blocks,
        move_wider_blocks,
        add_wider_blocks,
        add_bf16_blocks,
        expand_blocks,
    )
}
"""Each kernel over blocks, and the same shared among threads."""

ADAMW: Final[dict[tuple[str, str], tuple[Kernel, Kernel]]] = {
    ("float32", "float32"): _over_rows(_adamw_blocks, _float32_at, _float32_at, _float32_at),
    ("float64", "float64"): _over_rows(_adamw_blocks, _float64_at, _float64_at, _float64_at),
    ("bfloat16", "bfloat16"): _over_rows(_adamw_bf16_blocks, _uint16_at, _uint16_at, _float32_at),
    ("bfloat16", "float32"): _over_rows(_adamw_bf16_blocks, _uint16_at, _float32_at, _float32_at),
}
"""AdamW for weights and gradients of these types, on one thread and shared among several."""

# Infinities and NaNs, and no other number, have all bits of the exponent set.
FIND_NONFINITE: Final[dict[str, Kernel]] = {
    "bfloat16": _find_exponent_over_rows(_uint16_at, np.uint16(0x7F80)),
    "float16": _find_exponent_over_rows(_uint16_at, np.uint16(0x7C00)),
    "float32": _find_exponent_over_rows(_pointer_to(types.uint32), np.uint32(0x7F800000)),
    "float64": _find_exponent_over_rows(_uint64_at, np.uint64(0x7FF0000000000000)),
}
"""Searches for entries that are not finite, by their type."""
