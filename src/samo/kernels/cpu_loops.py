"""The loops behind the CPU kernels, compiled by numba; ``cpu.py`` calls them.

A kernel runs over a range of blocks. Blocks are independent, because each knows where its values
start, so that a call can be shared among threads. numba knows no 16-bit floats: bfloat16 arrives as
uint16 and float16 as int16, and both are widened and rounded by their bits.
"""

from collections.abc import Callable
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
    """Return whether compiled code can be kept for the next process, which needs a folder to write to."""
    try:
        njit(cache=True)(_can_cache)
    except RuntimeError:
        return False
    return True


# numpy's error model, since Python's check for a division by zero forbids vector instructions.
_OPTIONS: Final = {"nogil": True, "cache": _can_cache(), "error_model": "numpy"}
_jit = njit(**_OPTIONS)
_jit_parallel = njit(parallel=True, **_OPTIONS)


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

    def codegen(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), codegen


@intrinsic
def _fma(typing_context, a, b, c):
    """Return a * b + c rounded once, as torch's vector code does it."""

    def codegen(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return c(a, b, c), codegen


@intrinsic
def _bits_of(typing_context, number):
    """Return the bits of a float32."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def _float_of(typing_context, bits):
    """Return the float32 with these bits."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), codegen


# Between types -----------------------------------------------------------------------------------


@_jit
def _round_bf16(number):
    """Return the bits of a float32 as bfloat16, half to even, as torch rounds."""
    bits = _bits_of(number)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # One NaN for all: adding to their bits could carry them over into numbers.
    return np.uint16(np.uint32(0x7FC0) if np.isnan(number) else rounded)


@_jit
def _read_fp16(half):
    """Return float16 bits as float32.

    Exponents are 112 apart: a product by 2**112 moves them, and makes numbers of subnormal ones.
    """
    bits = np.uint32(np.uint16(half))
    exponent = bits & np.uint32(0x7C00)
    number = _float_of((bits & np.uint32(0x7FFF)) << np.uint32(13)) * np.float32(2.0**112)
    wide = _bits_of(number)
    if exponent == np.uint32(0x7C00):  # infinities and NaNs, whose exponent has all bits set
        wide |= np.uint32(0x7F800000)
    return _float_of(wide | ((bits & np.uint32(0x8000)) << np.uint32(16)))


@_jit
def _round_fp16(number):
    """Return the bits of a float32 as float16, half to even, as torch rounds."""
    bits = _bits_of(number)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    bits &= np.uint32(0x7FFFFFFF)
    # A subnormal one has its last place where that of 0.5 is in float32: a sum rounds it there.
    small = _bits_of(_float_of(bits) + np.float32(0.5)) - np.uint32(0x3F000000)
    half = np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    normal = (bits - np.uint32(112 << 23) + half) >> np.uint32(13)
    rounded = small if bits < np.uint32(113 << 23) else normal
    if bits >= np.uint32(143 << 23):  # 65,536 and more
        rounded = np.uint32(0x7E00) if bits > np.uint32(0x7F800000) else np.uint32(0x7C00)
    return np.int16(np.uint16(rounded | sign))


def _read(entry: Any) -> Any:
    """Return an entry of any type as a float; the overload picks by its type."""
    raise AssertionError("only ever called from compiled code")


@overload(_read)
def _read_overload(entry):
    if entry == types.uint16:
        return lambda entry: _float_of(np.uint32(entry) << np.uint32(16))
    if entry == types.int16:
        return lambda entry: _read_fp16(entry)
    return lambda entry: entry


def _convert(source: Array, target: Array) -> None:
    """Copy a vector to one of another type; the overload picks by both."""
    raise AssertionError("only ever called from compiled code")


@overload(_convert)
def _convert_overload(source, target):
    def copy(source, target):
        for k in range(source.size):
            target[k] = source[k]

    def to_float(source, target):
        for k in range(source.size):
            target[k] = _read(source[k])

    def to_bf16(source, target):
        for k in range(source.size):
            target[k] = _round_bf16(np.float32(_read(source[k])))

    def to_fp16(source, target):
        for k in range(source.size):
            target[k] = _round_fp16(np.float32(_read(source[k])))

    if source.dtype == target.dtype:
        return copy
    return {types.uint16: to_bf16, types.int16: to_fp16}.get(target.dtype, to_float)


# Between a block and its kept entries ------------------------------------------------------------
#
# Every kernel copies the kept entries of a block to a buffer, or back, and works on the buffer,
# where they lie side by side. A CPU with AVX-512 does it 8, 16 or 32 entries at a time; any other
# one walks over the set bits.

# With NUMBA_CPU_NAME set, numba compiles for that CPU, which may have less than this one.
_FEATURES: Final = {} if config.CPU_NAME else binding.get_host_cpu_features()
_LANES: Final = {
    types.float64: 8 if _FEATURES.get("avx512f") else 0,
    types.float32: 16 if _FEATURES.get("avx512f") else 0,
    types.uint16: 32 if _FEATURES.get("avx512vbmi2") else 0,
    types.int16: 32 if _FEATURES.get("avx512vbmi2") else 0,
}
"""Entries of a type that AVX-512 compresses or expands at once; 0 on a CPU that cannot."""

_SLACK: Final = 32
"""What a buffer needs beyond a block: the last instruction writes a whole vector."""


def _vector_step(is_gather: bool) -> Any:
    """Return a function that moves as many entries as one instruction does.

    It takes a block, a place in it, the bits of the entries from there on, a buffer and a place in
    it. Gathering [5, 6, 7, 8] with bits 1, 0, 0, 1 writes [5, 8] to the buffer; what it writes
    after that has no meaning.
    """

    @intrinsic
    def step(typing_context, block, start, bits, buffer, at):
        lanes = _LANES[block.dtype]

        def codegen(context, builder, signature, arguments):
            element = context.get_data_type(block.dtype)
            vector, mask_type = ir.VectorType(element, lanes), ir.VectorType(ir.IntType(1), lanes)
            in_block = _vector_pointer(context, builder, block, arguments[0], arguments[1], vector)
            in_buffer = _vector_pointer(
                context, builder, buffer, arguments[3], arguments[4], vector
            )
            mask = builder.bitcast(builder.trunc(arguments[2], ir.IntType(lanes)), mask_type)
            name, letter = ("compress" if is_gather else "expand"), str(element.intrinsic_name)
            function = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(vector, [vector, vector, mask_type]),
                f"llvm.x86.avx512.mask.{name}.v{lanes}{letter}",
            )
            source, target = (in_block, in_buffer) if is_gather else (in_buffer, in_block)
            size = context.get_abi_sizeof(element)
            moved = builder.load(source, align=size)
            zeros = ir.Constant(vector, None)
            builder.store(builder.call(function, [moved, zeros, mask]), target, align=size)
            return context.get_dummy_value()

        return types.void(block, types.int64, types.uint64, buffer, types.int64), codegen

    return step


