"""`compress_`, `decompress_`, and functions that read a compressed model.

All checks run first, so that an error leaves the model unchanged.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from samo import kernels as _kernels
from samo.core import step_hooks  # noqa: F401  (registers hooks)
from samo.core.checks import check_arguments, plan_parameters, resident_parameters
from samo.core.modules import (
    BITMAP,
    WEIGHTS,
    CompressedModule,
    check_class,
    from_bytes,
    named_weights,
    original_class,
    set_weights,
    weights_in,
)
from samo.core.rank_checks import check_masks_of_ranks
from samo.core.shards import whole
from samo.core.weight import Weight, mark_ragged, weight_of
from samo.errors import CompressionError
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters

__all__ = ["compress_", "decompress_", "dense_state_dict", "masks"]

_CAST: Final = "_samo_cast"
"""Attribute with the original dtypes of parameters that were only cast."""


def compress_(
    model: nn.Module,
    masks: Masks,
    *,
    dtype: torch.dtype | None = None,
    weights: Literal["resident", "streamed"] | int = "resident",
    grad_dtype: torch.dtype | None = None,
    value_dtype: torch.dtype | None = None,
    kernels: _kernels.Path = "auto",
) -> nn.Module:
    """Replace each pruned parameter of a model by its kept values, in place; return the model.

    ``model.parameters()`` and ``state_dict()`` keep their names; a pruned weight is 1-D there, its
    kept entries in row-major order. ``module.weight`` still returns the dense weight, in the
    compute dtype, with exact zeros; its gradient is compressed. Optimizers, gradient clipping and
    DistributedDataParallel work as with any model.

    A model on the meta device stays there; load its values after ``model.to_empty(device=...)``.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 10))
        >>> model = samo.compress_(model, samo.prune(model, sparsity=0.9), dtype=torch.bfloat16)
        >>> opt = torch.optim.AdamW(model.parameters())
        >>> model(torch.randn(3, 100, dtype=torch.bfloat16)).float().sum().backward()
        >>> {name: (p.dtype, tuple(p.grad.shape)) for name, p in model[0].named_parameters()}
        {'weight': (torch.float32, (500,)), 'bias': (torch.float32, (50,))}
        >>> model[0].weight.shape, model[0].weight.dtype
        (torch.Size([50, 100]), torch.bfloat16)

    Args:
        model: Any module. Build optimizers afterwards.
        masks: Kept weights by parameter name. Parameters without a mask stay whole, as fp32
            parameters with a copy in the compute dtype if that is narrower.
        dtype: Compute dtype: bfloat16, float16 (with ``torch.amp.GradScaler``), float32 or float64.
            By default each weight keeps its own. Buffers and the parameters of batch norms keep
            theirs; frozen parameters without a mask are cast.
        weights: ``"resident"`` keeps dense weights between uses. ``"streamed"`` expands each one
            where it is used, and again in backward, which costs a few percent of a step and holds
            no dense weight; unpruned parameters and recurrent layers stay resident. A number is a
            budget in bytes of resident dense weights; the rest are streamed. Results are identical.
        grad_dtype: Dtype of the gradients; by default that of the values, which every optimizer
            accepts. ``torch.bfloat16`` saves two bytes per value and needs `samo.AdamW`. Biases and
            norms always have gradients as wide as their values.
        value_dtype: Dtype of the values; by default float32, or float64 for float64 models.
            ``torch.bfloat16`` needs ``samo.AdamW(state="lean")``, which stores the rounding
            remainder.
        kernels: ``"auto"`` picks the fastest for the device, ``"reference"`` uses plain torch.

    Raises:
        TypeError: ``model`` is no module, or ``masks`` are no `samo.Masks`.
        ValueError: A dtype or option is not supported, or weights are not finite.
        MaskError: The masks do not fit the model.
        CompressionError: The model is already compressed, or a module's class cannot be replaced.
    """
    check_arguments(model, weights, dtype, grad_dtype, value_dtype, kernels)
    with torch.inference_mode(False), torch.no_grad():
        plans = plan_parameters(model, masks, dtype, grad_dtype, value_dtype)
        owned = {
            module: {
                name: id(param)
                for name, param in module._parameters.items()
                if param is not None and id(param) in plans and plans[id(param)].is_compressed
            }
            for module in model.modules()
        }
        changed = {module: own for module, own in owned.items() if own or module is model}
        residents = resident_parameters(plans, changed, weights)
        for module, own in changed.items():
            check_class(module, tuple(own))
        # Nothing below raises.
        model.__dict__[_CAST] = cast = {}
        made = {}
        for key, plan in plans.items():
            if plan.is_compressed:
                made[key] = Weight(plan, kernels, is_resident=key in residents)
            else:
                cast[plan.name] = plan.param.dtype
                plan.param.grad = None
                plan.param.data = plan.param.data.to(plan.dtype)
        mark_ragged(list(made.values()))
        for module, own in changed.items():
            set_weights(module, {name: made[key] for name, key in own.items()})
    model.register_forward_pre_hook(check_masks_of_ranks)
    return model


@torch.no_grad()
def decompress_(model: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Restore an ordinary model in place: original classes, shapes and dtypes.

    For tools that need plain modules, such as quantization, fusion or scripting. Pruned entries
    are exactly 0. Rebuild optimizers afterwards.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> masks = samo.prune(model, sparsity=0.9)
        >>> model = samo.decompress_(samo.compress_(model, masks))
        >>> type(model[0]) is torch.nn.Linear, int(model[0].weight.count_nonzero())
        (True, 10)

    Args:
        model: A model that is compressed, at least in part.
        dtype: Dtype of the parameters; by default what each had before compression.
    """
    check_whole(
        model, "decompress_ would give each rank all of them", "call samo.dense_state_dict(model)"
    )
    own = model.__dict__.pop(_CAST, {})
    for name, param in model.named_parameters():
        if weight_of(param) is None and param.is_floating_point():
            param.data = param.data.to(dtype or own.get(name, param.dtype))
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in weights_in(module).items():
            if id(weight) not in made:
                made[id(weight)] = param = nn.Parameter(dense_of(weight, dtype))
                param.requires_grad_(weight.values.requires_grad)
                param.__dict__.update(weight.attributes)
                weight.retire()
            module._parameters[name] = made[id(weight)]
        if isinstance(module, CompressedModule):
            module.__class__ = original_class(module)  # type: ignore[assignment]
            del module.__dict__[WEIGHTS]
        for key, hook in [*module._forward_pre_hooks.items()]:
            if hook is check_masks_of_ranks:
                del module._forward_pre_hooks[key]
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
    return model


