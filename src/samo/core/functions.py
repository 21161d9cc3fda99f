"""Functions of torch that an `Expansion` implements: products, and views that stay unexpanded.

Parameter names match torch's, so that keyword arguments work.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from samo.core.expansion import Expansion, implements
from samo.core.products import Convolution, GroupedMatmul, Matmul, Operation, product

__all__ = []

_MATMULS: Final = {
    (is_transposed, is_linear): Matmul(is_transposed, is_linear)
    for is_transposed in (False, True)
    for is_linear in (False, True)
}


def _matmul_kind(is_transposed: bool, is_linear: bool) -> Matmul:
    if torch.compiler.is_compiling():  # an object created outside would add guards
        return Matmul(is_transposed, is_linear)
    return _MATMULS[is_transposed, is_linear]


@implements(F.linear)
def _linear(input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    if not isinstance(weight, Expansion) or (isinstance(bias, Tensor) and bias.dim() > 1):
        return None
    return _product(_matmul_kind(not weight._is_flipped, True), input, weight, bias, 2)


@implements(torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
def _matmul(input: Any, other: Any = None, *, mat2: Any = None, out: Any = None) -> Tensor | None:
    weight = mat2 if other is None else other
    if not isinstance(weight, Expansion) or out is not None:
        return None
    return _product(_matmul_kind(weight._is_flipped, False), input, weight, None, 2)


@implements(torch.addmm)
def _addmm(input: Any, mat1: Any, mat2: Any, **others: Any) -> Tensor | None:
    if others or not isinstance(mat2, Expansion) or input.dim() != 1:
        return None
    return _product(_matmul_kind(mat2._is_flipped, False), mat1, mat2, input, 2)


@implements(F.grouped_mm, torch._grouped_mm)
def _grouped_mm(
    mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor | None:
    if bias is not None or out_dtype is not None or offs is None:
        return None
    if not isinstance(mat_b, Expansion) or mat_a.dim() != 2:
        return None
    return _product(GroupedMatmul(mat_b._is_flipped), mat_a, mat_b, None, 3, offs)


@implements(torch.conv1d, torch.conv2d, torch.conv3d)
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
        # Only symmetric padding; otherwise torch pads the input first.
        total = [each * (size - 1) for each, size in zip(dilation, shape[2:])]
        if any(size % 2 for size in total):
            return None
        padding = [size // 2 for size in total]
    elif isinstance(padding, str):
        return None  # let torch raise its own error
    operation = Convolution(stride, _each(padding, dims), dilation, groups)
    return (
        _product(operation, input, weight, bias, len(shape)) if input.dim() == len(shape) else None
    )


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))


def _product(
    operation: Operation, x: Any, weight: Any, bias: Any, dims: int, ends: Tensor | None = None
) -> Tensor | None:
    """Return the product, or None if torch should compute it from an expansion."""
    # Keep this cheap: it runs in every forward pass, and small models are host-bound.
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
        weight._sync()
    dtype = weight._dtype
    device = x.device.type
    is_cast = ends is None and device != "meta" and torch.is_autocast_enabled(device)
    if is_cast and dtype != torch.float64:
        # Cast here, because autocast would cache a 16-bit copy of the weight until backward.
        dtype = torch.get_autocast_dtype(device)
        x = x if x.dtype == torch.float64 else x.to(dtype)
        bias = bias if bias is None or bias.dtype == torch.float64 else bias.to(dtype)
    if x.dtype != dtype or (bias is not None and bias.dtype != dtype):
        return None  # let torch raise its own error
    return product(values, x, bias, ends, layout, operation)


_PLAIN: Final = (Tensor, nn.Parameter)
"""Input types without a `__torch_function__` of their own."""


@implements(Tensor.detach, torch.detach)
def _detach(weight: Any) -> Any:
    """Return a view whose writes are tracked; torch's own would not keep the expansion alive."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    owner = weight._samo_weight()
    if owner is None:
        return None
    weight._sync()
    return weight._expand_detached(owner)


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
