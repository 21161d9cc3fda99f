"""What ``module.weight`` is where the weight is streamed: a tensor without memory, until it is used.

torch hands every function of such a tensor to ``__torch_function__``. The products that we know become
`Product`; a transpose or one expert of a stack is again such a tensor; facts (shape, type, device) are
answered; everything else gets a fresh expansion, in the graph of the values. There is no state: the
same object serves in threads, copies and repeated passes.

`torch.compile` cannot make tensors without memory but follows any object with ``__torch_function__``:
it gets an `Expansion`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from samo.core.dense import DenseWeight, Expand, Layout, expand_by_index
from samo.core.products import Convolution, GroupedMatmul, Matmul, Operation, product
from samo.errors import CompressionError

if TYPE_CHECKING:
    from samo.core.weight import Weight

__all__ = []


class Expansion:
    """An expansion that has not been made: values, where they lie, and the type to compute in."""

    _param: Tensor
    """The values."""
    _layout: Layout
    _dtype: torch.dtype
    _is_flipped: bool
    """Whether the last two dimensions are exchanged."""
    _source: Tensor
    """Where gradients go: the values, or in compiled code what stands for them."""

    def __init__(
        self,
        values: Tensor,
        layout: Any,
        dtype: torch.dtype,
        is_flipped: bool,
        source: Tensor,
    ) -> None:
        self._param, self._layout = values, layout
        self._dtype, self._is_flipped, self._source = dtype, is_flipped, source

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            found = handler(*args, **kwargs)
            if found is not None:
                return found
        return func(*_expanded(args), **dict(zip(kwargs, _expanded(kwargs.values()))))

    def _expand(self) -> Tensor:
        """Make it."""
        values, layout, dtype = self._param, self._layout, self._dtype
        if torch.compiler.is_compiling():
            dense = Expand.apply(self._source, values, None, layout, dtype)  # type: ignore[no-untyped-call]
        elif torch._C._functorch.peek_interpreter_stack() is not None:
            dense = expand_by_index(values, layout, dtype)
        elif values.requires_grad and torch.is_grad_enabled():
            dense = Expand.apply(values, values, None, layout, dtype)  # type: ignore[no-untyped-call]
        else:
            dense = layout.expand(values.detach(), dtype)
        return dense.transpose(-2, -1) if self._is_flipped else dense

    def _like(self, values: Tensor, layout: Layout, is_flipped: bool) -> Any:
        return Expansion(values, layout, self._dtype, is_flipped, self._source)

    # What compiled code asks of it.

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
        return getattr(self._expand(), name)

    def __getitem__(self, index: Any) -> Any:
        found = _getitem(self, index)
        return self._expand()[index] if found is None else found

    def __matmul__(self, other: Any) -> Any:
        return self._expand() @ other

    def __rmatmul__(self, other: Any) -> Any:
        return torch.matmul(other, self)  # type: ignore[arg-type]

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Exchange two dimensions."""
        found = _transpose(self, dim0, dim1)
        return self._expand().transpose(dim0, dim1) if found is None else found

    def t(self) -> Any:
        """Exchange both dimensions."""
        return self.transpose(0, 1)

    T = mT = property(t)  # noqa: N815


