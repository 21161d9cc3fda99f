"""The loops of the CPU kernels, compiled by numba; ``cpu.py`` calls them.

A kernel runs over a range of blocks. Each block knows where its values start, so that threads can
share a call. numba has no bfloat16: it is passed as uint16, and widened and rounded by its bits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from llvmlite import binding, ir
from numba import carray, config, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from samo.mask import bitmap

__all__ = []

Kernel = Callable[..., Any]
Array = np.ndarray[Any, Any]

BLOCK_BITS: Final = bitmap.BLOCK_BITS
PAIR_BITS: Final = 2 * bitmap.WORD_BITS
BLOCK_PAIRS: Final = BLOCK_BITS // PAIR_BITS


def _can_cache() -> bool:
    """Return whether compiled code can be cached on disk, which needs a writable folder."""
    try:
        njit(cache=True)(_can_cache)
    except RuntimeError:
        return False
    return True


# numpy's error model: Python's check for a division by zero prevents vectorization.
_OPTIONS: Final = {"nogil": True, "cache": _can_cache(), "error_model": "numpy"}
_jit = njit(**_OPTIONS)
_jit_parallel = njit(parallel=True, **_OPTIONS)


def _chosen_by_type(choose: Kernel, inline: str = "never") -> Kernel:
    """Turn a function that returns an implementation for given types into one for compiled code."""

    def stub(*arguments: Any) -> Any:
        raise AssertionError("only called from compiled code")

    overload(stub, inline=inline)(choose)
    return stub


@intrinsic
def _lowest_bit(typing_context, bits):
    """Return the position of the lowest set bit, in one instruction."""

    def codegen(context, builder, signature, arguments):
        is_never_zero = ir.Constant(ir.IntType(1), 1)
        return builder.cttz(arguments[0], is_never_zero)

    return types.int64(types.uint64), codegen


@intrinsic
def _count_bits(typing_context, bits):
    """Return how many bits are set, in one instruction."""
    return types.int64(types.uint64), lambda _, builder, __, arguments: builder.ctpop(arguments[0])


@intrinsic
def _fma(typing_context, a, b, c):
    """Return a * b + c rounded once, as torch's vector code does it."""
    return c(a, b, c), lambda _, builder, __, arguments: builder.fma(*arguments)


@_jit
def _bits_of(number):
    return np.float32(number).view(np.uint32)


@_jit
def _float_of(bits):
    return np.uint32(bits).view(np.float32)


# Between types -----------------------------------------------------------------------------------


@_jit
def _round_bf16(number):
    """Return the bits of a float32 as bfloat16, half to even, as torch rounds."""
    bits = _bits_of(number)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # One NaN for all: adding to their bits could turn them into numbers.
    return np.uint16(np.uint32(0x7FC0) if np.isnan(number) else rounded)


@_chosen_by_type
def _read(entry):
    """Return an entry of any type as a float."""
    if entry == types.uint16:
        return lambda entry: _float_of(np.uint32(entry) << np.uint32(16))
    return lambda entry: entry


@_chosen_by_type
def _convert(source, target):
    """Copy a vector to one of another type."""

    def copy(source, target):
        for k in range(source.size):
            target[k] = source[k]

    def to_float(source, target):
        for k in range(source.size):
            target[k] = _read(source[k])

    def to_bf16(source, target):
        for k in range(source.size):
            target[k] = _round_bf16(np.float32(_read(source[k])))

    if source.dtype == target.dtype:
        return copy
    return to_bf16 if target.dtype == types.uint16 else to_float


# Between a block and its kept entries ------------------------------------------------------------
#
# Kernels copy the kept entries of a block to a contiguous buffer, or back, and work on the buffer.
# A CPU with AVX-512 moves 8, 16 or 32 entries at a time; any other walks over the set bits.

# With NUMBA_CPU_NAME set, numba compiles for that CPU, which may have fewer features.
_FEATURES: Final = {} if config.CPU_NAME else binding.get_host_cpu_features()
_LANES: Final = {
    types.float64: 8 if _FEATURES.get("avx512f") else 0,
    types.float32: 16 if _FEATURES.get("avx512f") else 0,
    types.uint16: 32 if _FEATURES.get("avx512vbmi2") else 0,
}
"""Entries that AVX-512 compresses or expands at once, by type; 0 without it."""

_SLACK: Final = 32
"""Extra entries of a buffer, since the last instruction writes a whole vector."""


