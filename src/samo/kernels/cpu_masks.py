"""Loops that compress and expand on a CPU, compiled by numba, and what all loops share.

A kernel runs over a range of blocks. Each block knows where its values start, so that threads can
share a call. numba has no bfloat16: it is passed as uint16, and widened and rounded by its bits.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import binding, ir
from numba import config, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from samo.mask import bitmap

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
jit = njit(**_OPTIONS)
jit_parallel = njit(parallel=True, **_OPTIONS)


def chosen_by_type(choose: Kernel, inline: str = "never") -> Kernel:
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
def count_bits(typing_context, bits):
    """Return how many bits are set, in one instruction."""
    return types.int64(types.uint64), lambda _, builder, __, arguments: builder.ctpop(arguments[0])


@jit
def bits_of(number):
    return np.float32(number).view(np.uint32)


@jit
def float_of(bits):
    return np.uint32(bits).view(np.float32)


# Between types -----------------------------------------------------------------------------------


@jit
def _round_bf16(number):
    """Return the bits of a float32 as bfloat16, half to even, as torch rounds."""
    bits = bits_of(number)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # One NaN for all: adding to their bits could turn them into numbers.
    return np.uint16(np.uint32(0x7FC0) if np.isnan(number) else rounded)


@chosen_by_type
def read(entry):
    """Return an entry of any type as a float."""
    if entry == types.uint16:
        return lambda entry: float_of(np.uint32(entry) << np.uint32(16))
    return lambda entry: entry


@chosen_by_type
def convert(source, target):
    """Copy a vector to one of another type."""

    def copy(source, target):
        for k in range(source.size):
            target[k] = source[k]

    def to_float(source, target):
        for k in range(source.size):
            target[k] = read(source[k])

    def to_bf16(source, target):
        for k in range(source.size):
            target[k] = _round_bf16(np.float32(read(source[k])))

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

SLACK: Final = 32
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


@jit
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


@chosen_by_type
def move_kept(part, pairs, block, kept, gathers):
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
                count += count_bits(some & np.uint64((1 << lanes) - 1))
        return count

    return leap if lanes else _walk.py_func


@jit
def block_of(dense, block):
    return dense[block * BLOCK_BITS : (block + 1) * BLOCK_BITS]


# compress and expand -----------------------------------------------------------------------------


@jit
def compress_blocks(dense, pairs, offsets, out, first, end):
    kept = np.empty(BLOCK_BITS + SLACK, dtype=dense.dtype)
    for block in range(first, end):
        at = offsets[block]
        count = move_kept(block_of(dense, block), pairs, block, kept, True)
        convert(kept[:count], out[at : at + count])


@jit
def expand_blocks(values, pairs, offsets, dense, first, end):
    kept = np.empty(BLOCK_BITS + SLACK, dtype=dense.dtype)
    for block in range(first, end):
        at = offsets[block]
        to = offsets[block + 1] if block + 1 < offsets.size else values.size
        part = block_of(dense, block)
        part[:] = 0
        convert(values[at:to], kept)
        move_kept(part, pairs, block, kept, False)


# Shared among threads: one function each, since numba does not cache functions that close over
# others.


@jit_parallel
def compress_shared(dense, pairs, offsets, out, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        compress_blocks(dense, pairs, offsets, out, first, end)


@jit_parallel
def expand_shared(values, pairs, offsets, dense, blocks, parts):
    for part in prange(parts):
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        expand_blocks(values, pairs, offsets, dense, first, end)
