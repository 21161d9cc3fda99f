"""The fast path on an NVIDIA GPU: hands tensors to the Triton kernels.

``docs/decisions/0011-triton-kernels.md`` says why the kernels are as they are. Nothing here waits
for the device: numbers that decide something on the host (sizes, kept entries) are on the host
already. All parameters of an AdamW step go into a few launches: ``tables.py``.

What the kernels do not cover (float64 updates, parameters with strides) falls back to
``reference``.
"""

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from samo.kernels import lean, reference, triton_common, triton_kernels, triton_lean
from samo.kernels.checks import check_pair, check_update, is_plain
from samo.kernels.protocol import AdamWSettings, AdamWUpdate
from samo.kernels.tables import (
    Table,
    Where,
    are_aligned,
    cdiv,
    device_of,
    fingerprint,
    hold,
    list_items,
    numbers,
    rate_type,
    row_of,
    send,
    where_of,
    with_addresses,
)
from samo.kernels.triton_common import BITMAP, COLUMNS, DENSE, GRAD, INTS, KINDS, SCALARS
from samo.mask import bitmap
from samo.mask.mask import Mask

__all__ = ["adamw_", "compress_", "expand_", "find_nonfinite"]


class Config(NamedTuple):
    """How a kernel is launched."""

    way: Literal["slot", "entry"]
    size: int
    """Slots, or words, that a program takes at once."""
    num_warps: int


_FEW: Final = 0.2
"""Density up to which a search for each kept entry is cheaper than a count for each entry."""

IS_INTERPRETED: Final = bool(triton_common.IS_INTERPRETED)
ITEM_BLOCKS: Final = 4
PART: Final = 1024
ITEM_PARTS: Final = 4
"""Blocks of a pruned weight, and parts of a parameter without a mask, to an item in the list."""

_EXPONENTS: Final = {
    torch.bfloat16: (INTS[2], 0x7F80),
    torch.float16: (INTS[2], 0x7C00),
    torch.float32: (INTS[4], 0x7F800000),
    torch.float64: (INTS[8], 0x7FF0000000000000),
}
"""For each type its entries as integers, and the bits that are all set in no finite number."""

_MAX_REGISTERS: Final = {32: None, 64: None, 128: 72, 256: 128}
"""By slots: with fewer registers to a lane more programs run at once (H200, 2026-11-15: 3 to 10 %)."""

assert PART % lean.UNPRUNED_GROUP == 0


def compress_(dense: Tensor, mask: Mask | None, out: Tensor) -> None:
    """Write the kept entries of ``dense`` to ``out``.

    Example: dense [5, 6, 7, 8] with kept bits 1, 0, 0, 1 gives [5, 8].
    """
    check_pair(out, mask, dense)
    if mask is None:
        out.detach().copy_(dense.detach().reshape(out.shape))
    elif _is_covered(dense.dtype, out.dtype) and out.is_contiguous():
        launch_compress(compress_config(mask.kept, mask.numel), dense, mask, out)
    else:
        reference.compress_(dense, mask, out)


def expand_(values: Tensor, mask: Mask | None, dense: Tensor) -> None:
    """Write ``values`` to the kept entries of ``dense`` and 0 elsewhere.

    Example: values [5, 8] with kept bits 1, 0, 0, 1 give [5, 0, 0, 8].
    """
    check_pair(values, mask, dense)
    if mask is None:
        dense.detach().copy_(values.detach().reshape(dense.shape))
        return
    if dense.is_contiguous():
        launch_expand(values, mask, dense)
    else:
        plain = torch.empty_like(dense, memory_format=torch.contiguous_format)
        launch_expand(values, mask, plain)
        dense.detach().copy_(plain)


