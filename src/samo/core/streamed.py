"""Streamed weights: what ``module.weight`` returns when the dense weight is not kept.

An `Expansion` is expanded lazily. torch passes every function called on it to
``__torch_function__``. Matrix products and convolutions expand and free the weight internally
(`samo.core.products`); any other function gets a fresh expansion, in the autograd graph of the
values.

Eager code gets the subclass `StreamedWeight`, a tensor without storage. It knows its shape, dtype
and device. A transpose, or one expert of a stack, is another such tensor. It has no mutable state,
so threads, copies and repeated passes can share it. For compiled code see `samo.core.traced`.

A caller may write to an expansion: `LiveExpansion` applies the write to the values.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from samo.core.dense import DenseWeight, Expand, Layout, expand_by_index, never_alone, run_first
from samo.errors import CompressionError

if TYPE_CHECKING:
    from samo.core.weight import Weight

HANDLERS: Final[dict[Any, Callable[..., Any]]] = {}
"""Replacements for functions of torch. A handler that returns None falls back to an expansion."""


def implements(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a handler for functions of torch."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


class Expansion:
    """A deferred expansion: the values, their layout, and the compute dtype."""

    _param: Tensor
    """The values."""
    _layout: Layout
    _dtype: torch.dtype
    _is_flipped: bool
    """Whether the last two dimensions are transposed."""

    def __init__(
        self, values: Tensor, layout: Any, dtype: torch.dtype, is_flipped: bool = False
    ) -> None:
        self._param, self._layout = values, layout
        self._dtype, self._is_flipped = dtype, is_flipped

    def _expand(self) -> Tensor:
        """Expand now."""
        values, layout, dtype = self._param, self._layout, self._dtype
        if torch._C._functorch.peek_interpreter_stack() is not None:
            dense = expand_by_index(values, layout, dtype)
        elif values.requires_grad and torch.is_grad_enabled():
            dense = Expand.apply(values, None, layout, dtype)  # type: ignore[no-untyped-call]
        else:
            dense = layout.expand(values.detach(), dtype)
        return dense.transpose(-2, -1) if self._is_flipped else dense

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        found = None if handler is None else handler(*args, **kwargs)
        if found is not None:
            return found
        return func(*map(_expanded, args), **{key: _expanded(arg) for key, arg in kwargs.items()})

    def _like(self, values: Tensor, layout: Layout, is_flipped: bool) -> Any:
        """Return another expansion of the same kind and dtype."""
        raise NotImplementedError

    def _transposed(self, dim0: Any, dim1: Any) -> Any:
        """Transpose the last two dimensions; return None for other dimensions."""
        dims = len(self._layout.shape)
        swapped = {dim % dims for dim in (dim0, dim1) if -dims <= dim < dims}
        if dims < 2 or swapped != {dims - 2, dims - 1}:
            return None
        return self._like(self._param, self._layout, not self._is_flipped)


def _expanded(arg: Any) -> Any:
    if isinstance(arg, Expansion):
        return arg._expand()
    if type(arg) in (list, tuple):
        return type(arg)(map(_expanded, arg))
    return arg


@implements(Tensor.__getitem__)
def _getitem(weight: Any, index: Any) -> Any:
    return weight._part(index)


@implements(Tensor.transpose, torch.transpose)
def _transpose(input: Any, dim0: Any, dim1: Any) -> Any:
    return input._transposed(dim0, dim1)


@implements(Tensor.t, torch.t, Tensor.T.__get__)  # type: ignore[attr-defined]
def _t(weight: Any) -> Any:
    return weight._transposed(0, 1) if len(weight._layout.shape) == 2 else None


@implements(Tensor.mT.__get__)  # type: ignore[attr-defined]
def _mT(weight: Any) -> Any:  # noqa: N802
    return weight._transposed(-2, -1)


# In eager code ----------------------------------------------------------------------------------


class StreamedWeight(Expansion, DenseWeight):
    """An `Expansion` that is a tensor, for eager code."""

    _index: tuple[int, ...]
    """Index into stacked weights; () for the whole weight."""
    _is_tracked: bool
    """Whether gradients that reach it go on to the values."""

    @classmethod
    @never_alone
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch._C._is_tracing():
            raise CompressionError(
                "torch.jit.trace would bake in the weights; use torch.export, or call "
                "samo.decompress_(model) first"
            )
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():
            return _call_eagerly(func, types, args, kwargs)
        found = super().__torch_function__(func, types, args, kwargs)
        # An in-place operation returns the expansion it wrote to; return the weight instead, as
        # torch would.
        if type(found) is Tensor and args and getattr(found, "_samo_expansion_of", None) is args[0]:
            return args[0]
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise CompressionError(
            f"{func} does not take a streamed weight; pass it module.weight.clone(), or compress "
            "the model with weights='resident'"
        )

    def _expand(self) -> Tensor:
        weight = self._samo_weight()
        if weight is None or torch._C._functorch.peek_interpreter_stack() is not None:
            return super()._expand()
        if weight.expansions:
            weight.sync_written()
        if self._param.requires_grad and torch.is_grad_enabled():
            dense = super()._expand()
            LiveExpansion(weight, self._index, dense if dense._base is None else dense._base)
        else:
            dense = self._expand_detached(weight)
        dense._samo_expansion_of = self  # type: ignore[attr-defined]
        return dense

    def _expand_detached(self, weight: Weight) -> Tensor:
        """Expand outside the graph. All readers share it, and see each other's writes."""
        base = self._live(weight)
        if base is None:
            with torch.inference_mode(False):  # tensors of inference mode have no version
                base = self._layout.expand(self._param.detach(), self._dtype)
            LiveExpansion(weight, self._index, base)
        return base.transpose(-2, -1) if self._is_flipped else base.view_as(base)

    def _live(self, weight: Weight) -> Tensor | None:
        """Return an earlier expansion that is alive and up to date, if any."""
        for expansion in tuple(weight.expansions):
            base = expansion.base()
            is_same = expansion.index == self._index and expansion.is_current(weight)
            if base is not None and is_same and not base.requires_grad:
                return base
        return None

    def _like(
        self, values: Tensor, layout: Layout, is_flipped: bool, index: tuple[int, ...] = ()
    ) -> StreamedWeight:
        weight, index = self._samo_weight, self._index + index
        found = streamed_weight(values, layout, self._dtype, weight, is_flipped, index)
        found._is_param = False
        return found

    def _sync(self) -> None:
        """Apply pending writes to earlier expansions."""
        weight = self._samo_weight()
        if weight is not None and weight.expansions:
            weight.sync_written()

    def _part(self, index: Any) -> StreamedWeight | None:
        """Return one of stacked weights alone, or None if its bits cut a block of the mask."""
        layout = self._layout
        mask = layout.mask
        # Watchers need the gradient of the whole weight.
        if len(layout.shape) < 3 or mask is None or layout.watchers:
            return None
        self._sync()
        if isinstance(index, Tensor):
            if index.dim() or index.is_floating_point() or index.dtype == torch.bool:
                return None
            index = int(index)
        found = mask.part(index) if type(index) is int else None
        if found is None:
            return None
        first, part = found
        own = layout._replace(shape=torch.Size(part.shape), strides=layout.strides[1:], mask=part)
        values = self._param.narrow(0, first, part.kept)
        return self._like(values, own, self._is_flipped, (index % layout.shape[0],))

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Raise an error: the dense gradient is never materialized outside the product."""
        raise CompressionError(
            f"'{self._weight.name}' is streamed: its dense gradient exists only inside backward; "
            "register the hook on its values in model.parameters(), or use weights='resident'"
        )


# Note [Eager weights in compiled frames]
#
# Where torch.compile breaks a graph, or gives up on a frame that it has recompiled too often, it
# compiles the functions that eager code calls next, one by one. They must not be traced with an
# eager weight, whose kernels are opaque: `never_alone` keeps them, and what they call, as they are,
# and `_call_eagerly` breaks the graph of a caller that has such a weight.


@torch.compiler.disable
def _call_eagerly(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return StreamedWeight.__torch_function__(func, types, args, kwargs)


def streamed_weight(
    values: Tensor,
    layout: Layout,
    dtype: torch.dtype,
    weight: weakref.ref[Weight],
    is_flipped: bool = False,
    index: tuple[int, ...] = (),
) -> StreamedWeight:
    """Return a `StreamedWeight`."""
    shape, strides = [*layout.shape], [*layout.strides]
    if is_flipped:
        shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
    make = partial(
        Tensor._make_wrapper_subclass,
        *(StreamedWeight, shape, strides),
        dtype=dtype,
        device=values.device,
    )
    is_plain = torch._C._functorch.peek_interpreter_stack() is None
    made = Attach.apply(values, make, layout, is_flipped) if is_plain else make()  # type: ignore[no-untyped-call]
    Expansion.__init__(made, values, layout, dtype, is_flipped)
    made._samo_weight, made._index = weight, index
    made._is_tracked = is_plain and values.requires_grad
    if made._is_tracked and torch.is_grad_enabled():
        run_first(made)
    return made


class Attach(torch.autograd.Function):
    """values -> `StreamedWeight`, for gradients that reach the tensor itself.

    Such as those of an autograd function of the caller, which gets it without __torch_function__.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, make: Callable[[], Tensor], layout: Layout, is_flipped: bool
    ) -> Tensor:
        ctx.layout, ctx.kept, ctx.is_flipped = layout, values.numel(), is_flipped
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad.transpose(-2, -1) if ctx.is_flipped else grad
        return ctx.layout.compress_grad(grad, ctx.kept), None, None, None


