"""A bfloat16 weight and its rounding error together are one fp32 master value.

    dtype     remainder             master
    float32   none                  the weight itself
    float64   none                  the weight itself
    bfloat16  int16 remainder       bits(weight) * 2**16 + remainder
    bfloat16  int8 correction       bits(weight) * 2**16 + correction * 2**8     (lean state)

For bfloat16 the weight is the upper half of its master, rounded half away from zero, and the
remainder is the signed distance, so both halves together are the master exactly:

    master    0x3F80C000  1.005859375
    weight        0x3F81  1.0078125       (0x3F80C000 + 0x8000) >> 16
    remainder    -0x4000                  0x3F80C000 - 0x3F810000

Rounding half to even, as torch does, has no such inverse: 0x3F7F8000 and 0x3F808000 would both
become weight 0x3F80 with a remainder of size 0x8000. The two differ only at exact ties.
"""

import torch
from torch import Tensor


def remainder_dtype(dtype: torch.dtype, *, is_lean: bool = False) -> torch.dtype | None:
    """Return the type of remainders of ``dtype`` weights; None if they have none."""
    if dtype != torch.bfloat16:
        return None
    return torch.int8 if is_lean else torch.int16


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which weights of ``dtype`` are updated."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def join(values: Tensor, remainder: Tensor | None) -> Tensor:
    """Return the master values of weights and their remainder; a new tensor."""
    if values.dtype == torch.bfloat16:
        bits = values.view(torch.int16).to(torch.int32) << 16
        if remainder is not None:
            bits += remainder.to(torch.int32) << 8 if remainder.dtype == torch.int8 else remainder
        return bits.view(torch.float32)
    return values.to(master_dtype(values.dtype), copy=True)


def split(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return master values as weights of ``dtype`` and their remainder."""
    if dtype == torch.bfloat16:
        bits = master.to(torch.float32).view(torch.int32)
        # A NaN may have all bits set, and rounding would turn it into a number.
        bits = torch.where(master.isnan(), 0x7FC00000, bits)
        upper = (bits + 0x8000) >> 16
        remainder = (bits - (upper << 16)).to(torch.int16)
        return upper.to(torch.int16).view(torch.bfloat16), remainder
    return master.to(dtype), None


def to_correction(remainder: Tensor, dither: Tensor | int) -> Tensor:
    """Return remainders as 8-bit corrections: 0x1234 gives 0x12.

    ``dither``, 0 to 255, is added before the lower 8 bits are cut off; if it is random, the mean of
    many roundings is the remainder. The largest correction is 0x7F, since 0x80 would be -0x80.
    """
    return ((remainder.to(torch.int32) + dither) >> 8).clamp_(max=0x7F).to(torch.int8)
