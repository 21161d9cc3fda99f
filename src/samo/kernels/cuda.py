"""The fast path on an NVIDIA GPU: hands tensors to the kernels of ``triton_kernels.py``.

``docs/decisions/0011-triton-kernels.md`` says why the kernels are as they are. Nothing here waits for
the device: numbers that decide something on the host (sizes, kept entries) are on the host already.
All weights of an AdamW step go into a few launches: ``tables.py``.

What the kernels do not cover (float64 sums, weights with strides) falls back to ``reference``.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from samo import bitmap
from samo.kernels import AdamWSettings, AdamWUpdate, reference, triton_kernels, triton_parts
from samo.kernels.rounding import rest_dtype
from samo.kernels.tables import (
    are_aligned,
    cdiv,
    device_of,
    items,
    lr_scales,
    plan,
    rows,
    where_of,
)
from samo.kernels.triton_parts import INTS, KINDS, SCALARS
from samo.mask import Mask

__all__ = ["adamw_", "compress_", "expand_", "find_nonfinite"]


class Config(NamedTuple):
    """How a kernel is launched."""

    way: Literal["slot", "entry"]
    size: int
    """Slots, or words, that a program takes at once."""
    num_warps: int


_FEW: Final = 0.2
"""Density up to which a search for each kept entry is cheaper than a count for each entry."""

_EXPAND: Final = Config("entry", bitmap.BLOCK_WORDS, 2)
IS_INTERPRETED: Final = bool(triton_parts.IS_INTERPRETED)
ITEM_BLOCKS: Final = 4
PART: Final = 1024
ITEM_PARTS: Final = 4
"""Blocks of a pruned weight, and parts of an unpruned one, to an item in the list on the device."""


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
    is_move = dense.dtype == out_Z.dtype and not add and factor is None
    is_covered = is_move or (dense.dtype in KINDS and out_Z.dtype in KINDS)
    if not is_covered or not out_Z.is_contiguous():
        reference.compress_(dense, mask, out_Z, add=add, factor=factor)
    elif mask is not None:
        config = compress_config(mask.kept, mask.numel)
        launch_compress(config, dense, mask, out_Z, add=add, factor=factor)
    elif factor is None:
        flat_N = dense.detach().reshape(-1)
        out_Z.add_(flat_N) if add else out_Z.copy_(flat_N)
    else:
        _launch_compress_all(dense, out_Z, add, factor)


def expand_(values_Z: Tensor, mask: Mask | None, dense: Tensor) -> None:
    """Write ``values_Z`` to the kept entries of ``dense`` and 0 elsewhere.

    Example: values [5, 8] with kept bits 1, 0, 0, 1 give [5, 0, 0, 8].
    """
    if mask is None:
        reference.expand_(values_Z, None, dense)
    elif dense.is_contiguous():
        launch_expand(_EXPAND, values_Z, mask, dense)
    else:
        plain = torch.empty_like(dense, memory_format=torch.contiguous_format)
        launch_expand(_EXPAND, values_Z, mask, plain)
        dense.detach().copy_(plain)


def adamw_(updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None) -> None:
    """Do one AdamW step: one launch for the step counts, one for each kind of weight."""
    plain = []
    for update in updates:
        if is_plain(update):
            plain.append(update)
        else:
            reference.adamw_([update], settings, skip)
    if plain:
        launch_adamw(plain, settings, skip)


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
    return Config("slot", _slots(kept, numel), 1)


def launch_compress(
    config: Config,
    dense: Tensor,
    mask: Mask,
    out_Z: Tensor,
    *,
    add: bool = False,
    factor: Tensor | None = None,
) -> None:
    """Compress in the way of ``config``."""
    if mask.kept == 0:
        return
    source, target = _raw(dense if dense.is_contiguous() else dense.reshape(-1)), _raw(out_Z)
    options = {
        "ADD": add,
        "HAS_FACTOR": factor is not None,
        "num_warps": config.num_warps,
        "enable_fp_fusion": False,  # a factor and a sum round twice, as torch's do
    }
    scale = target if factor is None else factor
    with device_of(dense):
        if config.way == "slot":
            pairs = mask.words.view(torch.int64)
            triton_kernels.compress_by_slot_kernel[(mask.offsets.numel(),)](
                source,
                pairs,
                mask.offsets,
                target,
                scale,
                pairs.numel(),
                SLOTS=config.size,
                **options,
            )
        else:
            triton_kernels.compress_by_entry_kernel[(cdiv(mask.words.numel(), config.size),)](
                source,
                mask.words,
                mask.offsets,
                target,
                scale,
                mask.numel,
                mask.words.numel(),
                WORDS=config.size,
                **options,
            )


def launch_expand(config: Config, values_Z: Tensor, mask: Mask, dense: Tensor) -> None:
    """Expand in the way of ``config``."""
    if mask.numel == 0:
        return
    values = values_Z.detach().to(dense.dtype).contiguous()
    with device_of(dense):
        triton_kernels.expand_kernel[(cdiv(mask.words.numel(), config.size),)](
            _raw(values),
            mask.words,
            mask.offsets,
            _raw(dense),
            mask.numel,
            mask.words.numel(),
            WORDS=config.size,
            num_warps=config.num_warps,
        )


def launch_adamw(
    updates: Sequence[AdamWUpdate],
    settings: AdamWSettings,
    skip: Tensor | None,
    config: Config | None = None,
) -> None:
    """Update plain weights, the pruned ones in the way of ``config``."""
    _, beta1, beta2, eps, _ = settings
    table, launches = plan(updates, num_items)
    scalars, skip_at = count_steps(table, settings, skip, lr_scales(updates))
    with device_of(table):
        for (dtype, grad_dtype, is_whole), members, found, is_aligned in launches:
            arguments = (table, found, scalars, skip_at, 1 - beta1, beta2, 1 - beta2, eps)
            options = {
                "WEIGHT": KINDS[dtype],
                "WHOLE": KINDS[REST_KINDS[dtype]],
                "GRADIENT": KINDS[grad_dtype],
                "HAS_SKIP": skip is not None,
                "IS_SMALL": 1 - beta1 < 0.5,
                "enable_fp_fusion": False,  # a multiply and an add round twice, as torch's do
            }
            if is_whole:
                triton_kernels.adamw_all_kernel[(found.numel() * ITEM_PARTS,)](
                    *arguments,
                    IS_ALIGNED=is_aligned,
                    PARTS=ITEM_PARTS,
                    PART=PART,
                    num_warps=8,
                    **options,
                )
            else:
                how = config or adamw_config([updates[index] for index in members])
                triton_kernels.adamw_kept_kernel[(found.numel() * ITEM_BLOCKS,)](
                    *arguments,
                    BLOCKS=ITEM_BLOCKS,
                    SLOTS=how.size,
                    num_warps=how.num_warps,
                    **options,
                )


def count_steps(
    table: Tensor, settings: AdamWSettings, skip: Tensor | None, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Count the step of every weight in a table; return what its entries share, and where to skip."""
    lr, beta1, beta2, _, weight_decay = settings
    device, count, size = table.device, len(table), 128
    scalars = torch.empty(count, SCALARS.value, dtype=torch.float32, device=device)
    lr_at, lr_here = rate_of(lr, scalars)
    # A number for each pointer that is not used: Triton wants something of the right type.
    skip_at = scalars if skip is None else skip.view(torch.int8)
    with device_of(scalars):
        triton_kernels.adamw_scalars_kernel[(cdiv(count, size),)](
            table,
            scalars,
            skip_at,
            scalars if scales is None else scales,
            lr_at,
            lr_here,
            float(beta1),
            float(beta2),
            float(weight_decay),
            count,
            HAS_SKIP=skip is not None,
            HAS_SCALES=scales is not None,
            HAS_LR_AT=lr_at is not scalars,
            SIZE=size,
        )
    return scalars, skip_at


