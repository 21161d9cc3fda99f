"""The computed order against what a shuffled order must be: complete, keyed, even."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from samo.data.order import key_of, shuffled

sizes = st.integers(1, 5000)
keys = st.integers(0, 2**64 - 1)


@given(sizes, keys)
def test_every_number_has_one_place(size: int, key: int) -> None:
    order = shuffled(np.arange(size), size, key)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(size))


def test_every_number_has_one_place_for_all_small_sizes() -> None:
    for size in range(1, 300):
        assert np.array_equal(np.sort(shuffled(np.arange(size), size, size)), np.arange(size))


@given(sizes, keys, st.data())
def test_a_single_place_is_that_of_the_array(size: int, key: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    number = shuffled(index, size, key)
    assert type(number) is int
    assert number == shuffled(np.arange(size), size, key)[index]


@given(st.integers(50, 5000), keys, keys)
def test_different_keys_give_different_orders(size: int, one: int, other: int) -> None:
    is_same = np.array_equal(*(shuffled(np.arange(size), size, key) for key in (one, other)))
    assert is_same == (one == other)


@pytest.mark.parametrize("size", [2**32 - 5, 10**15, 2**62 - 1, 2**62])
def test_huge_sizes_stay_in_range_and_apart(size: int) -> None:
    places = np.concatenate([np.arange(1000), size - 1 - np.arange(1000)])
    order = shuffled(places, size, key=3)
    assert len(np.unique(order)) == 2000
    assert 0 <= order.min() < size // 50  # 2000 numbers at random reach both ends
    assert size - size // 50 < order.max() < size


def test_all_orders_of_four_come_up_about_equally_often() -> None:
    counts = Counter(tuple(shuffled(np.arange(4), 4, key).tolist()) for key in range(2400))
    expected = 2400 / 24
    chi_square = sum(
        (counts[order] - expected) ** 2 / expected for order in itertools.permutations(range(4))
    )
    assert chi_square < 58  # 23 degrees of freedom: 1 in 10,000 of random tables is above


@pytest.mark.parametrize("size", [17, 64, 100])
def test_over_the_keys_every_number_is_everywhere(size: int) -> None:
    counts, rounds = np.zeros((size, size)), 1500
    for key in range(rounds):
        counts[np.arange(size), shuffled(np.arange(size), size, key)] += 1
    expected = rounds / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_neighbours_are_not_near_each_other() -> None:
    size = 100_000
    order = shuffled(np.arange(size), size, key=5)
    steps = np.diff(order) % size
    counts = np.bincount(steps // (size // 100), minlength=100)
    expected = (size - 1) / 100
    assert ((counts - expected) ** 2 / expected).sum() < 160  # 99 degrees: 1 in 10,000 is above
    # No rank correlation with the place itself: its deviation is 1 / sqrt(size).
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 5 / size**0.5


def test_keys_depend_on_every_number_and_on_their_order() -> None:
    groups = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (-1,), (2**64,), (1, 0, 0)]
    found = {key_of(*numbers) for numbers in groups}
    assert len(found) == len(groups) - 1  # 2**64 has the same lowest 64 bits as 0
    assert all(0 <= key < 2**64 for key in found)


def test_near_keys_differ_in_about_half_of_their_bits() -> None:
    flips = [(key_of(7, n) ^ key_of(7, n + 1)).bit_count() for n in range(1000)]
    assert 31 < sum(flips) / 1000 < 33


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"cannot shuffle .* numbers; size must be 1 to 2\*\*62"):
        shuffled(0, size, key=0)


@pytest.mark.parametrize("index", [-1, 10])
def test_a_place_out_of_range_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"no place {index} in an order of 10; places are 0 to"):
        shuffled(index, 10, key=0)
    with pytest.raises(ValueError, match=f"no place {index} in an order of 10"):
        shuffled(np.array([3, index]), 10, key=0)
