"""AdamW with 8-bit state on an NVIDIA GPU: hands tensors to the kernels of ``lean_kernels.py``.

As in ``cuda.py``, all weights of a step go into a few launches and nothing waits for the device. A
second table beside that of the weights has the addresses of their scales. What the kernels do not cover
(weights with strides) falls back to ``lean``.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from samo.kernels import AdamWSettings, LeanUpdate, lean, lean_kernels, triton_kernels
from samo.kernels.cuda import (
    _cdiv,
    _is_aligned,
    _items,
    _on,
    _row,
    _rows,
    _where,
    count_steps,
)
from samo.kernels.rounding import rest_dtype

__all__ = ["adamw_lean_"]

_ITEM_GROUPS: Final = 8
_PART: Final = 1024
_ITEM_PARTS: Final = 4
"""Groups of a pruned weight, and parts of an unpruned one, to an item in the list on the device."""

_Kind = tuple[torch.dtype, torch.dtype, bool]


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
    device = updates[0].update.dense.device
    where = _where(device)
    kinds: dict[_Kind, list[int]] = {}
    for index, (update, _, _) in enumerate(updates):
        kind = (update.dense.dtype, update.grad_Z.dtype, update.mask is None)
        kinds.setdefault(kind, []).append(index)
    firsts = [0] * len(updates)
    items: dict[_Kind, Tensor] = {}
    for kind, members in kinds.items():
        sizes = [0] * len(updates)
        for index in members:
            sizes[index] = _num_items(updates[index])
        items[kind], starts = _items(where, tuple(sizes))
        for index in members:
            firsts[index] = starts[index]
    rows_on_host = tuple(_row(update, first) for (update, _, _), first in zip(updates, firsts))
    scales_on_host = tuple((a.data_ptr(), b.data_ptr()) for _, a, b in updates)
    rows, scales = _rows(where, rows_on_host), _rows(where, scales_on_host)
    scalars, skip_at = count_steps(rows, settings, skip)
    with _on(device):
        for (dtype, grad_dtype, is_whole), members in kinds.items():
            found = items[dtype, grad_dtype, is_whole]
            if not found.numel():
                continue
            arguments = (rows, scales, found, scalars, skip_at, 1 - beta1, beta2, 1 - beta2, eps)
            options = {
                "WEIGHT": triton_kernels.KINDS[dtype],
                "WHOLE": lean_kernels.REST_KINDS[dtype],
                "GRADIENT": triton_kernels.KINDS[grad_dtype],
                "HAS_SKIP": skip is not None,
                "IS_SMALL": 1 - beta1 < 0.5,
                "enable_fp_fusion": False,  # a multiply and an add round twice, as torch's do
            }
            if is_whole:
                lean_kernels.adamw_lean_all_kernel[(found.numel() * _ITEM_PARTS,)](
                    *arguments,
                    IS_ALIGNED=all(_is_aligned(rows_on_host[index]) for index in members),
                    PARTS=_ITEM_PARTS,
                    PART=_PART,
                    num_warps=8,
                    **options,
                )
            else:
                lean_kernels.adamw_lean_kept_kernel[(found.numel() * _ITEM_GROUPS,)](
                    *arguments,
                    GROUPS=_ITEM_GROUPS,
                    SLOTS=slots or num_slots([updates[index] for index in members]),
                    num_warps=1,
                    **options,
                )


def num_slots(updates: Sequence[LeanUpdate]) -> int:
    """Return how many slots a program takes at once: 32 for groups that hardly fill them, else 64.

    More than 64 spill (H200, 2^30 weights, 2026-11-15: 10 % kept 2.0, 2.2 and 6.8 ms with 64, 128 and 256
    slots; 20 % kept 3.4, 4.2 and 6.2 ms).
    """
    masks = [update.mask for update, _, _ in updates if update.mask is not None]
    mean = lean.GROUP * sum(mask.kept for mask in masks) / sum(mask.numel for mask in masks)
    likely = int(mean + 2 * mean**0.5)  # two standard deviations over the mean
    return 32 if likely <= 32 else 64


def _num_items(lean_update: LeanUpdate) -> int:
    dense, mask = lean_update.update.dense, lean_update.update.mask
    if mask is None:
        return _cdiv(dense.numel(), _PART * _ITEM_PARTS)
    return _cdiv(lean.num_groups(dense.numel(), mask), _ITEM_GROUPS)


def _is_plain(lean_update: LeanUpdate) -> bool:
    """Return whether addresses and sizes say all about a weight's tensors."""
    (dense, mask, rest_Z, grad_Z, exp_avg_Z, exp_avg_sq_Z, step), *scales = lean_update
    kept = dense.numel() if mask is None else mask.kept
    groups = lean.num_groups(dense.numel(), mask)
    vectors = [grad_Z, exp_avg_Z, exp_avg_sq_Z, *([] if rest_Z is None else [rest_Z])]
    return (
        {dense.dtype, grad_Z.dtype} <= triton_kernels.KINDS.keys()
        and (None if rest_Z is None else rest_Z.dtype) == rest_dtype(dense.dtype, is_lean=True)
        and (exp_avg_Z.dtype, exp_avg_sq_Z.dtype, step.dtype)
        == (torch.int8, torch.uint8, torch.float32)
        and dense.is_contiguous()
        and all(vector.numel() == kept and vector.is_contiguous() for vector in vectors)
        and all(scale.numel() == groups and scale.is_contiguous() for scale in scales)
        and all(scale.dtype == torch.float32 for scale in scales)
        and all(tensor.device == dense.device for tensor in (step, *vectors, *scales))
    )


assert _PART % lean.UNPRUNED_GROUP == 0
