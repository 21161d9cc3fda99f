"""The loops behind the CPU kernels, compiled by numba; ``cpu.py`` calls them.

A kernel runs over a range of blocks. Blocks are independent, because each knows where its values
start, so that a call can be shared among threads. numba knows no bfloat16: those arrive as uint16 and
are widened by bit shifts.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import binding, ir
from numba import carray, config, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from samo import bitmap

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


# Between a block and its kept entries ------------------------------------------------------------
#
# Every kernel copies the kept entries of a block to a buffer, or back, and works on the buffer, where
# they lie side by side. A CPU with AVX-512 does it 8, 16 or 32 entries at a time; any other one walks
# over the set bits.

# What numba is told to compile for, where a user sets NUMBA_CPU_NAME, may be less than this CPU.
_FEATURES: Final = {} if config.CPU_NAME else binding.get_host_cpu_features()
_LANES: Final = {
    types.float64: 8 if _FEATURES.get("avx512f") else 0,
    types.float32: 16 if _FEATURES.get("avx512f") else 0,
    types.uint16: 32 if _FEATURES.get("avx512vbmi2") else 0,
}
"""Entries of a type that AVX-512 compresses or expands at once; 0 on a CPU that cannot."""

_SLACK: Final = 32
"""What a buffer needs beyond a block: the last instruction writes a whole vector."""


def _vector_step(is_gather: bool) -> Any:
    """Return a function that moves as many entries as one instruction does.

    It takes a block, a place in it, the bits of the entries from there on, a buffer and a place in
    it. Gathering [5, 6, 7, 8] with bits 1, 0, 0, 1 writes [5, 8] to the buffer; what it writes after
    that has no meaning.
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


@_jit
def _widen(half):
    """Return the bits of a bfloat16 as those of the same float32."""
    return np.int32(np.uint32(half) << np.uint32(16))


# Kernels over the blocks of one tensor -----------------------------------------------------------


@_jit
def move_blocks(dense, pairs, offsets, out, first, end):
    kept = np.empty(BLOCK_BITS + _SLACK, dtype=dense.dtype)
    for block in range(first, end):
        at = offsets[block]
        count = _gather(_block(dense, block), pairs, block, kept)
        out[at : at + count] = kept[:count]


@_jit
def add_blocks(dense, pairs, offsets, out, first, end):
    kept = np.empty(BLOCK_BITS + _SLACK, dtype=dense.dtype)
    for block in range(first, end):
        at = offsets[block]
        count = _gather(_block(dense, block), pairs, block, kept)
        sums = out[at : at + count]
        for k in range(count):
            sums[k] += kept[k]


@_jit
def move_wider_blocks(dense, pairs, offsets, out, first, end):
    kept = np.empty(BLOCK_BITS + _SLACK, dtype=np.uint16)
    out_bits = out.view(np.int32)
    for block in range(first, end):
        at = offsets[block]
        count = _gather(_block(dense, block), pairs, block, kept)
        wide = out_bits[at : at + count]
        for k in range(count):
            wide[k] = _widen(kept[k])


@_jit
def add_wider_blocks(dense, pairs, offsets, out, first, end):
    kept = np.empty(BLOCK_BITS + _SLACK, dtype=np.uint16)
    wide_bits = np.empty(BLOCK_BITS, dtype=np.int32)
    wide = wide_bits.view(np.float32)
    for block in range(first, end):
        at = offsets[block]
        count = _gather(_block(dense, block), pairs, block, kept)
        sums = out[at : at + count]
        for k in range(count):
            wide_bits[k] = _widen(kept[k])
        for k in range(count):
            sums[k] += wide[k]


@_jit
def add_bf16_blocks(dense, pairs, offsets, out, first, end):
    kept = np.empty(BLOCK_BITS + _SLACK, dtype=np.uint16)
    sum_bits, term_bits = np.empty(BLOCK_BITS, np.int32), np.empty(BLOCK_BITS, np.int32)
    sums, terms = sum_bits.view(np.float32), term_bits.view(np.float32)
    for block in range(first, end):
        at = offsets[block]
        count = _gather(_block(dense, block), pairs, block, kept)
        held = out[at : at + count]
        for k in range(count):
            sum_bits[k] = _widen(held[k])
            term_bits[k] = _widen(kept[k])
        for k in range(count):
            sums[k] += terms[k]
        for k in range(count):
            # Half to even, as torch rounds a sum; its NaNs all become one, so that none overflows.
            rounded = (sum_bits[k] + np.int32(0x7FFF) + ((sum_bits[k] >> 16) & 1)) >> np.int32(16)
            held[k] = np.uint16(0x7FC0) if np.isnan(sums[k]) else np.uint16(rounded)


@_jit
def expand_blocks(values, pairs, offsets, dense, first, end):
    kept = np.empty(BLOCK_BITS + _SLACK, dtype=values.dtype)
    for block in range(first, end):
        at = offsets[block]
        to = offsets[block + 1] if block + 1 < offsets.size else values.size
        part = _block(dense, block)
        part[:] = 0
        kept[: to - at] = values[at:to]
        _scatter(kept, pairs, block, part)


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


def _adamw_blocks(
    dense: Array,
    pairs: Array,
    offsets: Array,
    rest: Array,
    grad: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    scalars: Array,
    first: int,
    end: int,
) -> None:
    """Update the kept entries of some blocks; the overload picks by the type of the weights."""
    raise AssertionError("only ever called from compiled code")


@overload(_adamw_blocks)
def _adamw_overload(dense, pairs, offsets, rest, grad, exp_avg, exp_avg_sq, scalars, first, end):
    kernel = _adamw_bf16_blocks if dense.dtype == types.uint16 else _adamw_wide_blocks

    def run(dense, pairs, offsets, rest, grad, exp_avg, exp_avg_sq, scalars, first, end):
        kernel(dense, pairs, offsets, rest, grad, exp_avg, exp_avg_sq, scalars, first, end)

    return run


