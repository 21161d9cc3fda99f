"""The fast path on a CPU: loops over the mask's words, compiled by numba.

``docs/decisions/0003-cpu-kernels.md`` has the candidates that were measured. Kernels hold no lock
while they run, so a call is shared among as many threads as torch uses; blocks are independent
because each knows where its values start.

numba knows no bfloat16, so those tensors are read as uint16 and widened by bit shifts. float16 has
no such shortcut; what is not written here falls back to ``reference``.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload
from torch import Tensor

from samo import bitmap
from samo.kernels import AdamWSettings, AdamWUpdate, reference
from samo.masks import Mask

__all__ = ["adamw_", "compress_", "expand_"]

_BLOCK_BITS: Final = bitmap.BLOCK_BITS
_PAIR_BITS: Final = 2 * bitmap.WORD_BITS
_BLOCK_PAIRS: Final = _BLOCK_BITS // _PAIR_BITS

_BLOCKS_A_THREAD: Final = 32
"""Waking another thread costs about 20 us, the time of some 30 blocks."""

Kernel = Callable[..., None]
Array = np.ndarray[Any, Any]
Job = tuple[Kernel, int, tuple[Array, ...]]
"""A kernel, the number of weights it runs over, and its arguments."""


def compress_(
    dense: Tensor,
    mask: Mask | None,
    out_Z: Tensor,
    *,
    add: bool = False,
    factor: Tensor | None = None,
) -> None:
    """Write or add the kept entries of ``dense`` to ``out_Z``.

    Example: dense [5, 6, 7, 8] with kept bits 1, 0, 0, 1 gives [5, 8].
    """
    kernel = _compress_kernel(dense.dtype, out_Z.dtype, add)
    if kernel is None or mask is None or factor is not None or not out_Z.is_contiguous():
        reference.compress_(dense, mask, out_Z, add=add, factor=factor)
        return
    source = _array(dense.detach().reshape(-1))
    _run([(kernel, mask.numel, (source, *_mask_arrays(mask), _array(out_Z.detach())))])


def expand_(values_Z: Tensor, mask: Mask | None, dense: Tensor) -> None:
    """Write ``values_Z`` to the kept entries of ``dense`` and 0 elsewhere.

    Example: values [5, 8] with kept bits 1, 0, 0, 1 give [5, 0, 0, 8].
    """
    if mask is None or values_Z.dtype != dense.dtype or not dense.is_contiguous():
        reference.expand_(values_Z, mask, dense)
        return
    values = _array(values_Z.detach().contiguous())
    arrays = (values, *_mask_arrays(mask), _array(dense.detach().view(-1)))
    _run([(_expand_blocks, mask.numel, arrays)])


def adamw_(updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None) -> None:
    """Do one AdamW step: gather each block's kept weights, update them, scatter them back."""
    if skip is not None and bool(skip):
        return
    decay, beta1, beta2, eps = settings
    jobs: list[Job] = []
    for update in updates:
        kernel = _adamw_kernel(update)
        if kernel is None:
            reference.adamw_([update], settings, None)
            continue
        scalars = np.array(
            [decay, 1 - beta1, beta2, 1 - beta2, eps, -update.step_size, update.denominator],
            dtype=update.exp_avg_Z.numpy().dtype,
        )
        arrays = (
            _array(update.dense.detach().view(-1)),
            *(_NO_MASK if update.mask is None else _mask_arrays(update.mask)),
            _NO_REST if update.rest_Z is None else update.rest_Z.numpy(),
            _array(update.grad_Z.detach()),
            update.exp_avg_Z.numpy(),
            update.exp_avg_sq_Z.numpy(),
            scalars,
        )
        jobs.append((kernel, update.dense.numel(), arrays))
    _run(jobs)


_NO_MASK: Final = (np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64))
_NO_REST: Final = np.empty(0, dtype=np.int16)


