"""What `samo.compress_` will do to each parameter, decided and checked before anything changes."""

from typing import Final

import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from samo import kernels as _kernels
from samo.core.modules import named_weights
from samo.core.weight import Plan, weight_of
from samo.errors import CompressionError, MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks

__all__ = []

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_arguments(
    model: nn.Module,
    weights: str | int,
    dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    value_dtype: torch.dtype | None,
    kernels: str,
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
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
    for option, value, allowed in (
        ("kernels", kernels, _kernels.PATHS),
        ("dtype", dtype, (None, *_DTYPES)),
        ("grad_dtype", grad_dtype, (None, torch.bfloat16, torch.float32, torch.float64)),
        ("value_dtype", value_dtype, (None, torch.bfloat16, torch.float32)),
    ):
        if value not in allowed:
            raise ValueError(
                f"{option} must be one of {', '.join(map(str, allowed))}, got {value!r}"
            )


def resident_parameters(
    plans: dict[int, Plan], owned: dict[nn.Module, dict[str, int]], weights: str | int
) -> set[int]:
    """Return which parameters keep their dense weight between uses."""
    sizes = {
        key: plan.param.numel() * plan.dtype.itemsize
        for key, plan in plans.items()
        if plan.is_compressed
    }
    if weights == "resident":
        return set(sizes)
    # An unpruned parameter's copy is 2 of its 16 bytes. Recurrent layers save their weights for
    # backward anyway, and torch does not compile them.
    found = {key for key in sizes if plans[key].mask is None}
    ours = set()
    for module, own in owned.items():
        if isinstance(module, nn.RNNBase):
            found |= {*own.values()}
        is_product = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        is_product |= type(module).__name__ == "Conv1D"  # of Hugging Face
        ours |= {key for key in own.values() if is_product or plans[key].param.dim() == 3}
    if not isinstance(weights, int):
        return found
    # First those that products of ours do not use, since torch saves their dense weights for
    # backward. Then small ones, where streaming costs most time per byte.
    left = weights - sum(sizes[key] for key in found)
    for key in sorted(sizes.keys() - found, key=lambda key: (key in ours, sizes[key])):
        if sizes[key] <= left:
            found.add(key)
            left -= sizes[key]
    return found


def masks_by_parameter(model: nn.Module, masks: Masks) -> dict[int, tuple[str, Mask]]:
    """Return names and masks by the ids of their parameters.

    Raises:
        TypeError: ``masks`` is something else.
        MaskError: They do not fit the model, or one keeps nothing.
    """
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


def plan_parameters(
    model: nn.Module,
    masks: Masks,
    dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    value_dtype: torch.dtype | None,
) -> dict[int, Plan]:
    """Decide what happens to each parameter that is not left alone."""
    if torch_prune.is_pruned(model):
        raise MaskError(
            "the model has masks of torch.nn.utils.prune; call "
            "torch.nn.utils.prune.remove(module, name) for each pruned parameter first"
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
    plans: dict[int, Plan] = {}
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
        plan = Plan(name, param, mask, asked, values, narrow or values)
        if asked == torch.float64:
            plan = Plan(name, param, mask, asked, asked, asked)
        if asked not in _DTYPES:
            raise ValueError(
                f"parameter '{name}' is {asked}; pass dtype=torch.bfloat16 for narrower "
                "floats, and no masks for integers"
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