def rate_of(lr: float | Tensor, unused: Tensor) -> tuple[Tensor, float]:
    """Return where a learning rate is on the device, or ``unused``, and the rate known on the host."""
    if isinstance(lr, Tensor) and lr.device == unused.device:
        return lr, 0.0
    return unused, float(lr)


def adamw_config(updates: Sequence[AdamWUpdate]) -> Config:
    """Return how to update pruned weights: as if all had the density of all together."""
    masks = [update.mask for update in updates if update.mask is not None]
    kept = sum(mask.kept for mask in masks)
    return Config("slot", _slots(kept, sum(mask.numel for mask in masks)), 1)


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
"""Which of the kernels' types the rest beside a weight has."""


def num_items(update: AdamWUpdate) -> int:
    if update.mask is None:
        return _num_parts(update.dense.numel())
    return cdiv(bitmap.num_blocks(update.mask.numel), ITEM_BLOCKS)


def _num_parts(numel: int) -> int:
    return -(-numel // (PART * ITEM_PARTS))


def is_plain(update: AdamWUpdate) -> bool:
    """Return whether addresses and sizes say all about a weight's tensors."""
    dense, mask, rest_Z, grad_Z, exp_avg_Z, exp_avg_sq_Z, step, _ = update
    kept, device = dense.numel() if mask is None else mask.kept, dense.device
    return (
        dense.dtype in KINDS
        and grad_Z.dtype in KINDS
        and exp_avg_Z.dtype == exp_avg_sq_Z.dtype == step.dtype == torch.float32
        and (None if rest_Z is None else rest_Z.dtype) == rest_dtype(dense.dtype)
        and dense.is_contiguous()
        and step.device == device
        and is_vector(grad_Z, kept, device)
        and is_vector(exp_avg_Z, kept, device)
        and is_vector(exp_avg_sq_Z, kept, device)
        and (rest_Z is None or is_vector(rest_Z, kept, device))
    )


def is_vector(tensor: Tensor, size: int, device: torch.device) -> bool:
    """Return whether an address says all about a tensor of so many entries."""
    return tensor.numel() == size and tensor.is_contiguous() and tensor.device == device


def _slots(kept: int, numel: int) -> int:
    """Return how many slots nearly every block fills: a power of 2 from 32 to 256."""
    mean = bitmap.BLOCK_BITS * kept / max(numel, 1)
    likely = int(mean + 3 * mean**0.5)  # three standard deviations over the mean
    return min(256, max(32, 1 << (max(likely, 1) - 1).bit_length()))


_SEEN_AS: Final = {torch.bfloat16: torch.int16, torch.float64: torch.int64}
"""Types that the kernels see as integers."""


def _raw(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as the kernels see it: its memory, without a history."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    seen_as = _SEEN_AS.get(plain.dtype)
    return plain if seen_as is None else plain.view(seen_as)


def _launch_compress_all(dense: Tensor, out_Z: Tensor, add: bool, factor: Tensor) -> None:
    if dense.numel() == 0:
        return
    with device_of(dense):
        triton_kernels.compress_all_kernel[(cdiv(dense.numel(), PART),)](
            _raw(dense if dense.is_contiguous() else dense.reshape(-1)),
            _raw(out_Z),
            factor,
            dense.numel(),
            ADD=add,
            HAS_FACTOR=True,
            SIZE=PART,
            enable_fp_fusion=False,
        )