def find_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether any entry of any tensor is NaN or infinite, as a boolean scalar on its device."""
    device = tensors[0].device if tensors else torch.device("cpu")
    found = torch.zeros((), dtype=torch.bool, device=device)
    where = where_of(device)
    dtypes = {tensor.dtype for tensor in tensors}
    for dtype in dtypes:
        members = [t for t in tensors if t.dtype == dtype] if len(dtypes) > 1 else tensors
        if not all(map(Tensor.is_contiguous, members)):
            members = [tensor.detach().contiguous() for tensor in members]
        table, items = _parts_of(where, tuple(map(Tensor.numel, members)))
        if not items.numel():
            continue
        addresses = list(map(Tensor.data_ptr, members))
        kind, exponent = _EXPONENTS[dtype]
        with device_of(found):
            triton_kernels.find_exponent_kernel[(items.numel() * ITEM_PARTS,)](
                with_addresses(where, table, 0, addresses),
                items,
                found.view(torch.int8),
                EXPONENT=exponent,
                KIND=kind,
                IS_ALIGNED=are_aligned(addresses),
                PARTS=ITEM_PARTS,
                PART=PART,
            )
    return found


def _parts_of(where: Where, numels: tuple[int, ...]) -> tuple[Table, Tensor]:
    """Return the table of tensors of these sizes, and the list of their parts."""
    return (_list_parts if where.is_captured else _listed_parts)(where, numels)


def _list_parts(where: Where, numels: tuple[int, ...]) -> tuple[Table, Tensor]:
    counts = [cdiv(numel, PART * ITEM_PARTS) for numel in numels]
    items, firsts = list_items(where, range(len(numels)), counts)
    return np.array([(0, *pair) for pair in zip(numels, firsts)], dtype=np.int64), items


_listed_parts: Final = lru_cache(maxsize=8)(_list_parts)


# One launch each, with a choice of how -----------------------------------------------------------


@lru_cache(maxsize=1024)  # asked for in each backward pass, for each weight
def compress_config(kept: int, numel: int) -> Config:
    """Return how to compress a tensor with so many kept entries.

    Example:
        >>> compress_config(kept=410, numel=4096)
        Config(way='slot', size=256, num_warps=1)
        >>> compress_config(kept=4096, numel=4096)
        Config(way='entry', size=64, num_warps=2)
    """
    if kept > _FEW * numel:
        return Config("entry", bitmap.BLOCK_WORDS, 2)
    return Config("slot", slots(bitmap.BLOCK_BITS * kept / max(numel, 1), deviations=3), 1)


def launch_compress(config: Config, dense: Tensor, mask: Mask, out: Tensor) -> None:
    """Compress in the way of ``config``."""
    if mask.kept == 0:
        return
    source, target = _raw(dense if dense.is_contiguous() else dense.reshape(-1)), _raw(out)
    words = mask.words.numel()
    with device_of(dense):
        if config.way == "slot":
            triton_kernels.compress_by_slot_kernel[(mask.offsets.numel(),)](
                *(source, mask.words, mask.offsets, target, words // 2),
                SLOTS=config.size,
                num_warps=config.num_warps,
            )
        else:
            triton_kernels.compress_by_entry_kernel[(cdiv(words, config.size),)](
                *(source, mask.words, mask.offsets, target, mask.numel, words),
                WORDS=config.size,
                num_warps=config.num_warps,
            )


def launch_expand(values: Tensor, mask: Mask, dense: Tensor) -> None:
    """Expand to a contiguous tensor."""
    if mask.numel == 0:
        return
    if not _is_covered(values.dtype, dense.dtype):
        values = values.detach().to(dense.dtype)
    source = _raw(values if values.is_contiguous() else values.contiguous())
    with device_of(dense):
        triton_kernels.expand_kernel[(mask.offsets.numel(),)](
            source,
            mask.words,
            mask.offsets,
            source,
            _raw(dense),
            mask.numel,
            mask.words.numel(),
            WORDS=bitmap.BLOCK_WORDS,
            num_warps=2,
        )


# AdamW -------------------------------------------------------------------------------------------


class _Launch(NamedTuple):
    """One launch of a kernel over many parameters, without what changes from step to step."""

    kernel: Any
    items: Tensor
    units: int
    """Programs to an item."""
    is_aligned: bool
    """Whether all addresses but the gradients' are multiples of 16 bytes."""
    options: dict[str, Any]


