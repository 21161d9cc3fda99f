"""AdamW with ages on an NVIDIA GPU: hands tensors to the kernels of ``age_kernels.py``.

As in ``cuda.py``, all weights of a step go into a few launches and nothing waits for the device. A
second table beside that of the weights has the addresses of their ages. What the kernels do not cover
(float64, weights with strides) falls back to ``ages``.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from samo.kernels import AdamWSettings, AgedUpdate, age_kernels, ages
from samo.kernels.cuda import (
    ITEM_BLOCKS,
    REST_KINDS,
    adamw_config,
    count_steps,
    is_plain,
    num_items,
    rate_of,
)
from samo.kernels.tables import device_of, lr_scales, plan, rows, where_of
from samo.kernels.triton_parts import KINDS

__all__ = ["adamw_aged_"]

_SIZE: Final = 4096
"""Ages that a program works out the corrections of."""

assert (ages.OLDEST + 1) % _SIZE == 0


def adamw_aged_(
    updates: Sequence[AgedUpdate], settings: AdamWSettings, skip: Tensor | None
) -> None:
    """Do one AdamW step: one launch for the step counts, one for the ages, one for each kind of weight."""
    plain = []
    for aged in updates:
        if _is_plain(aged):
            plain.append(aged)
        else:
            ages.adamw_aged_([aged], settings, skip)
    if plain:
        _launch(plain, settings, skip)


def _launch(updates: Sequence[AgedUpdate], settings: AdamWSettings, skip: Tensor | None) -> None:
    _, beta1, beta2, eps, _ = settings
    plain = [update for update, _ in updates]
    table, launches = plan(plain, num_items)
    age_rows = rows(where_of(table.device), tuple((age_Z.data_ptr(),) for _, age_Z in updates))
    scales = lr_scales(plain)
    scalars, skip_at = count_steps(table, settings, skip, scales)
    step_sizes, denominators = _corrections(settings, table.device)
    with device_of(table):
        for (dtype, grad_dtype, _), members, found, _ in launches:
            how = adamw_config([plain[index] for index in members])
            age_kernels.adamw_aged_kernel[(found.numel() * ITEM_BLOCKS,)](
                table,
                found,
                scalars,
                skip_at,
                scalars if scales is None else scales,
                age_rows,
                step_sizes,
                denominators,
                1 - beta1,
                beta2,
                1 - beta2,
                eps,
                WEIGHT=KINDS[dtype],
                WHOLE=KINDS[REST_KINDS[dtype]],
                GRADIENT=KINDS[grad_dtype],
                HAS_SKIP=skip is not None,
                HAS_SCALES=scales is not None,
                IS_SMALL=1 - beta1 < 0.5,
                BLOCKS=ITEM_BLOCKS,
                SLOTS=how.size,
                num_warps=how.num_warps,
                enable_fp_fusion=False,  # a multiply and an add round twice, as torch's do
            )


def _corrections(settings: AdamWSettings, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return minus the step sizes and the denominators by age."""
    step_sizes = torch.empty(ages.OLDEST + 1, dtype=torch.float64, device=device)
    denominators = torch.empty_like(step_sizes, dtype=torch.float32)
    lr_at, lr = rate_of(settings.lr, step_sizes)
    with device_of(step_sizes):
        age_kernels.age_corrections_kernel[((ages.OLDEST + 1) // _SIZE,)](
            step_sizes,
            denominators,
            lr_at,
            lr,
            float(settings.beta1),
            float(settings.beta2),
            HAS_LR_AT=lr_at is not step_sizes,
            SIZE=_SIZE,
        )
    return step_sizes, denominators


def _is_plain(aged: AgedUpdate) -> bool:
    """Return whether addresses and sizes say all about a weight's tensors."""
    update, age_Z = aged
    return (
        is_plain(update)
        and update.mask is not None
        and age_Z.numel() == update.mask.kept
        and age_Z.dtype == torch.int16
        and age_Z.is_contiguous()
        and age_Z.device == update.dense.device
    )
