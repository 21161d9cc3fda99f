"""AdamW whose entries have step counts of their own, in plain torch operations: what "right" means.

Adam divides its moments, which start at 0, by how much of a full average they can have seen: 1 - beta**t
after t updates. An entry that is kept anew at step 1,000 has seen one gradient, not 1,000:

    moments after one gradient g     m = 0.1 g    v = 0.001 g^2          (betas 0.9, 0.999)
    corrected for t = 1              m / 0.1 = g, v / 0.001 = g^2        change lr * 1.0
    corrected for t = 1,000          m / 1 = 0.1 g, v / 0.63 = 0.0016 g^2    change lr * 2.5

and 3.16 once t is large. So each entry has an age, how many updates it has had, in 16 bits. Corrections
are looked up in a table. An age stops at `OLDEST`; from there on the step count of the weight stands in
for it, so that entries which were kept all along are corrected as without ages, bit for bit, for ever.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Final

import torch
from torch import Tensor

from samo.kernels import AdamWSettings, AdamWUpdate, AgedUpdate
from samo.kernels.corrections import Corrections, count_step
from samo.kernels.reference import update_pieces
from samo.kernels.sizes import check_update

__all__ = ["adamw_aged_"]

OLDEST: Final = 2**15 - 1
"""The largest age, that of an entry which had so many updates or more."""


def ages_at(step: Tensor, size: int) -> Tensor:
    """Return the ages of ``size`` entries that have been there from the first step on.

    Example:
        >>> ages_at(torch.tensor(70000.0), 2)
        tensor([32767, 32767], dtype=torch.int16)
    """
    return step.clamp(max=OLDEST).to(torch.int16).expand(size).clone()


@torch.no_grad()
def adamw_aged_(
    updates: Sequence[AgedUpdate], settings: AdamWSettings, skip: Tensor | None
) -> None:
    """Do one AdamW step, with bias corrections by the age of each entry."""
    for update, age_Z in updates:
        check_update(update, age=(age_Z, update.param.numel()))
    for update, age_Z in updates:
        whole = count_step(update, settings, skip)
        younger_Z = age_Z < OLDEST
        age_Z += younger_Z if skip is None else younger_Z & ~skip
        found = table(update, settings)
        update_pieces(update, settings, skip, partial(_look_up, age_Z, found, whole))


def _look_up(age_Z: Tensor, found: Tensor, whole: Corrections, piece_Z: slice) -> Corrections:
    ages = age_Z[piece_Z].to(torch.int32)
    is_oldest = ages == OLDEST
    step_sizes, denominators = (
        torch.where(is_oldest, of_all, by_age.index_select(0, ages))
        for of_all, by_age in zip(whole, found)
    )
    return Corrections(step_sizes, denominators, whole.decay)


def table(update: AdamWUpdate, settings: AdamWSettings) -> Tensor:
    """Return step sizes and denominators by age under `OLDEST`, two rows in the type of the moments."""
    like, lr = update.exp_avg, update.lr
    first, second = bias_corrections(settings.beta1, settings.beta2, like.device)
    if not isinstance(lr, Tensor):
        lr = torch.full((), lr, dtype=torch.float64, device=like.device)
    # A tensor over a tensor: torch takes a number over a tensor for its inverse times the number.
    step_sizes = lr.to(like.device) / first.to(lr.dtype)
    return torch.stack([step_sizes.to(like.dtype), second.to(like.dtype)])


@lru_cache(maxsize=8)
def bias_corrections(beta1: float, beta2: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the corrections of both moments for each age: the very doubles of `count_step`."""
    # Not by torch's power function, whose last digit may be another than Python's.
    ages = range(1, OLDEST + 1)
    first = [1.0, *(1 - beta1**age for age in ages)]  # age 0, before any update, is never looked up
    second = [1.0, *((1 - beta2**age) ** 0.5 for age in ages)]
    return (
        torch.tensor(first, dtype=torch.float64, device=device),
        torch.tensor(second, dtype=torch.float64, device=device),
    )
