"""`TracedLayout`: the way from values to a dense tensor and back inside `torch.compile` and `torch.export`."""

from typing import NamedTuple

import torch
from torch import Tensor

from samo.core.dense import Layout
from samo.kernels.operators import compress, expand

__all__ = ["TracedLayout", "traced"]


class TracedLayout(NamedTuple):
    """What `samo.core.dense.Layout` does, in operators that a compiler sees.

    Nothing here may look at the number of values: blocks of a model that differ in nothing else are then
    compiled once.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    words: Tensor | None
    """The bits of the mask; None where nothing is pruned."""
    offsets: Tensor | None
    grad_dtype: torch.dtype

    def expand(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dense tensor of ``values``."""
        return self.expand_again(values, dtype, None)

    def expand_again(self, values: Tensor, dtype: torch.dtype, grad: Tensor | None) -> Tensor:
        """Expand in a backward pass, once its gradient is there: see `samo.kernels.operators.expand`."""
        if self.words is None or self.offsets is None:
            return values.to(dtype)
        dense = expand(values, self.words, self.offsets, list(self.shape), dtype, grad)
        if dense.stride() == self.strides:
            return dense
        strided = torch.empty_strided(self.shape, self.strides, dtype=dtype, device=dense.device)
        return strided.copy_(dense)

    def compress_grad(self, grad: Tensor, kept: int) -> Tensor:
        """Return the gradient of the values for that of the dense weight."""
        if self.words is None or self.offsets is None:
            return grad.to(self.grad_dtype)
        return compress(grad, self.words, self.offsets, kept, self.grad_dtype)


def traced(layout: Layout) -> TracedLayout:
    """Return a layout for compiled code."""
    mask = layout.mask
    words, offsets = (None, None) if mask is None else (mask.words, mask.offsets)
    return TracedLayout(layout.shape, layout.strides, words, offsets, layout.grad_dtype)
