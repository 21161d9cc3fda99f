"""Reading a weight inside `torch.compile` and `torch.export`, through operators they can trace."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

# What compiled code calls, by its own name: else it would check in each call that torch is torch.
from torch import Tensor, compiler, is_grad_enabled

from samo.core.dense import Expand
from samo.core.products import Operation, Product
from samo.core.streamed import Expansion
from samo.errors import CompressionError
from samo.kernels.operators import compress, expand


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

    def expand(self, values: Tensor, dtype: torch.dtype, grad: Tensor | None = None) -> Tensor:
        """Expand; in backward, after ``grad`` is ready: see `samo.kernels.operators.expand`."""
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


# Note [Autograd functions in compiled code]
#
# Dynamo calls `product` and `_track` while it traces, instead of tracing them; AOTAutograd traces
# them later, forward and backward. Each is one node of Dynamo's graph, so it needs few guards, and
# under activation checkpointing torch 2.11 marks all its operations as to be recomputed. Inside of
# an autograd function that Dynamo traces, it does not, and would save the results of products.
#
# The transforms of torch.func cannot take such a node, and Dynamo traces what they differentiate.


@torch.compiler.allow_in_graph
def product(
    values: Tensor, x: Tensor, bias: Tensor | None, layout: TracedLayout, operation: Operation
) -> Tensor:
    """Multiply with a streamed weight."""
    return Product.apply(values, x, bias, layout, operation, False)  # type: ignore[no-untyped-call]


@torch.compiler.allow_in_graph
def _track(*args: Any) -> Tensor:
    return Expand.apply(*args)  # type: ignore[no-untyped-call]


def track(values: Tensor, dense: Tensor | None, layout: TracedLayout, dtype: torch.dtype) -> Tensor:
    """Return the resident dense weight, or a new one, in the graph of the values."""
    apply = Expand.apply if is_transformed() else _track
    return apply(values, dense, layout, dtype)


@torch.compiler.assume_constant_result  # torch guards the transforms that it traces
def is_transformed() -> bool:
    """Return whether `torch.func` transforms the code that is traced."""
    return torch._C._functorch.maybe_current_level() is not None


class TracedExpansion(Expansion):
    """An `Expansion` with the attributes and operators of tensors that compiled code uses."""

    def _like(self, values: Tensor, layout: Any, is_flipped: bool) -> "TracedExpansion":
        return TracedExpansion(values, layout, self._dtype, is_flipped)

    def _expand(self) -> Tensor:
        layout: Any = self._layout
        dense = track(self._param, None, layout, self._dtype)
        return dense.transpose(-2, -1) if self._is_flipped else dense

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense weight."""
        shape = list(self._layout.shape)
        if self._is_flipped:
            shape[-2:] = shape[-1], shape[-2]
        return torch.Size(shape)

    def __getattr__(self, name: str) -> Any:
        if name in ("device", "is_cuda"):
            return getattr(self._param, name)
        if name == "dtype":
            return self._dtype
        if name.endswith("_") and not name.endswith("__"):
            raise CompressionError(
                f"compiled code would lose what {name} writes to a streamed weight; write to it "
                "in eager code, or keep it resident"
            )
        return getattr(self._expand(), name)

    def __rmatmul__(self, other: Any) -> Any:
        return torch.matmul(other, self)  # type: ignore[arg-type]

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Transpose two dimensions."""
        found = self._transposed(dim0, dim1)
        return self._expand().transpose(dim0, dim1) if found is None else found

    def t(self) -> Any:
        """Transpose a matrix."""
        return self.transpose(0, 1) if len(self._layout.shape) == 2 else self._expand().t()

    T = property(t)

    @property
    def mT(self) -> Any:  # noqa: N802
        """Transpose the last two dimensions."""
        return self.transpose(-2, -1)


_OPERATORS: Final = (
    "add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rfloordiv rmod rpow neg pos abs "
    "matmul eq ne lt le gt ge getitem len iter"
)


def _operator(name: str) -> Callable[..., Any]:
    def call(self: TracedExpansion, *args: Any) -> Any:
        return getattr(self._expand(), name)(*args)

    return call


for _name in _OPERATORS.split():  # Python looks operators up on the class
    setattr(TracedExpansion, f"__{_name}__", _operator(f"__{_name}__"))


def read(weight: Any, traced: Any) -> Any:
    """Return the dense weight in a traced program, or a `TracedExpansion` of it.

    ``traced`` is the `samo.core.dense.Traced` of the `Weight`. Resident weights are not refreshed
    here; optimizers, ``load_state_dict`` and ``.to()`` have done that already.
    """
    values, dense, bitmap, text = traced
    shape, strides, dtype, is_watched = _parsed(text)
    if is_watched and is_grad_enabled() and not compiler._is_exporting_flag:
        return _read_eagerly(weight)
    if bitmap is None and values.dtype == dtype:
        return values
    layout = TracedLayout(shape, strides, bitmap, values.dtype)
    if compiler._is_exporting_flag or dense is None:
        return TracedExpansion(values, layout, dtype)
    if not values.requires_grad or not is_grad_enabled():
        return dense
    return track(values, dense, layout, dtype)


@torch.compiler.assume_constant_result  # or every call would check the functions it uses
def _parsed(text: str) -> tuple[torch.Size, tuple[int, ...], torch.dtype, bool]:
    """Return shape, strides, dtype and whether there are hooks."""
    sizes, strides, dtype, watched = text.split("/")
    shape = torch.Size(map(int, sizes.split()))
    return shape, tuple(map(int, strides.split())), getattr(torch, dtype), watched == "watched"


@torch.compiler.disable
def _read_eagerly(weight: Any) -> Any:
    """Break the graph, so that watchers see the dense gradient in eager code."""
    dense = weight.read(weight.values)
    return dense._expand() if isinstance(dense, Expansion) else dense