class _Group(NamedTuple):
    """Parameters with learning rates of one type and one kind of state."""

    members: list[int]
    table: Table
    """Their rows; the gradients' addresses are filled in at each step."""
    rate_type: torch.dtype | None
    has_ages: bool
    launches: list[_Launch]
    copies: list[tuple[Tensor, _Launch]]
    """The table of pruned weights with a dense copy, by types, and the launch that writes them."""


class _Plan(NamedTuple):
    """Which of some updates are done how."""

    others: list[int]
    """By the reference."""
    refreshed: list[int]
    """Have a dense copy that is written afterwards."""
    groups: list[_Group]


_plans: list[tuple[list[object], _Plan]] = []
_MAX_PLANS: Final = 8
"""The latest plans and the fingerprints of their updates; replaced as a whole, for other threads' sake."""


def adamw_(updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None) -> None:
    """Do one AdamW step: one launch for the step counts, one for each kind of parameter."""
    if not updates:
        return
    where = where_of(updates[0].param.device)
    plan = _plan_of(where, updates)
    if plan.others:
        others = [updates[index] for index in plan.others]
        if where.is_captured and any(update.age is not None for update in others):
            hold(*reference.bias_corrections(settings.beta1, settings.beta2, where.device))
        # Without the copies, for which the reference asks the host where kept entries lie.
        reference.adamw_([update._replace(dense=None) for update in others], settings, skip)
    for group in plan.groups:
        members = group.members
        together = updates if len(members) == len(updates) else [updates[i] for i in members]
        _launch_group(where, group, together, settings, skip)
    for index in plan.refreshed:
        _refresh(updates[index], skip)


def _plan_of(where: Where, updates: Sequence[AdamWUpdate]) -> _Plan:
    """Return the plan of some updates, from an earlier step if nothing but gradients has moved."""
    global _plans
    if where.is_captured:
        return _make_plan(where, updates)
    key = fingerprint(where, updates)
    for known, plan in _plans:
        if known == key:
            return plan
    plan = _make_plan(where, updates)
    _plans = [(key, plan), *_plans[: _MAX_PLANS - 1]]
    return plan


def _make_plan(where: Where, updates: Sequence[AdamWUpdate]) -> _Plan:
    others, refreshed = [], []
    together: dict[tuple[torch.dtype | None, bool, bool], list[int]] = {}
    taken: list[AdamWUpdate] = []
    for index, update in enumerate(updates):
        check_update(update)
        if update.dense is not None and not update.dense.is_contiguous():
            refreshed.append(index)
            update = update._replace(dense=None)
        taken.append(update)
        if is_plain(update, KINDS):
            key = rate_type(update), update.is_lean, update.age is not None
            together.setdefault(key, []).append(index)
        else:
            others.append(index)
            if update.dense is not None:
                refreshed.append(index)
    groups = [
        _make_group(where, members, [taken[index] for index in members], key[0])
        for key, members in together.items()
    ]
    return _Plan(others, refreshed, groups)


