"""`compress_` and its way back, and what looks at a compressed model.

Everything that could be wrong is looked for first, so that a refusal leaves the model as it was.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from samo import kernels as _kernels
from samo.core.modules import (
    BITMAP,
    CompressedModule,
    check_class,
    clear_weights,
    from_bytes,
    set_weights,
    weights_in,
)
from samo.core.ranks import check_masks_of_ranks
from samo.core.shards import whole
from samo.core.weight import Types, Weight, mark_ragged, weight_of
from samo.errors import CompressionError, MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters

__all__ = ["compress_", "decompress_", "dense_state_dict", "masks"]

_CAST: Final = "_samo_cast"
"""Where the model keeps the types that parameters had which were only cast."""

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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
    _check_arguments(model, weights, dtype, grad_dtype, value_dtype, kernels)
    with torch.inference_mode(False), torch.no_grad():
        plans = _plan(model, masks, dtype, grad_dtype, value_dtype)
        _check_scripted(model, plans)
        owned = {
            module: {
                name: id(param)
                for name, param in module._parameters.items()
                if param is not None and id(param) in plans and plans[id(param)].is_compressed
            }
            for module in model.modules()
        }
        changed = {module: own for module, own in owned.items() if own or module is model}
        residents = _residents(plans, changed, weights)
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


def named_weights(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, Weight]]:
    """Return the compressed weights of a model with the names of their parameters.

    In the order of ``named_parameters()``, and a tied one once, as there.
    """
    seen: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        for name, weight in weights_in(module).items():
            if id(weight) in seen and remove_duplicate:
                continue
            seen.add(id(weight))
            yield f"{path}.{name}" if path else name, weight


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


# What can be refused ---------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """What becomes of one parameter."""

    name: str
    param: nn.Parameter
    mask: Mask | None
    types: Types

    @property
    def is_compressed(self) -> bool:
        """Whether it gets values of its own, or is only cast."""
        is_narrow = self.types.dtype != self.types.value_dtype
        return self.mask is not None or (is_narrow and self.param.requires_grad)


def _check_arguments(
    model: nn.Module,
    weights: str | int,
    dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    value_dtype: torch.dtype | None,
    kernels: str,
) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"compress_ takes a torch.nn.Module whose parameters it can replace, got "
            f"{type(model).__name__}; the model comes first, its masks second, and a scripted module is "
            "compressed before it is scripted"
        )
    found = next(iter(named_weights(model)), None)
    if found is not None:
        raise CompressionError(
            f"the model is compressed already (its parameter '{found[0]}' is); to give it other masks, "
            "call samo.remap_(model, masks, opt)"
        )
    if isinstance(weights, bool) or not (
        weights in ("resident", "streamed") or (isinstance(weights, int) and weights >= 0)
    ):
        raise ValueError(
            "weights must be 'resident', 'streamed', or the bytes of dense weights that may be resident, "
            f"got {weights!r}"
        )
    if kernels not in _kernels.PATHS:
        raise ValueError(f"kernels must be one of {_kernels.PATHS}, got {kernels!r}")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype!r}")
    if grad_dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"grad_dtype must be bfloat16, float32 or float64, got {grad_dtype}; float16 holds no "
            "gradient without a loss scale"
        )
    if value_dtype not in (None, torch.bfloat16, torch.float32):
        raise ValueError(
            f"value_dtype must be bfloat16 or float32, got {value_dtype}; bfloat16 is for "
            "samo.AdamW(state='lean')"
        )


def _residents(
    plans: dict[int, _Plan], owned: dict[nn.Module, dict[str, int]], weights: str | int
) -> set[int]:
    """Return which parameters have a dense weight that is kept between uses."""
    sizes = {
        key: plan.param.numel() * plan.types.dtype.itemsize
        for key, plan in plans.items()
        if plan.is_compressed
    }
    if weights == "resident":
        return set(sizes)
    # The copy of an unpruned parameter is 2 of its 16 bytes, and costs more to make than one of a pruned
    # weight, which is 2 of 3.5.
    found = {key for key in sizes if plans[key].mask is None}
    # Recurrent layers hold their weights for backward whatever we do, and torch does not compile them.
    found |= {
        key
        for module, own in owned.items()
        if isinstance(module, nn.RNNBase)
        for key in own.values()
    }
    if not isinstance(weights, int):
        return found
    # First what is not used in a product of ours, and whose dense weight would be held for backward;
    # then small ones, where streaming costs most time for each byte.
    ours = {
        key
        for module, own in owned.items()
        for key in own.values()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        or plans[key].param.dim() == 3
        or type(module).__name__ == "Conv1D"
    }
    left = weights - sum(sizes[key] for key in found)
    for key in sorted(sizes.keys() - found, key=lambda key: (key in ours, sizes[key])):
        if sizes[key] <= left:
            found.add(key)
            left -= sizes[key]
    return found


def masks_by_parameter(model: nn.Module, masks: Masks) -> dict[int, tuple[str, Mask]]:
    """Return the masks, with a name for each, by the ids of the parameters that they are for.

    Raises:
        TypeError: They are something else.
        MaskError: They do not fit the model, or one keeps nothing.
    """
    if not isinstance(masks, Masks):
        raise TypeError(
            f"masks must be samo.Masks, got {type(masks).__name__}; build them with "
            "samo.prune(model, sparsity), or from samo.Mask objects with samo.Masks({name: mask})"
        )
    masks.parameters_of(model)  # looks for names and shapes
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, tuple[str, Mask]] = {}
    for name, mask in masks.items():
        if mask.kept == 0:
            raise MaskError(
                f"the mask of '{name}' keeps none of its {mask.numel:,} weights, so it could never be "
                "trained; keep one at least"
            )
        other, same = found.setdefault(id(parameters[name]), (name, mask))
        if same != mask:
            raise MaskError(
                f"'{other}' and '{name}' are one tied parameter but have different masks; "
                "give a mask to one of the names"
            )
    return found


def batch_norms_of(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of batch norms, which keep their type."""
    return {
        id(param)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for param in module.parameters(recurse=False)
    }


