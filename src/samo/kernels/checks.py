"""Checks of sizes, types and layouts that the kernels rely on and do not look at themselves."""

from collections.abc import Container

import torch
from torch import Tensor

from samo.kernels.lean import num_groups
from samo.kernels.ops import AdamWUpdate
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


def sizes_of(update: AdamWUpdate) -> dict[str, int]:
    """Return how many entries each tensor of an update must have."""
    kept, mask = update.param.numel(), update.mask
    numel = kept if mask is None else mask.numel
    groups = num_groups(numel, mask)
    vectors = ("remainder", "grad", "exp_avg", "exp_avg_sq", "age")
    return dict.fromkeys(vectors, kept) | {
        "step": 1,
        "dense": numel,
        "exp_avg_scale": groups,
        "exp_avg_sq_scale": groups,
    }


def check_update(update: AdamWUpdate) -> None:
    """Raise ValueError with the names of the tensors that have the wrong size."""
    kept, wrong = update.param.numel(), []
    for name, size in sizes_of(update).items():
        tensor = getattr(update, name)
        if tensor is not None and tensor.numel() != size:
            wrong.append(f"{name} ({tensor.numel():,}, not {size:,})")
    if update.mask is not None and update.mask.kept != kept:
        wrong.append(f"mask ({update.mask.kept:,}, not {kept:,})")
    if wrong:
        raise ValueError(
            f"a parameter of {kept:,} entries has the wrong size of {', '.join(wrong)}"
        )


def is_plain(update: AdamWUpdate, types: Container[torch.dtype]) -> bool:
    """Return whether addresses and sizes describe an update's tensors completely.

    That is: they are contiguous, on one device, of the right sizes, and parameter, gradient and copy
    are of ``types``.
    """
    param, mask = update.param, update.mask
    moments = (torch.int8, torch.uint8) if update.is_lean else (master_dtype(param.dtype),) * 2
    expected = {
        "remainder": remainder_dtype(param.dtype, is_lean=update.is_lean),
        "exp_avg": moments[0],
        "exp_avg_sq": moments[1],
        "step": torch.float32,
        "age": torch.int16,
        "exp_avg_scale": torch.float32,
        "exp_avg_sq_scale": torch.float32,
    }
    for name, size in sizes_of(update).items():
        tensor = getattr(update, name)
        if tensor is None:
            if name == "remainder" and expected[name] is not None:
                return False
        elif (
            tensor.numel() != size
            or not tensor.is_contiguous()
            or tensor.device != param.device
            or (tensor.dtype != expected[name] if name in expected else tensor.dtype not in types)
        ):
            return False
    return (
        param.dtype in types
        and param.is_contiguous()
        and (update.exp_avg_scale is None) == (update.exp_avg_sq_scale is None)
        and not (update.is_lean and update.age is not None)
        and (mask is None or (mask.kept == param.numel() and mask.words.device == param.device))
    )
