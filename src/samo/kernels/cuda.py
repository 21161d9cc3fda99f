"""The fast path on an NVIDIA GPU: hands tensors to the kernels of ``triton_kernels.py``.

``docs/decisions/0011-triton-kernels.md`` says why the kernels are as they are. Nothing here waits for
the device: numbers that decide something on the host (sizes, kept entries) are on the host already.
All parameters of an AdamW step go into a few launches: ``tables.py``.

What the kernels do not cover (float64 updates, parameters with strides) falls back to ``reference``.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from samo.kernels import (
    AdamWSettings,
    AdamWUpdate,
    AgedUpdate,
    LeanUpdate,
    reference,
    triton_kernels,
    triton_parts,
)
from samo.kernels.rounding import rest_dtype
from samo.kernels.sizes import check_pair, check_update, has_plain_tensors, mask_of_copy, set_apart
from samo.kernels.tables import (
    Launch,
    are_aligned,
    by_rate,
    cdiv,
    device_of,
    items,
    numbers,
    plan,
    rate_type,
    rows,
    signature,
    where_of,
    with_gradients,
)
from samo.kernels.triton_parts import INTS, KINDS, SCALARS
from samo.mask import bitmap
from samo.mask.mask import Mask

__all__ = ["adamw_", "compress_", "expand_", "find_nonfinite"]


class Config(NamedTuple):
    """How a kernel is launched."""

    way: Literal["slot", "entry"]
    size: int
    """Slots, or words, that a program takes at once."""
    num_warps: int


class Ages(NamedTuple):
    """What a launch has to know of entries with ages: see `samo.kernels.ages`."""

    rows: Tensor
    """The address of each parameter's ages."""
    inverses: Tensor
    denominators: Tensor
    """The inverse of the first bias correction, and the root of the second one, by age."""
    oldest: int


Extended = TypeVar("Extended", AgedUpdate, LeanUpdate)

_FEW: Final = 0.2
"""Density up to which a search for each kept entry is cheaper than a count for each entry."""

IS_INTERPRETED: Final = bool(triton_parts.IS_INTERPRETED)
ITEM_BLOCKS: Final = 4
PART: Final = 1024
ITEM_PARTS: Final = 4
"""Blocks of a pruned weight, and parts of a parameter without a mask, to an item in the list."""


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


def adamw_(updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None) -> None:
    """Do one AdamW step: one launch for the step counts, one for each kind of parameter."""
    order = _order_of(updates)
    reference.adamw_([without_copy(updates[index]) for index in order.others], settings, skip)
    for members, prepared in order.launches:
        together = updates if len(members) == len(updates) else [updates[i] for i in members]
        _launch(prepared, together, settings, skip, None)
    for index in order.refreshed:
        refresh(updates[index], skip)


class _Order(NamedTuple):
    """Which of some updates are done how."""

    others: list[int]
    """By the reference."""
    refreshed: list[int]
    """Have a copy that is written afterwards."""
    launches: list[tuple[list[int], "Prepared"]]


_ORDERS: Final[dict[tuple[object, ...], _Order]] = {}
_MAX_ORDERS: Final = 8


def _order_of(updates: Sequence[AdamWUpdate]) -> _Order:
    """Work out what goes where, once: a later step differs in its gradients' addresses."""
    if updates and where_of(updates[0].param.device).is_captured:
        return _sort_out(updates)
    key = signature(updates)
    order = _ORDERS.get(key)
    if order is None:
        order = _sort_out(updates)
        while len(_ORDERS) >= _MAX_ORDERS:
            del _ORDERS[next(iter(_ORDERS))]
        _ORDERS[key] = order
    return order


def _sort_out(updates: Sequence[AdamWUpdate]) -> _Order:
    strided = [index for index, update in enumerate(updates) if has_strided_copy(update)]
    pairs = [(index, without_strided_copy(update)) for index, update in enumerate(updates)]
    plain, others = set_apart(pairs, lambda pair: is_plain(pair[1]))
    launches = [
        ([index for index, _ in together], prepare([update for _, update in together]))
        for together in by_rate(plain, lambda pair: pair[1])
    ]
    refreshed = [*strided, *(index for index, update in others if update.dense is not None)]
    return _Order([index for index, _ in others], refreshed, launches)


def do_in_launches(
    updates: Sequence[Extended],
    is_plain: Callable[[Extended], bool],
    launch: Callable[[list[Extended]], None],
    by_reference: Callable[[list[Extended]], None],
    skip: Tensor | None,
) -> None:
    """Do updates with more state than `adamw_` knows: in a launch for each type of rate, if they are plain."""
    refreshed = [one.update for one in updates if has_strided_copy(one.update)]
    if refreshed:
        updates = [one._replace(update=without_strided_copy(one.update)) for one in updates]
    plain, others = set_apart(updates, is_plain)
    refreshed += [one.update for one in others if one.update.dense is not None]
    by_reference([one._replace(update=without_copy(one.update)) for one in others])
    for together in by_rate(plain, lambda one: one.update):
        launch(together)
    for update in refreshed:
        refresh(update, skip)


