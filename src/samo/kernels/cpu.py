"""The fast path on a CPU: hands tensors to the loops of ``cpu_masks.py`` and ``cpu_adamw.py``.

Work is split among as many threads as torch uses. They are OpenMP's, as torch's are: OpenMP threads
spin for some milliseconds after every torch operation, and would compete with any others.
``docs/decisions/0003-cpu-kernels.md`` compares alternatives.

``reference`` does the rest: float16, tensors with strides, 8-bit state of float64.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any, Final

import numba
import numpy as np
import torch
from torch import Tensor

from samo.kernels import cpu_adamw, cpu_masks, reference
from samo.kernels.checks import EXPONENTS, check_pair, is_plain
from samo.kernels.protocol import AdamWSettings, AdamWUpdate
from samo.kernels.reference import OLDEST, corrections_by_age, count_step
from samo.mask import bitmap
from samo.mask.mask import Mask

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, so the reference is faster")

_BLOCKS_A_THREAD: Final = 16
"""Starting another thread costs about 5 us, the time of some 10 blocks."""


def compress_(dense: Tensor, mask: Mask | None, out: Tensor) -> None:
    """Write the kept entries of ``dense`` to ``out``: `Kernels.compress_`."""
    if mask is None or not _is_covered(dense, out):
        reference.compress_(dense, mask, out)
        return
    check_pair(out, mask, dense)
    if out.is_meta:
        return
    _move(cpu_masks.compress_blocks, cpu_masks.compress_shared, mask, dense, out)


def expand_(values: Tensor, mask: Mask | None, dense: Tensor) -> None:
    """Write ``values`` to the kept entries of ``dense`` and 0 elsewhere: `Kernels.expand_`."""
    if mask is None or not _is_covered(values, dense):
        reference.expand_(values, mask, dense)
        return
    check_pair(values, mask, dense)
    if dense.is_meta:
        return
    _move(cpu_masks.expand_blocks, cpu_masks.expand_shared, mask, values, dense)


@torch.no_grad()
def adamw_(updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None) -> None:
    """Do one AdamW step; each block of a dense copy is written right after its values."""
    if skip is not None and bool(skip):
        return
    together: dict[tuple[torch.dtype | bool, ...], list[AdamWUpdate]] = {}
    others, refreshed = [], []
    for update in updates:
        fits = is_plain(update, _SEEN_AS)
        if not fits and update.dense is not None:
            # Written afterwards, so that values do not depend on whether there is such a copy.
            refreshed.append((update.param, update.mask, update.dense))
            update = update._replace(dense=None)
            fits = is_plain(update, _SEEN_AS)
        if fits and not (update.is_lean and update.param.dtype == torch.float64):
            copy = update.param if update.dense is None else update.dense
            kind = update.is_lean, update.age is not None
            key = update.param.dtype, update.grad.dtype, copy.dtype, *kind
            together.setdefault(key, []).append(update)
        else:
            others.append(update)
    reference.adamw_(others, settings, None)
    for members in together.values():
        _update_rows(members, settings)
    for values, mask, dense in refreshed:
        expand_(values, mask, dense)


def find_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether any entry is NaN or infinite: `Kernels.find_nonfinite`."""
    together: dict[torch.dtype, list[tuple[int, int]]] = {}
    plain = [each if each.is_contiguous() else each.contiguous() for each in tensors]
    for tensor in plain:
        together.setdefault(tensor.dtype, []).append((tensor.data_ptr(), tensor.numel()))
    found = False
    for dtype, rows in together.items():
        exponent = _EXPONENTS[dtype]
        blocks = max(1, bitmap.num_blocks(sum(size for _, size in rows)))
        arrays = (np.array(rows, dtype=np.int64), np.empty(0, exponent.dtype), exponent, blocks)
        kernels = cpu_adamw.find_exponent_rows, cpu_adamw.find_exponent_rows_shared
        found |= _run(*kernels, arrays, blocks)
    return torch.tensor(bool(found), device="cpu")


_EXPONENTS: Final[dict[torch.dtype, Any]] = {
    dtype: np.dtype(f"u{dtype.itemsize}").type(bits) for dtype, bits in EXPONENTS.items()
}

_SEEN_AS: Final[dict[torch.dtype, Any]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bfloat16: np.uint16,
}
"""The numpy type in which the loops get each type."""


