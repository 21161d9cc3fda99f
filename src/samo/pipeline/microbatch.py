"""Cut a batch into micro-batches, and weight their losses to sum up to the loss of the batch."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor

Tensors = Tensor | tuple[Tensor, ...]
Reduction = Literal["mean", "sum"]
IGNORE_INDEX: Final = -100
"""The target that torch's cross-entropy ignores by default."""


def cut(batch: object, num_micro_batches: int, name: str) -> list[tuple[Tensor, ...]]:
    """Return micro-batches: rows in order, as even as possible, such as 3, 2 and 2 of 7."""
    tensors = (batch,) if isinstance(batch, Tensor) else batch
    if not (
        isinstance(tensors, tuple)
        and tensors
        and all(isinstance(tensor, Tensor) and tensor.dim() for tensor in tensors)
    ):
        raise TypeError(
            f"{name} must be a tensor with rows or a tuple of them on the stage that reads it, "
            f"got {type(batch).__name__}"
        )
    lengths = {len(tensor) for tensor in tensors}
    if len(lengths) > 1 or min(lengths) < num_micro_batches:
        raise ValueError(
            f"{name} has {sorted(lengths)} rows for {num_micro_batches} micro-batches; all its "
            "tensors need the same number, and at least one row for each micro-batch"
        )
    return list(zip(*(tensor.tensor_split(num_micro_batches) for tensor in tensors)))


def loss_weights(
    targets: Sequence[tuple[Tensor, ...]], reduction: Reduction
) -> Callable[[], list[float]]:
    """Return a function that returns the weight of each micro-batch's loss.

    For a mean, a weight is the share of the targets. Targets of -100 do not count. If there are no
    others, all weights are NaN. Targets on a GPU are counted there: the count is on the host long
    before the first output is, so nobody waits for it.
    """
    first = targets[0][0]
    if reduction == "sum":
        return lambda: [1.0] * len(targets)
    if first.is_floating_point() or not first.dtype.is_signed:  # as uint8, -100 would be 156
        return partial(_shares, torch.tensor([target[0].numel() for target in targets]))
    counts = torch.stack([(target[0] != IGNORE_INDEX).sum() for target in targets])
    if not counts.is_cuda:
        return partial(_shares, counts)
    host = torch.empty_like(counts, device="cpu", pin_memory=True)
    host.copy_(counts, non_blocking=True)
    return partial(_shares, host, torch.cuda.current_stream(counts.device).record_event())


def _shares(counts: Tensor, ready: torch.cuda.Event | None = None) -> list[float]:
    if ready is not None:
        ready.synchronize()
    numbers = counts.tolist()
    total = sum(numbers)
    return [number / total if total else math.nan for number in numbers]