def _compress_kernel(source: torch.dtype, target: torch.dtype, add: bool) -> Kernel | None:
    if source == target and not add:
        return _move_blocks
    kernels: dict[tuple[torch.dtype, torch.dtype, bool], Kernel] = {
        (torch.float32, torch.float32, True): _add_blocks,
        (torch.float64, torch.float64, True): _add_blocks,
        (torch.bfloat16, torch.bfloat16, True): _add_bf16_blocks,
        (torch.bfloat16, torch.float32, True): _add_wider_blocks,
        (torch.bfloat16, torch.float32, False): _move_wider_blocks,
    }
    return kernels.get((source, target, add))


def _adamw_kernel(update: AdamWUpdate) -> Kernel | None:
    if not update.dense.is_contiguous() or not update.grad_Z.is_contiguous():
        return None
    if update.dense.dtype == torch.bfloat16 and update.rest_Z is None:
        return None
    kernels: dict[tuple[torch.dtype, torch.dtype], Kernel] = {
        (torch.float32, torch.float32): _adamw_blocks,
        (torch.float64, torch.float64): _adamw_blocks,
        (torch.bfloat16, torch.float32): _adamw_bf16_blocks,
        (torch.bfloat16, torch.bfloat16): _adamw_bf16_blocks,
    }
    return kernels.get((update.dense.dtype, update.grad_Z.dtype))


def _array(tensor: Tensor) -> Array:
    """Return a contiguous tensor as an array over the same memory; 16-bit types as uint16."""
    if tensor.element_size() == 2:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _mask_arrays(mask: Mask) -> tuple[Array, Array]:
    return mask.words.numpy().view(np.uint64), mask.offsets.numpy()