def _vector_pointer(
    context: Any, builder: Any, kind: Any, array: Any, index: Any, vector: Any
) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


@_jit
def _walk_gather(part, pairs, block, kept):
    count = 0
    first = block * BLOCK_PAIRS
    for index in range(first, min(first + BLOCK_PAIRS, pairs.size)):
        bits = pairs[index]
        while bits != 0:
            kept[count] = part[(index - first) * PAIR_BITS + _lowest_bit(bits)]
            count += 1
            bits &= bits - np.uint64(1)
    return count


@_jit
def _walk_scatter(kept, pairs, block, part):
    count = 0
    first = block * BLOCK_PAIRS
    for index in range(first, min(first + BLOCK_PAIRS, pairs.size)):
        bits = pairs[index]
        while bits != 0:
            part[(index - first) * PAIR_BITS + _lowest_bit(bits)] = kept[count]
            count += 1
            bits &= bits - np.uint64(1)


_gather_step, _scatter_step = _vector_step(is_gather=True), _vector_step(is_gather=False)


def _gather(part: Array, pairs: Array, block: int, kept: Array) -> int:
    """Copy the kept entries of a block to ``kept`` and return how many they are.

    Example: part [5, 6, 7, 8] with kept bits 1, 0, 0, 1 gives kept [5, 8] and returns 2.
    """
    raise AssertionError("only ever called from compiled code")


@overload(_gather, inline="never")
def _gather_overload(part, pairs, block, kept):
    lanes = _LANES[part.dtype]

    def walk(part, pairs, block, kept):
        return _walk_gather(part, pairs, block, kept)

    def leap(part, pairs, block, kept):
        if part.size < BLOCK_BITS:  # the last block: a vector would reach past its end
            return _walk_gather(part, pairs, block, kept)
        count = 0
        first = block * BLOCK_PAIRS
        for index in range(BLOCK_PAIRS):
            bits = pairs[first + index]
            for lane in range(0, PAIR_BITS, lanes):
                _gather_step(part, index * PAIR_BITS + lane, bits >> np.uint64(lane), kept, count)
                count += _count_bits((bits >> np.uint64(lane)) & np.uint64((1 << lanes) - 1))
        return count

    return leap if lanes else walk


