"""AdamW with 8-bit state on an NVIDIA GPU: hands tensors to the kernels of ``lean_kernels.py``.

As in ``cuda.py``, all weights of a step go into a few launches and nothing waits for the device. A
second table beside that of the weights has the addresses of their scales. What the kernels do not cover
(weights with strides) falls back to ``lean``.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from samo.kernels import AdamWSettings, LeanUpdate, lean, lean_kernels
from samo.kernels.cuda import ITEM_BLOCKS, ITEM_PARTS, PART, count_steps, num_items
from samo.kernels.rounding import rest_dtype
from samo.kernels.tables import device_of, lr_scales, plan, rows, where_of
from samo.kernels.triton_parts import KINDS

__all__ = ["adamw_lean_"]

_MAX_REGISTERS: Final = {32: None, 64: None, 128: 72, 256: 128}
"""By slots: with fewer registers to a lane more programs run at once (H200, 2026-11-15: 3 to 10 %)."""


def adamw_lean_(
    updates: Sequence[LeanUpdate], settings: AdamWSettings, skip: Tensor | None
) -> None:
    """Do one AdamW step: one launch for the step counts, one for each kind of weight."""
    plain = []
    for update in updates:
        if _is_plain(update):
            plain.append(update)
        else:
            lean.adamw_lean_([update], settings, skip)
    if plain:
        launch_adamw_lean(plain, settings, skip)


def launch_adamw_lean(
    updates: Sequence[LeanUpdate],
    settings: AdamWSettings,
    skip: Tensor | None,
    slots: int | None = None,
) -> None:
    """Update plain weights, the pruned ones with so many slots to a group."""
    _, beta1, beta2, eps, _ = settings
    plain = [update for update, _, _ in updates]
    table, launches = plan(plain, num_items)
    addresses = tuple((a.data_ptr(), b.data_ptr()) for _, a, b in updates)
    scales = rows(where_of(table.device), addresses)
    scalars, skip_at = count_steps(table, settings, skip, lr_scales(plain))
    with device_of(table):
        for (dtype, grad_dtype, is_whole), members, found, is_aligned in launches:
            arguments = (table, scales, found, scalars, skip_at, 1 - beta1, beta2, 1 - beta2, eps)
            options = {
                "WEIGHT": KINDS[dtype],
                "WHOLE": lean_kernels.REST_KINDS[dtype],
                "GRADIENT": KINDS[grad_dtype],
                "HAS_SKIP": skip is not None,
                "IS_SMALL": 1 - beta1 < 0.5,
                "enable_fp_fusion": False,  # a multiply and an add round twice, as torch's do
            }
            if is_whole:
                lean_kernels.adamw_lean_all_kernel[(found.numel() * ITEM_PARTS,)](
                    *arguments,
                    IS_ALIGNED=is_aligned,
                    PARTS=ITEM_PARTS,
                    PART=PART,
                    num_warps=8,
                    **options,
                )
            else:
                chosen = slots or num_slots([updates[index] for index in members])
                lean_kernels.adamw_lean_kept_kernel[(found.numel() * ITEM_BLOCKS,)](
                    *arguments,
                    BLOCKS=ITEM_BLOCKS,
                    SLOTS=chosen,
                    num_warps=1,
                    maxnreg=_MAX_REGISTERS[chosen],
                    **options,
                )


def num_slots(updates: Sequence[LeanUpdate]) -> int:
    """Return how many slots nearly every group fills: a power of 2 from 32 to 256."""
    masks = [update.mask for update, _, _ in updates if update.mask is not None]
    mean = lean.GROUP * sum(mask.kept for mask in masks) / sum(mask.numel for mask in masks)
    likely = int(mean + 2 * mean**0.5)  # two standard deviations over the mean
    return min(256, max(32, 1 << (max(likely, 1) - 1).bit_length()))


def _is_plain(lean_update: LeanUpdate) -> bool:
    """Return whether addresses and sizes say all about a weight's tensors."""
    (dense, mask, rest_Z, grad_Z, exp_avg_Z, exp_avg_sq_Z, step, _), *scales = lean_update
    kept = dense.numel() if mask is None else mask.kept
    groups = lean.num_groups(dense.numel(), mask)
    vectors = [grad_Z, exp_avg_Z, exp_avg_sq_Z, *([] if rest_Z is None else [rest_Z])]
    return (
        {dense.dtype, grad_Z.dtype} <= KINDS.keys()
        and (None if rest_Z is None else rest_Z.dtype) == rest_dtype(dense.dtype, is_lean=True)
        and (exp_avg_Z.dtype, exp_avg_sq_Z.dtype, step.dtype)
        == (torch.int8, torch.uint8, torch.float32)
        and dense.is_contiguous()
        and all(vector.numel() == kept and vector.is_contiguous() for vector in vectors)
        and all(scale.numel() == groups and scale.is_contiguous() for scale in scales)
        and all(scale.dtype == torch.float32 for scale in scales)
        and all(tensor.device == dense.device for tensor in (step, *vectors, *scales))
    )


assert PART % lean.UNPRUNED_GROUP == 0