@torch.no_grad()
def dense_state_dict(model: nn.Module, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the state dict of the equivalent ordinary model, as new tensors.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> plain = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> _ = samo.compress_(model, samo.prune(model, sparsity=0.9))
        >>> plain.load_state_dict(samo.dense_state_dict(model))
        <All keys matched successfully>

    Args:
        model: A compressed model.
        dtype: Dtype of the parameters; by default what each had before compression.
    """
    state = model.state_dict(keep_vars=True)  # tied ones are one object
    own = model.__dict__.get(_CAST, {})
    weights = dict(named_weights(model, remove_duplicate=False))
    found: dict[int, Tensor] = {}
    for name, value in list(state.items()):
        if name.endswith(BITMAP) and name.removesuffix(BITMAP) in weights:
            del state[name]
        elif isinstance(value, Tensor):  # not what get_extra_state() gave
            if id(value) not in found:
                if name in weights:
                    found[id(value)] = dense_of(weights[name], dtype)
                else:
                    is_cast = isinstance(value, nn.Parameter) and value.is_floating_point()
                    to = (dtype or own.get(name)) if is_cast else None
                    found[id(value)] = whole(value.detach()).to(to or value.dtype, copy=True)
            state[name] = found[id(value)]
    return state


def masks(model: nn.Module, state_dict: Mapping[str, Any] | None = None) -> Masks:
    """Return the masks of a compressed model or of a state dict.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> _ = samo.compress_(model, samo.prune(model, sparsity=0.9))
        >>> samo.masks(model)
        Masks(1 tensors, 10 of 100 weights kept, sparsity 0.900)
        >>> saved = model.state_dict()
        >>> other = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> _ = samo.compress_(other, samo.masks(other, saved))
        >>> other.load_state_dict(saved)
        <All keys matched successfully>

    Args:
        model: A compressed model; with ``state_dict``, also the dense model to be compressed.
        state_dict: A state dict of a compressed model.

    Raises:
        MaskError: The state dict has a bitmap that is damaged or does not fit the model.
    """
    if state_dict is not None:
        shapes = {name: param.shape for name, param in dense_parameters(model).items()}
        names = [name for name in shapes if name + BITMAP in state_dict]
        return Masks(
            {name: from_bytes(name, state_dict[name + BITMAP], shapes[name]) for name in names}
        )
    found = {name: weight.mask for name, weight in named_weights(model)}
    return Masks({name: mask for name, mask in found.items() if mask is not None})


def dense_of(weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """Return a weight as a new dense tensor, by default in its original dtype."""
    weight.sync_written()
    dense = weight.layout.new_dense(dtype or weight.dense_dtype, weight.device)
    weight.layout.kernels.expand_(whole(weight.values.detach()), weight.mask, dense)
    return dense


def check_whole(model: nn.Module, what: str, instead: str) -> None:
    """Raise an error if a weight is sharded."""
    for name, weight in named_weights(model):
        if weight.mesh is not None:
            raise CompressionError(
                f"'{name}' is sharded over {weight.mesh.size()} ranks, and {what}; {instead}"
            )