def types_of(
    own: torch.dtype,
    dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    value_dtype: torch.dtype | None,
) -> Types:
    """Return the types of a parameter that had the type ``own``, for what was asked of `compress_`."""
    chosen = own if dtype is None else dtype
    if chosen == torch.float64:
        return Types(chosen, chosen, chosen)
    values = value_dtype if value_dtype and chosen == torch.bfloat16 else torch.float32
    return Types(chosen, values, grad_dtype or values)


def _plan(
    model: nn.Module,
    masks: Masks,
    dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    value_dtype: torch.dtype | None,
) -> dict[int, _Plan]:
    """Decide what becomes of each parameter that is not left alone."""
    if torch_prune.is_pruned(model):
        raise MaskError(
            "the model still carries masks of torch.nn.utils.prune, which multiply in every forward "
            "pass; call torch.nn.utils.prune.remove(module, name) for each pruned parameter first"
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"embedding '{path}' has max_norm={module.max_norm}, which rewrites weights in every "
                "forward pass; set max_norm=None"
            )
    mask_of = masks_by_parameter(model, masks)
    batch_norms = batch_norms_of(model)
    plans: dict[int, _Plan] = {}
    seen: dict[int, str] = {}
    for name, param in model.named_parameters():
        _check_parameter(name, param, seen)
        _, mask = mask_of.get(id(param), (name, None))
        if not param.is_floating_point():
            if mask is not None or param.requires_grad:
                raise ValueError(
                    f"parameter '{name}' is {_name(param.dtype)}; only floating-point weights can "
                    "be compressed"
                )
            continue
        asked = None if id(param) in batch_norms else dtype
        # Narrow gradients of biases and norms save nothing, and compiled code returns them at a cost.
        narrow = grad_dtype if mask is not None or param.dim() > 1 else None
        types = types_of(param.dtype, asked, narrow, value_dtype)
        if types.dtype not in _DTYPES:
            raise ValueError(
                f"parameter '{name}' is {_name(types.dtype)}; pass dtype=torch.bfloat16 to compress_"
            )
        if mask is not None and not param.is_meta:
            _check_values(name, param, types.dtype)
        plan = _Plan(name, param, mask, types)
        if plan.is_compressed or types.dtype != param.dtype:
            plans[id(param)] = plan
    if value_dtype == torch.bfloat16 and not any(
        plan.types.dtype == value_dtype for plan in plans.values()
    ):
        raise ValueError(
            "value_dtype=torch.bfloat16 is for models that compute in bfloat16, and this one does not; "
            "pass dtype=torch.bfloat16 too, or leave value_dtype out"
        )
    return plans


def _check_parameter(name: str, param: nn.Parameter, seen: dict[int, str]) -> None:
    """Refuse a parameter whose memory is not its own; ``seen`` has names by addresses."""
    if weight_of(param) is not None:
        raise CompressionError(
            f"parameter '{name}' belongs to another compressed model; build the two models from "
            "parameters of their own"
        )
    if nn.parameter.is_lazy(param):
        raise ValueError(
            f"parameter '{name}' has no shape yet; run a batch through the model before compress_"
        )
    if hasattr(param, "__tensor_flatten__"):
        raise ValueError(
            f"parameter '{name}' is a {type(param).__name__}, not a plain tensor; compress the "
            "model before it is sharded or quantized"
        )
    if param.is_inference():
        raise ValueError(
            f"parameter '{name}' was made under torch.inference_mode and cannot be trained; build "
            "the model outside of it"
        )
    has_memory = param.numel() and not param.is_meta
    other = seen.setdefault(param.untyped_storage().data_ptr(), name) if has_memory else name
    if other != name or torch._debug_has_internal_overlap(param) == 1:
        what = f"shares its memory with '{other}'" if other != name else "repeats its entries"
        raise ValueError(
            f"parameter '{name}' is a view that {what}, so one update would change both; give it a "
            "tensor of its own: module.weight = torch.nn.Parameter(module.weight.detach().clone())"
        )


def _check_scripted(model: nn.Module, plans: dict[int, _Plan]) -> None:
    """Refuse parameters of scripted modules, which take no other ones and say nothing."""
    scripted = tuple(
        f"{path}."
        for path, module in model.named_modules()
        if isinstance(module, torch.jit.ScriptModule)
    )
    for plan in plans.values():
        if plan.name.startswith(scripted):
            raise CompressionError(
                f"parameter '{plan.name}' belongs to a scripted module, whose parameters cannot be "
                "exchanged; compress the model before it is scripted, traced or wrapped"
            )


def _check_values(name: str, param: nn.Parameter, dtype: torch.dtype) -> None:
    largest = param.detach().abs().amax()
    if not bool(largest <= torch.finfo(dtype).max):
        bad = int((~param.isfinite()).sum())
        what = f"{bad:,} weights that are NaN or infinite" if bad else f"a weight of {largest:.3g}"
        raise ValueError(
            f"parameter '{name}' has {what}, which {_name(dtype)} cannot hold; load a sound "
            "checkpoint, or choose another dtype"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
