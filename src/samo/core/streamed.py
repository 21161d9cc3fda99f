"""`StreamedWeight`: what ``module.weight`` returns for a streamed weight, a tensor without storage.

It knows its shape, dtype and device. A transpose, or one expert of a stack, is another such tensor.
It has no mutable state, so threads, copies and repeated passes can share it. For writes to
expansions see `samo.core.writes`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from samo.core import products  # noqa: F401  (registers handlers)
from samo.core.dense import DenseWeight, Layout
from samo.core.expansion import HANDLERS, OPERATORS, Expansion, expanded, implements
from samo.core.writes import Handed
from samo.errors import CompressionError

if TYPE_CHECKING:
    from samo.core.weight import Weight

__all__ = []


class StreamedWeight(Expansion, DenseWeight):
    """An `Expansion` that is a tensor, for eager code."""

    _index: tuple[int, ...]
    """Index into stacked weights; () for the whole weight."""

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch._C._is_tracing():
            raise CompressionError(
                "torch.jit.trace would bake in the weights; use torch.export, or call "
                "samo.decompress_(model) first"
            )
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            found = handler(*args, **kwargs)
            if found is not None:
                return found
        elif func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = func(*expanded(args), **dict(zip(kwargs, expanded(kwargs.values()))))
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
            Handed(weight, self._index, dense if dense._base is None else dense._base)
        else:
            dense = self._expand_detached(weight)
        dense._samo_expansion_of = self  # type: ignore[attr-defined]
        return dense

    def _expand_detached(self, weight: Weight) -> Tensor:
        """Expand outside the graph, or return a live expansion."""
        base = self._shared(weight)
        return base.transpose(-2, -1) if self._is_flipped else base.view_as(base)

    def _shared(self, weight: Weight) -> Tensor:
        """Return a live expansion or a new one, so that all readers see each other's writes."""
        for handed in tuple(weight.handed):
            base = handed.base()
            is_same = handed.index == self._index and handed.is_current(weight)
            if base is not None and is_same and not base.requires_grad:
                return base
        with torch.inference_mode(False):  # tensors of inference mode have no version
            base = self._layout.expand(self._param.detach(), self._dtype)
        Handed(weight, self._index, base)
        return base

    def _like(
        self, values: Tensor, layout: Layout, is_flipped: bool, index: tuple[int, ...] = ()
    ) -> StreamedWeight:
        weight, index = self._samo_weight, self._index + index
        found = streamed_weight(values, layout, self._dtype, weight, is_flipped, index)
        found._is_param = False
        return found

    def _sync(self) -> None:
        weight = self._samo_weight()
        if weight is not None and weight.handed:
            weight.sync_written()

    def _part(self, index: Any) -> StreamedWeight | None:
        """Return one of stacked weights, if its bits are aligned to blocks of the mask."""
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

    # Tensor's own, which dispatch to `__torch_function__`.
    shape = Tensor.shape
    t, transpose, T, mT = Tensor.t, Tensor.transpose, Tensor.T, Tensor.mT  # noqa: N815
    __getitem__ = Tensor.__getitem__
    __matmul__, __rmatmul__ = Tensor.__matmul__, Tensor.__rmatmul__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def data(self) -> Tensor:
        """An expansion; writes to it reach the values at the weight's next use."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if self._is_param:
            self._sync()  # `weight.data += delta` assigns the tensor it just wrote to
            self._weight.write(value)
        else:
            self.detach().copy_(value)

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Raise an error: the dense gradient is never materialized outside the product."""
        raise CompressionError(
            f"'{self._weight.name}' is streamed: its dense gradient exists only inside backward; "
            "register the hook on its values in model.parameters(), or use weights='resident'"
        )


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
    device, requires_grad = values.device, values.requires_grad
    made = Tensor._make_wrapper_subclass(
        StreamedWeight, shape, strides, dtype=dtype, device=device, requires_grad=requires_grad
    )
    Expansion.__init__(made, values, layout, dtype, is_flipped)
    made._samo_weight, made._index = weight, index
    return made


@implements(Tensor.detach, torch.detach)
def _detach(weight: Any) -> Any:
    """Return a view whose writes are tracked; torch's own would not keep the expansion alive."""
    owner = weight._samo_weight()
    if owner is None or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    weight._sync()
    return weight._expand_detached(owner)


for _name in OPERATORS:
    setattr(StreamedWeight, f"__{_name}__", getattr(Tensor, f"__{_name}__"))


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