@implements(Tensor.detach, torch.detach)
def _detach(weight: Any) -> Any:
    """Return a view whose writes are tracked; torch's own would not keep the expansion alive."""
    owner = weight._samo_weight()
    if owner is None or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    weight._sync()
    return weight._expand_detached(owner)


_PROPERTIES: Final = (
    "shape dtype device layout ndim _base _version "
    "is_cpu is_cuda is_meta is_mps is_xpu is_sparse is_quantized is_nested"
)
_METHODS: Final = (
    "size dim numel nelement stride element_size is_contiguous is_floating_point is_complex "
    "get_device data_ptr untyped_storage is_inference __len__ __hash__"
)
_FACTS: Final = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(getattr(Tensor, name) for name in _METHODS.split()),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}
"""Functions that need no expansion."""


# Writes to expansions ---------------------------------------------------------------------------

LOCK: Final = threading.RLock()
"""Held while values or a dense copy change. Reentrant, because the garbage collector may finalize a
written expansion anywhere."""


class LiveExpansion:
    """An expansion returned to a caller.

    Writes to it reach the values at the weight's next use, or when the expansion is freed.
    """

    def __init__(self, weight: Weight, index: tuple[int, ...], base: Tensor) -> None:
        self.base: Final = weakref.ref(base)
        self._dense: Final = base.detach()  # outlives `base`, for the final check
        self._weight: Final = weakref.ref(weight)
        self.index: Final = index
        self._mask: Final = weight.mask
        self._values: Final = weight.values.detach()  # holds their memory, and so the address
        self._version: int = base._version
        self._values_version: int = weight.values._version
        weight.expansions.append(self)
        weakref.finalize(base, self._finalize).atexit = False

    def is_current(self, weight: Weight) -> bool:
        """Return whether mask and values are still the same."""
        values = weight.values
        is_same = values._version == self._values_version
        return (
            is_same and weight.mask is self._mask and values.data_ptr() == self._values.data_ptr()
        )

    def apply_writes(self) -> None:
        """Apply writes to the values; raise CompressionError if the values changed too."""
        with LOCK:
            weight = self._weight()
            if weight is None or self._dense._version == self._version:
                return
            self._version = self._dense._version
            if not self.is_current(weight):
                raise written_twice(weight.name)
            self._apply_write(weight)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _apply_write(self, weight: Weight) -> None:
        dense = self._dense.detach()
        if self.index:
            dense = weight.layout.expand(weight.values, weight.dtype)
            dense[self.index] = self._dense
        weight.take_dense(dense)
        self._dense.copy_(weight.layout.expand(weight.values, weight.dtype)[self.index])
        self._version, self._values_version = self._dense._version, weight.values._version

    def _finalize(self) -> None:
        weight = self._weight()
        try:
            self.apply_writes()
        except CompressionError as error:
            warnings.warn(f"{error}; the write to the tensor is lost", stacklevel=2)
        if weight is not None and self in weight.expansions:
            weight.expansions.remove(self)


def written_twice(name: str) -> CompressionError:
    """Return the error for a weight whose dense weight and values were both written."""
    return CompressionError(
        f"'{name}' was written in two ways since it was last used: through module.weight and "
        "model.parameters(); read module.weight in between"
    )
