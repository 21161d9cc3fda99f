"""The fast path on an NVIDIA GPU: hands tensors to the Triton kernels.

``docs/decisions/0011-triton-kernels.md`` explains the choices. Nothing here waits for the device:
sizes and numbers of kept entries are on the host. All parameters of an AdamW step go into a few
launches: ``triton_tables.py``.

``reference`` does the rest: float64 updates, parameters with strides.
"""

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from samo.kernels import lean, reference, triton_adamw, triton_masks, triton_tables as tables
from samo.kernels.checks import EXPONENTS, check_pair, is_plain
from samo.kernels.protocol import AdamWSettings, AdamWUpdate
from samo.kernels.triton_adamw import BITMAP, COLUMNS, DENSE, SCALARS
from samo.kernels.triton_masks import KINDS
from samo.kernels.triton_tables import Table, Where, addresses_of, are_aligned, device_of
from samo.mask import bitmap
from samo.mask.mask import Mask

IS_INTERPRETED: Final = bool(triton_masks.IS_INTERPRETED)
PART: Final = 1024
UNITS: Final = 4
"""Entries to a part; blocks of a pruned weight, or parts of any other parameter, to an item."""

INTEGERS: Final = {2: tl.int16, 4: tl.int32, 8: tl.int64}
"""By size: the type of integers as which a search for nonfinite entries reads them."""

_FEW: Final = 0.2
"""Density up to which a search for each kept entry is cheaper than a count for each entry."""

_MAX_REGISTERS: Final = {32: None, 64: None, 128: 72, 256: 128}
"""By slots: with fewer registers more programs run at once (H200, 2026-11-15: 3 to 10 %)."""

assert PART % lean.UNPRUNED_GROUP == 0


# compress and expand -----------------------------------------------------------------------------


def compress_(dense: Tensor, mask: Mask | None, out: Tensor) -> None:
    """Write the kept entries of ``dense`` to ``out``: `Kernels.compress_`."""
    if mask is None or not (_is_covered(dense.dtype, out.dtype) and out.is_contiguous()):
        reference.compress_(dense, mask, out)
        return
    check_pair(out, mask, dense)
    launch_compress(compress_slots(mask.kept, mask.numel), dense, mask, out)


def expand_(values: Tensor, mask: Mask | None, dense: Tensor) -> None:
    """Write ``values`` to the kept entries of ``dense`` and 0 elsewhere: `Kernels.expand_`."""
    check_pair(values, mask, dense)
    if mask is None:
        reference.expand_(values, None, dense)
    elif dense.is_contiguous():
        launch_expand(values, mask, dense)
    else:
        plain = torch.empty_like(dense, memory_format=torch.contiguous_format)
        launch_expand(values, mask, plain)
        dense.detach().copy_(plain)


@lru_cache(maxsize=1024)  # called in each backward pass, for each weight
def compress_slots(kept: int, numel: int) -> int | None:
    """Return how many slots to search at once; None to count for each entry instead."""
    if kept > _FEW * numel:
        return None
    return slots(bitmap.BLOCK_BITS * kept / max(numel, 1), deviations=3)


def slots(mean: float, deviations: int) -> int:
    """Return the slots that fit nearly every block, given their mean: a power of 2, 32 to 256."""
    likely = int(mean + deviations * mean**0.5)
    return min(256, max(32, 1 << (max(likely, 1) - 1).bit_length()))


