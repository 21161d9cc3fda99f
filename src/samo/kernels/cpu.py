"""The fast path on a CPU: hands tensors to the compiled loops of ``loops.py``.

``docs/decisions/0003-cpu-kernels.md`` has the candidates that were measured. Work is shared among
torch's number of threads. They are OpenMP's, as torch's are: threads of Python's own would share their
cores with OpenMP's, which spin for some milliseconds after every torch operation in the hope of more.

What the loops do not cover (float16 parameters, tensors with strides) falls back to ``reference``.
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

from samo.kernels import AdamWSettings, AdamWUpdate, loops, reference
from samo.kernels.corrections import count_step
from samo.kernels.rounding import master_dtype, rest_dtype
from samo.kernels.sizes import check_pair, has_plain_tensors, mask_of_copy, set_apart
from samo.mask import bitmap
from samo.mask.mask import Mask

if numba.config.DISABLE_JIT:
    raise ImportError(
        "numba is told not to compile (NUMBA_DISABLE_JIT), so the reference is faster"
    )

__all__ = ["adamw_", "compress_", "expand_", "find_nonfinite"]

_BLOCKS_A_THREAD: Final = 16
"""Starting a second thread costs about 5 us, the time of some 10 blocks."""


def compress_(dense: Tensor, mask: Mask | None, out: Tensor) -> None:
    """Write the kept entries of ``dense`` to ``out``.

    Example: dense [5, 6, 7, 8] with kept bits 1, 0, 0, 1 gives [5, 8].
    """
    check_pair(out, mask, dense)
    if mask is None:
        out.detach().copy_(dense.detach().reshape(out.shape))
    elif _is_covered(dense.dtype, out.dtype) and out.is_contiguous():
        _run(loops.compress_blocks, mask, dense.detach().reshape(-1), out.detach().view(-1))
    else:
        reference.compress_(dense, mask, out)


def expand_(values: Tensor, mask: Mask | None, dense: Tensor) -> None:
    """Write ``values`` to the kept entries of ``dense`` and 0 elsewhere.

    Example: values [5, 8] with kept bits 1, 0, 0, 1 give [5, 0, 0, 8].
    """
    check_pair(values, mask, dense)
    if mask is None:
        dense.detach().copy_(values.detach().reshape(dense.shape))
    elif _is_covered(values.dtype, dense.dtype) and dense.is_contiguous():
        _run(loops.expand_blocks, mask, values.detach().reshape(-1), dense.detach().view(-1))
    else:
        reference.expand_(values, mask, dense)


def adamw_(updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None) -> None:
    """Do one AdamW step; each block of a dense copy is written as soon as its values are new."""
    if skip is not None and bool(skip):
        return
    plain, others = set_apart(updates, is_plain)
    reference.adamw_(others, settings, None)
    update_rows(plain, settings)


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

_SEEN_AS: Final[dict[torch.dtype, Any]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
}
"""How the loops see entries of a type."""


def update_rows(
    updates: Sequence[AdamWUpdate],
    settings: AdamWSettings,
    ages: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """Update plain parameters; ``ages`` has those of each one's entries, and a table to look them up."""
    together: dict[tuple[torch.dtype, ...], list[int]] = {}
    for index, update in enumerate(updates):
        copy = update.param if update.dense is None else update.dense
        key = update.param.dtype, update.grad.dtype, copy.dtype
        together.setdefault(key, []).append(index)
    for (param, grad, dense), members in together.items():
        chosen = [updates[index] for index in members]
        moment = np.float64 if param == torch.float64 else np.float32
        ends = np.cumsum([_num_blocks(update) for update in chosen])
        arrays: tuple[Any, ...] = (
            np.array(
                [_row(updates[index], ages[index] if ages else None) for index in members],
                dtype=np.int64,
            ),
            np.array([_scalars(update, settings) for update in chosen], dtype=moment),
            ends,
            0 if not ages else ages[0][1].shape[1] - 1,
            np.empty(0, _SEEN_AS[param]),
            np.empty(0, _SEEN_AS[grad]),
            np.empty(0, moment),
            np.empty(0, np.int16 if ages else np.bool_),
            np.empty(0, _SEEN_AS[dense]),
        )
        parts = _num_threads(int(ends[-1]))
        if parts == 1:
            loops.adamw_rows(*arrays, 0, int(ends[-1]))
        else:
            with _threads(parts):
                loops.adamw_rows_shared(*arrays, parts)


def _scalars(update: AdamWUpdate, settings: AdamWSettings) -> tuple[float, ...]:
    """Return what the entries of a parameter share, in the loops' order; counts its step."""
    step_size, denominator, decay = map(float, count_step(update, settings, None))
    beta1, beta2, eps = settings
    return decay, 1 - beta1, beta2, 1 - beta2, eps, -step_size, denominator


def _num_blocks(update: AdamWUpdate) -> int:
    """Return into how many blocks the work on a parameter is cut."""
    mask = mask_of_copy(update)
    return bitmap.num_blocks(update.param.numel() if mask is None else mask.numel)


def _is_covered(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether the loops move entries of one type to another."""
    return source in _SEEN_AS and target in _SEEN_AS


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
    """Return a contiguous tensor as an array over the same memory, in the type of the loops."""
    # Not by Tensor.numpy(): from then on torch could not free the memory of FSDP2's whole parameters.
    if tensor.element_size() == 2:
        return np.from_dlpack(tensor.view(torch.int16)).view(_SEEN_AS[tensor.dtype])
    return np.from_dlpack(tensor)


def _row(update: AdamWUpdate, age: tuple[Tensor, Tensor] | None) -> tuple[int, ...]:
    """Return what ``loops`` has to know of one parameter, in the order of its columns."""
    param, rest, grad, exp_avg, exp_avg_sq, _, _, _, dense, _ = update
    mask = mask_of_copy(update)
    return (
        param.data_ptr(),
        0 if rest is None else rest.data_ptr(),
        grad.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        *((0, 0) if age is None else (age[0].data_ptr(), age[1].data_ptr())),
        0 if dense is None else dense.data_ptr(),
        0 if mask is None else mask.words.data_ptr(),
        0 if mask is None else mask.offsets.data_ptr(),
        param.numel(),
        0 if dense is None else dense.numel(),
    )


def is_plain(update: AdamWUpdate) -> bool:
    """Return whether addresses and sizes say all about a parameter's tensors, and the loops know them."""
    dtype, rest = update.param.dtype, update.rest
    return (
        dtype != torch.float16
        and update.exp_avg.dtype == update.exp_avg_sq.dtype == master_dtype(dtype)
        and (None if rest is None else rest.dtype) == rest_dtype(dtype)
        and has_plain_tensors(update, _SEEN_AS)
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
