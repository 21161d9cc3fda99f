"""Checks of sizes, types and layouts, which the kernels rely on."""

from collections.abc import Container
from typing import Final

import torch
from torch import Tensor

from samo.kernels.lean import num_groups
from samo.kernels.protocol import AdamWUpdate
from samo.kernels.rounding import master_dtype, remainder_dtype
from samo.mask.mask import Mask

EXPONENTS: Final = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
"""The exponent bits of each type, which are all set only in infinities and NaNs."""


def check_pair(values: Tensor, mask: Mask | None, dense: Tensor) -> None:
    """Raise ValueError unless ``values`` has the kept entries of ``dense``."""
    numel = dense.numel()
    if mask is None:
        if values.numel() != numel:
            raise ValueError(f"{values.numel():,} values do not fill a tensor of {numel:,} entries")
    elif numel != mask.numel or values.numel() != mask.kept:
        raise ValueError(
            f"a mask that keeps {mask.kept:,} of {mask.numel:,} entries does not fit "
            f"{values.numel():,} values and a dense tensor of {numel:,}"
        )


def is_plain(update: AdamWUpdate, types: Container[torch.dtype]) -> bool:
    """Return whether addresses and sizes describe an update's tensors completely.

    They must be contiguous, on one device and of the right sizes and types, with parameter,
    gradient and copy of ``types``.
    """
    param, remainder, grad, exp_avg, exp_avg_sq, step, _, _, dense, mask, age, *scales = update
    kept, device, dtype = param.numel(), param.device, param.dtype
    numel = kept if mask is None else mask.numel
    moments = (torch.int8, torch.uint8) if update.is_lean else (master_dtype(dtype),) * 2
    remainder_type = remainder_dtype(dtype, is_lean=update.is_lean)

    def fits(tensor: Tensor | None, dtype: torch.dtype | None, size: int) -> bool:
        return (
            tensor is not None
            and tensor.dtype == dtype
            and tensor.numel() == size
            and tensor.is_contiguous()
            and tensor.device == device
        )

    return (
        dtype in types
        and dtype != torch.float16  # it has no master to update
        and param.is_contiguous()
        and grad.dtype in types
        and fits(grad, grad.dtype, kept)
        and fits(exp_avg, moments[0], kept)
        and fits(exp_avg_sq, moments[1], kept)
        and fits(step, torch.float32, 1)
        and (remainder_type is None if remainder is None else fits(remainder, remainder_type, kept))
        and (mask is None or (mask.kept == kept and mask.words.device == device))
        and (dense is None or (dense.dtype in types and fits(dense, dense.dtype, numel)))
        and (age is None or (not update.is_lean and fits(age, torch.int16, kept)))
        and (
            not update.is_lean
            or all(fits(each, torch.float32, num_groups(numel, mask)) for each in scales)
        )
    )
