"""Packed bits: 32 to a word, with a running count for each block of words.

Bit ``i`` of a mask is bit ``i % 32`` of word ``i // 32``; the bits past the last weight are 0. A
block is 64 words, 2,048 weights, and ``offsets[b]`` counts the bits set before block ``b``, so a
kernel finds the place of any block's values without looking at another block:

    weights   0 1 2 3 ... 2047 | 2048 ...          kept entries before block 1: 205
    words     [0b...1001, ...] | [0b...0010, ...]  offsets [0, 205, ...]

One bit per weight and 8 bytes per block are 0.129 bytes per weight. Counts are never written to a
file. Words are int32 because torch has few operations on uint32, and come in pairs so that a CPU
can read 64 bits at once.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

WORD_BITS: Final = 32
BLOCK_WORDS: Final = 64
BLOCK_BITS: Final = WORD_BITS * BLOCK_WORDS

_CHUNK_BLOCKS: Final = 512
"""Blocks that a torch operation takes at once (2**20 weights), so temporaries stay small."""


def num_words(numel: int) -> int:
    """Return how many words hold ``numel`` bits."""
    return 2 * -(-numel // (2 * WORD_BITS))


def num_blocks(numel: int) -> int:
    """Return how many blocks hold ``numel`` bits."""
    return -(-numel // BLOCK_BITS)


def chunks(numel: int, unit: int = BLOCK_BITS) -> Iterator[tuple[int, int]]:
    """Cut ``numel`` bits into ranges of at most 2**20 that start on a ``unit``, or of one unit."""
    size = max(1, _CHUNK_BLOCKS * BLOCK_BITS // unit) * unit
    for start in range(0, numel, size):
        yield start, min(start + size, numel)


def pack(bits: Tensor, out: Tensor, start: int = 0) -> None:
    """Write the 1-D boolean ``bits`` into ``out`` from bit ``start`` on, a multiple of 64."""
    for begin, end in chunks(bits.numel()):
        part = bits[begin:end]
        if part.numel() % (2 * WORD_BITS):
            part = torch.nn.functional.pad(part, (0, -part.numel() % (2 * WORD_BITS)))
        # Bytes first: a sum over 8 shifted bytes needs a temporary of 1 byte per weight.
        shifted = part.view(-1, 8).to(torch.uint8) << _arange8(bits.device)
        words = shifted.sum(1, dtype=torch.uint8).view(torch.int32)
        first = (start + begin) // WORD_BITS
        out[first : first + words.numel()] = words


def unpack(words: Tensor, start: int, stop: int) -> Tensor:
    """Return bits ``start`` to ``stop`` as booleans; ``start`` is a multiple of 32."""
    part = words[start // WORD_BITS : num_words(stop)].view(torch.uint8)
    bits = (part[:, None] >> _arange8(words.device)) & 1
    return bits.view(-1)[: stop - start].to(torch.bool)


def popcount(words: Tensor) -> Tensor:
    """Count the set bits of each word."""
    # Sums of neighbouring 1, 2 and 4 bits, then of the four bytes. A shift repeats the sign of a
    # word; the masks cut that off, and no sum of bytes reaches the sign again.
    x = words - ((words >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


def block_offsets(words: Tensor) -> tuple[Tensor, int]:
    """Return the int64 running count at the start of each block, and the count of all set bits."""
    ones = torch.nn.functional.pad(popcount(words), (0, -words.numel() % BLOCK_WORDS))
    counts = ones.view(-1, BLOCK_WORDS).sum(1)
    ends = counts.cumsum(0)
    return ends - counts, int(ends[-1]) if ends.numel() else 0


def _arange8(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