class StreamedWeight(Expansion, DenseWeight):
    """The same as a tensor, for eager code: a weight as far as anybody can see."""

    @staticmethod
    def __new__(
        cls,
        values: Tensor,
        layout: Layout,
        dtype: torch.dtype,
        is_flipped: bool,
        weight: weakref.ref[Weight],
    ) -> StreamedWeight:
        shape, strides = [*layout.shape], [*layout.strides]
        if is_flipped:
            shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
        return Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides,
            dtype=dtype,
            device=values.device,
            requires_grad=values.requires_grad,
        )

    def __init__(
        self,
        values: Tensor,
        layout: Layout,
        dtype: torch.dtype,
        is_flipped: bool,
        weight: weakref.ref[Weight],
    ) -> None:
        Expansion.__init__(self, values, layout, dtype, is_flipped, values)
        self._samo_weight = weight

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = super().__torch_function__(func, types, args, kwargs)
        # An operation in place returns the expansion that it wrote to: `_follow` takes it up.
        if type(found) is Tensor and args and getattr(found, "_samo_expansion_of", None) is args[0]:
            return args[0]
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise CompressionError(
            f"{func} was given a streamed weight where torch does not ask how to treat one; pass it "
            "module.weight.clone(), or compress the model with weights='resident'"
        )

    def _expand(self) -> Tensor:
        dense = super()._expand()
        weight = self._samo_weight()
        if weight is not None and not torch.compiler.is_compiling():
            base = dense if dense._base is None else dense._base
            if not torch._C._functorch.is_functorch_wrapped_tensor(base):
                dense._samo_expansion_of = self  # type: ignore[attr-defined]
                weakref.finalize(base, _follow, weight, base.detach(), base._version)
        return dense

    def _like(self, values: Tensor, layout: Layout, is_flipped: bool) -> StreamedWeight:
        # One expert is not the weight: what is written to it cannot be followed by the whole.
        weight = self._samo_weight if layout is self._layout else _NO_WEIGHT
        return StreamedWeight(values, layout, self._dtype, is_flipped, weight)

    # As a tensor it has these from torch, which asks `__torch_function__`.
    shape = Tensor.shape
    t, transpose, T, mT = Tensor.t, Tensor.transpose, Tensor.T, Tensor.mT  # noqa: N815
    __getitem__ = Tensor.__getitem__
    __matmul__, __rmatmul__ = Tensor.__matmul__, Tensor.__rmatmul__

    @property
    def data(self) -> Tensor:
        """A fresh expansion; what is written to it is taken over when it is let go."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self._weight.write(value)

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Refuse: there is no one dense gradient to call it with."""
        raise CompressionError(
            f"'{self._weight.name}' is streamed: its dense gradient exists only inside the product's "
            "backward pass; register the hook on the values in model.parameters(), or compress the "
            "model with weights='resident'"
        )


def _follow(weight: Weight, dense: Tensor, version: int) -> None:
    """Let the values follow what was written to an expansion, when it is let go."""
    if dense._version != version:
        weight.take_written(dense)


_NO_WEIGHT: Final[Any] = lambda: None  # noqa: E731


def _expanded(args: Any) -> list[Any]:
    return [_expanded_one(arg) for arg in args]


def _expanded_one(arg: Any) -> Any:
    if isinstance(arg, Expansion):
        return arg._expand()
    if type(arg) in (list, tuple):
        return type(arg)(_expanded(arg))
    return arg


# The functions that we know ---------------------------------------------------------------------------


