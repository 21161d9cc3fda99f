"""Products with a streamed weight: autograd functions that save no dense weight for backward.

Forward saves the input and the values. Backward expands the values again and compresses the
weight's gradient immediately, so at most one dense weight and one dense gradient are alive. Each
product uses the same torch operations, forward and backward, as autograd would, so results are
bit-identical.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from samo.core.dense import Layout

__all__ = []


class Operation(Protocol):
    """A product of an input and a weight."""

    needs_input: ClassVar[bool]
    """Whether the input's gradient needs more of the input than its shape and strides."""

    def shape(self, x: Tensor, weight: torch.Size) -> list[int]:
        """Return the shape of the product."""

    def forward(self, x: Tensor, dense: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        """Return the product."""

    def grad_weight(
        self, grad: Tensor, x: Tensor, ends: Tensor | None, shape: torch.Size, needs: list[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias, where needed."""

    def grad_input(self, grad: Tensor, x: Tensor, dense: Tensor, ends: Tensor | None) -> Tensor:
        """Return the gradient of the input."""


class Product(torch.autograd.Function):
    """``operation(x, expand(values), bias)``, in the dtype of ``x``."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        x: Tensor,
        bias: Tensor | None,
        ends: Tensor | None,
        layout: Layout,
        operation: Operation,
        is_deferred: bool,
    ) -> Tensor:
        ctx.layout, ctx.operation, ctx.kept = layout, operation, values.shape[0]
        if torch.compiler.is_compiling():
            ctx.save_for_backward(values, x, ends)
            return operation.forward(x, layout.expand(values, x.dtype), bias, ends)
        # Save what torch's operations would: an input that is not needed may be freed or
        # overwritten.
        needs_values, needs_x = ctx.needs_input_grad[:2]
        saved = x
        if not needs_values and not operation.needs_input:
            saved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        ctx.save_for_backward(values if needs_x else None, saved, ends)
        if is_deferred:
            shape = operation.shape(x, layout.shape)
            return x.new_empty_strided(shape, [0] * len(shape))
        return compute(values, x, bias, ends, layout, operation, needs_values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        values, x, ends = ctx.saved_tensors
        layout, operation = ctx.layout, ctx.operation
        needs_values, needs_x, needs_bias = ctx.needs_input_grad[:3]
        grad_values = grad_x = grad_bias = None
        if needs_values or needs_bias:
            needs = [needs_values, needs_bias]
            dense, grad_bias = operation.grad_weight(grad, x, ends, layout.shape, needs)
            if needs_values:
                grad_values = layout.compress_grad(dense, ctx.kept)
            del dense  # free it before expanding the weight
        if needs_x:
            weight = layout.expand_again(values, x.dtype, grad)
            grad_x = operation.grad_input(grad, x, weight, ends)
        return grad_values, grad_x, grad_bias, None, None, None, None


def compute(
    values: Tensor,
    x: Tensor,
    bias: Tensor | None,
    ends: Tensor | None,
    layout: Layout,
    operation: Operation,
    is_tracked: bool,
) -> Tensor:
    """Compute the product outside the graph."""
    dense = layout.expand(values.detach(), x.dtype)
    if is_tracked and isinstance(operation, Matmul):
        dense.requires_grad_()  # torch.matmul folds dimensions differently if it does
    return operation.forward(x, dense, bias, ends)


# Note [Products under checkpointing]
#
# torch.utils.checkpoint stops recomputing a block once every saved tensor of the block has been
# seen. torch's operations save before they compute, so a block's last product is never recomputed.
# An autograd function saves after it computes, which would waste the last product and its
# expansion: 5 % of a step. During recomputation (inside a backward pass) we therefore split the
# work: `Product` saves and returns a result without storage, and `Deferred` computes. The gradient
# of `Deferred` is passed on unchanged.


class Deferred(torch.autograd.Function):
    """Computes a product whose `Product` only saved."""

    @staticmethod
    def forward(ctx: Any, saved: Tensor, args: Any) -> Tensor:
        return compute(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def product(
    values: Tensor,
    x: Tensor,
    bias: Tensor | None,
    ends: Tensor | None,
    layout: Layout,
    operation: Operation,
) -> Tensor:
    """Return ``operation(x, expand(values), bias)``; backward expands again."""
    args = (values, x, bias, ends, layout, operation)
    if not torch.is_grad_enabled():
        return compute(*args, is_tracked=False)
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return Product.apply(*args, False)  # type: ignore[no-untyped-call]
    saved = Product.apply(*args, True)  # type: ignore[no-untyped-call]
    return Deferred.apply(saved, (*args, values.requires_grad))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Matmul:
    """``x @ weight``, or ``x @ weight.T`` as a linear layer has it; 2-D weights."""

    needs_input: ClassVar = False

    is_transposed: bool
    is_linear: bool
    """Whether to use F.linear, or addmm and matmul."""

    def shape(self, x: Tensor, weight: torch.Size) -> list[int]:
        """Return the shape of the product."""
        return [*x.shape[:-1], weight[0] if self.is_transposed else weight[1]]

    def forward(self, x: Tensor, dense: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        """Return the product."""
        if self.is_linear:
            out = F.linear(x, dense if self.is_transposed else dense.t(), bias)
            # With more than two dimensions it is a view, and autograd forbids in-place writes to
            # ours.
            return out if x.dim() == 2 else torch.ops.aten._unsafe_view(out, out.shape)
        factor = dense.t() if self.is_transposed else dense
        return torch.matmul(x, factor) if bias is None else torch.addmm(bias, x, factor)

    def grad_weight(
        self, grad: Tensor, x: Tensor, ends: Tensor | None, shape: torch.Size, needs: list[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias."""
        grad = grad.reshape(-1, grad.shape[-1])
        dense = bias = None
        if needs[0]:
            x = x.reshape(-1, x.shape[-1])
            dense = grad.t().mm(x) if self.is_transposed else x.t().mm(grad)
        if needs[1]:
            bias = grad.sum(0)
        return dense, bias

    def grad_input(self, grad: Tensor, x: Tensor, dense: Tensor, ends: Tensor | None) -> Tensor:
        """Return the gradient of the input."""
        factor = dense if self.is_transposed else dense.t()
        grad = grad.reshape(-1, grad.shape[-1])
        if _is_column_major(x):  # match the strides of torch's gradient
            return factor.t().mm(grad.t()).t().view(x.shape)
        return grad.mm(factor).view(x.shape)


def _is_column_major(x: Tensor) -> bool:
    """Return whether ``x``, viewed as a matrix, is column-major."""
    if x.dim() > 2 and not x.is_contiguous():
        x = torch.empty_strided(x.shape, x.stride(), device="meta").reshape(-1, x.shape[-1])
    return x.stride() == (1, x.shape[0])


@dataclass(frozen=True)
class Convolution:
    """A convolution over any number of dimensions."""

    needs_input: ClassVar = True

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def shape(self, x: Tensor, weight: torch.Size) -> list[int]:
        """Return the shape of the product."""
        sizes = zip(x.shape[2:], weight[2:], self.stride, self.padding, self.dilation)
        places = [
            (size + 2 * pad - wide * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, wide in sizes
        ]
        return [x.shape[0], weight[0], *places]

    def forward(self, x: Tensor, dense: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        """Return the product."""
        zeros = [0] * len(self.stride)
        return torch.convolution(
            x, dense, bias, self.stride, self.padding, self.dilation, False, zeros, self.groups
        )

    def grad_weight(
        self, grad: Tensor, x: Tensor, ends: Tensor | None, shape: torch.Size, needs: list[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias."""
        nothing = grad.new_empty(1).expand(shape)  # only its shape is used
        found = self._backward(grad, x, nothing, [False, *needs])
        return found[1], found[2]

    def grad_input(self, grad: Tensor, x: Tensor, dense: Tensor, ends: Tensor | None) -> Tensor:
        """Return the gradient of the input."""
        return self._backward(grad, x, dense, [True, False, False])[0]

    def _backward(self, grad: Tensor, x: Tensor, dense: Tensor, needs: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(
            grad,
            x,
            dense,
            [dense.shape[0]],
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.stride),
            self.groups,
            needs,
        )


@dataclass(frozen=True)
class GroupedMatmul:
    """A mixture of experts: the rows of ``x`` up to each of ``ends`` times their own weight."""

    needs_input: ClassVar = False

    is_transposed: bool

    def shape(self, x: Tensor, weight: torch.Size) -> list[int]:
        """Return the shape of the product."""
        return [x.shape[0], weight[1] if self.is_transposed else weight[2]]

    def forward(self, x: Tensor, dense: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        """Return the product."""
        factor = dense.transpose(-2, -1) if self.is_transposed else dense
        return F.grouped_mm(x, factor, offs=ends)

    def grad_weight(
        self, grad: Tensor, x: Tensor, ends: Tensor | None, shape: torch.Size, needs: list[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradient of the weight."""
        left, right = (grad, x) if self.is_transposed else (x, grad)
        return F.grouped_mm(left.t(), right, offs=ends), None

    def grad_input(self, grad: Tensor, x: Tensor, dense: Tensor, ends: Tensor | None) -> Tensor:
        """Return the gradient of the input."""
        factor = dense if self.is_transposed else dense.transpose(-2, -1)
        return F.grouped_mm(grad, factor, offs=ends)
