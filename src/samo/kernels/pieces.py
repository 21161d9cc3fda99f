"""Tensors and masks in pieces of 2**20 entries, so that temporaries do not grow with a tensor."""

from collections.abc import Iterator

import torch
from torch import Tensor

from samo.mask import bitmap
from samo.mask.mask import Mask

__all__ = []


def pieces(numel: int, mask: Mask | None) -> Iterator[tuple[slice, Tensor | None, slice]]:
    """Yield slices of a dense tensor, their kept bits, and their slices of compressed vectors."""
    if mask is not None:
        yield from kept_pieces(mask)
        return
    for start, stop in bitmap.chunks(numel):
        yield slice(start, stop), None, slice(start, stop)


def kept_pieces(mask: Mask) -> Iterator[tuple[slice, Tensor, slice]]:
    """Yield slices of a mask's tensor, their kept bits, and their slices of compressed vectors."""
    spans = list(bitmap.chunks(mask.numel))
    first_blocks = [start // bitmap.BLOCK_BITS for start, _ in spans]
    # One copy to the host for all pieces.
    begins = [*mask.offsets[first_blocks].tolist(), mask.kept]
    for (start, stop), begin, end in zip(spans, begins, begins[1:]):
        yield slice(start, stop), bitmap.unpack(mask.words, start, stop), slice(begin, end)


def flattened(tensor: Tensor) -> Tensor:
    """Return a tensor as a vector: a view, or a copy if its strides allow none."""
    return tensor.detach().reshape(-1)


def write_back(flat: Tensor, tensor: Tensor) -> None:
    """Write what was written to a `flattened` tensor to the tensor itself."""
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def put(target: Tensor, source: Tensor, skip: Tensor | None) -> None:
    """Copy to ``target`` in place, unless ``skip`` is true."""
    target.copy_(source if skip is None else torch.where(skip, target, source))
