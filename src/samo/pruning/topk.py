"""Find the largest entries, exactly and in constant memory: of several tensors, or of neighbours.

Each entry has an integer key; the largest keys are kept. The key of a magnitude is its bit pattern
without the sign, which orders floating-point numbers by value and makes -0.0 and 0.0 equal. A hash
of name, place and seed breaks ties: of equal values it draws some at random.

Over whole tensors, the smallest kept key, the cut, is found by counting digits (radix select), so
nothing is ever sorted, and only the tables of counts are copied to the host:

    keep 3 of     0x4a1  0x4a7  0x13c  0x4a1  0x4c2       digits here: 4 bits, then 8
    pass 1        digit 4: 4 keys, digit 1: 1 key         the 3rd largest begins with 4
    pass 2        4c2: 1, 4a7: 1, 4a1: 2                  it is 0x4a1; 1 of its 2 entries fits
    ties          the same passes over the hashes of the entries with key 0x4a1
    last pass     key > cut, or key = cut and hash > its cut; written straight to bits

Neighbours are m entries along one dimension: a group of an n:m pattern, or a whole row. With it, a
tensor is (before, dimension, after) in flat order, and m rows of ``after`` entries hold whole
groups, so chunks of such rows are independent:

    2:4, (out, in)     [ 3 -1  0  2 | -5 ...     keeps  [ 1  0  0  1 | ...
    2:4, (in, out)     4 rows of `out` entries, a group in each column
"""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from samo.mask import bitmap
from samo.mask.mask import Mask

_DIGIT_BITS: Final = 16
_HASH_BITS: Final = 31
_GOLDEN: Final = -0x61C8864680B583EB  # 2**64 / golden ratio; SplitMix64's constants, as int64
_MIX_1: Final = -0x40A7B892E31B1A47
_MIX_2: Final = -0x6B2FB644ECCEEE15
_MOST_COMPARED: Final = 8
"""Most neighbours compared pair by pair: 2**20 scores on a CPU core take 5 ms for 2:4, 11 ms for
4:8 and 27 ms for 4:16; sorting them takes 24, 19 and 22 ms."""


def keep_largest(
    tensors: Mapping[str, Tensor], kept: int, seed: int, *, excluded: Mask | None = None
) -> dict[str, Tensor]:
    """Return the words of a mask for each tensor, with ``kept`` bits set in total.

    Entries of ``excluded`` rank below all others.
    """
    dtype = _key_dtype(values.dtype for values in tensors.values())
    group = [_Entries(name, values, seed, dtype, excluded) for name, values in tensors.items()]
    cut = _find_cut(group, _Entries.keys, 8 * dtype.itemsize - 1, kept)
    hash_cut = None
    if cut.fits < cut.equal:

        def tie_hashes(entries: _Entries, start: int, stop: int) -> Tensor:
            return _ties(entries, entries.keys(start, stop), cut.key, start)[1]

        # One cut for all tensors: its count runs down over entries whose hashes are equal too.
        hash_cut = _find_cut(group, tie_hashes, _HASH_BITS, cut.fits)
    return {entries.name: _words(entries, cut.key, hash_cut) for entries in group}


def largest(
    name: str, values: Tensor, kept: int, seed: int, *, excluded: Mask | None = None
) -> Tensor:
    """Return the words of a mask of the ``kept`` largest magnitudes of one tensor."""
    return keep_largest({name: values}, kept, seed, excluded=excluded)[name]


def keep_neighbours(
    name: str, values: Tensor, dim: int, size: int, kept: int | Tensor, seed: int
) -> Tensor:
    """Return the words of a mask that keeps the largest of every ``size`` neighbours along ``dim``.

    ``kept`` is how many: of each group alike, or one number a group.
    """
    entries = _Entries(name, values, seed, _key_dtype([values.dtype]))
    after = math.prod(values.shape[dim + 1 :])
    words = _new_words(values)
    unit = math.lcm(size * after, 2 * bitmap.WORD_BITS)  # whole groups, and whole pairs of words
    for start, stop in bitmap.chunks(values.numel(), unit):
        scores = entries.scores(start, stop, (-1, size, after))
        first = start // (size * after)
        share = kept if isinstance(kept, int) else kept[first : first + len(scores), None, None]
        bitmap.pack(largest_of(scores, share).view(-1), words, start)
    return words


