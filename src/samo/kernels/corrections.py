"""The step count of a weight and the bias corrections that follow from it, for the host's paths."""

from typing import NamedTuple

from torch import Tensor

from samo.kernels import AdamWSettings, AdamWUpdate

__all__ = []


class Corrections(NamedTuple):
    """What all entries of one weight share in an AdamW step."""

    step_size: float | Tensor
    """Learning rate over the first moment's bias correction."""
    denominator: float | Tensor
    """Square root of the second moment's bias correction."""
    decay: float | Tensor
    """Factor on the weight: 1 - learning rate * weight decay."""


def count_step(update: AdamWUpdate, settings: AdamWSettings, skip: Tensor | None) -> Corrections:
    """Count a step of a weight unless it is skipped, and return what follows from the count.

    Doubles on the host, or a double on the device where ``skip`` is there: the digits are needed.
    """
    lr, beta1, beta2, _, weight_decay = settings
    step = update.step
    count: float | Tensor
    if skip is None:
        step.add_(1)
        lr, count = float(lr), step.item()
    else:
        step.add_(~skip)
        count = step.double()
    rate = lr * update.lr_scale
    return Corrections(rate / (1 - beta1**count), (1 - beta2**count) ** 0.5, 1 - lr * weight_decay)