def has_strided_copy(update: AdamWUpdate) -> bool:
    return update.dense is not None and not update.dense.is_contiguous()


def without_strided_copy(update: AdamWUpdate) -> AdamWUpdate:
    """Return an update that leaves a copy with strides (channels_last) alone: `refresh` writes it."""
    return without_copy(update) if has_strided_copy(update) else update


def without_copy(update: AdamWUpdate) -> AdamWUpdate:
    """Return an update that leaves the copy to `refresh`: the reference asks the host for kept places."""
    if update.dense is None:
        return update
    check_update(update)
    return update._replace(dense=None)


def refresh(update: AdamWUpdate, skip: Tensor | None) -> None:
    """Write a parameter to its dense copy, whatever its strides."""
    dense = update.dense
    assert dense is not None
    if skip is None:
        expand_(update.param, update.mask, dense)
    else:
        new = torch.empty_like(dense, memory_format=torch.contiguous_format)
        expand_(update.param, update.mask, new)
        dense.detach().copy_(torch.where(skip, dense.detach(), new))


def find_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether any entry of any tensor is NaN or infinite, as a boolean scalar on its device."""
    device = tensors[0].device if tensors else torch.device("cpu")
    found = torch.zeros((), dtype=torch.bool, device=device)
    together: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            plain = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
            together.setdefault(plain.dtype, []).append(plain)
    where = where_of(device)
    for dtype, members in together.items():
        kind, exponent = _EXPONENTS[dtype]
        numels = [tensor.numel() for tensor in members]
        addresses = [tensor.data_ptr() for tensor in members]
        listed, firsts = items(where, tuple([_num_parts(numel) for numel in numels]))
        with device_of(found):
            triton_kernels.find_exponent_kernel[(listed.numel() * ITEM_PARTS,)](
                rows(where, tuple(zip(addresses, numels, firsts))),
                listed,
                found.view(torch.int8),
                EXPONENT=exponent,
                KIND=kind,
                IS_ALIGNED=are_aligned(addresses),
                PARTS=ITEM_PARTS,
                PART=PART,
            )
    return found


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
    with device_of(dense):
        if config.way == "slot":
            triton_kernels.compress_by_slot_kernel[(mask.offsets.numel(),)](
                source,
                mask.words,
                mask.offsets,
                target,
                mask.words.numel() // 2,
                SLOTS=config.size,
                num_warps=config.num_warps,
            )
        else:
            triton_kernels.compress_by_entry_kernel[(cdiv(mask.words.numel(), config.size),)](
                source,
                mask.words,
                mask.offsets,
                target,
                mask.numel,
                mask.words.numel(),
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


class Prepared(NamedTuple):
    """What a launch of plain parameters needs that stays from step to step."""

    table: "np.ndarray[Any, np.dtype[np.int64]]"
    """Rows of addresses and sizes; those of the gradients are filled in at each step."""
    launches: list[Launch]
    copies: list[tuple[Tensor, Tensor, dict[str, Any]]]
    """For each pair of types: rows of pruned weights with a copy, the list of items, and options."""


def launch_adamw(
    updates: Sequence[AdamWUpdate],
    settings: AdamWSettings,
    skip: Tensor | None,
    *,
    ages: Ages | None = None,
) -> None:
    """Update plain parameters with rates of one type, then the copies of those with a mask.

    Two passes are faster than one that scatters each updated value: a copy is written in whole sectors.
    """
    _launch(prepare(updates), updates, settings, skip, ages)


def prepare(updates: Sequence[AdamWUpdate]) -> Prepared:
    """Work out the tables of plain parameters with rates of one type."""
    flat = [
        update if update.mask is None else update._replace(dense=None, mask=None)
        for update in updates
    ]
    table, launches = plan(flat, mask_of_copy, num_items)
    copied = [update for update in updates if mask_of_copy(update) is not None]
    return Prepared(table, launches, prepare_copies(copied))


def _launch(
    prepared: Prepared,
    updates: Sequence[AdamWUpdate],
    settings: AdamWSettings,
    skip: Tensor | None,
    ages: Ages | None,
) -> None:
    beta1, beta2, eps = settings
    where = where_of(updates[0].param.device)
    addresses = [update.grad.data_ptr() for update in updates]
    table = with_gradients(where, prepared.table, addresses)
    is_aligned = are_aligned(addresses)
    scalars, skip_at = count_steps(table, updates, settings, skip)
    # A tensor for each pointer that is not used: Triton wants something of the right type.
    by_age = (table, scalars, scalars) if ages is None else ages[:3]
    with device_of(table):
        for (dtype, grad_dtype, copy_dtype, _), _, found, is_rest_aligned in prepared.launches:
            triton_kernels.adamw_all_kernel[(found.numel() * ITEM_PARTS,)](
                table,
                found,
                scalars,
                skip_at,
                *by_age,
                1 - beta1,
                beta2,
                1 - beta2,
                eps,
                WEIGHT=KINDS[dtype],
                WHOLE=KINDS[REST_KINDS[dtype]],
                GRADIENT=KINDS[grad_dtype],
                COPY=None if copy_dtype is None else KINDS[copy_dtype],
                OLDEST=0 if ages is None else ages.oldest,
                HAS_SKIP=skip is not None,
                IS_SMALL=1 - beta1 < 0.5,
                IS_ALIGNED=is_aligned and is_rest_aligned,
                PARTS=ITEM_PARTS,
                PART=PART,
                num_warps=8,
                enable_fp_fusion=False,  # a multiply and an add round twice, as torch's do
            )
    expand_copies(prepared.copies, skip)


def expand_copies(
    copies: Sequence[tuple[Tensor, Tensor, dict[str, Any]]], skip: Tensor | None
) -> None:
    """Write the values of pruned weights to their dense copies: a launch for each pair of types."""
    for table, listed, options in copies:
        with device_of(listed):
            triton_kernels.expand_rows_kernel[(listed.numel() * ITEM_BLOCKS,)](
                table,
                listed,
                listed if skip is None else skip.view(torch.int8),
                HAS_SKIP=skip is not None,
                BLOCKS=ITEM_BLOCKS,
                num_warps=2,
                **options,
            )


def prepare_copies(
    updates: Sequence[AdamWUpdate],
) -> list[tuple[Tensor, Tensor, dict[str, Any]]]:
    kinds: dict[tuple[torch.dtype, torch.dtype], list[AdamWUpdate]] = {}
    for update in updates:
        assert update.dense is not None
        kinds.setdefault((update.param.dtype, update.dense.dtype), []).append(update)
    found = []
    for (dtype, copy_dtype), members in kinds.items():
        where = where_of(members[0].param.device)
        masks = [update.mask for update in members if update.mask is not None]
        sizes = [cdiv(mask.offsets.numel(), ITEM_BLOCKS) for mask in masks]
        listed, firsts = items(where, tuple(sizes))
        if not listed.numel():
            continue
        table = tuple(
            [
                (
                    update.param.data_ptr(),
                    update.dense.data_ptr(),  # type: ignore[union-attr]
                    mask.words.data_ptr(),
                    mask.offsets.data_ptr(),
                    mask.numel,
                    mask.words.numel(),
                    first,
                )
                for update, mask, first in zip(members, masks, firsts)
            ]
        )
        is_aligned = are_aligned(address for row in table for address in row[1:3])
        options = {"VALUES": KINDS[dtype], "COPY": KINDS[copy_dtype], "IS_ALIGNED": is_aligned}
        found.append((rows(where, table), listed, options))
    return found


def count_steps(
    table: Tensor,
    updates: Sequence[AdamWUpdate],
    settings: AdamWSettings,
    skip: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Count the step of every parameter in a table; return what its entries share, and where to skip."""
    device, count, size = table.device, len(table), 128
    where, kind = where_of(device), rate_type(updates[0])
    scalars = torch.empty(count, SCALARS.value, dtype=torch.float64, device=device)
    lrs = [0.0] if kind is not None else [float(update.lr) for update in updates]
    rates, lr = numbers(where, lrs)
    decays, weight_decay = numbers(where, [float(update.weight_decay) for update in updates])
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
            RATE_TYPE=None if kind is None else _RATE_KINDS[kind],
            HAS_RATES=rates is not None,
            HAS_DECAYS=decays is not None,
            HAS_SKIP=skip is not None,
            SIZE=size,
        )
    return scalars, skip_at


