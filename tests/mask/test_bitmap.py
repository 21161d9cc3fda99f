"""Packed bits against plain boolean tensors, at the sizes where words, blocks and chunks end."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from samo.mask import bitmap

CHUNK = 2**20
EDGES = [0, 1, 31, 33, 64, 65, 2047, 2049, CHUNK, CHUNK + 1]


def random_bits(numel: int, density: float = 0.5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(numel, generator=generator) < density


def packed(bits: Tensor) -> Tensor:
    words = torch.full((bitmap.num_words(bits.numel()),), -1, dtype=torch.int32)
    bitmap.pack(bits, words)
    return words


@pytest.mark.parametrize("numel", EDGES)
def test_unpack_inverts_pack_where_words_blocks_and_chunks_end(numel: int) -> None:
    bits = random_bits(numel)
    words = packed(bits)
    assert words.numel() == bitmap.num_words(numel)
    assert words.numel() % 2 == 0
    assert 0 <= 32 * words.numel() - numel < 64
    assert torch.equal(bitmap.unpack(words, 0, numel), bits)
    assert not bitmap.unpack(words, 0, 32 * words.numel())[numel:].any()


@pytest.mark.parametrize("bit", [0, 7, 8, 31, 32, 63, 64, 2047])
def test_bit_i_is_bit_i_mod_32_of_word_i_div_32(bit: int) -> None:
    bits = torch.zeros(2048, dtype=torch.bool)
    bits[bit] = True
    words = packed(bits)
    assert int(words[bit // 32]) & 0xFFFFFFFF == 1 << bit % 32
    assert words.count_nonzero() == 1


def test_pack_takes_bits_of_any_stride() -> None:
    for bits in (random_bits(300)[::3], torch.tensor(True).expand(100)):
        assert torch.equal(packed(bits), packed(bits.clone()))


@pytest.mark.parametrize("numel", [*EDGES, 5000, 2 * CHUNK + 2049])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_offsets_count_the_bits_before_each_block(numel: int, density: float) -> None:
    bits = random_bits(numel, density)
    offsets, total = bitmap.block_offsets(packed(bits))
    per_block = torch.nn.functional.pad(bits, (0, -numel % 2048)).view(-1, 2048).sum(1)
    assert offsets.dtype == torch.int64
    assert torch.equal(offsets, per_block.cumsum(0) - per_block)
    assert total == bits.sum()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_popcount_counts_the_bits_of_each_word(values: list[int]) -> None:
    words = torch.tensor(values, dtype=torch.int32)
    expected = [(value & 0xFFFFFFFF).bit_count() for value in values]
    assert bitmap.popcount(words).tolist() == expected
    assert bitmap.count_common(words, words) == sum(expected)


def test_pieces_packed_one_after_another_make_the_whole() -> None:
    whole = random_bits(64 * 7 + 5)
    words = torch.full((bitmap.num_words(whole.numel()),), -1, dtype=torch.int32)
    for start, stop in ((0, 64), (64, 320), (320, 453)):
        bitmap.pack(whole[start:stop], words, start)
    assert torch.equal(words, packed(whole))
    assert torch.equal(bitmap.unpack(words, 96, 401), whole[96:401])
