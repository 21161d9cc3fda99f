"""Packed bits against plain boolean tensors, at the sizes where words, blocks and chunks end."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from samo.mask import bitmap

CHUNK = 2**20
EDGES = [0, 1, 31, 32, 33, 63, 64, 65, 2047, 2048, 2049, CHUNK - 1, CHUNK, CHUNK + 1]

sizes = st.integers(0, 5000)
densities = st.sampled_from([0.0, 0.01, 0.5, 0.99, 1.0])


def random_bits(numel: int, density: float = 0.5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(numel, generator=generator) < density


def packed(bits: Tensor) -> Tensor:
    words = torch.full((bitmap.num_words(bits.numel()),), -1, dtype=torch.int32)
    bitmap.pack(bits, words)
    return words


def running_counts(bits: Tensor) -> list[int]:
    return [int(bits[:start].sum()) for start in range(0, bits.numel(), bitmap.BLOCK_BITS)]


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


@given(st.lists(densities, min_size=1, max_size=4), st.integers(0, 63), st.integers(0, 2**32))
def test_pieces_packed_one_after_another_make_the_whole(
    pieces: list[float], rest: int, seed: int
) -> None:
    parts = [random_bits(64 * (3 + i), density, seed) for i, density in enumerate(pieces)]
    parts.append(random_bits(rest, 0.5, seed))
    whole = torch.cat(parts)
    words = torch.full((bitmap.num_words(whole.numel()),), -1, dtype=torch.int32)
    start = 0
    for part in parts:
        bitmap.pack(part, words, start)
        start += part.numel()
    assert torch.equal(words, packed(whole))


@given(st.integers(0, 60), st.integers(0, 2000), densities)
def test_unpack_takes_any_range_that_starts_on_a_word(
    word: int, length: int, density: float
) -> None:
    bits = random_bits(4000, density)
    start, stop = 32 * word, 32 * word + length
    assert torch.equal(bitmap.unpack(packed(bits), start, stop), bits[start:stop])


@pytest.mark.parametrize(
    "bits",
    [
        random_bits(300)[::3],
        random_bits(4096).view(64, 64).t().reshape(-1),
        torch.tensor(True).expand(100),
    ],
    ids=["every third", "transposed", "expanded"],
)
def test_pack_takes_bits_of_any_stride(bits: Tensor) -> None:
    assert torch.equal(packed(bits), packed(bits.clone()))


@given(sizes, densities, st.integers(0, 2**32))
def test_offsets_count_the_bits_before_each_block(numel: int, density: float, seed: int) -> None:
    bits = random_bits(numel, density, seed)
    offsets, total = bitmap.block_offsets(packed(bits), numel)
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == running_counts(bits)
    assert total == bits.sum()


@pytest.mark.parametrize("numel", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 2049])
def test_offsets_go_on_over_the_end_of_a_chunk(numel: int) -> None:
    bits = random_bits(numel)
    offsets, total = bitmap.block_offsets(packed(bits), numel)
    per_block = torch.nn.functional.pad(bits, (0, -numel % 2048)).view(-1, 2048).sum(1)
    assert torch.equal(offsets, per_block.cumsum(0) - per_block)
    assert total == bits.sum()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_popcount_counts_the_bits_of_each_word(values: list[int]) -> None:
    words = torch.tensor(values, dtype=torch.int32)
    expected = [(value & 0xFFFFFFFF).bit_count() for value in values]
    assert bitmap.popcount(words).tolist() == expected
    assert bitmap.count_common(words, words) == sum(expected)


@pytest.mark.parametrize("numel", [*EDGES, 5 * CHUNK + 7])
def test_chunks_cover_everything_once_and_start_on_blocks(numel: int) -> None:
    ranges = list(bitmap.chunks(numel))
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])][: len(ranges)]
    assert sum(stop - start for start, stop in ranges) == numel
    assert all(start % bitmap.BLOCK_BITS == 0 for start, _ in ranges)
    assert all(0 < stop - start <= CHUNK for start, stop in ranges)