def _vector_step(is_gather: bool) -> Any:
    """Return a function that moves as many entries as one instruction does.

    It takes a block, an index into it, the bits of the entries from there on, a buffer and an index
    into it. Gathering writes a whole vector: kept entries, then entries without meaning.
    """

    @intrinsic
    def step(typing_context, block, start, bits, buffer, at):
        lanes = _LANES[block.dtype]

        def codegen(context, builder, signature, arguments):
            element = context.get_data_type(block.dtype)
            vector, mask_type = ir.VectorType(element, lanes), ir.VectorType(ir.IntType(1), lanes)

            def pointer(kind: Any, array: Any, index: Any) -> Any:
                data = context.make_array(kind)(context, builder, array).data
                return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())

            source = pointer(block, arguments[0], arguments[1])
            target = pointer(buffer, arguments[3], arguments[4])
            if not is_gather:
                source, target = target, source
            mask = builder.bitcast(builder.trunc(arguments[2], ir.IntType(lanes)), mask_type)
            name, letter = ("compress" if is_gather else "expand"), str(element.intrinsic_name)
            function = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(vector, [vector, vector, mask_type]),
                f"llvm.x86.avx512.mask.{name}.v{lanes}{letter}",
            )
            size = context.get_abi_sizeof(element)
            moved = builder.load(source, align=size)
            zeros = ir.Constant(vector, None)
            builder.store(builder.call(function, [moved, zeros, mask]), target, align=size)
            return context.get_dummy_value()

        return types.void(block, types.int64, types.uint64, buffer, types.int64), codegen

    return step


_gather_step, _scatter_step = _vector_step(is_gather=True), _vector_step(is_gather=False)


@_jit
def _walk(part, pairs, block, kept, gathers):
    count = 0
    first = block * BLOCK_PAIRS
    for index in range(first, min(first + BLOCK_PAIRS, pairs.size)):
        bits = pairs[index]
        while bits != 0:
            place = (index - first) * PAIR_BITS + _lowest_bit(bits)
            if gathers:
                kept[count] = part[place]
            else:
                part[place] = kept[count]
            count += 1
            bits &= bits - np.uint64(1)
    return count


@_chosen_by_type
def _move(part, pairs, block, kept, gathers):
    """Copy a block's kept entries to a buffer, or back, and return how many they are.

    The block's other entries are 0 before they are copied back, and after.
    """
    lanes = _LANES[part.dtype]

    def leap(part, pairs, block, kept, gathers):
        if part.size < BLOCK_BITS:  # the last block: a vector would reach past its end
            return _walk(part, pairs, block, kept, gathers)
        count = 0
        first = block * BLOCK_PAIRS
        for index in range(BLOCK_PAIRS):
            bits = pairs[first + index]
            for lane in range(0, PAIR_BITS, lanes):
                place, some = index * PAIR_BITS + lane, bits >> np.uint64(lane)
                if gathers:
                    _gather_step(part, place, some, kept, count)
                else:
                    _scatter_step(part, place, some, kept, count)
                count += _count_bits(some & np.uint64((1 << lanes) - 1))
        return count

    return leap if lanes else _walk.py_func


@_jit
def _block(dense, block):
    return dense[block * BLOCK_BITS : (block + 1) * BLOCK_BITS]


# compress and expand -----------------------------------------------------------------------------


@_jit
def compress_blocks(dense, pairs, offsets, out, first, end):
    kept = np.empty(BLOCK_BITS + _SLACK, dtype=dense.dtype)
    for block in range(first, end):
        at = offsets[block]
        count = _move(_block(dense, block), pairs, block, kept, True)
        _convert(kept[:count], out[at : at + count])


@_jit
def expand_blocks(values, pairs, offsets, dense, first, end):
    kept = np.empty(BLOCK_BITS + _SLACK, dtype=dense.dtype)
    for block in range(first, end):
        at = offsets[block]
        to = offsets[block + 1] if block + 1 < offsets.size else values.size
        part = _block(dense, block)
        part[:] = 0
        _convert(values[at:to], kept)
        _move(part, pairs, block, kept, False)


# Shared among threads: one function each, since numba does not cache functions that close over
# others.