def largest_of(scores: Tensor, kept: int | Tensor) -> Tensor:
    """Return which of (groups, neighbours, after) are among the ``kept`` largest of their group."""
    size = scores.shape[1]
    if size > _MOST_COMPARED:
        order = scores.sort(dim=1, descending=True, stable=True).indices
        is_kept = torch.arange(size, device=scores.device)[:, None] < kept
        keep = torch.empty_like(order, dtype=torch.bool)
        return keep.scatter_(1, order, is_kept.expand_as(order))
    num_larger = torch.zeros(scores.shape, dtype=torch.uint8, device=scores.device)
    for i in range(size):
        for j in range(i + 1, size):
            is_larger = scores[:, j] > scores[:, i]
            num_larger[:, i] += is_larger
            num_larger[:, j] += ~is_larger  # of equal scores the first counts as larger
    return num_larger < kept


def equal_values(shape: Iterable[int], device: torch.device) -> Tensor:
    """Return equal values, which take no memory: the hash alone decides, so at random."""
    return torch.zeros((), dtype=torch.bfloat16, device=device).expand(tuple(shape))


def count_finite_and_nonzero(values: Tensor) -> tuple[int, int]:
    """Count the entries that are finite, and those that are not 0."""
    num_finite = num_nonzero = 0
    for chunk in bitmap.chunks(values.numel()):
        part = flat_slice(values, *chunk)
        num_finite += int(part.isfinite().sum())
        num_nonzero += int(part.count_nonzero())
    return num_finite, num_nonzero


def flat_slice(values: Tensor, start: int, stop: int) -> Tensor:
    """Return entries ``start`` to ``stop`` in flat order, copying no more than those."""
    if values.is_contiguous():
        return values.view(-1)[start:stop]
    row = values[0].numel()
    first, last = start // row, (stop - 1) // row
    if first == last:
        return flat_slice(values[first], start - first * row, stop - first * row)
    parts = [
        flat_slice(values[first], start - first * row, row),
        values[first + 1 : last].reshape(-1),
        flat_slice(values[last], 0, stop - last * row),
    ]
    return torch.cat(parts)


def hashes(name: str, seed: int, index: Tensor) -> Tensor:
    """Return 31 pseudo-random bits per flat index, the same on every device."""
    salt = int(_mix_(torch.tensor(seed % 2**63, device="cpu"))) ^ zlib.crc32(name.encode())
    z = _mix_((index * _GOLDEN).add_(salt))
    # 31 of the 64 bits: a non-negative int32, with the same two digits as a float32 magnitude.
    return z.bitwise_right_shift_(33).bitwise_and_(0x7FFFFFFF).to(torch.int32)


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of one tensor, each with a key to rank by and a hash to break ties."""

    name: str
    values: Tensor
    seed: int
    dtype: torch.dtype  # whose bit patterns are the keys; one for all that are compared
    excluded: Mask | None = None

    def keys(self, start: int, stop: int) -> Tensor:
        """Return the keys of a range of entries in flat order, as int16, int32 or int64."""
        values = flat_slice(self.values, start, stop).to(self.dtype)
        dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        keys = values.view(dtype) & torch.iinfo(dtype).max
        if self.excluded is None:
            return keys
        # Key 0 is for excluded entries alone. The two largest keys, both NaNs, become one.
        keys = keys.clamp(max=torch.iinfo(dtype).max - 1).add_(1)
        return keys.masked_fill_(bitmap.unpack(self.excluded.words, start, stop), 0)

    def hashes(self, index: Tensor) -> Tensor:
        return hashes(self.name, self.seed, index)

    def scores(self, start: int, stop: int, shape: tuple[int, int, int]) -> Tensor:
        """Return (groups, neighbours, after) with the keys above the hashes, in 62 bits."""
        tie = self.hashes(torch.arange(start, stop, device=self.values.device))
        keys = self.keys(start, stop).to(torch.int64).view(shape)
        if self.dtype.itemsize > 4:  # the rank within a group takes the place of a key of 63 bits
            keys = _ranks(keys)
        return (keys << _HASH_BITS).bitwise_or_(tie.view(shape))


def _key_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the narrowest dtype, for the fewest passes, that represents all of some exactly."""
    found = set(dtypes)
    if torch.float64 in found:
        return torch.float64
    is_half = found in ({torch.float16}, {torch.bfloat16})
    return found.pop() if is_half else torch.float32


