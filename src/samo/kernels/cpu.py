"""The fast path on a CPU: hands tensors to the compiled loops of ``loops.py``.

``docs/decisions/0003-cpu-kernels.md`` has the candidates that were measured. Work is shared among
torch's number of threads. They are OpenMP's, as torch's are: threads of Python's own would share their
cores with OpenMP's, which spin for some milliseconds after every torch operation in the hope of more.

What the loops do not cover (float16, tensors with strides) falls back to ``reference``.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numba
import numpy as np
import torch
from torch import Tensor

from samo import bitmap
from samo.kernels import AdamWSettings, AdamWUpdate, loops, reference
from samo.kernels.corrections import count_step
from samo.mask import Mask

if numba.config.DISABLE_JIT:
    raise ImportError(
        "numba is told not to compile (NUMBA_DISABLE_JIT), so the reference is faster"
    )

__all__ = ["adamw_", "compress_", "expand_", "find_nonfinite"]

_BLOCKS_A_THREAD: Final = 16
"""Starting a second thread costs about 5 us, the time of some 10 blocks."""


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
    flat_N = dense.detach().reshape(-1)
    kernel = _compress_kernel(dense.dtype, out_Z.dtype, add)
    if factor is not None or not out_Z.is_contiguous():
        reference.compress_(flat_N, mask, out_Z, add=add, factor=factor)
    elif mask is None:
        out_Z.add_(flat_N) if add else out_Z.copy_(flat_N)
    elif kernel is None:
        reference.compress_(flat_N, mask, out_Z, add=add)
    else:
        _run(kernel, mask, flat_N, out_Z.detach())


def expand_(values_Z: Tensor, mask: Mask | None, dense: Tensor) -> None:
    """Write ``values_Z`` to the kept entries of ``dense`` and 0 elsewhere.

    Example: values [5, 8] with kept bits 1, 0, 0, 1 give [5, 0, 0, 8].
    """
    if mask is None or values_Z.dtype != dense.dtype or not dense.is_contiguous():
        reference.expand_(values_Z, mask, dense)
        return
    _run(loops.expand_blocks, mask, values_Z.detach().contiguous(), dense.detach().view(-1))


def adamw_(updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None) -> None:
    """Do one AdamW step: gather each block's kept weights, update them, scatter them back."""
    if skip is not None and bool(skip):
        return
    together: dict[tuple[torch.dtype, torch.dtype], list[AdamWUpdate]] = {}
    for update in updates:
        key = (update.dense.dtype, update.grad_Z.dtype)
        if key in _ADAMW_TYPES and _is_plain(update):
            together.setdefault(key, []).append(update)
        else:
            reference.adamw_([update], settings, None)
    for key, members in together.items():
        _adamw_rows(members, settings, *_ADAMW_TYPES[key])