def _scatter(kept: Array, pairs: Array, block: int, part: Array) -> None:
    """Copy ``kept`` to the kept entries of a block; the others are 0 before and after.

    Example: kept [5, 8] with kept bits 1, 0, 0, 1 gives part [5, 0, 0, 8].
    """
    raise AssertionError("only ever called from compiled code")


@overload(_scatter, inline="never")
def _scatter_overload(kept, pairs, block, part):
    lanes = _LANES[part.dtype]

    def walk(kept, pairs, block, part):
        _walk_scatter(kept, pairs, block, part)

    def leap(kept, pairs, block, part):
        if part.size < BLOCK_BITS:
            _walk_scatter(kept, pairs, block, part)
            return
        count = 0
        first = block * BLOCK_PAIRS
        for index in range(BLOCK_PAIRS):
            bits = pairs[first + index]
            for lane in range(0, PAIR_BITS, lanes):
                _scatter_step(part, index * PAIR_BITS + lane, bits >> np.uint64(lane), kept, count)
                count += _count_bits((bits >> np.uint64(lane)) & np.uint64((1 << lanes) - 1))

    return leap if lanes else walk


@_jit
def _block(dense, block):
    return dense[block * BLOCK_BITS : (block + 1) * BLOCK_BITS]


# Kernels over the blocks of one tensor -----------------------------------------------------------


@_jit
def compress_blocks(dense, pairs, offsets, out, first, end):
    kept = np.empty(BLOCK_BITS + _SLACK, dtype=dense.dtype)
    for block in range(first, end):
        at = offsets[block]
        count = _gather(_block(dense, block), pairs, block, kept)
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
        _scatter(kept, pairs, block, part)


def _corrections(age: Array, k: int, table: Array, scalars: Array) -> tuple[Any, Any]:
    """Return step size and denominator of an entry; the overload picks by whether there are ages."""
    raise AssertionError("only ever called from compiled code")


@overload(_corrections, inline="always")
def _corrections_overload(age, k, table, scalars):
    def of_all(age, k, table, scalars):
        return scalars[5], scalars[6]

    def of_age(age, k, table, scalars):
        oldest = table.size // 2 - 1
        t = min(max(np.int64(age[k]) + 1, 1), oldest)
        age[k] = np.int16(t)
        if t == oldest:
            return scalars[5], scalars[6]
        # Unsigned, so that numba need not look whether an index counts from the end.
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


def _join(param: Array, remainder: Array, wide: Array) -> Array:
    """Return masters: parameters themselves, or ``wide`` with bfloat16 ones and their remainders."""
    raise AssertionError("only ever called from compiled code")


@overload(_join)
def _join_overload(param, remainder, wide):
    def with_remainder(param, remainder, wide):
        # Slices counted from 0: an index like `at + k` might be negative for all numba knows, and
        # the check for it keeps the loop from vector instructions.
        for k in range(param.size):
            upper = np.int32(np.uint32(param[k]) << np.uint32(16))
            wide[k] = _float_of(np.uint32(upper + np.int32(remainder[k])))
        return wide[: param.size]

    if param.dtype == types.uint16:
        return with_remainder
    return lambda param, remainder, wide: param


def _split(master: Array, param: Array, remainder: Array) -> None:
    """Write masters back where `_join` took them from."""
    raise AssertionError("only ever called from compiled code")


@overload(_split)
def _split_overload(master, param, remainder):
    def with_remainder(master, param, remainder):
        for k in range(param.size):
            bits = np.int32(_bits_of(master[k]))
            if np.isnan(master[k]):  # its bits may all be set, and rounding would carry over
                bits = np.int32(0x7FC00000)
            rounded = np.int32((bits + np.int32(0x8000)) >> np.int32(16))
            remainder[k] = np.int16(bits - np.int32(rounded << np.int32(16)))
            param[k] = np.uint16(rounded)

    def nothing(master, param, remainder):
        pass

    return with_remainder if param.dtype == types.uint16 else nothing


