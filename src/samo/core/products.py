"""Products with a streamed weight: autograd functions that save no dense weight for backward.

Forward saves the input and the values. Backward expands the values again and compresses the
weight's gradient immediately, so at most one dense weight and one dense gradient are alive. Each
product uses the same torch operations, forward and backward, as autograd would, so results are
bit-identical.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from samo.core.dense import Layout
from samo.core.streamed import Expansion, implements


class Product(torch.autograd.Function):
    """``operation(x, expand(values), bias)``, in the dtype of ``x``."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        x: Tensor,
        bias: Tensor | None,
        layout: Layout,
        operation: Operation,
        is_deferred: bool,
    ) -> Tensor:
        ctx.layout, ctx.operation, ctx.kept = layout, operation, values.shape[0]
        if not isinstance(layout, Layout):  # compiled code, whose compiler decides what is saved
            ctx.save_for_backward(values, x)
            return operation.forward(x, layout.expand(values, x.dtype), bias)
        # Save what torch's operations would: an input that is not needed may be freed or
        # overwritten.
        needs_values, needs_x = ctx.needs_input_grad[:2]
        saved = x
        if not needs_values and not operation.needs_input:
            saved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        ctx.save_for_backward(values if needs_x else None, saved)
        if is_deferred:
            shape = operation.shape(x, layout.shape)
            return x.new_empty_strided(shape, [0] * len(shape))
        return _compute(values, x, bias, layout, operation, needs_values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        values, x = ctx.saved_tensors
        layout, operation = ctx.layout, ctx.operation
        needs_values, needs_x, needs_bias = ctx.needs_input_grad[:3]
        if needs_values and isinstance(layout, Layout):  # a compiler drops what nobody reads
            needs_values = _is_wanted(ctx.next_functions[0][0])
        grad_values = grad_x = grad_bias = None
        if needs_values or needs_bias:
            needs = [needs_values, needs_bias]
            dense, grad_bias = operation.grad_weight(grad, x, layout, needs)
            if needs_values:
                grad_values = layout.compress_grad(dense, ctx.kept)
            del dense  # free it before expanding the weight
        if needs_x:
            grad_x = operation.grad_input(grad, x, layout.expand(values, x.dtype, grad))
        return grad_values, grad_x, grad_bias, None, None, None


def _is_wanted(node: Any) -> bool:
    """Return whether this pass runs a node: ``torch.autograd.grad(loss, x)`` may not need it."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf whose gradient is returned
        return True


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
        return _compute(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _compute(
    values: Tensor,
    x: Tensor,
    bias: Tensor | None,
    layout: Layout,
    operation: Operation,
    is_tracked: bool,
) -> Tensor:
    """Compute a product outside the graph."""
    # Without rows, as `samo.chunk_loss_` asks a head for dtype and size, nothing is expanded.
    if not torch.compiler.is_compiling() and not x.numel():
        shape = operation.shape(x, layout.shape)
        if 0 in shape:
            return x.new_empty(shape)
    dense = layout.expand(values.detach(), x.dtype)
    if is_tracked and isinstance(operation, _Matmul):
        dense.requires_grad_()  # torch.matmul folds dimensions differently if it does
    return operation.forward(x, dense, bias)


def _product(operation: Operation, x: Any, weight: Any, bias: Any, dims: int) -> Tensor | None:
    """Return the product, or None if torch should compute it from an expansion."""
    # Keep this cheap: it runs in every forward pass, and small models are host-bound.
    values, layout, dtype = weight._param, weight._layout, weight._dtype
    if isinstance(x, Expansion) or isinstance(bias, Expansion):
        return None
    if len(layout.shape) != dims or x.dim() < 2 or x.device != values.device:
        return None
    is_compiling = torch.compiler.is_compiling()
    if is_compiling:
        from samo.core.traced import is_transformed, product  # registers operators: takes time

        if is_transformed():
            return None
    else:
        if type(layout) is not Layout:
            return None  # an expansion that compiled code has returned
        if type(x) not in (Tensor, nn.Parameter) or forward_ad._current_level >= 0:
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        weight._sync()
    device = x.device.type
    is_cast = device != "meta" and not isinstance(operation, _GroupedMatmul)
    if is_cast and dtype != torch.float64 and torch.is_autocast_enabled(device):
        # Cast here, because autocast would cache a 16-bit copy of the weight until backward.
        dtype = torch.get_autocast_dtype(device)
        x = x if x.dtype == torch.float64 else x.to(dtype)
        bias = bias if bias is None or bias.dtype == torch.float64 else bias.to(dtype)
    if x.dtype != dtype or (bias is not None and bias.dtype != dtype):
        return None  # let torch raise its own error
    args = (values, x, bias, layout, operation)
    if not torch.is_grad_enabled():
        # Torch folds dimensions by it; compilers do not.
        return _compute(*args, is_tracked=values.requires_grad and not is_compiling)
    if is_compiling:
        return product(*args)
    if (
        torch._C._current_graph_task_id() == -1
        # Selective checkpointing, a dispatch mode, expects the operations of the forward pass.
        or torch._C._len_torch_dispatch_stack()
    ):
        return Product.apply(*args, False)  # type: ignore[no-untyped-call]
    saved = Product.apply(*args, True)  # type: ignore[no-untyped-call]
    return Deferred.apply(saved, (*args, values.requires_grad))  # type: ignore[no-untyped-call]


# Matrix products --------------------------------------------------------------------------------


_Gradients: TypeAlias = tuple[Tensor | None, Tensor | None]


class _Matmul(NamedTuple):
    """``x @ weight``, or ``x @ weight.T`` as in a linear layer; 2-D weights."""

    is_transposed: bool
    is_linear: bool
    """Whether to use F.linear, or addmm and matmul."""
    needs_input: bool = False
    """Whether the input's gradient needs more of the input than its shape and strides."""

    def shape(self, x: Tensor, weight: torch.Size) -> list[int]:
        """Return the shape of the product."""
        return [*x.shape[:-1], weight[0] if self.is_transposed else weight[1]]

    def forward(self, x: Tensor, dense: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_linear:
            out = F.linear(x, dense if self.is_transposed else dense.t(), bias)
            # With more than two dimensions it is a view, and autograd forbids in-place writes to
            # views that a custom function returns.
            return out if x.dim() == 2 else torch.ops.aten._unsafe_view(out, out.shape)
        factor = dense.t() if self.is_transposed else dense
        return torch.matmul(x, factor) if bias is None else torch.addmm(bias, x, factor)

    def grad_weight(self, grad: Tensor, x: Tensor, layout: Any, needs: list[bool]) -> _Gradients:
        """Return the gradients of weight and bias, where needed."""
        grad = grad.reshape(-1, grad.shape[-1])
        dense = bias = None
        if needs[0]:
            x = x.reshape(-1, x.shape[-1])
            # torch's gradient has the strides of the weight.
            is_by_column = tuple(layout.strides) == (1, layout.shape[0])
            left, right = (grad, x) if self.is_transposed != is_by_column else (x, grad)
            dense = left.t().mm(right)
            dense = dense.t() if is_by_column else dense
        if needs[1]:
            bias = grad.sum(0)
        return dense, bias

    def grad_input(self, grad: Tensor, x: Tensor, dense: Tensor) -> Tensor:
        factor = dense if self.is_transposed else dense.t()
        grad = grad.reshape(-1, grad.shape[-1])
        matrix = x
        if x.dim() > 2 and not x.is_contiguous():
            matrix = torch.empty_strided(x.shape, x.stride(), device="meta")
            matrix = matrix.reshape(-1, x.shape[-1])
        if matrix.stride() == (1, matrix.shape[0]):  # match the strides of torch's gradient
            return factor.t().mm(grad.t()).t().view(x.shape)
        return grad.mm(factor).view(x.shape)


# Handlers have torch's parameter names, so that keyword arguments work.


@implements(F.linear)
def _linear(input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    if not isinstance(weight, Expansion) or (isinstance(bias, Tensor) and bias.dim() > 1):
        return None
    return _product(_Matmul(not weight._is_flipped, True), input, weight, bias, 2)


@implements(torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
def _matmul(input: Any, other: Any = None, *, mat2: Any = None, out: Any = None) -> Tensor | None:
    weight = mat2 if other is None else other
    if not isinstance(weight, Expansion) or out is not None:
        return None
    return _product(_Matmul(weight._is_flipped, False), input, weight, None, 2)


@implements(torch.addmm)
def _addmm(input: Any, mat1: Any, mat2: Any, **others: Any) -> Tensor | None:
    if others or not isinstance(mat2, Expansion) or input.dim() != 1:
        return None
    return _product(_Matmul(mat2._is_flipped, False), mat1, mat2, input, 2)


class _GroupedMatmul(NamedTuple):
    """A mixture of experts: the rows of ``x`` up to each of ``ends`` times their own weight."""

    is_transposed: bool
    ends: Tensor
    needs_input: bool = False

    def shape(self, x: Tensor, weight: torch.Size) -> list[int]:
        return [x.shape[0], weight[1] if self.is_transposed else weight[2]]

    def forward(self, x: Tensor, dense: Tensor, bias: Tensor | None) -> Tensor:
        factor = dense.transpose(-2, -1) if self.is_transposed else dense
        return F.grouped_mm(x, factor, offs=self.ends)

    def grad_weight(self, grad: Tensor, x: Tensor, layout: Any, needs: list[bool]) -> _Gradients:
        left, right = (grad, x) if self.is_transposed else (x, grad)
        return F.grouped_mm(left.t(), right, offs=self.ends), None

    def grad_input(self, grad: Tensor, x: Tensor, dense: Tensor) -> Tensor:
        factor = dense if self.is_transposed else dense.transpose(-2, -1)
        return F.grouped_mm(grad, factor, offs=self.ends)


@implements(F.grouped_mm, torch._grouped_mm)
def _grouped_mm(
    mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor | None:
    if bias is not None or out_dtype is not None or offs is None:
        return None
    if not isinstance(mat_b, Expansion) or mat_a.dim() != 2:
        return None
    return _product(_GroupedMatmul(mat_b._is_flipped, offs), mat_a, mat_b, None, 3)


# Convolutions -----------------------------------------------------------------------------------


class _Convolution(NamedTuple):
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    needs_input: bool = True

    @property
    def _settings(self) -> tuple[Any, ...]:
        zeros = [0] * len(self.stride)
        return self.stride, self.padding, self.dilation, False, zeros, self.groups

    def shape(self, x: Tensor, weight: torch.Size) -> list[int]:
        sizes = zip(x.shape[2:], weight[2:], self.stride, self.padding, self.dilation)
        places = [
            (size + 2 * pad - wide * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, wide in sizes
        ]
        return [x.shape[0], weight[0], *places]

    def forward(self, x: Tensor, dense: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, dense, bias, *self._settings)

    def grad_weight(self, grad: Tensor, x: Tensor, layout: Any, needs: list[bool]) -> _Gradients:
        nothing = grad.new_empty_strided(layout.shape, layout.strides)  # its memory is not read
        found = self._backward(grad, x, nothing, [False, *needs])
        return found[1], found[2]

    def grad_input(self, grad: Tensor, x: Tensor, dense: Tensor) -> Tensor:
        found: Tensor = self._backward(grad, x, dense, [True, False, False])[0]
        return found

    def _backward(self, grad: Tensor, x: Tensor, dense: Tensor, needs: list[bool]) -> Any:
        sizes = [dense.shape[0]]
        return torch.ops.aten.convolution_backward(grad, x, dense, sizes, *self._settings, needs)


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
    if input.dim() != len(shape):
        return None
    stride, dilation = (_each(n, len(shape) - 2) for n in (stride, dilation))
    if padding == "valid":
        padding = 0
    elif padding == "same" and set(stride) == {1}:
        total = [wide * (kernel - 1) for wide, kernel in zip(dilation, shape[2:])]
        padding = [n // 2 for n in total]
        if any(n % 2 for n in total):  # one more on the right, as torch pads
            input = F.pad(input, [side for n in reversed(total) for side in (0, n % 2)])
    if isinstance(padding, str):
        return None  # torch raises its own error
    padding = _each(padding, len(shape) - 2)
    operation = _Convolution(stride, padding, dilation, groups)
    return _product(operation, input, weight, bias, len(shape))


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))


Operation: TypeAlias = _Matmul | _GroupedMatmul | _Convolution