def _make_group(
    where: Where, members: list[int], updates: list[AdamWUpdate], rate: torch.dtype | None
) -> _Group:
    """Work out the tables of plain parameters, and what is launched for which of them.

    Two passes, over the values and then over the dense copies of pruned weights, are faster than
    one that scatters each updated value: a copy is written in whole sectors.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    copied: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index, update in enumerate(updates):
        # The groups of 8-bit codes follow the blocks of the mask; else values are just a vector.
        is_by_block = update.is_lean and update.mask is not None
        copy = None if update.dense is None else update.dense.dtype
        if update.mask is not None and copy is not None:
            copied.setdefault((update.param.dtype, copy), []).append(index)
            copy = None
        kinds.setdefault((update.param.dtype, update.grad.dtype, copy, is_by_block), []).append(
            index
        )
    table = np.zeros((len(updates), COLUMNS.value), dtype=np.int64)
    launches = []
    for (dtype, grad_dtype, copy, is_by_block), rows in kinds.items():
        chosen = [updates[row] for row in rows]
        is_lean = chosen[0].is_lean
        options: dict[str, Any] = {
            "WEIGHT": KINDS[dtype],
            "REMAINDERS": tl.int8 if is_lean else tl.int16,  # read for bfloat16 alone
            "GRADIENT": KINDS[grad_dtype],
            "enable_fp_fusion": False,  # a multiply and an add round twice, as torch's do
        }
        kernel, units = triton_kernels.adamw_kernel, ITEM_PARTS
        if is_by_block:
            kernel, units = triton_lean.adamw_lean_kept_kernel, ITEM_BLOCKS
            slots = lean_slots([update.mask for update in chosen if update.mask is not None])
            options |= {"BLOCKS": units, "SLOTS": slots}
            options |= {"num_warps": 1, "maxnreg": _MAX_REGISTERS[slots]}
        else:
            options |= {"PARTS": units, "PART": PART, "num_warps": 8}
            options["COPY"] = None if copy is None else KINDS[copy]
            if is_lean:
                kernel = triton_lean.adamw_lean_kernel
            else:
                options["OLDEST"] = 0 if chosen[0].age is None else reference.OLDEST
        items = _fill(where, table, rows, chosen, is_by_block=is_by_block)
        if items.numel():
            is_aligned = are_aligned(table[rows, : BITMAP.value].flat)
            launches.append(_Launch(kernel, items, units, is_aligned, options))
    copies = []
    for (dtype, copy), rows in copied.items():
        chosen = [updates[row] for row in rows]
        copy_table = np.zeros((len(rows), COLUMNS.value), dtype=np.int64)
        items = _fill(where, copy_table, range(len(rows)), chosen, is_by_block=True)
        if items.numel():
            is_aligned = are_aligned(copy_table[:, [DENSE.value, BITMAP.value]].flat)
            options = {"VALUES": KINDS[dtype], "COPY": KINDS[copy], "IS_ALIGNED": is_aligned}
            options |= {"BLOCKS": ITEM_BLOCKS, "num_warps": 2}
            kernel = triton_kernels.expand_rows_kernel
            launch = _Launch(kernel, items, ITEM_BLOCKS, is_aligned, options)
            copies.append((send(where, copy_table), launch))
    return _Group(members, table, rate, updates[0].age is not None, launches, copies)


def _fill(
    where: Where,
    table: Table,
    rows: Sequence[int],
    updates: Sequence[AdamWUpdate],
    *,
    is_by_block: bool,
) -> Tensor:
    """Write the rows of some parameters, and return the items of their entries or blocks."""
    sizes = [
        update.mask.numel if is_by_block and update.mask is not None else update.param.numel()
        for update in updates
    ]
    size = bitmap.BLOCK_BITS * ITEM_BLOCKS if is_by_block else PART * ITEM_PARTS
    items, firsts = list_items(where, rows, [cdiv(numel, size) for numel in sizes])
    for row, update, numel, first in zip(rows, updates, sizes, firsts):
        table[row] = row_of(update, numel, first)
    return items


def lean_slots(masks: Sequence[Mask]) -> int:
    """Return how many slots nearly every group of some pruned weights fills."""
    numel = sum(mask.numel for mask in masks)
    return slots(lean.GROUP * sum(mask.kept for mask in masks) / max(numel, 1), deviations=2)


def _launch_group(
    where: Where,
    group: _Group,
    updates: Sequence[AdamWUpdate],
    settings: AdamWSettings,
    skip: Tensor | None,
) -> None:
    beta1, beta2, eps = settings
    addresses = list(map(Tensor.data_ptr, map(_grad, updates)))
    table = with_addresses(where, group.table, GRAD.value, addresses)
    is_aligned = are_aligned(addresses)
    scalars, skip_at = _count_steps(where, group, table, updates, settings, skip)
    # A tensor for each pointer that is not used: Triton wants something of the right type.
    by_age = (scalars, scalars)
    if group.has_ages:
        by_age = _corrections(beta1, beta2, where.device)
        if where.is_captured:
            hold(*by_age)
    common = {"HAS_SKIP": skip is not None, "IS_SMALL": 1 - beta1 < 0.5}
    with device_of(table):
        for launch in group.launches:
            changing: dict[str, Any] = dict(common)
            if launch.kernel is not triton_lean.adamw_lean_kept_kernel:
                changing["IS_ALIGNED"] = is_aligned and launch.is_aligned
            launch.kernel[(launch.items.numel() * launch.units,)](
                table,
                launch.items,
                scalars,
                skip_at,
                *(by_age if launch.kernel is triton_kernels.adamw_kernel else ()),
                1 - beta1,
                beta2,
                1 - beta2,
                eps,
                **changing,
                **launch.options,
            )
        for copy_table, launch in group.copies:
            launch.kernel[(launch.items.numel() * launch.units,)](
                copy_table,
                launch.items,
                launch.items if skip is None else skip_at,
                HAS_SKIP=skip is not None,
                **launch.options,
            )


@lru_cache(maxsize=8)
def _corrections(beta1: float, beta2: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inverse of the first bias correction, and the root of the second one, by age."""
    first, second = reference.bias_corrections(beta1, beta2, device)
    return first.reciprocal(), second.to(torch.float32)


