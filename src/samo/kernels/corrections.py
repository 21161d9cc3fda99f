"""The step count of a parameter and the bias corrections that follow from it, for the host's paths."""

from typing import NamedTuple

from torch import Tensor

from samo.kernels import AdamWSettings, AdamWUpdate

__all__ = []


class Corrections(NamedTuple):
    """What all entries of one parameter share in an AdamW step."""

    step_size: float | Tensor
    """Learning rate over the first moment's bias correction."""
    denominator: float | Tensor
    """Square root of the second moment's bias correction."""
    decay: float | Tensor
    """Factor on the parameter: 1 - learning rate * weight decay."""


def count_step(update: AdamWUpdate, settings: AdamWSettings, skip: Tensor | None) -> Corrections:
    """Count a step of a parameter unless it is skipped, and return what follows from the count.

    Doubles on the host, or a double on the device where ``skip`` is there: the digits are needed. Where
    the learning rate is a tensor, step size and decay are in its type, as torch's are.
    """
    beta1, beta2, _ = settings
    step, lr = update.step, update.lr
    count: float | Tensor
    if skip is None:
        step.add_(1)
        count = step.item()
    else:
        step.add_(~skip)
        count = step.double()
    first = 1 - beta1**count
    if isinstance(lr, Tensor) and isinstance(first, Tensor):
        first = first.to(lr.dtype)
    return Corrections(lr / first, (1 - beta2**count) ** 0.5, 1 - lr * update.weight_decay)
