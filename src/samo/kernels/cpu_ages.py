"""AdamW with an age for each entry on a CPU: gather a weight's kept values, update them, scatter them.

Unlike the update without ages it holds the compressed values of one weight for the time of its update.
What the loops do not cover (float16, tensors with strides) falls back to ``ages``.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from samo import bitmap
from samo.kernels import AdamWSettings, AdamWUpdate, AgedUpdate, age_loops, ages, cpu
from samo.kernels.corrections import count_step
from samo.kernels.cpu import _ADAMW_TYPES, _array, _is_plain, _num_threads, _threads

__all__ = ["adamw_aged_"]


@torch.no_grad()
def adamw_aged_(
    updates: Sequence[AgedUpdate], settings: AdamWSettings, skip: Tensor | None
) -> None:
    """Do one AdamW step, with bias corrections by the age of each entry."""
    if skip is not None and bool(skip):
        return
    for update, age_Z in updates:
        types = (update.dense.dtype, update.grad_Z.dtype)
        if types in _ADAMW_TYPES and _is_plain(update) and age_Z.is_contiguous():
            _update(update, age_Z, settings)
        else:
            ages.adamw_aged_([AgedUpdate(update, age_Z)], settings, None)


def _update(update: AdamWUpdate, age_Z: Tensor, settings: AdamWSettings) -> None:
    whole = count_step(update, settings, None)
    step_sizes, denominators = ages.tables(whole, settings, update)
    _, beta1, beta2, eps, _ = settings
    exp_avg = _array(update.exp_avg_Z)
    values_Z = torch.empty(age_Z.numel(), dtype=update.dense.dtype, device=age_Z.device)
    cpu.compress_(update.dense, update.mask, values_Z)
    arrays = (
        _array(values_Z),
        np.empty(0, np.int16) if update.rest_Z is None else update.rest_Z.numpy(),
        _array(update.grad_Z),
        exp_avg,
        _array(update.exp_avg_sq_Z),
        age_Z.numpy(),
        step_sizes.neg_().numpy(),
        denominators.numpy(),
        np.array([whole.decay, 1 - beta1, beta2, 1 - beta2, eps], dtype=exp_avg.dtype),
    )
    is_bf16 = update.dense.dtype == torch.bfloat16
    parts = _num_threads(bitmap.num_blocks(age_Z.numel()))
    if parts == 1:
        kernel = age_loops.update_bf16 if is_bf16 else age_loops.update_wide
        kernel(*arrays, 0, age_Z.numel())
    else:
        shared = age_loops.update_bf16_shared if is_bf16 else age_loops.update_wide_shared
        with _threads(parts):
            shared(*arrays, parts)
    cpu.expand_(values_Z, update.mask, update.dense)
