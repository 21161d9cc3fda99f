"""`compress_` and its way back, and what looks at a compressed model.

Everything that could be wrong is looked for first, so that a refusal leaves the model as it was.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from samo import kernels as _kernels
from samo.core.modules import (
    BITMAP,
    CompressedModule,
    check_class,
    clear_weights,
    from_bytes,
    named_weights,
    set_weights,
    weights_in,
)
from samo.core.plan import (
    check_arguments,
    check_scripted,
    plan_parameters,
    resident_parameters,
)
from samo.core.ranks import check_masks_of_ranks
from samo.core.shards import whole
from samo.core.weight import Weight, mark_ragged, weight_of
from samo.errors import CompressionError
from samo.mask.layouts import dense_parameters
from samo.mask.masks import Masks

__all__ = ["compress_", "decompress_", "dense_state_dict", "masks"]

_CAST: Final = "_samo_cast"
"""Where the model keeps the types that parameters had which were only cast."""


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
    """Make each pruned parameter of a model its kept values, in place.

    ``model.parameters()`` and ``state_dict()`` have the same names as before; a pruned weight is 1-D
    there, its kept entries in flat order. ``module.weight`` still gives the dense weight, in the type
    that the model computes in, with exact zeros; its gradient arrives compressed. Everything that takes
    ``model.parameters()`` works as with any model: optimizers, clipping, DistributedDataParallel.

    A model on the meta device has no memory, and its values get none: load them after
    ``model.to_empty(device=...)``.

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
        model: Any module; its parameters are replaced in place. Build optimizers afterwards.
        masks: Which weights are kept, by parameter name. Parameters without a mask are kept whole, as
            fp32 parameters with a copy in the compute type where that is narrower.
        dtype: Type to compute in: bfloat16, float16 (with ``torch.amp.GradScaler``), float32 or
            float64. By default each weight keeps its own. Buffers, and the scale and shift of batch
            norms, which torch computes beside fp32 statistics, keep theirs; so do frozen parameters
            without a mask, which are cast.
        weights: ``"resident"`` keeps the dense weights between uses. ``"streamed"`` makes each one where it
            is used, and once more in backward: no dense weight is held, for some percent of the time of
            a step; unpruned parameters and recurrent layers stay resident. A number is a budget: so many bytes of dense weights are resident, the rest is
            streamed. Results are the same.
        grad_dtype: Type of the gradients. By default that of the values, which every optimizer takes;
            ``torch.bfloat16`` saves two bytes for each and is for `samo.AdamW`. Those of biases and
            norms stay as wide as their values.
        value_dtype: Type of the values. By default float32, and float64 for float64 models;
            ``torch.bfloat16`` is for ``samo.AdamW(state="lean")``, which keeps what rounding leaves over.
        kernels: ``"auto"`` takes the fastest for the model's device, ``"reference"`` plain torch.

    Returns:
        The same model.

    Raises:
        TypeError: ``model`` is not a module whose parameters can be replaced.
        ValueError: A type or option is not supported, or weights are not finite.
        MaskError: The masks do not fit the model.
        CompressionError: The model is compressed already, or a module's class cannot be exchanged.
    """
    check_arguments(model, weights, dtype, grad_dtype, value_dtype, kernels)
    with torch.inference_mode(False), torch.no_grad():
        plans = plan_parameters(model, masks, dtype, grad_dtype, value_dtype)
        check_scripted(model, plans)
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
        # From here on nothing is refused.
        model.__dict__[_CAST] = cast = {}
        made = {}
        for key, (name, param, mask, types) in plans.items():
            if plans[key].is_compressed:
                made[key] = Weight(
                    name,
                    param,
                    mask if mask is None or param.is_meta else mask.to(param.device),
                    types,
                    kernels,
                    is_resident=key in residents,
                )
            else:
                cast[name] = param.dtype
                param.grad = None
                param.data = param.data.to(types.dtype)
        mark_ragged(list(made.values()))
        for module, own in changed.items():
            set_weights(module, {name: made[key] for name, key in own.items()})
    model.register_forward_pre_hook(check_masks_of_ranks)
    return model


@torch.no_grad()
def decompress_(model: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Make a compressed model the ordinary one again, in place: its classes, shapes and types.

    For tools that want plain modules: quantisation, fusing, scripting. Pruned entries are exactly 0.
    Optimizers built on the compressed model do not follow.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> masks = samo.prune(model, sparsity=0.9)
        >>> model = samo.decompress_(samo.compress_(model, masks))
        >>> type(model[0]) is torch.nn.Linear, int(model[0].weight.count_nonzero())
        (True, 10)

    Args:
        model: A compressed model, or one with compressed parts.
        dtype: Type of the parameters; by default what each had before it was compressed.

    Returns:
        The same model.
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
                param = nn.Parameter(
                    dense_of(weight, dtype), requires_grad=weight.values.requires_grad
                )
                param.__dict__.update(weight.attributes)
                made[id(weight)] = param
                weight.retire()
            module._parameters[name] = made[id(weight)]
        if isinstance(module, CompressedModule):
            clear_weights(module)
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is check_masks_of_ranks:
                del module._forward_pre_hooks[key]
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
    return model


@torch.no_grad()
def dense_state_dict(model: nn.Module, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the state dict of the ordinary model that a compressed one stands for; new tensors.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> plain = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> _ = samo.compress_(model, samo.prune(model, sparsity=0.9))
        >>> plain.load_state_dict(samo.dense_state_dict(model))
        <All keys matched successfully>

    Args:
        model: A compressed model.
        dtype: Type of the parameters; by default what each had before it was compressed.
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
    """Return the masks of a compressed model, or those that a state dict was saved with.

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
        model: A compressed model; with a state dict also the dense one that is to be compressed.
        state_dict: What ``state_dict()`` of a compressed model gave.

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
    """Return the values of a weight as a new dense tensor, in the type that its parameter had."""
    weight.sync_written()
    dense = weight.layout.new_dense(dtype or weight.dense_dtype, weight.device)
    weight.layout.kernels.expand_(whole(weight.values.detach()), weight.mask, dense)
    return dense


def check_whole(model: nn.Module, what: str, instead: str) -> None:
    """Refuse a model whose weights are in shards.

    Raises:
        CompressionError: One is.
    """
    for name, weight in named_weights(model):
        if weight.mesh is not None:
            raise CompressionError(
                f"'{name}' is sharded over {weight.mesh.size()} ranks, and {what}; {instead}"
            )
