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
        words, offsets, _, shape = _parts(weight)
        if words is None:
            return values.to(weight.dtype)
        return expand(values, words, offsets, shape, weight.dtype)
    if not values.requires_grad or not torch.is_grad_enabled():
        return dense
    return _Resident.apply(values, dense, *_parts(weight), weight.layout.grad_dtype)  # type: ignore[no-untyped-call]


def _parts(weight: Weight) -> tuple[Tensor | None, Tensor | None, int, list[int]]:
    """Return a mask in parts that can be seen; with None for its bits if nothing is pruned."""
    mask, shape = weight.mask, list(weight.shape)
    return (None, None, 0, shape) if mask is None else (mask.words, mask.offsets, mask.kept, shape)


class _Resident(torch.autograd.Function):
    """values -> the resident dense weight, as `samo.core.dense.Expand`."""

    @staticmethod
    def forward(
        values: Tensor,
        dense: Tensor,
        words: Tensor | None,
        offsets: Tensor | None,
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
        if words is None:
            grad = grad.to(ctx.dtype)
        else:
            grad = compress(grad, words, offsets, ctx.kept, ctx.shape, ctx.dtype)
        return grad, *[None] * 6


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
