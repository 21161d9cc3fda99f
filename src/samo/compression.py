"""`compress_`: put a model's gradients and optimizer state in compressed form, in place.

Everything that could be wrong is looked for first, so that a refusal leaves the model as it was.
``owners.py`` says what happens to the modules, ``weights.py`` what to each parameter.
"""

from typing import Final, Literal

import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from samo import kernels as _kernels, stepping
from samo.errors import CompressionError, MaskError
from samo.kernels.rounding import rest_dtype
from samo.mask import Mask
from samo.masks import Masks
from samo.owners import Owner, compressed_class, owned_weights
from samo.weights import Weight, weight_of

__all__ = ["compress_"]

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def compress_(
    model: nn.Module,
    masks: Masks,
    *,
    weights: Literal["resident"] = "resident",
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    kernels: _kernels.Path = "auto",
) -> nn.Module:
    """Prune a model for good and train it on compressed state from here on, in place.

    Pruned weights become exactly 0 and stay so. Each gradient is compressed to its kept entries the
    moment backward has it, and the dense one is freed. Build the optimizer on
    ``samo.parameters(model)`` afterwards; everything else stays as it was.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 10))
        >>> model = samo.compress_(model, samo.prune(model, sparsity=0.9), dtype=torch.bfloat16)
        >>> model(torch.randn(3, 100, dtype=torch.bfloat16)).float().sum().backward()
        >>> gradients = {name: leaf.grad for name, leaf in samo.named_parameters(model)}
        >>> gradients["0.weight"].shape, gradients["0.bias"].shape
        (torch.Size([500]), torch.Size([50]))

    Args:
        model: Any module on one device; its parameters are changed in place.
        masks: Which weights are kept, by parameter name. Parameters without a mask are kept whole.
        weights: ``"resident"`` holds the weights dense all the time, for dense kernels.
        dtype: Type of the weights: bfloat16 (with a 16-bit remainder, together an exact fp32
            master), float16 (with an fp32 master; use `samo.LossScaler`), float32 or float64. By
            default each keeps its own. Buffers, and the scale and shift of batch norms, which torch
            computes beside fp32 statistics, keep theirs.
        grad_dtype: Type in which compressed gradients are held and accumulated. By default that of
            the weights, bfloat16 for float16 weights; ``torch.float32`` adds up many micro-batches
            without loss.
        kernels: ``"auto"`` takes the fastest for the model's device, ``"reference"`` plain torch.

    Returns:
        The same model.

    Raises:
        TypeError: ``model`` is not a module whose parameters can be replaced.
        ValueError: A type or option is not supported, or weights are not finite.
        MaskError: The masks do not fit the model.
        CompressionError: The model is compressed already.
    """
    _check_arguments(model, weights, dtype, grad_dtype, kernels)
    mask_of = _masks_by_parameter(model, masks)
    plans = _plan(model, mask_of, dtype, grad_dtype)  # everything that can be wrong is found here

    made: dict[int, Weight] = {}
    for name, param, weight_dtype, weight_grad_dtype in plans:
        mask = mask_of.get(id(param))
        made[id(param)] = Weight(
            name,
            param,
            None if mask is None else mask.to(param.device),
            dtype=weight_dtype,
            grad_dtype=weight_grad_dtype,
            path=kernels,
        )
    for module in model.modules():
        owned = {
            name: made[id(param)]
            for name, param in module._parameters.items()
            if param is not None and id(param) in made
        }
        if owned:
            Owner(owned).attach(module)
    model.__class__ = compressed_class(type(model))
    stepping.watch_optimizers()
    return model


def _check_arguments(
    model: nn.Module,
    weights: str,
    dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    kernels: str,
) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"compress_ takes a torch.nn.Module whose parameters it can replace, got "
            f"{type(model).__name__}; the model comes first, its masks second, and a scripted module is "
            "compressed before it is scripted"
        )
    if owned_weights(model):
        name = next(iter(owned_weights(model)))
        raise CompressionError(
            f"the model is compressed already (its parameter '{name}' is); to give it other masks, call "
            "samo.remap_(model, masks, opt)"
        )
    if weights != "resident":
        raise ValueError(f"weights must be 'resident', got {weights!r}")
    if kernels not in _kernels.PATHS:
        raise ValueError(f"kernels must be one of {_kernels.PATHS}, got {kernels!r}")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype!r}")
    if grad_dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"grad_dtype must be bfloat16, float32 or float64, got {grad_dtype}; gradients are held "
            "without a loss scale, too small for float16"
        )


