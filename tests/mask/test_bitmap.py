"""Packed bits against plain boolean tensors, at the sizes where words, blocks and chunks end."""

import pytest
import torch
from torch import Tensor

from samo.mask import bitmap

CHUNK = 2**20


def packed(bits: Tensor) -> Tensor:
    words = torch.full((bitmap.num_words(bits.numel()),), -1, dtype=torch.int32)
    bitmap.pack(bits, words)
    return words


@pytest.mark.parametrize("numel", [0, 1, 31, 33, 64, 65, 2047, 2049, CHUNK, 2 * CHUNK + 2049])
@pytest.mark.parametrize("density", [0.3, 1.0])
def test_bits_come_back_and_are_counted_before_each_block(numel: int, density: float) -> None:
    bits = torch.rand(numel) < density
    words = packed(bits)
    assert words.numel() % 2 == 0
    assert 0 <= 32 * words.numel() - numel < 64
    assert torch.equal(bitmap.unpack(words, 0, numel), bits)
    assert not bitmap.unpack(words, 0, 32 * words.numel())[numel:].any()
    offsets, total = bitmap.block_offsets(words)
    per_block = torch.nn.functional.pad(bits, (0, -numel % 2048)).view(-1, 2048).sum(1)
    assert offsets.dtype == torch.int64
    assert torch.equal(offsets, per_block.cumsum(0) - per_block)
    assert total == bits.sum()


@pytest.mark.parametrize("bit", [0, 7, 8, 31, 32, 63, 64, 2047])
def test_bit_i_is_bit_i_mod_32_of_word_i_div_32(bit: int) -> None:
    bits = torch.zeros(2048, dtype=torch.bool)
    bits[bit] = True
    words = packed(bits)
    assert int(words[bit // 32]) & 0xFFFFFFFF == 1 << bit % 32
    assert words.count_nonzero() == 1
    assert bitmap.popcount(words).sum() == 1


def test_pieces_packed_one_after_another_make_the_whole() -> None:
    whole = (torch.rand(3 * (64 * 7 + 5)) < 0.5)[::3]  # of any stride
    words = torch.full((bitmap.num_words(whole.numel()),), -1, dtype=torch.int32)
    for start, stop in ((0, 64), (64, 320), (320, 453)):
        bitmap.pack(whole[start:stop], words, start)
    assert torch.equal(words, packed(whole.clone()))
    assert torch.equal(bitmap.unpack(words, 96, 401), whole[96:401])
