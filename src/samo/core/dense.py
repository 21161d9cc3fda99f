"""From values to a dense weight and back: `Layout`, and the two autograd functions on it.

The dense weight of a *resident* weight is made once and handed out at every read, so that it behaves as
a parameter would: hooks stay on it, and ``module.weight is module.weight``. It shares its memory and its
version with the resident copy, so a write to it is seen (`samo.core.weight`) and a backward pass over
overwritten values is refused by autograd. Its node in the graph saves no tensors and serves any number
of backward passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from samo.kernels import Kernels
from samo.mask.mask import Mask

if TYPE_CHECKING:
    from samo.core.weight import Weight

__all__ = []


class Layout(NamedTuple):
    """All that leads from values to a dense tensor and back; without a reference to the weight."""

    shape: torch.Size
    strides: tuple[int, ...]
    """Of the dense weight: channels_last stays that."""
    mask: Mask | None
    grad_dtype: torch.dtype
    kernels: Kernels
    watchers: list[Callable[[Tensor], None]]
    """Called with each dense gradient before it is compressed: see `Weight.watch`."""

    def compress(self, dense: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the kept entries of a dense tensor; a new one, unless nothing is pruned or cast."""
        if self.mask is None:
            return dense.to(dtype)
        values = torch.empty(self.mask.kept, dtype=dtype, device=dense.device)
        self.kernels.compress_(dense, self.mask, values)
        return values

    def compress_grad(self, grad: Tensor, kept: int) -> Tensor:
        """Return the gradient of the values for that of the dense weight."""
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        for watcher in self.watchers:
            watcher(grad)
        if torch.is_grad_enabled():  # backward(create_graph=True)
            return Compress.apply(grad, self)  # type: ignore[no-untyped-call]
        return self.compress(grad, self.grad_dtype)

    def expand(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a new dense tensor with zeros where nothing is kept."""
        if self.mask is None:
            return values.to(dtype, copy=True)
        dense = self.new_dense(dtype, values.device)
        self.kernels.expand_(values, self.mask, dense)
        return dense

    def expand_again(self, values: Tensor, dtype: torch.dtype, grad: Tensor) -> Tensor:
        """Expand in a backward pass."""
        if torch.is_grad_enabled():  # backward(create_graph=True)
            return Expand.apply(values, None, self, dtype)  # type: ignore[no-untyped-call]
        return self.expand(values, dtype)

    def new_dense(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a dense tensor to be filled, laid out as the parameter was."""
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)


class Expand(torch.autograd.Function):
    """values -> a dense weight: the resident one, or if that is None a new one; backward compresses."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, dense: Tensor | None, layout: Layout, dtype: torch.dtype
    ) -> Tensor:
        # Not save_for_backward: the node serves many backward passes, and each would free it.
        ctx.layout, ctx.kept = layout, values.numel()
        return layout.expand(values, dtype) if dense is None else dense.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.layout.compress_grad(grad, ctx.kept), None, None, None


class Traced(NamedTuple):
    """What compiled code reads of a weight: see `samo.core.traced`."""

    values: Tensor
    dense: Tensor | None
    """The resident weight."""
    bitmap: Tensor | None
    """The mask's `Mask.packed`; None where nothing is pruned."""
    sizes: str
    """Shape and strides as text, one guard in place of many; "" while dense gradients are watched."""
    dtype: torch.dtype


class Compress(torch.autograd.Function):
    """dense -> values; backward expands. For gradients of gradients."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, layout: Layout) -> Tensor:
        ctx.layout, ctx.dtype = layout, dense.dtype
        return layout.compress(dense, layout.grad_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layout: Layout = ctx.layout
        if torch.is_grad_enabled():
            return expand_by_index(grad, layout, ctx.dtype), None
        return layout.expand(grad, ctx.dtype), None


def expand_by_index(values: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Expand in plain torch operations: for any values, any number of derivatives, and `torch.func`."""
    if layout.mask is None:
        return values.to(dtype)
    places = layout.mask.to_bool().view(-1).nonzero().view(-1)
    dense = torch.zeros(layout.mask.numel, dtype=dtype, device=values.device)
    return dense.index_put((places,), values.to(dtype)).view(layout.shape)


class DenseWeight(Tensor):
    """A dense weight that answers for its parameter where a plain tensor could not.

    Operations on it give plain tensors and cost nothing more. ``.data`` is a view whose writes are seen,
    ``.grad`` is the parameter's gradient in dense form, and ``requires_grad`` is the parameter's.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _is_param = True  # isinstance(module.weight, nn.Parameter), as of the module that it was

    _samo_weight: weakref.ref[Weight]

    @property
    def _weight(self) -> Weight:
        weight = self._samo_weight()
        if weight is None:
            raise RuntimeError("the module of this weight no longer exists")
        return weight

    @property
    def data(self) -> Tensor:
        return self.detach()  # Tensor.data would hide writes

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            if value.data_ptr() != self.data_ptr():  # not what `weight.data += delta` gives back
                self._weight.write(value)

    @property
    def grad(self) -> Tensor | None:
        weight = self._weight
        grad = weight.values.grad
        return None if grad is None else weight.layout.expand(grad.detach(), grad.dtype)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        weight = self._weight
        with torch.no_grad():
            dtype = weight.layout.grad_dtype
            weight.values.grad = None if value is None else weight.layout.compress(value, dtype)

    @property
    def requires_grad(self) -> bool:
        return self._weight.values.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._weight.values.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> DenseWeight:
        """Freeze or unfreeze the parameter."""
        self._weight.values.requires_grad_(requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


def as_dense_weight(tensor: Tensor, weight: Weight) -> DenseWeight:
    """Make a fresh tensor a `DenseWeight` of ``weight``, with the attributes people gave the parameter."""
    tensor.__class__ = DenseWeight
    tensor.__dict__.update(weight.attributes)
    tensor.__dict__["_samo_weight"] = weakref.ref(weight)
    return tensor  # type: ignore[return-value]
