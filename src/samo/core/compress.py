"""`compress_`, `decompress_`, and functions that read a compressed model.

All checks run first, so that an error leaves the model unchanged.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from samo import kernels as _kernels
from samo.core import step_hooks  # noqa: F401  (registers hooks)
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
from samo.errors import CompressionError, MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters
from samo.utils.validation import check_model

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_OPTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "dtype": (None, *_DTYPES),
    "grad_dtype": (None, torch.bfloat16, torch.float32, torch.float64),
    "value_dtype": (None, torch.bfloat16, torch.float32),
    "kernels": _kernels.PATHS,
}
"""What options of `compress_` may be."""

_CAST: Final = "_samo_cast"
"""Attribute with the original dtypes of parameters that were only cast."""


class _Plan(NamedTuple):
    """What will happen to one parameter."""

    name: str
    param: nn.Parameter
    mask: Mask | None
    dtype: torch.dtype
    """Of the dense weight."""
    value_dtype: torch.dtype
    grad_dtype: torch.dtype

    @property
    def is_compressed(self) -> bool:
        """Whether it gets values of its own, or is only cast."""
        is_narrow = self.dtype != self.value_dtype
        return self.mask is not None or (is_narrow and self.param.requires_grad)


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
            ``torch.bfloat16`` needs `samo.AdamW`, which stores the rounding remainder: 16 bits that
            lose nothing, or 8 with ``state="lean"``.
        kernels: ``"auto"`` picks the fastest for the device, ``"reference"`` uses plain torch.
    """
    options = {"dtype": dtype, "grad_dtype": grad_dtype, "value_dtype": value_dtype}
    _check_arguments(model, weights, {**options, "kernels": kernels})
    with torch.inference_mode(False), torch.no_grad():
        _replace_parameters(model, _plan_parameters(model, masks, **options), kernels)
    keep_resident(model, weights)
    model.register_forward_pre_hook(check_masks_of_ranks)
    return model


def _replace_parameters(model: nn.Module, plans: dict[int, _Plan], kernels: _kernels.Path) -> None:
    """Do what is planned. Nobody holds the dense parameters afterwards."""
    compressed = {key: plan for key, plan in plans.items() if plan.is_compressed}
    changed: dict[nn.Module, dict[str, int]] = {}
    for module in model.modules():
        own = {name: id(param) for name, param in module._parameters.items()}
        own = {name: key for name, key in own.items() if key in compressed}
        if own or module is model:
            check_class(module, tuple(own))
            changed[module] = own
    # Nothing below raises.
    made = {key: Weight(*plan, kernels) for key, plan in compressed.items()}
    model.__dict__[_CAST] = cast = {}
    for key, plan in plans.items():
        if key not in compressed:
            cast[plan.name] = plan.param.dtype
            plan.param.grad = None
            plan.param.data = plan.param.data.to(plan.dtype)
    mark_ragged(list(made.values()))
    for module, own in changed.items():
        set_weights(module, {name: made[key] for name, key in own.items()})


def keep_resident(model: nn.Module, weights: str | int) -> None:
    """Decide which dense weights of a compressed model stay between uses, as `compress_` says."""
    # An unpruned parameter's copy is 2 of its 16 bytes. Recurrent layers save their weights for
    # backward anyway, and torch does not compile them.
    found = {
        weight: weights == "resident" or weight.mask is None for _, weight in named_weights(model)
    }
    ours = set()  # those that our products use; torch saves the others for backward
    for module in model.modules():
        is_product = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        is_product |= type(module).__name__ == "Conv1D"  # of Hugging Face
        for weight in weights_in(module).values():
            found[weight] |= isinstance(module, nn.RNNBase)
            if is_product or len(weight.shape) == 3:
                ours.add(weight)
    if isinstance(weights, int):
        left = weights - sum(weight.dense_bytes for weight, stays in found.items() if stays)
        # Small ones first within each kind: there streaming costs most time per byte.
        for weight in sorted(found, key=lambda weight: (weight in ours, weight.dense_bytes)):
            if not found[weight] and weight.dense_bytes <= left:
                found[weight] = True
                left -= weight.dense_bytes
    for weight, stays in found.items():
        if stays != weight.is_resident:
            weight.is_resident = stays
            weight.bind(weight.values)