def _ranks(keys: Tensor) -> Tensor:
    """Return the rank of each key along dimension 1; equal keys have equal ranks."""
    ordered, order = keys.sort(dim=1)
    is_new = torch.zeros_like(keys)
    is_new[:, 1:] = ordered.diff(dim=1) != 0
    return torch.empty_like(keys).scatter_(1, order, is_new.cumsum(1))


@dataclass(slots=True)
class _Cut:
    key: int  # the smallest kept key
    fits: int  # entries with this key that are kept
    equal: int  # entries with this key

    def choose(self, keys: Tensor) -> Tensor:
        """Return which keys to keep: those above the cut, and the first that fit at it."""
        keep = keys > self.key
        at_cut = (keys == self.key).nonzero().view(-1)[: self.fits]
        keep[at_cut] = True
        self.fits -= at_cut.numel()
        return keep


def _find_cut(
    group: Sequence[_Entries], keys_of: Callable[[_Entries, int, int], Tensor], bits: int, kept: int
) -> _Cut:
    """Find the ``kept``-th largest key of a group, digit by digit."""
    prefix, equal, shift = 0, 0, bits
    while shift:
        width = min(_DIGIT_BITS, shift)
        shift -= width
        table = torch.zeros(1 << width, dtype=torch.int64, device="cpu")
        for entries in group:
            counts = torch.zeros_like(table, device=entries.values.device)
            for start, stop in bitmap.chunks(entries.values.numel()):
                counts += _count_digits(keys_of(entries, start, stop), prefix, shift, width)
            table += counts.cpu()
        from_top = table.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, kept))
        digit = table.numel() - 1 - place
        equal = int(table[digit])
        kept -= int(from_top[place]) - equal
        prefix = prefix << width | digit
    return _Cut(prefix, kept, equal)


def _count_digits(keys: Tensor, prefix: int, shift: int, width: int) -> Tensor:
    """Count the values of ``width`` bits from bit ``shift`` on, in keys that start with prefix."""
    if shift + width < 8 * keys.element_size() - 1:  # keys fill their integer but for the sign
        keys = keys[keys >> (shift + width) == prefix]
    digits = (keys >> shift).bitwise_and_((1 << width) - 1)
    # Measured, 2**20 keys on 2 cores with torch 2.13: bincount 0.7 ms, index_add_ 1.0, scatter_add_
    # 1.4, histc 3.3, sort 4.2.
    return torch.bincount(digits, minlength=1 << width)


def _words(entries: _Entries, cut: int, hash_cut: _Cut | None) -> Tensor:
    """Pack which entries are kept: those above ``cut``, and at it those that their hash chooses."""
    words = _new_words(entries.values)
    for start, stop in bitmap.chunks(entries.values.numel()):
        keys = entries.keys(start, stop)
        keep = keys >= cut
        if hash_cut is not None:
            index, tie = _ties(entries, keys, cut, start)
            keep[index] = hash_cut.choose(tie)
        bitmap.pack(keep, words, start)
    return words


def _new_words(values: Tensor) -> Tensor:
    return torch.empty(bitmap.num_words(values.numel()), dtype=torch.int32, device=values.device)


def _ties(entries: _Entries, keys: Tensor, cut: int, start: int) -> tuple[Tensor, Tensor]:
    """Return the places in a chunk whose keys equal ``cut``, and their hashes."""
    index = (keys == cut).nonzero().view(-1)
    return index, entries.hashes(index + start)


def _mix_(z: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 to the int64 ``z`` in place. Products wrap, on purpose."""
    # Right shifts of an int64 extend its sign; the masks remove that.
    z.bitwise_xor_((z >> 30).bitwise_and_(0x3FFFFFFFF)).mul_(_MIX_1)
    z.bitwise_xor_((z >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(_MIX_2)
    return z.bitwise_xor_((z >> 31).bitwise_and_(0x1FFFFFFFF))