def _masks_by_parameter(model: nn.Module, masks: Masks) -> dict[int, Mask]:
    if not isinstance(masks, Masks):
        raise TypeError(
            f"masks must be samo.Masks, got {type(masks).__name__}; build them with "
            "samo.prune(model, sparsity) or samo.Masks.from_zeros(model)"
        )
    if torch_prune.is_pruned(model):
        raise MaskError(
            "the model still carries masks of torch.nn.utils.prune, which multiply in every forward "
            "pass; call torch.nn.utils.prune.remove(module, name) for each pruned parameter first"
        )
    by_parameter: dict[int, tuple[str, Mask]] = {}
    for name, param in masks.parameters_of(model).items():
        other, mask = by_parameter.setdefault(id(param), (name, masks[name]))
        if mask != masks[name]:
            raise MaskError(
                f"'{other}' and '{name}' are one tied parameter but have different masks; "
                "give a mask to one of the names"
            )
    return {key: mask for key, (_, mask) in by_parameter.items()}


def batch_norms_of(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of batch norms, which keep their type."""
    return {
        id(param)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for param in module.parameters(recurse=False)
    }


def types_of(
    own: torch.dtype, dtype: torch.dtype | None, grad_dtype: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype]:
    """Return the types of a weight and of its gradient, for what was asked of `compress_`."""
    chosen = own if dtype is None else dtype
    if grad_dtype is not None and rest_dtype(chosen) is not None:
        return chosen, grad_dtype  # fp32 sums for 16-bit weights are the only choice with an effect
    return chosen, torch.bfloat16 if chosen == torch.float16 else chosen


Plan = tuple[str, nn.Parameter, torch.dtype, torch.dtype]


def _plan(
    model: nn.Module,
    mask_of: dict[int, Mask],
    dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
) -> list[Plan]:
    """Decide the types of each parameter, and refuse what cannot be compressed before any change."""
    batch_norms = batch_norms_of(model)
    _check_tensors(model)
    plans: list[Plan] = []
    for name, param in model.named_parameters():
        if weight_of(param) is not None:
            raise CompressionError(
                f"parameter '{name}' belongs to another compressed model; build the two models from "
                "parameters of their own"
            )
        if nn.parameter.is_lazy(param) or param.is_meta:
            raise ValueError(
                f"parameter '{name}' has no values yet; run a batch through the model, or load its "
                "weights, before compress_"
            )
        if not param.is_floating_point():
            if id(param) in mask_of or param.requires_grad:
                raise ValueError(
                    f"parameter '{name}' is {_name(param.dtype)}; only floating-point weights can "
                    "be compressed"
                )
            continue
        chosen, held = types_of(
            param.dtype, None if id(param) in batch_norms else dtype, grad_dtype
        )
        if chosen not in _DTYPES:
            raise ValueError(
                f"parameter '{name}' is {_name(chosen)}; pass dtype=torch.bfloat16 to compress_"
            )
        _check_values(name, param, mask_of.get(id(param)), chosen)
        plans.append((name, param, chosen, held))
    types = {chosen for _, _, chosen, _ in plans}
    if grad_dtype not in {None, *types} and not any(map(rest_dtype, types)):
        raise ValueError(
            f"grad_dtype={grad_dtype} has no effect on weights of {', '.join(map(_name, types))}, "
            "whose gradients have their own type; leave it out"
        )
    return plans


def _check_tensors(model: nn.Module) -> None:
    """Refuse parameters whose memory or device is not their own."""
    seen: dict[int, str] = {}
    devices: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        if nn.parameter.is_lazy(param) or param.is_meta:
            continue  # refused with a message of its own
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
        address = param.untyped_storage().data_ptr()
        other = seen.setdefault(address, name) if param.numel() else name
        if other != name or torch._debug_has_internal_overlap(param) == 1:
            with_whom = (
                f"shares its memory with '{other}'" if other != name else "repeats its entries"
            )
            raise ValueError(
                f"parameter '{name}' is a view that {with_whom}, so one update would change both; "
                "give it a tensor of its own: "
                "module.weight = torch.nn.Parameter(module.weight.detach().clone())"
            )
        devices.setdefault(param.device, name)
    if len(devices) > 1:
        where = ", ".join(f"'{name}' on {device}" for device, name in devices.items())
        raise ValueError(
            f"the model must be on one device, but has {where}; move it with model.to()"
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"embedding '{path}' has max_norm={module.max_norm}, which rewrites weights in every "
                "forward pass; set max_norm=None"
            )


def _check_values(name: str, param: nn.Parameter, mask: Mask | None, dtype: torch.dtype) -> None:
    values = param.detach()
    if mask is not None and mask.kept == 0:
        raise MaskError(
            f"the mask of '{name}' keeps none of its {mask.numel:,} weights, so it could never be "
            "trained; leave its name out of the masks"
        )
    largest = values.abs().amax() if values.numel() else torch.zeros(())
    if not bool(largest <= torch.finfo(dtype).max):
        bad = int((~values.isfinite()).sum())
        what = f"{bad:,} weights that are NaN or infinite" if bad else f"a weight of {largest:.3g}"
        raise ValueError(
            f"parameter '{name}' has {what}, which {_name(dtype)} cannot hold; load a sound "
            "checkpoint, or choose another dtype"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