@torch.inference_mode(False)
@torch.no_grad()
def decompress_(model: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Restore an ordinary model in place: original classes, shapes and dtypes.

    For tools that need plain modules, such as quantization, fusion or scripting. Pruned entries
    are exactly 0. ``dtype`` replaces the dtypes that the parameters had before compression. Rebuild
    optimizers afterwards.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> masks = samo.prune(model, sparsity=0.9)
        >>> model = samo.decompress_(samo.compress_(model, masks))
        >>> type(model[0]) is torch.nn.Linear, int(model[0].weight.count_nonzero())
        (True, 10)
    """
    check_not_sharded(
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
    """Return the state dict that `decompress_` would give the model, as new tensors.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> plain = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> _ = samo.compress_(model, samo.prune(model, sparsity=0.9))
        >>> plain.load_state_dict(samo.dense_state_dict(model))
        <All keys matched successfully>
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
    """Return the masks of a compressed model, or of a state dict for a model of its shapes.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> _ = samo.compress_(model, samo.prune(model, sparsity=0.9))
        >>> samo.masks(model)
        Masks(1 tensor, 10 of 100 weights kept, sparsity 0.900)
        >>> saved = model.state_dict()
        >>> other = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> _ = samo.compress_(other, samo.masks(other, saved))
        >>> other.load_state_dict(saved)
        <All keys matched successfully>
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


def check_not_sharded(model: nn.Module, what: str, instead: str) -> None:
    """Raise an error if a weight is sharded."""
    for name, weight in named_weights(model):
        if weight.mesh is not None:
            raise CompressionError(
                f"'{name}' is sharded over {weight.mesh.size()} ranks, and {what}; {instead}"
            )


# What will happen to each parameter -------------------------------------------------------------


def _check_arguments(model: nn.Module, weights: str | int, options: dict[str, Any]) -> None:
    check_model(model)
    for name, _ in named_weights(model):
        raise CompressionError(
            f"the model is compressed already (see '{name}'); to change its masks, call "
            "samo.remap_(model, masks, opt)"
        )
    if isinstance(weights, bool) or not (
        weights in ("resident", "streamed") or (isinstance(weights, int) and weights >= 0)
    ):
        raise ValueError(
            "weights must be 'resident', 'streamed', or the number of bytes that resident dense "
            f"weights may take, got {weights!r}"
        )
    for option, value in options.items():
        if value not in _OPTIONS[option]:
            allowed = ", ".join(map(str, _OPTIONS[option]))
            raise ValueError(f"{option} must be one of {allowed}, got {value!r}")


def masks_by_parameter(model: nn.Module, masks: Masks) -> dict[int, tuple[str, Mask]]:
    """Return names and masks by the ids of their parameters, if they fit the model."""
    if not isinstance(masks, Masks):
        raise TypeError(
            f"masks must be samo.Masks, got {type(masks).__name__}; create them with "
            "samo.prune(model, sparsity) or samo.Masks({name: mask})"
        )
    masks.parameters_of(model)  # checks names and shapes
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, tuple[str, Mask]] = {}
    for name, mask in masks.items():
        if mask.kept == 0:
            raise MaskError(
                f"the mask of '{name}' keeps none of its {mask.numel:,} weights; keep at least one"
            )
        other, same = found.setdefault(id(parameters[name]), (name, mask))
        if same != mask:
            raise MaskError(
                f"'{other}' and '{name}' are one tied parameter but have different masks; "
                "give a mask to one of the names"
            )
    return found


def _plan_parameters(
    model: nn.Module,
    masks: Masks,
    dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    value_dtype: torch.dtype | None,
) -> dict[int, _Plan]:
    """Decide what happens to each parameter that is not left alone."""
    if torch_prune.is_pruned(model):
        raise MaskError(
            "the model has masks of torch.nn.utils.prune; call torch.nn.utils.prune.remove(module, "
            "name) for each pruned parameter, and read the masks with samo.Masks.from_zeros(model)"
        )
    mask_of = masks_by_parameter(model, masks)
    batch_norms: set[int] = set()  # ids of their parameters, which keep their dtype
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"embedding '{path}' has max_norm={module.max_norm}, which rewrites weights in "
                "every forward pass; set max_norm=None"
            )
        if isinstance(module, nn.modules.batchnorm._NormBase):
            batch_norms |= {id(param) for param in module.parameters(recurse=False)}
        if isinstance(module, torch.jit.ScriptModule):
            raise CompressionError(
                f"'{path}' is a scripted module; compress the model before it is scripted or traced"
            )
    plans: dict[int, _Plan] = {}
    seen: dict[int, str] = {}
    for name, param in model.named_parameters():
        _check_parameter(name, param, seen)
        _, mask = mask_of.get(id(param), (name, None))
        is_float = param.is_floating_point()
        if mask is None and not is_float:
            continue
        is_left = not is_float or id(param) in batch_norms
        asked = param.dtype if dtype is None or is_left else dtype
        # Narrow gradients of biases and norms save nothing, and cost time in compiled code.
        narrow = grad_dtype if mask is not None or param.dim() > 1 else None
        values = value_dtype if value_dtype and asked == torch.bfloat16 else torch.float32
        plan = _Plan(name, param, mask, asked, values, narrow or values)
        if asked == torch.float64:
            plan = _Plan(name, param, mask, asked, asked, asked)
        if asked not in _DTYPES:
            raise ValueError(
                f"parameter '{name}' is {asked}; pass dtype=torch.bfloat16 for narrower "
                "floats, and no masks for integers and complex numbers"
            )
        if mask is not None and not param.is_meta:
            _check_values(name, param, asked)
        if plan.is_compressed or asked != param.dtype:
            plans[id(param)] = plan
    is_used = any(plan.dtype == torch.bfloat16 for plan in plans.values())
    if value_dtype == torch.bfloat16 and not is_used:
        raise ValueError("value_dtype=torch.bfloat16 needs dtype=torch.bfloat16")
    return plans


def _check_parameter(name: str, param: nn.Parameter, seen: dict[int, str]) -> None:
    """Check that a parameter's memory is its own; ``seen`` has names by address."""
    if weight_of(param) is not None:
        raise CompressionError(f"parameter '{name}' belongs to another compressed model")
    if hasattr(param, "__tensor_flatten__"):
        raise ValueError(
            f"parameter '{name}' is a {type(param).__name__}, not a plain tensor; compress the "
            "model before it is sharded or quantized"
        )
    has_memory = param.numel() and not param.is_meta
    other = seen.setdefault(param.untyped_storage().data_ptr(), name) if has_memory else name
    if other != name or torch._debug_has_internal_overlap(param) == 1:
        what = f"shares its memory with '{other}'" if other != name else "repeats its entries"
        raise ValueError(
            f"parameter '{name}' is a view that {what}; give it a tensor of its own: "
            "module.weight = torch.nn.Parameter(module.weight.detach().clone())"
        )


def _check_values(name: str, param: nn.Parameter, dtype: torch.dtype) -> None:
    largest = param.detach().abs().amax()
    if not bool(largest <= torch.finfo(dtype).max):
        bad = int((~param.isfinite()).sum())
        what = f"{bad:,} weights that are NaN or infinite" if bad else f"a weight of {largest:.3g}"
        raise ValueError(f"parameter '{name}' has {what}, which {dtype} cannot represent")
