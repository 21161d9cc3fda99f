"""AdamW with ages on an NVIDIA GPU, by the kernels of the update without ages.

As in ``cuda.py``, all parameters of a step go into a few launches and nothing waits for the device. A
second table beside that of the parameters has the addresses of their ages. What the kernels do not
cover (float64, parameters with strides) falls back to ``ages``.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from samo.kernels import AdamWSettings, AgedUpdate, ages
from samo.kernels.cuda import Ages, do_in_launches, is_plain, launch_adamw
from samo.kernels.sizes import is_vector
from samo.kernels.tables import hold, rows, where_of

__all__ = ["adamw_aged_"]


def adamw_aged_(
    updates: Sequence[AgedUpdate], settings: AdamWSettings, skip: Tensor | None
) -> None:
    """Do one AdamW step: one launch for the step counts, one for each kind of parameter."""

    def launch(together: list[AgedUpdate]) -> None:
        where = where_of(together[0].age_Z.device)
        table = rows(where, tuple([(age_Z.data_ptr(),) for _, age_Z in together]))
        corrections = _corrections(settings.beta1, settings.beta2, where.device)
        if where.is_captured:
            hold(*corrections)
        by_age = Ages(table, *corrections, ages.OLDEST)
        launch_adamw([update for update, _ in together], settings, skip, ages=by_age)

    def by_reference(others: list[AgedUpdate]) -> None:
        if others and where_of(device := others[0].age_Z.device).is_captured:
            hold(*ages.bias_corrections(settings.beta1, settings.beta2, device))
        ages.adamw_aged_(others, settings, skip)

    do_in_launches(updates, _is_plain, launch, by_reference, skip)


@lru_cache(maxsize=8)
def _corrections(beta1: float, beta2: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inverse of the first bias correction, and the root of the second one, by age."""
    first, second = ages.bias_corrections(beta1, beta2, device)
    return first.reciprocal(), second.to(torch.float32)


def _is_plain(aged: AgedUpdate) -> bool:
    update, age_Z = aged
    return (
        is_plain(update)
        and age_Z.dtype == torch.int16
        and is_vector(age_Z, update.param.numel(), update.param.device)
    )
