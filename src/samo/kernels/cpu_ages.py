"""AdamW with an age for each entry on a CPU, by the loops of the update without ages.

What the loops do not cover (float16 parameters, tensors with strides) falls back to ``ages``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from samo.kernels import AdamWSettings, AgedUpdate, ages
from samo.kernels.cpu import is_plain, update_rows
from samo.kernels.sizes import is_vector, set_apart

__all__ = ["adamw_aged_"]


@torch.no_grad()
def adamw_aged_(
    updates: Sequence[AgedUpdate], settings: AdamWSettings, skip: Tensor | None
) -> None:
    """Do one AdamW step, with bias corrections by the age of each entry."""
    if skip is not None and bool(skip):
        return
    plain, others = set_apart(updates, _is_plain)
    ages.adamw_aged_(others, settings, None)
    tables: dict[tuple[float, torch.dtype], Tensor] = {}
    found = []
    for update, age_Z in plain:
        key = float(update.lr), update.exp_avg.dtype
        if key not in tables:
            tables[key] = ages.table(update, settings)
            tables[key][0].neg_()
        found.append((age_Z, tables[key]))
    update_rows([update for update, _ in plain], settings, found)


def _is_plain(aged: AgedUpdate) -> bool:
    update, age_Z = aged
    return (
        is_plain(update)
        and age_Z.dtype == torch.int16
        and is_vector(age_Z, update.param.numel(), update.param.device)
    )