def _count_steps(
    where: Where,
    group: _Group,
    table: Tensor,
    updates: Sequence[AdamWUpdate],
    settings: AdamWSettings,
    skip: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Count the step of every parameter in a table; return what its entries share, and where to skip."""
    count, size = len(updates), 128
    scalars = torch.empty(count, SCALARS.value, dtype=torch.float64, device=where.device)
    is_on_host = group.rate_type is None
    rates, lr = numbers(where, list(map(float, map(_lr, updates))) if is_on_host else [0.0])
    decays, weight_decay = numbers(where, list(map(float, map(_weight_decay, updates))))
    skip_at = scalars if skip is None else skip.view(torch.int8)
    with device_of(scalars):
        triton_kernels.adamw_scalars_kernel[(cdiv(count, size),)](
            table,
            scalars,
            skip_at,
            scalars if rates is None else rates,
            scalars if decays is None else decays,
            lr,
            weight_decay,
            float(settings.beta1),
            float(settings.beta2),
            count,
            RATE_TYPE=None if group.rate_type is None else _RATE_KINDS[group.rate_type],
            HAS_RATES=rates is not None,
            HAS_DECAYS=decays is not None,
            HAS_SKIP=skip is not None,
            SIZE=size,
        )
    return scalars, skip_at


_RATE_KINDS: Final = {torch.float32: tl.float32, torch.float64: tl.float64}


def _refresh(update: AdamWUpdate, skip: Tensor | None) -> None:
    """Write a parameter to its dense copy, whatever its strides."""
    dense = update.dense
    assert dense is not None
    if skip is None:
        expand_(update.param, update.mask, dense)
    else:
        new = torch.empty_like(dense, memory_format=torch.contiguous_format)
        expand_(update.param, update.mask, new)
        dense.detach().copy_(torch.where(skip, dense.detach(), new))


_grad, _lr, _weight_decay = map(attrgetter, ("grad", "lr", "weight_decay"))

# Types and sizes ---------------------------------------------------------------------------------


def _is_covered(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether the kernels move entries of one type to another."""
    return source == target or (source in KINDS and target in KINDS)


def slots(mean: float, deviations: int) -> int:
    """Return the slots that nearly every block fills, if ``mean`` is usual: a power of 2, 32 to 256."""
    likely = int(mean + deviations * mean**0.5)
    return min(256, max(32, 1 << (max(likely, 1) - 1).bit_length()))


_SEEN_AS: Final = {torch.bfloat16: torch.int16, torch.float64: torch.int64}
"""Types that the kernels see as integers."""


def _raw(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as the kernels see it: its memory, without a history."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    seen_as = _SEEN_AS.get(plain.dtype)
    return plain if seen_as is None else plain.view(seen_as)