def find_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether any entry of any tensor is NaN or infinite, as a boolean scalar."""
    together: dict[torch.dtype, list[tuple[int, int]]] = {}
    strided = []
    for tensor in tensors:
        if tensor.is_contiguous():
            together.setdefault(tensor.dtype, []).append((tensor.data_ptr(), tensor.numel()))
        else:
            strided.append(tensor)
    found = False
    for dtype, rows in together.items():
        exponent = _EXPONENTS[dtype]
        arrays = (np.array(rows, dtype=np.int64), np.empty(0, dtype=exponent.dtype), exponent)
        parts = _num_threads(bitmap.num_blocks(sum(size for _, size in rows)))
        if parts == 1:
            found |= loops.find_exponent_rows(*arrays, 0, 1)
        else:
            with _threads(parts):
                found |= loops.find_exponent_rows_shared(*arrays, parts)
    here = torch.tensor(bool(found), device="cpu")
    return here | reference.find_nonfinite(strided) if strided else here


_EXPONENTS: Final[dict[torch.dtype, Any]] = {
    torch.bfloat16: np.uint16(0x7F80),
    torch.float16: np.uint16(0x7C00),
    torch.float32: np.uint32(0x7F800000),
    torch.float64: np.uint64(0x7FF0000000000000),
}
"""Bits that are all set in infinities and NaNs and in no other number."""

_ADAMW_TYPES: Final = {
    (torch.float32, torch.float32): (np.float32, np.float32, np.float32),
    (torch.float64, torch.float64): (np.float64, np.float64, np.float64),
    (torch.bfloat16, torch.bfloat16): (np.uint16, np.uint16, np.float32),
    (torch.bfloat16, torch.float32): (np.uint16, np.float32, np.float32),
}
"""For weights and gradients of these types, how the loops see them, and the moments."""


def _adamw_rows(
    updates: Sequence[AdamWUpdate], settings: AdamWSettings, dense: Any, grad: Any, moment: Any
) -> None:
    _, beta1, beta2, eps, _ = settings
    rows = np.array([_row(update) for update in updates], dtype=np.int64)
    scalars = np.array(
        [
            (decay, 1 - beta1, beta2, 1 - beta2, eps, -step_size, denominator)
            for step_size, denominator, decay in (
                count_step(update, settings, None) for update in updates
            )
        ],
        dtype=moment,
    )
    ends = np.cumsum([bitmap.num_blocks(update.dense.numel()) for update in updates])
    arrays = (rows, scalars, ends, np.empty(0, dense), np.empty(0, grad), np.empty(0, moment))
    parts = _num_threads(int(ends[-1]))
    if parts == 1:
        loops.adamw_rows(*arrays, 0, int(ends[-1]))
    else:
        with _threads(parts):
            loops.adamw_rows_shared(*arrays, parts)


def _compress_kernel(source: torch.dtype, target: torch.dtype, add: bool) -> loops.Kernel | None:
    if source == target and not add:
        return loops.move_blocks
    kernels: dict[tuple[torch.dtype, torch.dtype, bool], loops.Kernel] = {
        (torch.float32, torch.float32, True): loops.add_blocks,
        (torch.float64, torch.float64, True): loops.add_blocks,
        (torch.bfloat16, torch.bfloat16, True): loops.add_bf16_blocks,
        (torch.bfloat16, torch.float32, True): loops.add_wider_blocks,
        (torch.bfloat16, torch.float32, False): loops.move_wider_blocks,
    }
    return kernels.get((source, target, add))


def _run(kernel: loops.Kernel, mask: Mask, source: Tensor, target: Tensor) -> None:
    """Run a kernel over all blocks of a mask, on as many threads as it is worth."""
    arrays = (
        _array(source),
        mask.words.numpy().view(np.uint64),
        mask.offsets.numpy(),
        _array(target),
    )
    blocks = mask.offsets.numel()
    parts = _num_threads(blocks)
    if parts == 1:
        kernel(*arrays, 0, blocks)
    else:
        with _threads(parts):
            loops.SHARED[kernel](*arrays, blocks, parts)


def _array(tensor: Tensor) -> loops.Array:
    """Return a contiguous tensor as an array over the same memory; 16-bit types as uint16."""
    if tensor.element_size() == 2:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _row(update: AdamWUpdate) -> tuple[int, ...]:
    """Return what ``loops`` has to know of one weight, in the order of its columns."""
    dense, mask, rest_Z, grad_Z, exp_avg_Z, exp_avg_sq_Z, *_ = update
    return (
        dense.data_ptr(),
        0 if mask is None else mask.words.data_ptr(),
        0 if mask is None else mask.offsets.data_ptr(),
        0 if rest_Z is None else rest_Z.data_ptr(),
        grad_Z.data_ptr(),
        exp_avg_Z.data_ptr(),
        exp_avg_sq_Z.data_ptr(),
        dense.numel(),
        grad_Z.numel(),
    )


def _is_plain(update: AdamWUpdate) -> bool:
    """Return whether addresses and sizes say all about a weight's tensors."""
    dense, mask, rest_Z, grad_Z, exp_avg_Z, exp_avg_sq_Z, *_ = update
    kept = dense.numel() if mask is None else mask.kept
    moment = torch.float64 if dense.dtype == torch.float64 else torch.float32
    is_rest_plain = (
        dense.dtype != torch.bfloat16
        if rest_Z is None
        else rest_Z.dtype == torch.int16 and rest_Z.numel() == kept and rest_Z.is_contiguous()
    )
    return (
        is_rest_plain
        and dense.is_contiguous()
        and grad_Z.numel() == exp_avg_Z.numel() == exp_avg_sq_Z.numel() == kept
        and exp_avg_Z.dtype == exp_avg_sq_Z.dtype == moment
        and grad_Z.is_contiguous()
        and exp_avg_Z.is_contiguous()
        and exp_avg_sq_Z.is_contiguous()
    )


def _num_threads(blocks: int) -> int:
    """Return how many threads so many blocks are worth."""
    most = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS) if _has_openmp else 1
    return max(1, min(most, blocks // _BLOCKS_A_THREAD))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let numba use so many threads, and leave its setting as it was."""
    before = numba.get_num_threads()
    numba.set_num_threads(count)
    try:
        yield
    finally:
        numba.set_num_threads(before)


# numba's other thread pools may not be entered by two threads at once.
_has_openmp = importlib.util.find_spec("numba.np.ufunc.omppool") is not None
if _has_openmp and numba.config.THREADING_LAYER == "default":
    numba.config.THREADING_LAYER = "omp"


def _use_one_thread() -> None:
    global _has_openmp
    _has_openmp = False


# GNU's OpenMP ends a forked child that uses it after its parent did.
os.register_at_fork(after_in_child=_use_one_thread)