@_jit
def _adamw_wide_blocks(dense, pairs, offsets, rest, grad, exp_avg, exp_avg_sq, scalars, first, end):
    kept = np.empty(BLOCK_BITS + _SLACK, dtype=dense.dtype)
    for block in range(first, end):
        part = _block(dense, block)
        if pairs.size == 0:
            at = block * BLOCK_BITS
            to = at + part.size
            _update(part, grad[at:to], exp_avg[at:to], exp_avg_sq[at:to], scalars)
            continue
        at = offsets[block]
        count = _gather(part, pairs, block, kept)
        to = at + count
        _update(kept[:count], grad[at:to], exp_avg[at:to], exp_avg_sq[at:to], scalars)
        _scatter(kept, pairs, block, part)


@_jit
def _adamw_bf16_blocks(dense, pairs, offsets, rest, grad, exp_avg, exp_avg_sq, scalars, first, end):
    kept = np.empty(BLOCK_BITS + _SLACK, dtype=np.uint16)
    param_bits = np.empty(BLOCK_BITS, dtype=np.int32)
    grad_bits = np.empty(BLOCK_BITS, dtype=np.int32)
    param, wide_grad = param_bits.view(np.float32), grad_bits.view(np.float32)
    for block in range(first, end):
        part = _block(dense, block)
        if pairs.size == 0:
            at = block * BLOCK_BITS
            count = part.size
            kept[:count] = part
        else:
            at = offsets[block]
            count = _gather(part, pairs, block, kept)
        to = at + count
        # Slices counted from 0: an index like `at + k` might be negative for all numba knows, and
        # the check for it keeps the loop from vector instructions.
        rests = rest[at:to]
        for k in range(count):
            param_bits[k] = _widen(kept[k]) + rests[k]
        _read_grad(grad[at:to], grad_bits, wide_grad)
        _update(param[:count], wide_grad[:count], exp_avg[at:to], exp_avg_sq[at:to], scalars)
        for k in range(count):
            if np.isnan(param[k]):  # its bits may all be set, and rounding would carry over
                param_bits[k] = np.int32(0x7FC00000)
            rounded = (param_bits[k] + np.int32(0x8000)) >> np.int32(16)
            rests[k] = np.int16(param_bits[k] - (rounded << np.int32(16)))
            kept[k] = np.uint16(rounded)
        if pairs.size == 0:
            part[:] = kept[:count]
        else:
            _scatter(kept, pairs, block, part)


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


# The same kernels, their blocks shared among threads ---------------------------------------------
#
# One function each and no factory: numba keeps no compiled code of functions that close over others.


@_jit_parallel
def _move_shared(dense, pairs, offsets, out, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        move_blocks(dense, pairs, offsets, out, first, end)


@_jit_parallel
def _add_shared(dense, pairs, offsets, out, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        add_blocks(dense, pairs, offsets, out, first, end)


@_jit_parallel
def _move_wider_shared(dense, pairs, offsets, out, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        move_wider_blocks(dense, pairs, offsets, out, first, end)


@_jit_parallel
def _add_wider_shared(dense, pairs, offsets, out, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        add_wider_blocks(dense, pairs, offsets, out, first, end)


@_jit_parallel
def _add_bf16_shared(dense, pairs, offsets, out, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        add_bf16_blocks(dense, pairs, offsets, out, first, end)


@_jit_parallel
def _expand_shared(values, pairs, offsets, dense, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        expand_blocks(values, pairs, offsets, dense, first, end)


SHARED: Final[dict[Kernel, Kernel]] = {
    move_blocks: _move_shared,
    add_blocks: _add_shared,
    move_wider_blocks: _move_wider_shared,
    add_wider_blocks: _add_wider_shared,
    add_bf16_blocks: _add_bf16_shared,
    expand_blocks: _expand_shared,
}
"""Each kernel over blocks, and the same shared among threads."""


# Many weights in one call ------------------------------------------------------------------------
#
# They come as rows of addresses instead of arrays, which cost some 10 us a weight to hand over. Empty
# arrays (``dense``, ``grad``, ``moment``) say what the addresses point to.

DENSE, PAIRS, OFFSETS, REST, GRAD, EXP_AVG, EXP_AVG_SQ, NUMEL, KEPT = range(9)
"""The columns of a row."""


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
def adamw_rows(rows, scalars, ends, dense, grad, moment, first, end):
    """Run over the blocks from ``first`` to ``end`` of all rows; ``ends`` counts blocks up to each."""
    begin = 0
    for index in range(ends.size):
        low, high = max(first, begin) - begin, min(end, ends[index]) - begin
        begin = ends[index]
        if low >= high:
            continue
        row = rows[index]
        numel, kept = row[NUMEL], row[KEPT]
        _adamw_blocks(
            _array_at(row[DENSE], dense, numel),
            _array_at(row[PAIRS], np.empty(0, np.uint64), -(-numel // PAIR_BITS)),
            _array_at(row[OFFSETS], np.empty(0, np.int64), -(-numel // BLOCK_BITS)),
            _array_at(row[REST], np.empty(0, np.int16), kept),
            _array_at(row[GRAD], grad, kept),
            _array_at(row[EXP_AVG], moment, kept),
            _array_at(row[EXP_AVG_SQ], moment, kept),
            scalars[index],
            low,
            high,
        )


@_jit_parallel
def adamw_rows_shared(rows, scalars, ends, dense, grad, moment, parts):
    """Give each of ``parts`` threads the same number of blocks."""
    blocks = ends[-1]
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        adamw_rows(rows, scalars, ends, dense, grad, moment, first, end)


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