# What the kernels are told -----------------------------------------------------------------------

_EXPONENTS: Final = {
    torch.bfloat16: (INTS[2], 0x7F80),
    torch.float16: (INTS[2], 0x7C00),
    torch.float32: (INTS[4], 0x7F800000),
    torch.float64: (INTS[8], 0x7FF0000000000000),
}
"""For each type its entries as integers, and the bits that are all set in no finite number."""

REST_KINDS: Final = {
    torch.bfloat16: torch.bfloat16,  # the remainder: 16 bits as well
    torch.float16: torch.float32,
    torch.float32: torch.float32,  # none; any type will do
}
"""Which of the kernels' types the rest beside a parameter has."""

_RATE_KINDS: Final = {torch.float32: tl.float32, torch.float64: tl.float64}


def num_items(numel: int, is_whole: bool) -> int:
    """Return how many items of the list so many entries are."""
    return _num_parts(numel) if is_whole else cdiv(bitmap.num_blocks(numel), ITEM_BLOCKS)


def _num_parts(numel: int) -> int:
    return cdiv(numel, PART * ITEM_PARTS)


def is_plain(update: AdamWUpdate) -> bool:
    """Return whether addresses and sizes say all about a parameter's tensors, and the kernels know them."""
    _, rest, _, exp_avg, exp_avg_sq, *_ = update
    return (
        exp_avg.dtype == exp_avg_sq.dtype == torch.float32
        and (None if rest is None else rest.dtype) == rest_dtype(update.param.dtype)
        and has_plain_tensors(update, KINDS)
    )


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