def _update_rows(updates: Sequence[AdamWUpdate], settings: AdamWSettings) -> None:
    """Update plain parameters of the same types and the same kind of state."""
    first = updates[0]
    is_lean, has_ages = first.is_lean, first.age is not None
    wide = np.float64 if first.param.dtype == torch.float64 else np.float32
    scalars = [_scalars(update, settings) for update in updates]  # counts the steps
    tables: dict[object, Tensor] = {}
    rows, ends, seeds, blocks = [], [], [], 0
    for update in updates:
        rate = (float(update.lr), getattr(update.lr, "dtype", None)) if has_ages else None
        if rate is not None and rate not in tables:
            tables[rate] = corrections_by_age(update, settings)
            tables[rate][0].neg_()
        # Groups of 8-bit codes and dense copies follow the mask; all else is a plain vector.
        mask = update.mask if is_lean or update.dense is not None else None
        numel = update.param.numel() if mask is None else mask.numel
        rows.append(_row(update, tables.get(rate), mask, numel))
        seeds.append(int(update.step) * 0x85EBCA77 & 0xFFFFFFFF if is_lean else 0)
        blocks += bitmap.num_blocks(numel)
        ends.append(blocks)
    dense = first.param if first.dense is None else first.dense
    types = (
        _SEEN_AS[first.param.dtype],
        np.int8 if is_lean else np.int16,
        _SEEN_AS[first.grad.dtype],
        np.int8 if is_lean else wide,
        np.uint8 if is_lean else wide,
        np.int16 if has_ages else np.bool_,
        _SEEN_AS[dense.dtype],
    )
    arrays = (
        np.array(rows, dtype=np.int64),
        np.array(scalars, dtype=wide),
        np.array(seeds, dtype=np.uint32),
        np.array(ends, dtype=np.int64),
        OLDEST if has_ages else 0,
        tuple(np.empty(0, kind) for kind in types),
    )
    _run(cpu_adamw.adamw_rows, cpu_adamw.adamw_rows_shared, arrays, blocks)


def _row(
    update: AdamWUpdate, table: Tensor | None, mask: Mask | None, numel: int
) -> tuple[int, ...]:
    """Return a parameter's row, in the order of the loops' columns."""
    # Written out: a small model waits for this in each step, and a loop costs 5 % of it.
    return (
        update.param.data_ptr(),
        0 if update.remainder is None else update.remainder.data_ptr(),
        update.grad.data_ptr(),
        update.exp_avg.data_ptr(),
        update.exp_avg_sq.data_ptr(),
        0 if update.age is None else update.age.data_ptr(),
        0 if table is None else table.data_ptr(),
        0 if update.dense is None else update.dense.data_ptr(),
        0 if mask is None else mask.words.data_ptr(),
        0 if mask is None else mask.offsets.data_ptr(),
        0 if update.exp_avg_scale is None else update.exp_avg_scale.data_ptr(),
        0 if update.exp_avg_sq_scale is None else update.exp_avg_sq_scale.data_ptr(),
        update.param.numel(),
        numel,
    )


def _scalars(update: AdamWUpdate, settings: AdamWSettings) -> tuple[float, ...]:
    """Count a parameter's step, and return its scalars in the loops' order."""
    step_size, denominator, decay = map(float, count_step(update, settings, None))
    beta1, beta2, eps = settings
    return decay, 1 - beta1, beta2, 1 - beta2, eps, -step_size, denominator


def _is_covered(source: Tensor, target: Tensor) -> bool:
    return source.dtype in _SEEN_AS and target.dtype in _SEEN_AS and target.is_contiguous()


def _move(
    alone: cpu_masks.Kernel, shared: cpu_masks.Kernel, mask: Mask, source: Tensor, target: Tensor
) -> None:
    """Run a kernel over all blocks of a mask."""
    words, offsets = mask.words.numpy().view(np.uint64), mask.offsets.numpy()
    _run(alone, shared, (_array(source), words, offsets, _array(target)), offsets.size)


def _run(
    alone: cpu_masks.Kernel, shared: cpu_masks.Kernel, arrays: tuple[Any, ...], blocks: int
) -> Any:
    """Run a kernel over ``blocks`` blocks, shared among threads if there are enough."""
    most = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS) if _has_openmp else 1
    parts = min(most, blocks // _BLOCKS_A_THREAD)
    if parts <= 1:
        return alone(*arrays, 0, blocks)
    before = numba.get_num_threads()
    numba.set_num_threads(parts)
    try:
        return shared(*arrays, blocks, parts)
    finally:
        numba.set_num_threads(before)


def _array(tensor: Tensor) -> cpu_masks.Array:
    """Return a tensor as a vector in the type of the loops, over the same memory if contiguous."""
    # A reshape to a vector would be a view with strides where every second entry is wanted, say.
    flat = tensor.detach().resolve_neg().contiguous().view(-1)
    # Not Tensor.numpy(), after which torch could not free the memory of FSDP2's whole parameters.
    if flat.element_size() == 2:
        return np.from_dlpack(flat.view(torch.int16)).view(_SEEN_AS[flat.dtype])
    return np.from_dlpack(flat)


# numba's other thread pools cannot be entered by two threads at once.
_has_openmp = importlib.util.find_spec("numba.np.ufunc.omppool") is not None
if _has_openmp and numba.config.THREADING_LAYER == "default":
    numba.config.THREADING_LAYER = "omp"


def _use_one_thread() -> None:
    global _has_openmp
    _has_openmp = False


# GNU's OpenMP kills a forked child that uses it after its parent did.
os.register_at_fork(after_in_child=_use_one_thread)