@_jit_parallel
def compress_shared(dense, pairs, offsets, out, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        compress_blocks(dense, pairs, offsets, out, first, end)


@_jit_parallel
def expand_shared(values, pairs, offsets, dense, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        expand_blocks(values, pairs, offsets, dense, first, end)


# AdamW -------------------------------------------------------------------------------------------


@partial(_chosen_by_type, inline="always")
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


@_jit
def _update(param, grad, exp_avg, exp_avg_sq, age, table, scalars):
    """Update contiguous vectors in place, rounding where torch's unfused AdamW rounds."""
    decay, lerp, beta2, lerp2, eps = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    is_small = lerp < 0.5
    one = scalars.dtype.type(1)
    for k in range(param.size):
        step, denominator = _corrections(age, k, table, scalars)
        g = scalars.dtype.type(_read(grad[k]))
        m = exp_avg[k]
        m = _fma(lerp, g - m, m) if is_small else _fma(lerp - one, g - m, g)
        v = _fma(lerp2 * g, g, exp_avg_sq[k] * beta2)
        exp_avg[k] = m
        exp_avg_sq[k] = v
        param[k] = param[k] * decay + m * step / (np.sqrt(v) / denominator + eps)


@_chosen_by_type
def _join(param, remainder, wide):
    """Return masters: parameters, or bfloat16 ones joined with their remainders in ``wide``."""

    def with_remainder(param, remainder, wide):
        # Slices that start at 0: numba checks whether an index like `at + k` is negative, which
        # keeps the loop from being vectorized.
        for k in range(param.size):
            upper = np.int32(np.uint32(param[k]) << np.uint32(16))
            wide[k] = _float_of(np.uint32(upper + np.int32(remainder[k])))
        return wide[: param.size]

    if param.dtype == types.uint16:
        return with_remainder
    return lambda param, remainder, wide: param


@_chosen_by_type
def _split(master, param, remainder):
    """Write masters back to where `_join` took them from."""

    def with_remainder(master, param, remainder):
        for k in range(param.size):
            bits = np.int32(_bits_of(master[k]))
            if np.isnan(master[k]):  # its bits may all be set, and rounding would overflow
                bits = np.int32(0x7FC00000)
            rounded = np.int32((bits + np.int32(0x8000)) >> np.int32(16))
            remainder[k] = np.int16(bits - np.int32(rounded << np.int32(16)))
            param[k] = np.uint16(rounded)

    return with_remainder if param.dtype == types.uint16 else lambda master, param, remainder: None


# Many parameters come in one call, as rows of addresses: an array costs some 10 us to hand over.

PARAM, REMAINDER, GRAD, EXP_AVG, EXP_AVG_SQ, AGE = range(6)
TABLE, DENSE, PAIRS, OFFSETS, KEPT, NUMEL = range(6, 12)
"""The columns of a row: addresses, and the entries of the parameter and of its dense copy."""


@intrinsic
def _pointer(typing_context, address, like):
    """Return an address as a pointer to entries of the type of the array ``like``."""
    kind = types.CPointer(like.dtype)

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64, like), codegen


@_jit
def _array_at(address, like, size):
    return carray(_pointer(address, like), size if address != 0 else 0)


@_jit
def _refresh(values, pairs, block, span, dense, buffer):
    """Write a block's values to the dense copy, if there is one."""
    if not dense.size:
        return
    if pairs.size:
        _convert(values, buffer)
        _move(_block(dense, block), pairs, block, buffer, False)
    else:
        _convert(values, dense[span])


@_jit
def adamw_rows(rows, scalars, ends, oldest, like, start, stop):
    """Update the blocks from ``start`` to ``stop`` of all rows; ``ends`` counts blocks up to each.

    Blocks are those of a dense copy with a mask, or of the parameter itself. ``like`` has empty
    arrays of the types that addresses point to: parameters, gradients, moments, ages, dense copies.
    """
    a_param, a_grad, a_moment, an_age, a_dense = like
    wide = np.empty(BLOCK_BITS, dtype=a_moment.dtype)
    buffer = np.empty(BLOCK_BITS + _SLACK, dtype=a_dense.dtype)
    begin = 0
    for index in range(ends.size):
        low, high = max(start, begin) - begin, min(stop, ends[index]) - begin
        begin = ends[index]
        if low >= high:
            continue
        row = rows[index]
        kept, numel = row[KEPT], row[NUMEL]
        param = _array_at(row[PARAM], a_param, kept)
        remainder = _array_at(row[REMAINDER], np.empty(0, np.int16), kept)
        grad = _array_at(row[GRAD], a_grad, kept)
        exp_avg = _array_at(row[EXP_AVG], a_moment, kept)
        exp_avg_sq = _array_at(row[EXP_AVG_SQ], a_moment, kept)
        age = _array_at(row[AGE], an_age, kept)
        table = _array_at(row[TABLE], a_moment, 2 * (oldest + 1))
        dense = _array_at(row[DENSE], a_dense, numel)
        pairs = _array_at(row[PAIRS], np.empty(0, np.uint64), -(-numel // PAIR_BITS))
        offsets = _array_at(row[OFFSETS], np.empty(0, np.int64), -(-numel // BLOCK_BITS))
        for block in range(low, high):
            at, to = block * BLOCK_BITS, min((block + 1) * BLOCK_BITS, kept)
            if pairs.size:
                at = offsets[block]
                to = offsets[block + 1] if block + 1 < offsets.size else kept
            span = slice(at, to)
            values, remainders = param[span], remainder[span]
            master = _join(values, remainders, wide)
            moments = exp_avg[span], exp_avg_sq[span]
            _update(master, grad[span], *moments, age[span], table, scalars[index])
            _split(master, values, remainders)
            _refresh(values, pairs, block, span, dense, buffer)


@_jit_parallel
def adamw_rows_shared(rows, scalars, ends, oldest, like, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        adamw_rows(rows, scalars, ends, oldest, like, first, end)


# Nonfinite values --------------------------------------------------------------------------------


@_jit
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


@_jit_parallel
def find_exponent_rows_shared(rows, like, exponent, _, blocks, parts):
    found = np.zeros(parts, dtype=np.bool_)
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        found[part] = find_exponent_rows(rows, like, exponent, blocks, first, end)
    return found.any()