@_jit
def _adamw_blocks(
    param,
    remainder,
    grad,
    exp_avg,
    exp_avg_sq,
    age,
    table,
    dense,
    pairs,
    offsets,
    scalars,
    first,
    end,
):
    """Update some blocks: of a dense copy with a mask, or of the parameter itself."""
    wide = np.empty(BLOCK_BITS, dtype=exp_avg.dtype)
    kept = np.empty(BLOCK_BITS + _SLACK, dtype=dense.dtype)
    for block in range(first, end):
        at, to = block * BLOCK_BITS, min((block + 1) * BLOCK_BITS, param.size)
        if pairs.size:
            at = offsets[block]
            to = offsets[block + 1] if block + 1 < offsets.size else param.size
        values, remainders = param[at:to], remainder[at:to]
        master = _join(values, remainders, wide)
        _update(master, grad[at:to], exp_avg[at:to], exp_avg_sq[at:to], age[at:to], table, scalars)
        _split(master, values, remainders)
        if pairs.size:
            _convert(values, kept)
            _scatter(kept, pairs, block, _block(dense, block))
        elif dense.size:
            _convert(values, dense[at:to])


# The same kernels, their blocks shared among threads ---------------------------------------------
#
# One function each and no factory: numba keeps no compiled code of functions that close over
# others.


@_jit_parallel
def _compress_shared(dense, pairs, offsets, out, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        compress_blocks(dense, pairs, offsets, out, first, end)


@_jit_parallel
def _expand_shared(values, pairs, offsets, dense, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        expand_blocks(values, pairs, offsets, dense, first, end)


SHARED: Final[dict[Kernel, Kernel]] = {
    compress_blocks: _compress_shared,
    expand_blocks: _expand_shared,
}
"""Each kernel over blocks, and the same shared among threads."""


# Many parameters in one call ---------------------------------------------------------------------
#
# They come as rows of addresses instead of arrays, which cost some 10 us each to hand over. Empty
# arrays (``param``, ``grad``, ``moment``, ``age``, ``dense``) say what the addresses point to.

PARAM, REMAINDER, GRAD, EXP_AVG, EXP_AVG_SQ, AGE, TABLE, DENSE, PAIRS, OFFSETS, KEPT, NUMEL = range(
    12
)
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
def adamw_rows(rows, scalars, ends, oldest, param, grad, moment, age, dense, first, end):
    """Run over the blocks from ``first`` to ``end`` of all rows; ``ends`` counts blocks up to each."""
    begin = 0
    for index in range(ends.size):
        low, high = max(first, begin) - begin, min(end, ends[index]) - begin
        begin = ends[index]
        if low >= high:
            continue
        row = rows[index]
        kept, numel = row[KEPT], row[NUMEL]
        _adamw_blocks(
            _array_at(row[PARAM], param, kept),
            _array_at(row[REMAINDER], np.empty(0, np.int16), kept),
            _array_at(row[GRAD], grad, kept),
            _array_at(row[EXP_AVG], moment, kept),
            _array_at(row[EXP_AVG_SQ], moment, kept),
            _array_at(row[AGE], age, kept),
            _array_at(row[TABLE], moment, 2 * (oldest + 1)),
            _array_at(row[DENSE], dense, numel),
            _array_at(row[PAIRS], np.empty(0, np.uint64), -(-numel // PAIR_BITS)),
            _array_at(row[OFFSETS], np.empty(0, np.int64), -(-numel // BLOCK_BITS)),
            scalars[index],
            low,
            high,
        )


@_jit_parallel
def adamw_rows_shared(rows, scalars, ends, oldest, param, grad, moment, age, dense, parts):
    """Give each of ``parts`` threads the same number of blocks."""
    blocks = ends[-1]
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        adamw_rows(rows, scalars, ends, oldest, param, grad, moment, age, dense, first, end)


@_jit
def find_exponent_rows(rows, like, exponent, part, parts):
    """Return whether, in a part of some row of address and size, an entry has all bits of ``exponent``."""
    for index in range(rows.shape[0]):
        size = rows[index, 1]
        bits = _array_at(rows[index, 0], like, size)[
            size * part // parts : size * (part + 1) // parts
        ]
        found = False
        for k in range(bits.size):
            found |= (bits[k] & exponent) == exponent
        if found:
            return True
    return False


@_jit_parallel
def find_exponent_rows_shared(rows, like, exponent, parts):
    """Let each of ``parts`` threads look at its part of every row."""
    found = np.zeros(parts, dtype=np.bool_)
    for part in prange(parts):
        found[part] = find_exponent_rows(rows, like, exponent, part, parts)
    return found.any()