def _run(jobs: list[Job]) -> None:
    """Run every job's ``kernel(*arrays, first_block, end_block)``, each thread a share of each job."""
    most = max((bitmap.num_blocks(numel) for _, numel, _ in jobs), default=0)
    parts = max(1, min(torch.get_num_threads(), most // _BLOCKS_A_THREAD))
    others = [_threads(parts - 1).submit(_run_part, jobs, part, parts) for part in range(1, parts)]
    _run_part(jobs, 0, parts)
    for other in others:
        other.result()


def _run_part(jobs: list[Job], part: int, parts: int) -> None:
    for kernel, numel, arrays in jobs:
        blocks = bitmap.num_blocks(numel)
        kernel(*arrays, blocks * part // parts, blocks * (part + 1) // parts)


@lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="samo")


# A forked child (a data loader's worker) inherits the pool but none of its threads.
os.register_at_fork(after_in_child=_threads.cache_clear)

_jit = njit(nogil=True, cache=True, error_model="numpy")
"""numpy's error model, since Python's check for a division by zero forbids vector instructions."""


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
    return range(block * _BLOCK_PAIRS, min((block + 1) * _BLOCK_PAIRS, pairs.size))


@_jit
def _widen(half):
    """Return the bits of a bfloat16 as those of the same float32."""
    return np.int32(np.uint32(half) << np.uint32(16))


@_jit
def _move_blocks(dense, pairs, offsets, out, first, end):
    for block in range(first, end):
        at = offsets[block]
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                out[at] = dense[index * _PAIR_BITS + _lowest_bit(bits)]
                at += 1
                bits &= bits - np.uint64(1)


@_jit
def _add_blocks(dense, pairs, offsets, out, first, end):
    for block in range(first, end):
        at = offsets[block]
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                out[at] += dense[index * _PAIR_BITS + _lowest_bit(bits)]
                at += 1
                bits &= bits - np.uint64(1)


@_jit
def _move_wider_blocks(dense, pairs, offsets, out, first, end):
    out_bits = out.view(np.int32)
    for block in range(first, end):
        at = offsets[block]
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                out_bits[at] = _widen(dense[index * _PAIR_BITS + _lowest_bit(bits)])
                at += 1
                bits &= bits - np.uint64(1)


@_jit
def _add_wider_blocks(dense, pairs, offsets, out, first, end):
    value_bits = np.empty(1, dtype=np.int32)
    value = value_bits.view(np.float32)
    for block in range(first, end):
        at = offsets[block]
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                value_bits[0] = _widen(dense[index * _PAIR_BITS + _lowest_bit(bits)])
                out[at] += value[0]
                at += 1
                bits &= bits - np.uint64(1)


@_jit
def _add_bf16_blocks(dense, pairs, offsets, out, first, end):
    value_bits = np.empty(2, dtype=np.int32)
    value = value_bits.view(np.float32)
    for block in range(first, end):
        at = offsets[block]
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                value_bits[0] = _widen(out[at])
                value_bits[1] = _widen(dense[index * _PAIR_BITS + _lowest_bit(bits)])
                value[0] += value[1]
                if np.isnan(value[0]):
                    out[at] = np.uint16(0x7FC0)
                else:  # half to even, as torch rounds a sum
                    odd = (value_bits[0] >> 16) & 1
                    out[at] = np.uint16((value_bits[0] + 0x7FFF + odd) >> 16)
                at += 1
                bits &= bits - np.uint64(1)


@_jit
def _expand_blocks(values, pairs, offsets, dense, first, end):
    for block in range(first, end):
        at = offsets[block]
        dense[block * _BLOCK_BITS : (block + 1) * _BLOCK_BITS] = 0
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                dense[index * _PAIR_BITS + _lowest_bit(bits)] = values[at]
                at += 1
                bits &= bits - np.uint64(1)


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
    kept = np.empty(_BLOCK_BITS, dtype=dense.dtype)
    for block in range(first, end):
        if pairs.size == 0:
            at = block * _BLOCK_BITS
            to = min(at + _BLOCK_BITS, dense.size)
            _update(dense[at:to], grad[at:to], exp_avg[at:to], exp_avg_sq[at:to], scalars)
            continue
        at = offsets[block]
        count = 0
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                kept[count] = dense[index * _PAIR_BITS + _lowest_bit(bits)]
                count += 1
                bits &= bits - np.uint64(1)
        to = at + count
        _update(kept[:count], grad[at:to], exp_avg[at:to], exp_avg_sq[at:to], scalars)
        count = 0
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                dense[index * _PAIR_BITS + _lowest_bit(bits)] = kept[count]
                count += 1
                bits &= bits - np.uint64(1)


@_jit
def _adamw_bf16_blocks(dense, pairs, offsets, rest, grad, exp_avg, exp_avg_sq, scalars, first, end):
    upper = np.empty(_BLOCK_BITS, dtype=np.uint16)
    param_bits = np.empty(_BLOCK_BITS, dtype=np.int32)
    grad_bits = np.empty(_BLOCK_BITS, dtype=np.int32)
    param, wide_grad = param_bits.view(np.float32), grad_bits.view(np.float32)
    for block in range(first, end):
        if pairs.size == 0:
            at = block * _BLOCK_BITS
            count = min(_BLOCK_BITS, dense.size - at)
            upper[:count] = dense[at : at + count]
        else:
            at = offsets[block]
            count = 0
            for index in _pairs_of(block, pairs):
                bits = pairs[index]
                while bits != 0:
                    upper[count] = dense[index * _PAIR_BITS + _lowest_bit(bits)]
                    count += 1
                    bits &= bits - np.uint64(1)
        to = at + count
        for k in range(count):
            param_bits[k] = _widen(upper[k]) + rest[at + k]
        _read_grad(grad[at:to], grad_bits, wide_grad)
        _update(param[:count], wide_grad[:count], exp_avg[at:to], exp_avg_sq[at:to], scalars)
        for k in range(count):
            rounded = (param_bits[k] + 0x8000) >> 16
            rest[at + k] = np.int16(param_bits[k] - (rounded << 16))
            upper[k] = np.uint16(rounded)
        if pairs.size == 0:
            dense[at:to] = upper[:count]
            continue
        count = 0
        for index in _pairs_of(block, pairs):
            bits = pairs[index]
            while bits != 0:
                dense[index * _PAIR_BITS + _lowest_bit(bits)] = upper[count]
                count += 1
                bits &= bits - np.uint64(1)


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