def _linear(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    return _product(Matmul(not weight._is_flipped, True), x, weight, bias, 2)


def _matmul(x: Any, weight: Any) -> Tensor | None:
    if not isinstance(weight, Expansion):
        return None
    return _product(Matmul(weight._is_flipped, False), x, weight, None, 2)


def _addmm(bias: Any, x: Any, weight: Any, **scales: Any) -> Tensor | None:
    if scales or not isinstance(weight, Expansion) or bias.dim() != 1:
        return None
    return _product(Matmul(weight._is_flipped, False), x, weight, bias, 2)


def _grouped_mm(
    x: Any, weight: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor | None:
    if bias is not None or out_dtype is not None or offs is None:
        return None
    if not isinstance(weight, Expansion) or x.dim() != 2:
        return None
    return _product(GroupedMatmul(weight._is_flipped), x, weight, None, 3, offs)


def _convolution(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    shape = weight._layout.shape
    dims = len(shape) - 2
    stride, dilation = _each(stride, dims), _each(dilation, dims)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        # Where it is the same on both sides; torch pads the input first where it is not.
        total = [each * (size - 1) for each, size in zip(dilation, shape[2:])]
        if any(size % 2 for size in total):
            return None
        padding = [size // 2 for size in total]
    operation = Convolution(stride, _each(padding, dims), dilation, groups)
    return _product(operation, x, weight, bias, len(shape)) if x.dim() == len(shape) else None


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))


def _product(
    operation: Operation, x: Any, weight: Any, bias: Any, dims: int, ends: Tensor | None = None
) -> Tensor | None:
    """Return a product, or None if it is not one that we know and torch has to do it."""
    values, layout = weight._param, weight._layout
    if not isinstance(weight, Expansion) or isinstance(x, Expansion) or isinstance(bias, Expansion):
        return None
    if len(layout.shape) != dims or x.dim() < 2 or x.device != values.device:
        return None
    if not torch.compiler.is_compiling() and (
        torch._C._functorch.peek_interpreter_stack() is not None or type(x) is not Tensor
    ):
        return None
    dtype = weight._dtype
    device = x.device.type
    if ends is None and torch.is_autocast_enabled(device) and dtype != torch.float64:
        # Here, not inside: autocast would keep its own 16-bit copy of the weight until backward.
        dtype = torch.get_autocast_dtype(device)
        x = x if x.dtype == torch.float64 else x.to(dtype)
        bias = bias if bias is None or bias.dtype == torch.float64 else bias.to(dtype)
    if x.dtype != dtype or (bias is not None and bias.dtype != dtype):
        return None  # for torch to refuse
    return product(weight._source, x, bias, values, ends, layout, operation)


def _getitem(weight: Any, index: Any) -> Any:
    """Return one of stacked weights, if its bits begin and end with blocks of the mask."""
    if len(weight._layout.shape) < 3 or torch.compiler.is_compiling():
        return None
    mask, values = weight._layout.mask, weight._param
    if mask is None:
        return None
    if isinstance(index, Tensor):
        if index.dim() or index.is_floating_point() or index.dtype == torch.bool:
            return None
        index = int(index)
    found = mask.part(index) if type(index) is int else None
    if found is None:
        return None
    first, part = found
    layout = weight._layout._replace(
        shape=torch.Size(part.shape), strides=weight._layout.strides[1:], mask=part
    )
    return weight._like(values.narrow(0, first, part.kept), layout, weight._is_flipped)


def _transpose(weight: Any, first: int, second: int) -> Any:
    dims = len(weight._layout.shape)
    if dims < 2 or {first % dims, second % dims} != {dims - 2, dims - 1}:
        return None
    return weight._like(weight._param, weight._layout, not weight._is_flipped)


def _turn(weight: Any) -> Any:
    return _transpose(weight, 0, 1) if len(weight._layout.shape) == 2 else None


_HANDLERS: Final[dict[Any, Callable[..., Any]]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
    F.grouped_mm: _grouped_mm,
    torch._grouped_mm: _grouped_mm,
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    torch.conv3d: _convolution,
    Tensor.__getitem__: _getitem,
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    Tensor.t: _turn,
    torch.t: _turn,
    Tensor.T.__get__: _turn,  # type: ignore[attr-defined]
    Tensor.mT.__get__: lambda weight: _transpose(weight, -2, -1),  # type: ignore[attr-defined]
}
"""What each function becomes; where the handler returns None it is torch's own, on an expansion."""

_FACTS: Final = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            *(
                "shape",
                "dtype",
                "device",
                "layout",
                "ndim",
                "is_leaf",
                "grad_fn",
                "_base",
                "_version",
            ),
            *(
                "is_cpu",
                "is_cuda",
                "is_meta",
                "is_mps",
                "is_xpu",
                "is_sparse",
                "is_quantized",
                "is_nested",
            ),
        )
    ),
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.stride,
    Tensor.element_size,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.get_device,
    Tensor.data_ptr,
    Tensor.untyped_storage,
    Tensor.is_inference,
    Tensor.__len__,
    Tensor.__hash__,
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
}
"""What the tensor without memory knows itself."""
