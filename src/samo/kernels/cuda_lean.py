"""AdamW with 8-bit state on an NVIDIA GPU: hands tensors to the kernels of ``lean_kernels.py``.

As in ``cuda.py``, all parameters of a step go into a few launches and nothing waits for the device. A
second table beside that of the parameters has the addresses of their scales. What the kernels do not
cover (parameters with strides) falls back to ``lean``.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from samo.kernels import AdamWSettings, AdamWUpdate, LeanUpdate, lean, lean_kernels
from samo.kernels.cuda import (
    ITEM_BLOCKS,
    ITEM_PARTS,
    PART,
    count_steps,
    do_in_launches,
    expand_copies,
    num_items,
    prepare_copies,
    slots as slots_of,
)
from samo.kernels.rounding import rest_dtype
from samo.kernels.sizes import has_plain_tensors, is_vector, mask_of_copy
from samo.kernels.tables import (
    are_aligned,
    device_of,
    plan,
    rows,
    where_of,
    with_gradients,
)
from samo.kernels.triton_parts import KINDS
from samo.mask.mask import Mask

__all__ = ["adamw_lean_"]

_MAX_REGISTERS: Final = {32: None, 64: None, 128: 72, 256: 128}
"""By slots: with fewer registers to a lane more programs run at once (H200, 2026-11-15: 3 to 10 %)."""


def adamw_lean_(
    updates: Sequence[LeanUpdate], settings: AdamWSettings, skip: Tensor | None
) -> None:
    """Do one AdamW step: one launch for the step counts, one for each kind of parameter."""

    def launch(together: list[LeanUpdate]) -> None:
        launch_adamw_lean(together, settings, skip)

    def by_reference(others: list[LeanUpdate]) -> None:
        lean.adamw_lean_(others, settings, skip)

    do_in_launches(updates, _is_plain, launch, by_reference, skip)


def _mask_of(update: AdamWUpdate) -> Mask | None:
    """Return whose blocks a parameter is updated by: its groups follow them, with a copy or without."""
    return update.mask


def launch_adamw_lean(
    updates: Sequence[LeanUpdate],
    settings: AdamWSettings,
    skip: Tensor | None,
    *,
    slots: int | None = None,
) -> None:
    """Update plain parameters with rates of one type, those with a mask with so many slots to a group."""
    beta1, beta2, eps = settings
    copied = [update for update, _, _ in updates if mask_of_copy(update) is not None]
    plain = [
        update if update.mask is None else update._replace(dense=None) for update, _, _ in updates
    ]
    on_host, launches = plan(plain, _mask_of, num_items)
    where = where_of(plain[0].param.device)
    gradients = [update.grad.data_ptr() for update in plain]
    table = with_gradients(where, on_host, gradients)
    are_gradients_aligned = are_aligned(gradients)
    scales = rows(where, tuple([(a.data_ptr(), b.data_ptr()) for _, a, b in updates]))
    scalars, skip_at = count_steps(table, plain, settings, skip)
    with device_of(table):
        for (dtype, grad_dtype, copy_dtype, is_whole), members, found, is_aligned in launches:
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
                    COPY=None if copy_dtype is None else KINDS[copy_dtype],
                    IS_ALIGNED=is_aligned and are_gradients_aligned,
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
    expand_copies(prepare_copies(copied), skip)


def num_slots(updates: Sequence[LeanUpdate]) -> int:
    """Return how many slots nearly every group of some pruned weights fills."""
    masks = [update.mask for update, _, _ in updates if update.mask is not None]
    mean = lean.GROUP * sum(mask.kept for mask in masks) / sum(mask.numel for mask in masks)
    return slots_of(mean, deviations=2)


def _is_plain(lean_update: LeanUpdate) -> bool:
    """Return whether addresses and sizes say all about a parameter's tensors."""
    update, exp_avg_scale, exp_avg_sq_scale = lean_update
    param, rest, device = update.param, update.rest, update.param.device
    groups = lean.num_groups(lean.numel_of(update), update.mask)
    return (
        update.exp_avg.dtype == torch.int8
        and update.exp_avg_sq.dtype == torch.uint8
        and (None if rest is None else rest.dtype) == rest_dtype(param.dtype, is_lean=True)
        and exp_avg_scale.dtype == exp_avg_sq_scale.dtype == torch.float32
        and is_vector(exp_avg_scale, groups, device)
        and is_vector(exp_avg_sq_scale, groups, device)
        and has_plain_tensors(update, KINDS)
    )


assert PART % lean.UNPRUNED_GROUP == 0