def launch_compress(slots: int | None, dense: Tensor, mask: Mask, out: Tensor) -> None:
    """Compress by slot, or by entry if ``slots`` is None."""
    if mask.kept == 0:
        return
    source, target = _raw(dense.resolve_neg().contiguous()), _raw(out)
    words, grid = mask.words.numel(), (mask.offsets.numel(),)
    with device_of(dense):
        if slots is None:
            triton_masks.compress_by_entry_kernel[grid](
                *(source, mask.words, mask.offsets, target, mask.numel, words),
                num_warps=2,
            )
        else:
            triton_masks.compress_by_slot_kernel[grid](
                *(source, mask.words, mask.offsets, 0, target, words // 2),
                SLOTS=slots,
                num_warps=1,
            )


def launch_expand(values: Tensor, mask: Mask, dense: Tensor) -> None:
    """Expand to a contiguous tensor."""
    if mask.numel == 0:
        return
    if not _is_covered(values.dtype, dense.dtype):
        values = values.detach().to(dense.dtype)
    source = _raw(values if values.is_contiguous() else values.contiguous())
    with device_of(dense):
        triton_masks.expand_kernel[(mask.offsets.numel(),)](
            *(source, mask.words, mask.offsets, 0, source, _raw(dense), mask.numel),
            mask.words.numel(),
            num_warps=2,
        )


def _is_covered(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether the kernels convert one type to another."""
    return source == target or (source in KINDS and target in KINDS)


_SEEN_AS: Final = {torch.bfloat16: torch.int16, torch.float64: torch.int64}
"""Types that the kernels get as integers."""


def _raw(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as the kernels get it, without a graph."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    seen_as = _SEEN_AS.get(plain.dtype)
    return plain if seen_as is None else plain.view(seen_as)


# Nonfinite values --------------------------------------------------------------------------------


def find_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether any entry is NaN or infinite: `Kernels.find_nonfinite`."""
    device = tensors[0].device if tensors else torch.device("cpu")
    found = torch.zeros((), dtype=torch.bool, device=device)
    where = tables.where_of(device)
    list_parts = _list_parts if where.is_captured else _listed_parts
    dtypes = {*map(_dtype, tensors)}
    for dtype in dtypes:
        members = [t for t in tensors if t.dtype == dtype] if len(dtypes) > 1 else tensors
        if not all(map(Tensor.is_contiguous, members)):
            members = [tensor.detach().contiguous() for tensor in members]
        table, items = list_parts(where, tuple(map(Tensor.numel, members)))
        if not items.numel():
            continue
        addresses = addresses_of(members)
        with device_of(found):
            triton_adamw.find_exponent_kernel[(items.numel() * UNITS,)](
                table,
                tables.send(where, addresses),
                items,
                found.view(torch.int8),
                EXPONENT=EXPONENTS[dtype],
                KIND=INTEGERS[dtype.itemsize],
                IS_ALIGNED=are_aligned(addresses),
                PARTS=UNITS,
                PART=PART,
            )
    return found


def _list_parts(where: Where, numels: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return a table of tensors of these sizes, and the list of their parts."""
    counts = [-(-numel // (PART * UNITS)) for numel in numels]
    items, firsts = tables.list_items(where, range(len(numels)), counts)
    return tables.send(where, np.array([*zip(numels, firsts)], dtype=np.int64)), items


_listed_parts: Final = lru_cache(maxsize=8)(_list_parts)


# AdamW -------------------------------------------------------------------------------------------


class _Launch(NamedTuple):
    """One launch of a kernel over many parameters: what stays the same from step to step."""

    kernel: Any
    items: Tensor
    is_aligned: bool  # all addresses but the gradients' are multiples of 16 bytes
    options: dict[str, Any]


class _Plan(NamedTuple):
    """How each of some updates is done, by index."""

    others: list[int]  # by the reference
    refreshed: list[int]  # their dense copy is written afterwards
    members: list[int]  # by the kernels
    table: Tensor  # rows of the members
    launches: list[_Launch]
    copies: list[tuple[Tensor, _Launch]]
    """Tables of pruned weights with a dense copy, by types, and the launches that write them."""


_plans: list[tuple[list[object], _Plan]] = []
"""The latest plans by fingerprints of their updates; replaced as a whole, for thread safety."""
_MAX_PLANS: Final = 8
_SCALARS_SIZE: Final = 128


def adamw_(updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None) -> None:
    """Do one AdamW step: one launch for the step counts, one for each kind of parameter."""
    if not updates:
        return
    where = tables.where_of(updates[0].param.device)
    plan = _plan_of(where, updates)
    if plan.others:
        others = [updates[index] for index in plan.others]
        if where.is_captured and any(update.age is not None for update in others):
            tables.hold(*reference.bias_corrections(settings.beta1, settings.beta2, where.device))
        # Without the copies, for which the reference would copy the mask's offsets to the host.
        reference.adamw_([update._replace(dense=None) for update in others], settings, skip)
    if members := plan.members:
        together = updates if len(members) == len(updates) else [updates[i] for i in members]
        _launch(where, plan, together, settings, skip)
    for index in plan.refreshed:
        _refresh(updates[index], skip)


def _plan_of(where: Where, updates: Sequence[AdamWUpdate]) -> _Plan:
    """Return the plan of some updates: an earlier one if only gradients have moved."""
    global _plans
    if where.is_captured:
        return _make_plan(where, updates)
    key = tables.fingerprint(where, updates)
    for known, plan in _plans:
        if known == key:
            return plan
    plan = _make_plan(where, updates)
    _plans = [(key, plan), *_plans[: _MAX_PLANS - 1]]
    return plan


def _make_plan(where: Where, updates: Sequence[AdamWUpdate]) -> _Plan:
    others, refreshed, members = [], [], []
    plain: list[AdamWUpdate] = []
    for index, update in enumerate(updates):
        if update.dense is not None and not update.dense.is_contiguous():
            refreshed.append(index)
            update = update._replace(dense=None)
        if is_plain(update, KINDS):
            members.append(index)
            plain.append(update)
        else:
            others.append(index)
            if update.dense is not None:
                refreshed.append(index)
    return _Plan(others, refreshed, members, *_make_launches(where, plain))


def _make_launches(
    where: Where, updates: list[AdamWUpdate]
) -> tuple[Tensor, list[_Launch], list[tuple[Tensor, _Launch]]]:
    """Make the tables of plain parameters, and decide what is launched for which of them.

    Two passes, over the values and then over the dense copies of pruned weights, are faster than
    one that scatters each updated value: a copy is written in whole sectors.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    copied: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index, update in enumerate(updates):
        # Groups of 8-bit codes follow the blocks of the mask; all other values are a plain vector.
        is_by_block = update.is_lean and update.mask is not None
        copy = None if update.dense is None else update.dense.dtype
        if update.mask is not None and copy is not None:
            copied.setdefault((update.param.dtype, copy), []).append(index)
            copy = None
        types = (update.param.dtype, update.grad.dtype, copy)
        kind = (*types, is_by_block, update.is_lean, update.age is not None)
        kinds.setdefault(kind, []).append(index)
    table = np.zeros((len(updates), COLUMNS.value), dtype=np.int64)
    launches = []
    for (dtype, grad_dtype, copy, is_by_block, is_lean, has_ages), rows in kinds.items():
        chosen = [updates[row] for row in rows]
        options: dict[str, Any] = {
            "WEIGHT": KINDS[dtype],
            "REMAINDERS": tl.int8 if is_lean else tl.int16,  # only read for bfloat16
            "GRADIENT": KINDS[grad_dtype],
            "enable_fp_fusion": False,  # a multiply and an add round twice, as torch's do
        }
        kernel = triton_adamw.adamw_kernel
        if is_by_block:
            kernel = triton_adamw.adamw_lean_kept_kernel
            slots = lean_slots([update.mask for update in chosen if update.mask is not None])
            options |= {"BLOCKS": UNITS, "SLOTS": slots}
            options |= {"num_warps": 1, "maxnreg": _MAX_REGISTERS[slots]}
        else:
            options |= {"PARTS": UNITS, "PART": PART, "num_warps": 8, "IS_LEAN": is_lean}
            options["COPY"] = None if copy is None else KINDS[copy]
            options["OLDEST"] = reference.OLDEST if has_ages else 0
        items = _fill(where, table, rows, chosen, is_by_block)
        if items.numel():
            is_aligned = are_aligned(table[rows, : BITMAP.value])
            launches.append(_Launch(kernel, items, is_aligned, options))
    copies = []
    for (dtype, copy), rows in copied.items():
        chosen = [updates[row] for row in rows]
        copy_table = np.zeros((len(rows), COLUMNS.value), dtype=np.int64)
        items = _fill(where, copy_table, range(len(rows)), chosen, True)
        if items.numel():
            is_aligned = are_aligned(copy_table[:, [DENSE.value, BITMAP.value]])
            options = {"VALUES": KINDS[dtype], "COPY": KINDS[copy], "IS_ALIGNED": is_aligned}
            options |= {"BLOCKS": UNITS, "num_warps": 2}
            launch = _Launch(triton_adamw.expand_rows_kernel, items, is_aligned, options)
            copies.append((tables.send(where, copy_table), launch))
    return tables.send(where, table), launches, copies


def _fill(
    where: Where, table: Table, rows: Sequence[int], updates: list[AdamWUpdate], is_by_block: bool
) -> Tensor:
    """Write the rows of some parameters, and return the items of their entries or blocks."""
    sizes = [
        update.mask.numel if is_by_block and update.mask is not None else update.param.numel()
        for update in updates
    ]
    size = UNITS * (bitmap.BLOCK_BITS if is_by_block else PART)
    items, firsts = tables.list_items(where, rows, [-(-numel // size) for numel in sizes])
    for row, update, numel, first in zip(rows, updates, sizes, firsts):
        table[row] = tables.row_of(update, numel, first)
    return items


def lean_slots(masks: Sequence[Mask]) -> int:
    """Return the slots that fit nearly every group of some pruned weights."""
    numel = sum(mask.numel for mask in masks)
    return slots(lean.GROUP * sum(mask.kept for mask in masks) / max(numel, 1), deviations=2)


_dtype, _grad, _lr, _weight_decay = map(attrgetter, ("dtype", "grad", "lr", "weight_decay"))


def _launch(
    where: Where,
    plan: _Plan,
    updates: Sequence[AdamWUpdate],
    settings: AdamWSettings,
    skip: Tensor | None,
) -> None:
    """Count the steps of a plan's members, update them and write their dense copies."""
    beta1, beta2, eps = settings
    addresses = addresses_of([*map(_grad, updates)])
    grads = tables.send(where, addresses)
    is_aligned, count = are_aligned(addresses), len(updates)
    scalars = torch.empty(count, SCALARS.value, dtype=torch.float64, device=where.device)
    skip = torch.zeros((), dtype=torch.bool, device=where.device) if skip is None else skip
    skip_at = skip.view(torch.int8)
    rates, lr = tables.numbers(where, list(map(_lr, updates)))
    decays, decay = tables.numbers(where, list(map(_weight_decay, updates)))
    with device_of(scalars):
        triton_adamw.adamw_scalars_kernel[(-(-count // _SCALARS_SIZE),)](
            *(plan.table, scalars, skip_at),
            # A pointer that is not used still needs a tensor.
            scalars if rates is None else rates,
            scalars if decays is None else decays,
            *(lr, decay, float(beta1), float(beta2), count),
            HAS_RATES=rates is not None,
            HAS_DECAYS=decays is not None,
            SIZE=_SCALARS_SIZE,
        )
    by_age = (scalars, scalars)
    if any(launch.options.get("OLDEST") for launch in plan.launches):
        by_age = _corrections(beta1, beta2, where.device)
        if where.is_captured:
            tables.hold(*by_age)
    numbers = (1.0 - beta1, float(beta2), 1.0 - beta2, float(eps))  # 0 would be another type
    with device_of(grads):
        for launch in plan.launches:
            changing = {"IS_SMALL": 1 - beta1 < 0.5}
            ages: tuple[Tensor, ...] = ()
            if launch.kernel is triton_adamw.adamw_kernel:
                changing["IS_ALIGNED"] = is_aligned and launch.is_aligned
                ages = by_age
            launch.kernel[(launch.items.numel() * UNITS,)](
                *(plan.table, grads, launch.items, scalars, skip_at, *ages, *numbers),
                **changing,
                **launch.options,
            )
        for copy_table, launch in plan.copies:
            launch.kernel[(launch.items.numel() * UNITS,)](
                *(copy_table, launch.items, skip_at),
                **launch.options,
            )


@lru_cache(maxsize=8)
def _corrections(beta1: float, beta2: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inverse of the first bias correction, and the root of the second one, by age."""
    first, second = reference.bias_corrections(beta1, beta2, device)
    return first.reciprocal(), second.to(torch.float32)


def _refresh(update: AdamWUpdate, skip: Tensor | None) -> None:
    """Write a parameter to its dense copy, whatever its strides."""
    assert update.dense is not None
    new = torch.empty_like(update.dense, memory_format=torch.contiguous_format)
    expand_(update.param, update.mask, new)
    reference.put(update.dense.detach(), new, skip)
