"""Cut a batch into micro-batches, and weight their losses so that their sum is the loss of the batch."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

__all__ = ["count_targets", "cut", "loss_weights", "zero_loss"]

Tensors = Tensor | tuple[Tensor, ...]
Count = Callable[[Any], float | Tensor]
Reduction = Literal["mean", "sum"]
IGNORE_INDEX: Final = -100
"""The target that torch's cross-entropy ignores by default."""


def cut(batch: object, num_micro_batches: int, name: str) -> list[tuple[Tensor, ...]]:
    """Return micro-batches: rows in order, as even as possible, the first ones larger by one.

    Example:
        >>> import torch
        >>> from samo.pipeline.microbatch import cut
        >>> [len(x) for (x,) in cut(torch.zeros(7, 2), 3, "x")]
        [3, 2, 2]

    Raises:
        TypeError: It is not a tensor or a tuple of tensors.
        ValueError: There are fewer rows than micro-batches, or tensors of different lengths.
    """
    tensors = (batch,) if isinstance(batch, Tensor) else batch
    if (
        not isinstance(tensors, tuple)
        or not tensors
        or not all(isinstance(t, Tensor) and t.dim() for t in tensors)
    ):
        raise TypeError(
            f"{name} must be a tensor with rows or a tuple of them, got {type(batch).__name__}; every "
            "rank may pass it, the stage that needs it must"
        )
    lengths = {len(tensor) for tensor in tensors}
    if len(lengths) > 1 or min(lengths) < num_micro_batches:
        raise ValueError(
            f"{name} has {sorted(lengths)} rows for {num_micro_batches} micro-batches; all its tensors "
            "must have the same number, one for each micro-batch or more"
        )
    return list(zip(*(tensor.tensor_split(num_micro_batches) for tensor in tensors)))


def count_targets(target: Any) -> float | Tensor:
    """Count the terms of a mean loss: entries, without those that cross-entropy ignores."""
    first = target if isinstance(target, Tensor) else target[0]
    if first.is_floating_point() or first.dtype == torch.bool:
        return first.numel()
    return (first != IGNORE_INDEX).sum()


def zero_loss(output: Any) -> Tensor:
    """Return a loss of 0 with gradients of 0, also if the output is not finite."""
    tensors = [output] if isinstance(output, Tensor) else list(output)
    floats = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]
    zeros = [t.masked_fill(torch.ones_like(t, dtype=torch.bool), 0).sum() for t in floats]
    return sum(zeros[1:], zeros[0]) if zeros else torch.zeros(())


def loss_weights(
    targets: Sequence[tuple[Tensor, ...]], reduction: Reduction, count: Count | None
) -> list[float]:
    """Return the weight of each micro-batch's loss: 0 without targets, NaN if no micro-batch has any.

    Example:
        >>> import torch
        >>> from samo.pipeline.microbatch import cut, loss_weights
        >>> loss_weights(cut(torch.zeros(4, 1), 3, "target"), "mean", None)
        [0.5, 0.25, 0.25]
    """
    if reduction == "sum":
        return [1.0] * len(targets)
    counts = [(count or count_targets)(t[0] if len(t) == 1 else t) for t in targets]
    if any(isinstance(number, Tensor) for number in counts):  # one wait for the device, not many
        counts = torch.stack([torch.as_tensor(number) for number in counts]).double().tolist()
    numbers = [float(number) for number in counts]
    total = sum(numbers)
    return [number / total if total else math.nan for number in numbers]
