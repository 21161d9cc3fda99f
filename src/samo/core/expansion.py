"""`Expansion`: a dense weight that is expanded lazily.

torch passes every function called on it to ``__torch_function__``. Matrix products and convolutions
expand and free the weight internally (`samo.core.products`); any other function gets a fresh
expansion, in the autograd graph of the values. `torch.compile` traces through this object; eager
code uses its tensor subclass, `samo.core.streamed.StreamedWeight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from samo.core.dense import Expand, Layout, expand_by_index

__all__ = []

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

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            found = handler(*args, **kwargs)
            if found is not None:
                return found
        return func(*expanded(args), **dict(zip(kwargs, expanded(kwargs.values()))))

    def _expand(self) -> Tensor:
        """Expand now."""
        values, layout, dtype = self._param, self._layout, self._dtype
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and torch._C._functorch.peek_interpreter_stack() is not None:
            dense = expand_by_index(values, layout, dtype)
        elif is_compiling or (values.requires_grad and torch.is_grad_enabled()):
            dense = Expand.apply(values, None, layout, dtype)  # type: ignore[no-untyped-call]
        else:
            dense = layout.expand(values.detach(), dtype)
        return dense.transpose(-2, -1) if self._is_flipped else dense

    def _like(self, values: Tensor, layout: Layout, is_flipped: bool) -> Any:
        return Expansion(values, layout, self._dtype, is_flipped)

    def _sync(self) -> None:
        """Apply pending writes to earlier expansions."""

    def _part(self, index: Any) -> Any:
        """Return one of stacked weights without expanding the others, or None if impossible."""
        return None

    def _transposed(self, dim0: Any, dim1: Any) -> Any:
        """Transpose the last two dimensions; return None for other dimensions."""
        dims = len(self._layout.shape)
        if dims < 2 or {dim % dims for dim in (dim0, dim1) if -dims <= dim < dims} != {
            dims - 2,
            dims - 1,
        }:
            return None
        return self._like(self._param, self._layout, not self._is_flipped)

    # Attributes and operators that compiled code uses.

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
        return self._expand()[index]

    def __matmul__(self, other: Any) -> Any:
        return self._expand() @ other

    def __rmatmul__(self, other: Any) -> Any:
        return torch.matmul(other, self)  # type: ignore[arg-type]

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Transpose two dimensions."""
        found = self._transposed(dim0, dim1)
        return self._expand().transpose(dim0, dim1) if found is None else found

    def t(self) -> Any:
        """Transpose a matrix."""
        return self.transpose(0, 1)

    T = mT = property(t)  # noqa: N815


OPERATORS: Final = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "radd", "rsub", "rmul", "rtruediv"),
    *("rfloordiv", "rmod", "rpow", "neg", "pos", "abs", "eq", "ne", "lt", "le", "gt", "ge", "len"),
    "iter",
)


def _operator(name: str) -> Callable[..., Any]:
    def call(self: Expansion, *args: Any) -> Any:
        return getattr(self._expand(), name)(*args)

    return call


for _name in OPERATORS:  # Python looks operators up on the class
    setattr(Expansion, f"__{_name}__", _operator(f"__{_name}__"))


def expanded(args: Any) -> list[Any]:
    return [_expanded_one(arg) for arg in args]


def _expanded_one(arg: Any) -> Any:
    if isinstance(arg, Expansion):
        return arg._expand()
    if type(arg) in (list, tuple):
        return type(arg)(expanded(arg))
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
