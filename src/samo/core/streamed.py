"""What ``module.weight`` is where the weight is streamed: a tensor without memory, until it is used.

torch hands every function of such a tensor to ``__torch_function__``. The products that we know become
`Product`; a transpose or one expert of a stack is again such a tensor; facts (shape, type, device) are
answered; everything else gets a fresh expansion, in the graph of the values. The same object serves in
threads, copies and repeated passes. Who writes to an expansion means the weight: see `Handed`.

`torch.compile` cannot make tensors without memory but follows any object with ``__torch_function__``:
it gets an `Expansion`.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from samo.core.dense import DenseWeight, Expand, Layout, expand_by_index
from samo.core.products import Convolution, GroupedMatmul, Matmul, Operation, product
from samo.errors import CompressionError

if TYPE_CHECKING:
    from samo.core.weight import Weight

__all__ = []

LOCK: Final = threading.RLock()
"""One thread at a time changes values or a dense copy. Again on the same thread: the garbage collector may
let go of a written expansion anywhere."""


class Expansion:
    """An expansion that has not been made: values, where they lie, and the type to compute in."""

    _param: Tensor
    """The values."""
    _layout: Layout
    _dtype: torch.dtype
    _is_flipped: bool
    """Whether the last two dimensions are exchanged."""

    def __init__(
        self,
        values: Tensor,
        layout: Any,
        dtype: torch.dtype,
        is_flipped: bool,
    ) -> None:
        self._param, self._layout = values, layout
        self._dtype, self._is_flipped = dtype, is_flipped

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
            dense = Expand.apply(values, None, layout, dtype)  # type: ignore[no-untyped-call]
        elif torch._C._functorch.peek_interpreter_stack() is not None:
            dense = expand_by_index(values, layout, dtype)
        elif values.requires_grad and torch.is_grad_enabled():
            dense = Expand.apply(values, None, layout, dtype)  # type: ignore[no-untyped-call]
        else:
            dense = layout.expand(values.detach(), dtype)
        return dense.transpose(-2, -1) if self._is_flipped else dense

    def _like(self, values: Tensor, layout: Layout, is_flipped: bool) -> Any:
        return Expansion(values, layout, self._dtype, is_flipped)

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

    _index: tuple[int, ...]
    """Which one of stacked weights it is; () for the whole."""

    @staticmethod
    def __new__(
        cls,
        values: Tensor,
        layout: Layout,
        dtype: torch.dtype,
        is_flipped: bool,
        weight: weakref.ref[Weight],
        index: tuple[int, ...] = (),
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
        index: tuple[int, ...] = (),
    ) -> None:
        Expansion.__init__(self, values, layout, dtype, is_flipped)
        self._samo_weight, self._index = weight, index

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch._C._is_tracing():
            raise CompressionError(
                "torch.jit.trace would keep the weights that it sees as they are; use torch.export, or call "
                "samo.decompress_(model) first"
            )
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            found = handler(*args, **kwargs)
            if found is not None:
                return found
        elif func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = func(*_expanded(args), **dict(zip(kwargs, _expanded(kwargs.values()))))
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
        weight = self._samo_weight()
        if (
            weight is None
            or torch.compiler.is_compiling()
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return super()._expand()
        if weight.handed:
            weight.sync_written()
        if self._param.requires_grad and torch.is_grad_enabled():
            dense = super()._expand()
            Handed(weight, self, dense if dense._base is None else dense._base)
        else:
            dense = self._expand_detached(weight)
        dense._samo_expansion_of = self  # type: ignore[attr-defined]
        return dense

    def _expand_detached(self, weight: Weight) -> Tensor:
        """Make it, or return the one there is, outside the graph."""
        base = self._shared(weight)
        return base.transpose(-2, -1) if self._is_flipped else base.view_as(base)

    def _shared(self, weight: Weight) -> Tensor:
        """Return the expansion that somebody still holds, or a new one: writes to one are seen in all."""
        for handed in tuple(weight.handed):
            base = handed.base()
            if base is not None and handed.fits(weight, self._index) and not base.requires_grad:
                return base
        with torch.inference_mode(False):  # tensors of inference mode have no version
            base = self._layout.expand(self._param.detach(), self._dtype)
        Handed(weight, self, base)
        return base

    def _like(
        self, values: Tensor, layout: Layout, is_flipped: bool, index: tuple[int, ...] = ()
    ) -> StreamedWeight:
        weight, index = self._samo_weight, self._index + index
        found = StreamedWeight(values, layout, self._dtype, is_flipped, weight, index)
        found._is_param = False
        return found

    # As a tensor it has these from torch, which asks `__torch_function__`.
    shape = Tensor.shape
    t, transpose, T, mT = Tensor.t, Tensor.transpose, Tensor.T, Tensor.mT  # noqa: N815
    __getitem__ = Tensor.__getitem__
    __matmul__, __rmatmul__ = Tensor.__matmul__, Tensor.__rmatmul__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def data(self) -> Tensor:
        """An expansion; what is written to it is taken over at the next use of the weight."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if self._is_param:
            _sync(self)  # `weight.data += delta` gives back what it has written to
            self._weight.write(value)
        else:
            self.detach().copy_(value)

    @property
    def requires_grad(self) -> bool:
        """Whether the values do."""
        return self._param.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._weight.values.requires_grad = value

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Refuse: there is no one dense gradient to call it with."""
        raise CompressionError(
            f"'{self._weight.name}' is streamed: its dense gradient exists only inside the product's "
            "backward pass; register the hook on the values in model.parameters(), or compress the "
            "model with weights='resident'"
        )


def _operator(name: str) -> Callable[..., Any]:
    def call(self: Expansion, *args: Any) -> Any:
        return getattr(self._expand(), name)(*args)

    return call


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "radd", "rsub", "rmul", "rtruediv"),
    *("rfloordiv", "rmod", "rpow", "neg", "pos", "abs", "eq", "ne", "lt", "le", "gt", "ge", "len"),
    "iter",
):
    # Python looks for operators in the class alone.
    setattr(Expansion, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(StreamedWeight, f"__{_name}__", getattr(Tensor, f"__{_name}__"))


class Handed:
    """An expansion that is in somebody's hands: the values follow what is written to it.

    At the next use of the weight, or when it is let go.
    """

    def __init__(self, weight: Weight, streamed: StreamedWeight, base: Tensor) -> None:
        self.base: Final = weakref.ref(base)
        self._dense: Final = base.detach()  # outlives it, for a last look
        self._weight: Final = weakref.ref(weight)
        self._index: Final = streamed._index
        self._mask: Final = weight.mask
        self._version: int = base._version
        self._values_version: int = weight.values._version
        weight.handed.append(self)
        weakref.finalize(base, self._let_go).atexit = False

    def fits(self, weight: Weight, index: tuple[int, ...]) -> bool:
        """Whether the values are still those that were expanded."""
        return self._index == index and self._is_current(weight)

    def _is_current(self, weight: Weight) -> bool:
        return weight.mask is self._mask and weight.values._version == self._values_version

    def follow(self) -> None:
        """Take up what was written.

        Raises:
            CompressionError: The values have changed as well.
        """
        with LOCK:
            weight = self._weight()
            if weight is None or self._dense._version == self._version:
                return
            self._version = self._dense._version
            if not self._is_current(weight):
                raise CompressionError(
                    f"'{weight.name}' was written in two ways since it was last used: through a tensor that "
                    "module.weight gave, and through its values in model.parameters(); take module.weight "
                    "anew after a step, or keep to one of them"
                )
            self._take(weight)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take(self, weight: Weight) -> None:
        dense = self._dense.detach()
        if self._index:
            dense = weight.layout.expand(weight.values, weight.dtype)
            dense[self._index] = self._dense
        weight.take_written(dense)
        self._dense.copy_(weight.layout.expand(weight.values, weight.dtype)[self._index])
        self._version, self._values_version = self._dense._version, weight.values._version

    def _let_go(self) -> None:
        weight = self._weight()
        try:
            self.follow()
        except CompressionError as error:
            warnings.warn(f"{error}; what was written to the tensor is lost", stacklevel=2)
        if weight is not None and self in weight.handed:
            weight.handed.remove(self)


def _expanded(args: Any) -> list[Any]:
    return [_expanded_one(arg) for arg in args]


def _expanded_one(arg: Any) -> Any:
    if isinstance(arg, Expansion):
        return arg._expand()
    if type(arg) in (list, tuple):
        return type(arg)(_expanded(arg))
    return arg


# The functions that we know ---------------------------------------------------------------------------


# Their arguments have the names that they have in torch.

_MATMULS: Final = {
    (is_transposed, is_linear): Matmul(is_transposed, is_linear)
    for is_transposed in (False, True)
    for is_linear in (False, True)
}


def _matmul_kind(is_transposed: bool, is_linear: bool) -> Matmul:
    if torch.compiler.is_compiling():  # which would guard one that it did not see made
        return Matmul(is_transposed, is_linear)
    return _MATMULS[is_transposed, is_linear]


def _linear(input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    if not isinstance(weight, Expansion) or (isinstance(bias, Tensor) and bias.dim() > 1):
        return None
    return _product(_matmul_kind(not weight._is_flipped, True), input, weight, bias, 2)


def _matmul(input: Any, other: Any = None, *, mat2: Any = None, out: Any = None) -> Tensor | None:
    weight = mat2 if other is None else other
    if not isinstance(weight, Expansion) or out is not None:
        return None
    return _product(_matmul_kind(weight._is_flipped, False), input, weight, None, 2)


def _addmm(input: Any, mat1: Any, mat2: Any, **others: Any) -> Tensor | None:
    if others or not isinstance(mat2, Expansion) or input.dim() != 1:
        return None
    return _product(_matmul_kind(mat2._is_flipped, False), mat1, mat2, input, 2)


def _grouped_mm(
    mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor | None:
    if bias is not None or out_dtype is not None or offs is None:
        return None
    if not isinstance(mat_b, Expansion) or mat_a.dim() != 2:
        return None
    return _product(GroupedMatmul(mat_b._is_flipped), mat_a, mat_b, None, 3, offs)


def _convolution(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    if not isinstance(weight, Expansion) or weight._is_flipped:
        return None
    shape = weight._layout.shape
    dims = len(shape) - 2
    stride, dilation = _each(stride, dims), _each(dilation, dims)
    if padding == "valid":
        padding = 0
    elif padding == "same" and all(step == 1 for step in stride):
        # Where it is the same on both sides; torch pads the input first where it is not.
        total = [each * (size - 1) for each, size in zip(dilation, shape[2:])]
        if any(size % 2 for size in total):
            return None
        padding = [size // 2 for size in total]
    elif isinstance(padding, str):
        return None  # for torch to refuse
    operation = Convolution(stride, _each(padding, dims), dilation, groups)
    return (
        _product(operation, input, weight, bias, len(shape)) if input.dim() == len(shape) else None
    )


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))


def _product(
    operation: Operation, x: Any, weight: Any, bias: Any, dims: int, ends: Tensor | None = None
) -> Tensor | None:
    """Return a product, or None if it is not one that we know and torch has to do it."""
    # Every line here counts in every forward pass: a small model waits for the host.
    values, layout = weight._param, weight._layout
    if isinstance(x, Expansion) or isinstance(bias, Expansion):
        return None
    if len(layout.shape) != dims or x.dim() < 2 or x.device != values.device:
        return None
    if not torch.compiler.is_compiling():
        if type(x) not in _PLAIN or forward_ad._current_level >= 0:
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        _sync(weight)
    dtype = weight._dtype
    device = x.device.type
    is_cast = ends is None and device != "meta" and torch.is_autocast_enabled(device)
    if is_cast and dtype != torch.float64:
        # Here, not inside: autocast would keep its own 16-bit copy of the weight until backward.
        dtype = torch.get_autocast_dtype(device)
        x = x if x.dtype == torch.float64 else x.to(dtype)
        bias = bias if bias is None or bias.dtype == torch.float64 else bias.to(dtype)
    if x.dtype != dtype or (bias is not None and bias.dtype != dtype):
        return None  # for torch to refuse
    return product(values, x, bias, ends, layout, operation)


_PLAIN: Final = (Tensor, nn.Parameter)
"""Types of an input that has no ways of its own."""


def _sync(weight: Expansion) -> None:
    owner = weight._samo_weight() if isinstance(weight, StreamedWeight) else None
    if owner is not None and owner.handed:
        owner.sync_written()


def _getitem(weight: Any, index: Any) -> Any:
    """Return one of stacked weights, if its bits begin and end with blocks of the mask."""
    if len(weight._layout.shape) < 3 or not isinstance(weight, StreamedWeight):
        return None
    mask, values = weight._layout.mask, weight._param
    if mask is None or weight._layout.watchers:  # who want the gradient of the whole
        return None
    _sync(weight)
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
    index %= weight._layout.shape[0]
    return weight._like(values.narrow(0, first, part.kept), layout, weight._is_flipped, (index,))


def _transpose(input: Any, dim0: Any, dim1: Any) -> Any:
    dims = len(input._layout.shape)
    last = ({-2, dims - 2}, {-1, dims - 1})
    if dims < 2 or not (
        (dim0 in last[0] and dim1 in last[1]) or (dim0 in last[1] and dim1 in last[0])
    ):
        return None
    return input._like(input._param, input._layout, not input._is_flipped)


def _detach(weight: Any) -> Any:
    """Return a view that a write is followed from: torch's own would not keep the expansion alive."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    owner = weight._samo_weight()
    if owner is None:
        return None
    _sync(weight)
    return weight._expand_detached(owner)


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
    Tensor.detach: _detach,
    torch.detach: _detach,
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
