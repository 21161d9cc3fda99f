"""Reading a weight inside `torch.compile` and `torch.export`: the same, in operators they can see.

The copy is not refreshed there: optimizers, ``load_state_dict`` and ``.to()`` have done that before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samo import kernels
from samo.mask import Mask

if TYPE_CHECKING:
    from samo.core.weight import Weight

__all__ = []


def expand_traced(values: Tensor, weight: Weight) -> Tensor:
    """Return the dense weight of ``values`` in a traced region."""
    dense = weight.dense
    if dense is None or torch.compiler.is_exporting():
        return _expand_from(values, weight)
    if not values.requires_grad or not torch.is_grad_enabled():
        return dense
    mask, dtype = weight.mask, weight.layout.grad_dtype
    if mask is None:
        return _Cast.apply(values, dense, dtype)  # type: ignore[no-untyped-call]
    shape = list(weight.shape)
    return _Expand.apply(values, dense, mask.words, mask.offsets, mask.kept, shape, dtype)  # type: ignore[no-untyped-call]


def _expand_from(values: Tensor, weight: Weight) -> Tensor:
    if weight.mask is None:
        return values.to(weight.dtype)
    mask = weight.mask
    return expand(values, mask.words, mask.offsets, list(weight.shape), weight.dtype)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(
        values: Tensor,
        dense: Tensor,
        words: Tensor,
        offsets: Tensor,
        kept: int,
        shape: list[int],
        dtype: torch.dtype,
    ) -> Tensor:
        return dense.view_as(dense)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, _, words, offsets, ctx.kept, ctx.shape, ctx.dtype = inputs
        ctx.save_for_backward(words, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        words, offsets = ctx.saved_tensors
        values = compress(grad, words, offsets, ctx.kept, ctx.shape, ctx.dtype)
        return values, None, None, None, None, None, None


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor, dense: Tensor, dtype: torch.dtype) -> Tensor:
        return dense.view_as(dense)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.dtype = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None, None


@torch.library.custom_op("samo::compress", mutates_args=())
def compress(
    dense: Tensor, words: Tensor, offsets: Tensor, kept: int, shape: list[int], dtype: torch.dtype
) -> Tensor:
    """Return the kept entries of a dense tensor."""
    values = torch.empty(kept, dtype=dtype, device=dense.device)
    mask = Mask.from_parts(shape, words, offsets, kept)
    kernels.choose(dense.device).compress_(dense, mask, values)
    return values


@compress.register_fake
def _(
    dense: Tensor, words: Tensor, offsets: Tensor, kept: int, shape: list[int], dtype: torch.dtype
) -> Tensor:
    return dense.new_empty(kept, dtype=dtype)


@torch.library.custom_op("samo::expand", mutates_args=())
def expand(
    values: Tensor, words: Tensor, offsets: Tensor, shape: list[int], dtype: torch.dtype
) -> Tensor:
    """Return the dense tensor of kept entries, 0 elsewhere."""
    dense = torch.empty(shape, dtype=dtype, device=values.device)
    mask = Mask.from_parts(shape, words, offsets, values.numel())
    kernels.choose(values.device).expand_(values, mask, dense)
    return dense


@expand.register_fake
def _(
    values: Tensor, words: Tensor, offsets: Tensor, shape: list[int], dtype: torch.dtype
) -> Tensor:
    return values.new_empty(shape, dtype=dtype)


def _keep_mask(ctx: Any, inputs: Any, output: Tensor) -> None:
    values, words, offsets, ctx.shape, _ = inputs
    ctx.save_for_backward(words, offsets)
    ctx.kept, ctx.dtype = values.numel(), values.dtype


def _compress_grad(ctx: Any, grad: Tensor) -> Any:
    words, offsets = ctx.saved_tensors
    return compress(grad, words, offsets, ctx.kept, ctx.shape, ctx.dtype), None, None, None, None


expand.register_autograd(_compress_grad, setup_context=_keep_mask)
