"""Reading a weight inside `torch.compile` and `torch.export`: the same, in operators that they can see."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from samo.core.dense import Expand
from samo.core.expansion import Expansion
from samo.kernels.operators import compress, expand

__all__ = []


class TracedLayout(NamedTuple):
    """What `samo.core.dense.Layout` does, in operators that a compiler sees.

    Nothing here may look at the number of values: blocks of a model that differ in nothing else are then
    compiled once.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    bitmap: Tensor | None
    """The mask; None where nothing is pruned."""
    grad_dtype: torch.dtype
    """That of the values: a compiler takes it for granted, and torch casts what leaves compiled code."""

    def expand(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dense tensor of ``values``."""
        return self.expand_again(values, dtype, None)

    def expand_again(self, values: Tensor, dtype: torch.dtype, grad: Tensor | None) -> Tensor:
        """Expand in a backward pass, once its gradient is there: see `samo.kernels.operators.expand`."""
        if self.bitmap is None:
            return values.to(dtype)
        dense = expand(values, self.bitmap, list(self.shape), dtype, grad)
        if dense.stride() == self.strides:
            return dense
        strided = torch.empty_strided(self.shape, self.strides, dtype=dtype, device=dense.device)
        return strided.copy_(dense)

    def compress_grad(self, grad: Tensor, kept: int) -> Tensor:
        """Return the gradient of the values for that of the dense weight."""
        if self.bitmap is None:
            return grad.to(self.grad_dtype)
        return compress(grad, self.bitmap, kept, self.grad_dtype)


def read(weight: Any, traced: Any) -> Any:
    """Return the dense weight inside `torch.compile` and `torch.export`, or what stands for it.

    ``traced`` is a `samo.core.dense.Traced` of the `Weight`. A resident weight is not refreshed there:
    optimizers, ``load_state_dict`` and ``.to()`` have done that.
    """
    values, dense, bitmap, sizes, dtype = traced
    if not sizes:
        return _read_eagerly(weight)
    if bitmap is None and values.dtype == dtype:
        return values
    shape, strides = [tuple([int(n) for n in part.split()]) for part in sizes.split("/")]
    layout = TracedLayout(torch.Size(shape), strides, bitmap, values.dtype)
    if torch.compiler._is_exporting_flag or dense is None:
        return Expansion(values, layout, dtype, False)
    if not values.requires_grad or not torch.is_grad_enabled():
        return dense
    return Expand.apply(values, dense, layout, dtype)  # type: ignore[no-untyped-call]


@torch.compiler.disable
def _read_eagerly(weight: Any) -> Any:
    """Leave compiled code for a dense weight whose gradient comes to eager code: watchers wait there."""
    dense = weight.read(weight.values)
    return dense._expand() if isinstance(dense, Expansion) else dense
