"""From values to a dense weight and back: `Layout`, and the autograd function on it.

The dense tensor of a *resident* weight is created once and returned by every read (once for each
stream of a GPU), so that it behaves like a parameter: hooks stay on it, and
``module.weight is module.weight``. It shares storage and version counter with the resident copy, so
writes are noticed (`samo.core.weight`) and autograd rejects a backward pass over overwritten
values. Its graph node saves no tensors and serves any number of backward passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

from samo.errors import CompressionError
from samo.kernels import Kernels
from samo.mask.mask import Mask

if TYPE_CHECKING:
    from samo.core.weight import Weight


_F = TypeVar("_F", bound=Callable[..., Any])


class Layout(NamedTuple):
    """Converts values to a dense tensor and back. Holds no reference to the `Weight`."""

    shape: torch.Size
    strides: tuple[int, ...]
    """Strides of the dense weight, so that channels_last is preserved."""
    mask: Mask | None
    grad_dtype: torch.dtype
    kernels: Kernels
    watchers: list[Callable[[Tensor], None]]
    """Called with every dense gradient before compression: see `Weight.watch`."""

    def compress(self, dense: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the kept entries of a dense tensor."""
        if self.mask is None:
            return dense.to(dtype)
        values = torch.empty(self.mask.kept, dtype=dtype, device=dense.device)
        self.kernels.compress_(dense, self.mask, values)
        return values

    def compress_grad(self, grad: Tensor, kept: int) -> Tensor:
        """Return the gradient of the values, given that of the dense weight."""
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        for watcher in self.watchers:
            watcher(grad)
        if self.mask is not None and torch.is_grad_enabled():  # backward(create_graph=True)
            return grad[self.mask.to_bool()].to(self.grad_dtype)
        return self.compress(grad, self.grad_dtype)

    def expand(self, values: Tensor, dtype: torch.dtype, grad: Tensor | None = None) -> Tensor:
        """Return a new dense tensor with zeros in pruned entries; ``grad`` in a backward pass."""
        if grad is not None and torch.is_grad_enabled():  # backward(create_graph=True)
            return expand_by_index(values, self, dtype)
        if self.mask is None:
            return values.to(dtype, copy=True)
        dense = self.new_dense(dtype, values.device)
        self.kernels.expand_(values, self.mask, dense)
        return dense

    def new_dense(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized dense tensor with the parameter's shape and strides."""
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)


class Expand(torch.autograd.Function):
    """values -> dense weight: the resident one if given, else a new one. Backward compresses."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, dense: Tensor | None, layout: Layout, dtype: torch.dtype
    ) -> Tensor:
        # Not save_for_backward, which would be freed by the first of many backward passes.
        ctx.layout, ctx.kept = layout, values.numel()
        return layout.expand(values, dtype) if dense is None else dense.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.layout.compress_grad(grad, ctx.kept), None, None, None


def run_first(weight: Tensor) -> None:
    """Run the node of a dense weight as soon as its gradient is ready, like AccumulateGrad.

    Autograd runs the most recent nodes first. This one is older than the passes it serves and would
    run last, keeping every dense gradient alive until then.
    """
    with torch._C.DisableTorchFunctionSubclass():
        weight.grad_fn._set_sequence_nr(2**63 - 1)  # type: ignore[union-attr]


def never_alone(function: _F) -> _F:
    """Let the compiler trace a function as a part of its caller only, not by itself.

    See Note [Eager weights in compiled frames] in `samo.core.streamed`.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


def stream_on(device: torch.device) -> Callable[[], int]:
    """Return a function that returns the stream of nodes made now, on which backward runs them.

    A node that is kept also keeps the parameter's AccumulateGrad, with its stream. A capture of a
    CUDA graph must not reach a node of the default stream.
    """
    if device.type != "cuda":
        return int
    # Not a function of Python: every forward pass calls it for every weight.
    return partial(torch._C._cuda_getCurrentRawStream, device.index)


Traced: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, str]
"""What compiled code reads from a weight: see `samo.core.traced`.

The values, the resident weight, the mask's `Mask.packed`, and a text: shape, strides and compute
dtype, and "watched" while hooks want the dense gradient. A plain tuple and one text, since every
object and every name costs guards in every call. ``dynamic_sources`` goes by the place of values.
"""


def expand_by_index(values: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Expand with plain torch operations, for `torch.func` and higher derivatives."""
    if layout.mask is None:
        return values.to(dtype)
    # The count is known: nothing waits for a device, and exported programs have static shapes.
    bits, count = layout.mask.to_bool().view(-1), layout.mask.kept
    places = torch.nonzero_static(bits, size=count).view(-1)
    dense = torch.zeros(layout.mask.numel, dtype=dtype, device=values.device)
    return dense.index_put((places,), values.to(dtype)).view(layout.shape)


class DenseWeight(Tensor):
    """The dense weight as ``module.weight`` returns it; stands in for the parameter.

    Operations on it return plain tensors at no extra cost. Writes through ``.data`` are tracked,
    ``.grad`` is the parameter's gradient in dense form, and ``requires_grad`` is the parameter's.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _is_param = True  # makes isinstance(module.weight, nn.Parameter) true

    _samo_weight: weakref.ref[Weight]

    @property
    def _weight(self) -> Weight:
        weight = self._samo_weight()
        if weight is None:
            raise RuntimeError("the module of this weight no longer exists")
        return weight

    @property
    def data(self) -> Tensor:
        """The dense weight, or an expansion of it; writes reach the values at the next use."""
        return self.detach()  # Tensor.data would hide writes

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            if not self._is_param:  # a part or the transpose of a streamed weight
                self.detach().copy_(value)
            elif value.data_ptr() == self.data_ptr() != 0:
                # `weight.data += delta` assigns the same memory. Now, so that a warning comes from
                # where the write is.
                self._weight.sync_written()
            else:
                self._weight.write(value)

    @property
    def grad(self) -> Tensor | None:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return None  # a compiler copies what it has been given
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

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse other memory, of which the values would know nothing."""
        raise CompressionError(
            f"'{self._weight.name}' is compressed, and cannot take the memory of another tensor; "
            "write to it with copy_, and register parametrizations before compress_"
        )

    def requires_grad_(self, requires_grad: bool = True) -> DenseWeight:
        """Freeze or unfreeze the parameter."""
        self._weight.values.requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Register a hook that stays after writes to the weight, ``.to()`` and new masks."""
        handle = super().register_hook(hook)  # type: ignore[no-untyped-call]
        weight = self._weight
        weight.hooks = self._backward_hooks
        weight.prepare_traced()
        handle.remove = partial(_remove, handle.remove, self._samo_weight)
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


def _remove(remove: Callable[[], None], weight: weakref.ref[Weight]) -> None:
    """Remove a hook, for compiled code too."""
    remove()
    if (owner := weight()) is not None:
        owner.prepare_traced()


def as_dense_weight(tensor: Tensor, weight: Weight) -> DenseWeight:
    """Turn a new tensor into the `DenseWeight` of ``weight``."""
    tensor.__class__ = DenseWeight
    tensor.__dict__.update(weight.attributes)
    tensor.__dict__["_samo_weight"] = weakref.ref(weight)
    return tensor  # type: ignore[return-value]
