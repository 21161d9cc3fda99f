"""Numbers of 8-bit state in Triton: codes and fp32, dither, scales. ``lean.py`` has the same in torch."""

import triton
import triton.language as tl

from samo.kernels import lean

__all__ = []

SMALLEST = tl.constexpr(lean.SMALLEST)


@triton.jit
def random_bits(index, step):
    """Return 32 bits that look random for each entry in a step: `lean.random_bits`."""
    steps = (tl.zeros_like(index) + step).to(tl.uint32)
    bits = (index.to(tl.uint32) * 0x9E3779B1) ^ (steps * 0x85EBCA77)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


# Between floats and small integers by their bits: the instructions that convert run at a quarter of the
# speed of those that add. An fp32 number from 2**23 on has whole numbers as its lowest bits.


@triton.jit
def to_float(code):
    """Return codes from 0 to 255 as fp32."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def to_signed_float(code):
    """Return codes from -128 to 127 as fp32."""
    shifted = (code.to(tl.int32) & 0xFF) ^ (0x4B000000 | 0x80)
    return shifted.to(tl.float32, bitcast=True) - (8388608.0 + 128.0)


@triton.jit
def to_code(x, bits, SHIFT: tl.constexpr, MOST: tl.constexpr):
    """Return floor(x + dither), at most ``MOST``; 12 of the 32 bits are the dither, between 0 and 1.

    Example: x = 2.6 gives 3 for six of ten dithers, and 2 for the others.
    """
    part = ((bits >> SHIFT) & 0xFFF).to(tl.int32)
    dither = ((part << 11) | 0x3F800000).to(tl.float32, bitcast=True) - (1.5 - 2**-13)
    # Half less, and rounded to nearest, is down: no tie, since the dither is an odd multiple of 2**-13.
    whole = (tl.minimum(x + dither, MOST) + 8388864.0).to(tl.int32, bitcast=True)
    return whole & 0xFF


@triton.jit
def invert(largest):
    """Return a scale from the largest size in a group, and its inverse; 0 and 0 for next to nothing."""
    scale = tl.where(largest < SMALLEST, 0.0, largest)
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(scale > 0, scale, 1.0))
    return scale, tl.where(scale > 0, inverse, 0.0)
