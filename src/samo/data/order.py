"""A shuffled order that is computed, not stored: any place in it costs the same, and no memory.

A number below ``rows * columns`` is a row and a column, and a round moves each by a hash of the other,
which can be undone whatever the hash is (a Feistel network, here over any two sizes and not over halves
of bits: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 5):

    row = row + hash(column) mod rows        column = column + hash(row) mod columns

Both sizes are the square root of ``size``, rounded up, so the table has few cells too many. A number
that lands in one of those goes through the rounds again until it is below ``size`` (cycle walking).
So the order of an epoch is a size and a key, and a place in it is one integer.
"""

import math
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["key_of", "shuffled"]

_ROUNDS: Final = 8  # with 4, some orders of 5 numbers come up far more often than others
_MASK: Final = 2**64 - 1

# The steps and multipliers of SplitMix64.
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB


def key_of(*numbers: int) -> int:
    """Return 64 bits that depend on every bit and on the order of some integers.

    Example:
        >>> key_of(0, 1) != key_of(1, 0)
        True
        >>> hex(key_of(7))
        '0x63cbe1e459320dd7'
    """
    key = 0
    for number in numbers:
        key = _mix((key ^ (number & _MASK)) + _GOLDEN)
    return key


@overload
def shuffled(index: int, size: int, key: int) -> int: ...
@overload
def shuffled(index: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]: ...
def shuffled(index: int | NDArray[np.int64], size: int, key: int) -> int | NDArray[np.int64]:
    """Return which of ``range(size)`` stands at ``index`` in the order that ``key`` gives.

    Example:
        >>> [shuffled(index, 10, key=1) for index in range(10)]
        [4, 1, 6, 2, 7, 9, 8, 0, 5, 3]
        >>> shuffled(np.array([0, 10**12]), 10**15, key=1)
        array([475980186663280, 150134979764307])

    Args:
        index: A place, or an array of places; each at least 0 and less than ``size``.
        size: How many numbers are put in order, at most 2**62.
        key: Chooses the order; its lowest 64 bits count.

    Raises:
        ValueError: ``size`` or an index is out of range.
    """
    if not 1 <= size <= 2**62:
        raise ValueError(f"cannot shuffle {size:,} numbers; size must be 1 to 2**62")
    places = np.atleast_1d(np.asarray(index, dtype=np.int64))
    outside = places[(places < 0) | (places >= size)]
    if outside.size:
        raise ValueError(
            f"no place {outside[0]:,} in an order of {size:,}; places are 0 to size - 1"
        )
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    keys = np.array([key_of(key, number) for number in range(_ROUNDS)], dtype=np.uint64)
    numbers = _rounds(places.astype(np.uint64), rows, columns, keys)
    while (beyond := np.flatnonzero(numbers >= size)).size:
        numbers[beyond] = _rounds(numbers[beyond], rows, columns, keys)
    return int(numbers[0]) if isinstance(index, int) else numbers.astype(np.int64)


def _rounds(
    numbers: NDArray[np.uint64], rows: int, columns: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    num_rows, num_columns = np.uint64(rows), np.uint64(columns)
    row, column = np.divmod(numbers, num_columns)
    for key in keys.reshape(-1, 2):
        row = (row + _mix_array(column ^ key[0]) % num_rows) % num_rows
        column = (column + _mix_array(row ^ key[1]) % num_columns) % num_columns
    return row * num_columns + column


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _mix_array(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))
