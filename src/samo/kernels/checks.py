"""Checks of sizes, types and layouts that the kernels rely on and do not look at themselves."""

from collections.abc import Container

import torch
from torch import Tensor

from samo.kernels.lean import num_groups
from samo.kernels.protocol import AdamWUpdate
from samo.kernels.rounding import master_dtype, remainder_dtype
from samo.mask.mask import Mask

__all__ = []


def check_pair(values: Tensor, mask: Mask | None, dense: Tensor) -> None:
    """Raise ValueError unless ``values`` has the kept entries of ``dense``."""
    numel = dense.numel()
    if mask is None:
        if values.numel() != numel:
            raise ValueError(f"{values.numel():,} values do not fill a tensor of {numel:,} entries")
    elif numel != mask.numel or values.numel() != mask.kept:
        raise ValueError(
            f"a mask that keeps {mask.kept:,} of {mask.numel:,} entries does not fit {values.numel():,} "
            f"values and a dense tensor of {numel:,}"
        )


def check_update(update: AdamWUpdate) -> None:
    """Raise ValueError with the names of the tensors that have the wrong size."""
    kept, mask = update.param.numel(), update.mask
    numel = kept if mask is None else mask.numel
    sizes = dict.fromkeys(("remainder", "grad", "exp_avg", "exp_avg_sq", "age"), kept)
    sizes |= dict.fromkeys(("exp_avg_scale", "exp_avg_sq_scale"), num_groups(numel, mask))
    sizes |= {"step": 1, "dense": numel}
    wrong = [
        f"{name} ({tensor.numel():,}, not {size:,})"
        for name, size in sizes.items()
        if (tensor := getattr(update, name)) is not None and tensor.numel() != size
    ]
    if mask is not None and mask.kept != kept:
        wrong.append(f"mask ({mask.kept:,}, not {kept:,})")
    if wrong:
        raise ValueError(
            f"a parameter of {kept:,} entries has the wrong size of {', '.join(wrong)}"
        )


def is_plain(update: AdamWUpdate, types: Container[torch.dtype]) -> bool:
    """Return whether addresses and sizes describe an update's tensors completely.

    That is: they are contiguous, on one device, of the right sizes and types, and parameter,
    gradient and copy are of ``types``.
    """
    param, remainder, grad, exp_avg, exp_avg_sq, step, _, _, dense, mask, age, *scales = update
    kept, device, dtype = param.numel(), param.device, param.dtype
    numel = kept if mask is None else mask.numel
    moments = (torch.int8, torch.uint8) if update.is_lean else (master_dtype(dtype),) * 2
    remainder_type = remainder_dtype(dtype, is_lean=update.is_lean)
    return (
        dtype in types
        and dtype != torch.float16  # it has no master to update
        and param.is_contiguous()
        and grad.dtype in types
        and _is_vector(grad, kept, device)
        and exp_avg.dtype == moments[0]
        and _is_vector(exp_avg, kept, device)
        and exp_avg_sq.dtype == moments[1]
        and _is_vector(exp_avg_sq, kept, device)
        and step.dtype == torch.float32
        and _is_vector(step, 1, device)
        and (None if remainder is None else remainder.dtype) == remainder_type
        and (remainder is None or _is_vector(remainder, kept, device))
        and (mask is None or (mask.kept == kept and mask.words.device == device))
        and (dense is None or (dense.dtype in types and _is_vector(dense, numel, device)))
        and (age is None or (age.dtype == torch.int16 and _is_vector(age, kept, device)))
        and (not update.is_lean or (age is None and _are_scales(scales, numel, mask, device)))
    )


def _is_vector(tensor: Tensor, size: int, device: torch.device) -> bool:
    return tensor.numel() == size and tensor.is_contiguous() and tensor.device == device


def _are_scales(
    scales: list[Tensor | None], numel: int, mask: Mask | None, device: torch.device
) -> bool:
    groups = num_groups(numel, mask)
    return all(
        scale is not None and scale.dtype == torch.float32 and _is_vector(scale, groups, device)
        for scale in scales
    )
