"""`Mask`: which weights of one tensor are kept.

A mask is stored as bits, never as booleans and never as "the weight is not zero": a kept weight may
be exactly 0 and must stay trainable. ``bitmap.py`` describes the layout.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from samo.errors import MaskError
from samo.mask import bitmap


class Mask:
    """The kept entries of one tensor, one bit each. Immutable.

    Example:
        >>> import torch, samo
        >>> mask = samo.Mask.from_bool(torch.tensor([[True, False, False], [False, True, True]]))
        >>> mask
        Mask(2x3, 3 of 6 kept, sparsity 0.500)
        >>> mask.to_bool()
        tensor([[ True, False, False],
                [False,  True,  True]])

    Args:
        shape: Shape of the dense tensor.
        words: Its bits in row-major order, int32; copied.
    """

    def __init__(self, shape: Iterable[int], words: Tensor) -> None:
        self.shape: Final = tuple(shape)
        if any(size < 0 for size in self.shape):
            raise ValueError(f"a mask cannot have shape {self.shape}")
        self.numel: Final = math.prod(self.shape)
        expected = bitmap.num_words(self.numel)
        if words.dtype != torch.int32 or words.shape != (expected,):
            raise ValueError(
                f"a mask of {self.numel:,} weights needs {expected:,} int32 words, got "
                f"{tuple(words.shape)} of {words.dtype}; build masks with Mask.from_bool(tensor)"
            )
        tail = bitmap.unpack(words, self.numel // 32 * 32, expected * 32)[self.numel % 32 :]
        if tail.any():
            raise ValueError(f"a mask of {self.numel:,} weights has bits set past its last weight")
        self.words = words.clone(memory_format=torch.contiguous_format)
        self.offsets, self.kept = bitmap.block_offsets(words)

    @classmethod
    def from_parts(cls, shape: Iterable[int], words: Tensor, offsets: Tensor, kept: int) -> "Mask":
        """Rebuild a mask from its own parts, which are neither copied nor checked."""
        mask = object.__new__(cls)
        mask.shape = tuple(shape)  # type: ignore[misc]
        mask.numel = math.prod(mask.shape)  # type: ignore[misc]
        mask.words, mask.offsets, mask.kept = words, offsets, kept
        return mask

    @classmethod
    def from_bool(cls, keep: Tensor) -> "Mask":
        """Build a mask from a boolean tensor, True where the weight is kept."""
        if keep.dtype != torch.bool:  # 0 and 1 could be weights, passed by mistake
            raise TypeError(
                f"Mask.from_bool takes a boolean tensor, got {keep.dtype}; "
                "compare to make one, for example `scores > threshold`"
            )
        words = torch.empty(bitmap.num_words(keep.numel()), dtype=torch.int32, device=keep.device)
        bitmap.pack(keep.reshape(-1), words)
        return cls(keep.shape, words)

    @classmethod
    def ones(cls, shape: Iterable[int], device: torch.device | str = "cpu") -> "Mask":
        """Build a mask that keeps everything."""
        return cls.from_bool(torch.tensor(True, device=device).expand(tuple(shape)))

    def to_bool(self) -> Tensor:
        """Return the mask as a boolean tensor of its shape, 1 byte per weight."""
        words = self.words
        if "packed" in self.__dict__:  # torch.export warns of a constant that is a part of a tensor
            words = self.packed[: words.numel()]
        return bitmap.unpack(words, 0, self.numel).view(self.shape)

    @cached_property
    def packed(self) -> Tensor:
        """Words and offsets in one int32 tensor, of which they are views from then on."""
        # For compiled code, where each tensor costs the host time in every call.
        packed = torch.cat([self.words, self.offsets.view(torch.int32)])
        self.words, offsets = packed.split([len(self.words), 2 * len(self.offsets)])
        self.offsets = offsets.view(torch.int64)
        return packed

    @classmethod
    def from_packed(cls, shape: Iterable[int], packed: Tensor, kept: int) -> "Mask":
        """Return the mask that `packed` belongs to; nothing is copied or checked."""
        shape = tuple(shape)
        num_words = bitmap.num_words(math.prod(shape))
        offsets = packed[num_words:].view(torch.int64)
        mask = cls.from_parts(shape, packed[:num_words], offsets, kept)
        mask.packed = packed
        return mask

    @property
    def sparsity(self) -> float:
        """Fraction of the entries pruned."""
        return 1.0 - self.kept / self.numel if self.numel else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the words and block counts."""
        return self.words.nbytes + self.offsets.nbytes

    def to(self, device: torch.device | str) -> "Mask":
        """Return this mask on another device, or itself if it is there already."""
        words = self.words.to(device)
        return self if words is self.words else Mask(self.shape, words)

    def part(self, index: int) -> "tuple[int, Mask] | None":
        """Return the kept count before ``self[index]``, and its mask; None if it cuts a block."""
        count = self.shape[0] if len(self.shape) > 1 else 0
        size = self.numel // count if count else 0
        if not size or size % bitmap.BLOCK_BITS or not -count <= index < count:
            return None
        index, blocks = index % count, size // bitmap.BLOCK_BITS
        first, last = self._firsts[index : index + 2]
        words = self.words[index * blocks * bitmap.BLOCK_WORDS :][: blocks * bitmap.BLOCK_WORDS]
        offsets = self.offsets[index * blocks :][:blocks] - first
        return first, Mask.from_parts(self.shape[1:], words, offsets, last - first)

    @cached_property
    def _firsts(self) -> list[int]:
        """The kept counts before the parts of `part`, and of all."""
        blocks = self.numel // self.shape[0] // bitmap.BLOCK_BITS
        return [*self.offsets[::blocks].tolist(), self.kept]

    def pieces(self) -> Iterator[tuple[slice, Tensor, slice]]:
        """Yield slices of 2**20 dense entries, their bits, and their slices of kept entries."""
        spans = list(bitmap.chunks(self.numel))
        first_blocks = [start // bitmap.BLOCK_BITS for start, _ in spans]
        # One copy to the host for all pieces.
        begins = [*self.offsets[first_blocks].tolist(), self.kept]
        for (start, stop), begin, end in zip(spans, begins, begins[1:]):
            yield slice(start, stop), bitmap.unpack(self.words, start, stop), slice(begin, end)

    def zero_(self, dense: Tensor) -> Tensor:
        """Set the pruned entries of ``dense`` to exactly 0, in place."""
        self._check_shape(tuple(dense.shape))
        flat = dense.detach().reshape(-1)  # a view if strides allow, else a copy
        for start, stop in bitmap.chunks(self.numel):
            flat[start:stop].masked_fill_(~bitmap.unpack(self.words, start, stop), 0)
        if not dense.is_contiguous():
            dense.detach().copy_(flat.view(self.shape))
        return dense

    def is_zeroed(self, dense: Tensor) -> bool:
        """Return whether the pruned entries of ``dense`` are all 0."""
        self._check_shape(tuple(dense.shape))
        flat = dense.detach().reshape(-1)
        chunks = bitmap.chunks(self.numel)
        return not any(flat[i:j][~bitmap.unpack(self.words, i, j)].any() for i, j in chunks)

    def common(self, other: "Mask") -> int:
        """Count the entries that two masks both keep."""
        return int(bitmap.popcount(self.words & self._words_of(other)).sum())

    def fingerprint(self) -> str:
        """Return the SHA-256 of shape and bits."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.shape).encode())
        digest.update(self.words.cpu().numpy().tobytes())
        return digest.hexdigest()

    def __and__(self, other: "Mask") -> "Mask":
        return Mask(self.shape, self.words & self._words_of(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Mask(self.shape, self.words | self._words_of(other))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        return self.shape == other.shape and torch.equal(self.words, self._words_of(other))

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __deepcopy__(self, memo: object) -> "Mask":
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return Mask, (self.shape, self.words)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"Mask({shape}, {self.kept:,} of {self.numel:,} kept, sparsity {self.sparsity:.3f})"

    def _words_of(self, other: "Mask") -> Tensor:
        self._check_shape(other.shape)
        return other.words.to(self.words.device)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if shape != self.shape:
            raise MaskError(f"the mask has shape {self.shape}, the other operand has {shape}")
