"""The two ends of a stage: how received tensors go in, and what may come out."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["as_tuple"]


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    """Return a stage's output as a tuple of tensors.

    Raises:
        TypeError: It is something else.
    """
    outputs = (output,) if isinstance(output, Tensor) else output
    if not isinstance(outputs, tuple | list) or not all(isinstance(t, Tensor) for t in outputs):
        kinds = [type(o).__name__ for o in outputs] if isinstance(outputs, tuple) else ""
        raise TypeError(
            f"a layer at the end of a stage must return a tensor or a tuple of tensors, got "
            f"{type(output).__name__} {kinds or ''}; wrap the layer, or cut elsewhere"
        )
    return tuple(outputs)


def enter(tensor: Tensor) -> Tensor:
    """Return a received tensor as the inside of a graph, so that a layer may change it in place."""
    is_inside = tensor.requires_grad and torch.is_grad_enabled()
    return _Enter.apply(tensor) if is_inside else tensor  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    """The identity. Its result shares memory with the leaf, which autograd need not know."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
