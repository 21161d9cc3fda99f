"""What `samo.compress_` will do to each parameter, decided and checked before anything is changed."""

from typing import Final, NamedTuple

import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from samo import kernels as _kernels
from samo.core.modules import named_weights
from samo.core.weight import Types, weight_of
from samo.errors import CompressionError, MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks

__all__ = []

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Plan(NamedTuple):
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


def check_arguments(
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


def resident_parameters(
    plans: dict[int, Plan], owned: dict[nn.Module, dict[str, int]], weights: str | int
) -> set[int]:
    """Return which parameters have a dense weight that is kept between uses."""
    sizes = {
        key: plan.param.numel() * plan.types.dtype.itemsize
        for key, plan in plans.items()
        if plan.is_compressed
    }
    if weights == "resident":
        return set(sizes)
    # The copy of an unpruned parameter is 2 of its 16 bytes, and costs more to make than one of a
    # pruned weight, which is 2 of 3.5.
    found = {key for key in sizes if plans[key].mask is None}
    # Recurrent layers hold their weights for backward whatever we do, and torch does not compile
    # them.
    found |= {
        key
        for module, own in owned.items()
        if isinstance(module, nn.RNNBase)
        for key in own.values()
    }
    if not isinstance(weights, int):
        return found
    # First what is not used in a product of ours, and whose dense weight would be held for
    # backward; then small ones, where streaming costs most time for each byte.
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


def plan_parameters(
    model: nn.Module,
    masks: Masks,
    dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    value_dtype: torch.dtype | None,
) -> dict[int, Plan]:
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
    plans: dict[int, Plan] = {}
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
        # Narrow gradients of biases and norms save nothing, and compiled code returns them at a
        # cost.
        narrow = grad_dtype if mask is not None or param.dim() > 1 else None
        types = types_of(param.dtype, asked, narrow, value_dtype)
        if types.dtype not in _DTYPES:
            raise ValueError(
                f"parameter '{name}' is {_name(types.dtype)}; pass dtype=torch.bfloat16 to compress_"
            )
        if mask is not None and not param.is_meta:
            _check_values(name, param, types.dtype)
        plan = Plan(name, param, mask, types)
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


def check_scripted(model: nn.Module, plans: dict[int, Plan]) -> None:
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
