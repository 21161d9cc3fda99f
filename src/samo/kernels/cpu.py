"""The fast path on a CPU: hands tensors to the compiled loops of ``cpu_loops.py``.

``docs/decisions/0003-cpu-kernels.md`` has the candidates that were measured. Work is shared among
torch's number of threads. They are OpenMP's, as torch's are: threads of Python's own would share
their cores with OpenMP's, which spin for some milliseconds after every torch operation in the hope
of more.

What the loops do not cover (float16 parameters, 8-bit state, tensors with strides) falls back to
``reference``.
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

from samo.kernels import cpu_loops, reference
from samo.kernels.checks import check_pair, is_plain
from samo.kernels.protocol import AdamWSettings, AdamWUpdate
from samo.kernels.reference import OLDEST, corrections_by_age, count_step
from samo.mask import bitmap
from samo.mask.mask import Mask

if numba.config.DISABLE_JIT:
    raise ImportError(
        "numba does not compile here (NUMBA_DISABLE_JIT is set), so the reference is faster"
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
        _run(cpu_loops.compress_blocks, mask, dense.detach().reshape(-1), out.detach().view(-1))
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
        _run(cpu_loops.expand_blocks, mask, values.detach().reshape(-1), dense.detach().view(-1))
    else:
        reference.expand_(values, mask, dense)


@torch.no_grad()
def adamw_(updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None) -> None:
    """Do one AdamW step; each block of a dense copy is written as soon as its values are new."""
    if skip is not None and bool(skip):
        return
    together: dict[tuple[torch.dtype | bool, ...], list[AdamWUpdate]] = {}
    others = []
    for update in updates:
        if _is_plain(update):
            copy = update.param if update.dense is None else update.dense
            key = update.param.dtype, update.grad.dtype, copy.dtype, update.age is not None
            together.setdefault(key, []).append(update)
        else:
            others.append(update)
    reference.adamw_(others, settings, None)
    for members in together.values():
        _update_rows(members, settings)


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
            found |= cpu_loops.find_exponent_rows(*arrays, 0, 1)
        else:
            with _threads(parts):
                found |= cpu_loops.find_exponent_rows_shared(*arrays, parts)
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


def _update_rows(updates: Sequence[AdamWUpdate], settings: AdamWSettings) -> None:
    """Update plain parameters of the same types, all with ages or all without."""
    first = updates[0]
    has_ages = first.age is not None
    moment = np.float64 if first.param.dtype == torch.float64 else np.float32
    tables: dict[_Rate, Tensor] = {}
    for update in updates if has_ages else ():
        if (rate := _rate_of(update)) not in tables:
            tables[rate] = corrections_by_age(update, settings)
            tables[rate][0].neg_()
    blocks = [
        bitmap.num_blocks(update.param.numel() if mask is None else mask.numel)
        for update in updates
        for mask in (update.mask_of_copy,)
    ]
    ends = np.cumsum(blocks)
    dense = first.param if first.dense is None else first.dense
    arrays: tuple[Any, ...] = (
        np.array([_row(update, tables) for update in updates], dtype=np.int64),
        np.array([_scalars(update, settings) for update in updates], dtype=moment),
        ends,
        OLDEST if has_ages else 0,
        np.empty(0, _SEEN_AS[first.param.dtype]),
        np.empty(0, _SEEN_AS[first.grad.dtype]),
        np.empty(0, moment),
        np.empty(0, np.int16 if has_ages else np.bool_),
        np.empty(0, _SEEN_AS[dense.dtype]),
    )
    parts = _num_threads(int(ends[-1]))
    if parts == 1:
        cpu_loops.adamw_rows(*arrays, 0, int(ends[-1]))
    else:
        with _threads(parts):
            cpu_loops.adamw_rows_shared(*arrays, parts)


_Rate = tuple[float, torch.dtype | None]


def _rate_of(update: AdamWUpdate) -> _Rate:
    """Return a learning rate and the type it is computed with, if it is a tensor."""
    return float(update.lr), update.lr.dtype if isinstance(update.lr, Tensor) else None


def _scalars(update: AdamWUpdate, settings: AdamWSettings) -> tuple[float, ...]:
    """Return what the entries of a parameter share, in the loops' order; counts its step."""
    step_size, denominator, decay = map(float, count_step(update, settings, None))
    beta1, beta2, eps = settings
    return decay, 1 - beta1, beta2, 1 - beta2, eps, -step_size, denominator


def _is_covered(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether the loops move entries of one type to another."""
    return source in _SEEN_AS and target in _SEEN_AS


def _run(kernel: cpu_loops.Kernel, mask: Mask, source: Tensor, target: Tensor) -> None:
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
            cpu_loops.SHARED[kernel](*arrays, blocks, parts)


def _array(tensor: Tensor) -> cpu_loops.Array:
    """Return a contiguous tensor as an array over the same memory, in the type of the cpu_loops."""
    # Not by Tensor.numpy(): from then on torch could not free the memory of FSDP2's whole
    # parameters.
    if tensor.element_size() == 2:
        return np.from_dlpack(tensor.view(torch.int16)).view(_SEEN_AS[tensor.dtype])
    return np.from_dlpack(tensor)


def _row(update: AdamWUpdate, tables: dict[_Rate, Tensor]) -> tuple[int, ...]:
    """Return what the loops have to know of one parameter, in the order of their columns."""
    mask, dense, age = update.mask_of_copy, update.dense, update.age
    return (
        update.param.data_ptr(),
        0 if update.remainder is None else update.remainder.data_ptr(),
        update.grad.data_ptr(),
        update.exp_avg.data_ptr(),
        update.exp_avg_sq.data_ptr(),
        0 if age is None else age.data_ptr(),
        0 if age is None else tables[_rate_of(update)].data_ptr(),
        0 if dense is None else dense.data_ptr(),
        0 if mask is None else mask.words.data_ptr(),
        0 if mask is None else mask.offsets.data_ptr(),
        update.param.numel(),
        0 if dense is None else dense.numel(),
    )


def _is_plain(update: AdamWUpdate) -> bool:
    """Return whether the loops can do an update from addresses and sizes."""
    return not update.is_lean and is_plain(update, _SEEN_AS)


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
