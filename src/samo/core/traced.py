"""Reading a weight inside `torch.compile` and `torch.export`, through operators they can trace."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from samo.core.dense import Expand
from samo.core.expansion import Expansion
from samo.kernels.operators import compress, expand

__all__ = []


class TracedLayout(NamedTuple):
    """`samo.core.dense.Layout` in traceable operators.

    It never inspects the number of values, so blocks that differ only in their kept counts share a
    graph.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    bitmap: Tensor | None
    """The packed mask; None if nothing is pruned."""
    grad_dtype: torch.dtype
    """The values' dtype, as compilers assume; torch casts gradients that leave compiled code."""

    def expand(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the expanded ``values``."""
        return self.expand_again(values, dtype, None)

    def expand_again(self, values: Tensor, dtype: torch.dtype, grad: Tensor | None) -> Tensor:
        """Expand in backward, after its gradient is ready: see `samo.kernels.operators.expand`."""
        if self.bitmap is None:
            return values.to(dtype)
        dense = expand(values, self.bitmap, list(self.shape), dtype, grad)
        if dense.stride() == self.strides:
            return dense
        strided = torch.empty_strided(self.shape, self.strides, dtype=dtype, device=dense.device)
        return strided.copy_(dense)

    def compress_grad(self, grad: Tensor, kept: int) -> Tensor:
        """Return the gradient of the values, given that of the dense weight."""
        if self.bitmap is None:
            return grad.to(self.grad_dtype)
        return compress(grad, self.bitmap, kept, self.grad_dtype)


def read(weight: Any, traced: Any) -> Any:
    """Return the dense weight in a traced program, or an `Expansion` of it.

    ``traced`` is the `samo.core.dense.Traced` of the `Weight`. Resident weights are not refreshed
    here; optimizers, ``load_state_dict`` and ``.to()`` have done that already.
    """
    values, dense, bitmap, sizes, dtype = traced
    if not sizes:
        return _read_eagerly(weight)
    if bitmap is None and values.dtype == dtype:
        return values
    shape, strides = [tuple([int(n) for n in part.split()]) for part in sizes.split("/")]
    layout = TracedLayout(torch.Size(shape), strides, bitmap, values.dtype)
    if torch.compiler._is_exporting_flag or dense is None:
        return Expansion(values, layout, dtype)
    if not values.requires_grad or not torch.is_grad_enabled():
        return dense
    return Expand.apply(values, dense, layout, dtype)  # type: ignore[no-untyped-call]


@torch.compiler.disable
def _read_eagerly(weight: Any) -> Any:
    """Break the graph, so that watchers see the dense gradient in eager code."""
    dense = weight.read(weight.values)
    return dense._expand() if isinstance(dense, Expansion) else dense
