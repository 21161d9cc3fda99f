"""Tables of addresses on the device: how one launch of a Triton kernel works on many tensors.

All parameters of an AdamW step go into a few launches. A table has a row of addresses and sizes for
each, and a list of items says which one a program works on:

    parameters of 5,000 and 100 entries, 4,096 to an item     items [0, 0, 1], first items 0 and 2

Both are sent again only when their contents change, and nothing waits for the device.

While a CUDA graph is captured, copies are recorded for each replay: the graph has tables of its
own, in its memory, and what they are copied from is kept.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from samo.kernels.protocol import AdamWUpdate

Table = np.ndarray[Any, np.dtype[np.int64]]


class Where(NamedTuple):
    """A device and a stream: what one stream sent is not there yet for another."""

    device: torch.device
    stream: int
    is_captured: bool
    """Whether what is sent becomes part of a CUDA graph."""


def where_of(device: torch.device) -> Where:
    if device.type != "cuda":
        return Where(device, 0, False)
    # Without objects for stream and device, twice in each step.
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return Where(device, stream, torch._C._cuda_isCurrentStreamCapturing())


_HERE: Final = nullcontext()


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, on which Triton launches."""
    # A traced tensor may be on a device that this machine does not have.
    if not tensor.is_cuda or not torch.cuda.is_initialized():
        return _HERE
    # Not by tensor.device, since this runs at every launch: a device builds its type's name.
    if tensor.get_device() == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device_of(tensor)


def send(where: Where, array: np.ndarray[Any, Any]) -> Tensor:
    """Return an array on the device; the same tensor as before if it was sent already.

    A graph gets its own tensor, which it reads at each replay: the cache may have dropped its own
    by then, and what is recorded for a graph is not there yet for a step outside of it.
    """
    copy = _send if where.is_captured else _sent
    return copy(where, array.tobytes(), array.dtype.str, array.shape)


def _send(where: Where, content: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.from_numpy(np.frombuffer(bytearray(content), dtype=dtype).reshape(shape))
    if where.device.type != "cuda":
        return tensor
    pinned = tensor.pin_memory()  # or the copy would wait for the device
    if where.is_captured:
        hold(pinned)
    return pinned.to(where.device, non_blocking=True)


_sent: Final = lru_cache(maxsize=64)(_send)

_HELD: Final[list[Tensor]] = []


def hold(*tensors: Tensor) -> None:
    """Keep what a graph reads at each replay, forever: nothing tells when a graph is deleted."""
    _HELD.extend(tensors)


def numbers(where: Where, values: Sequence[float | Tensor]) -> tuple[Tensor | None, float]:
    """Return numbers on the device, in fp64; or None and the number if all are the same.

    The host does not read those that are tensors on the device.
    """
    if not any(issubclass(kind, Tensor) for kind in {*map(type, values)}):
        known = [*map(float, values)]
        if known.count(known[0]) == len(known):
            return None, known[0]
        return send(where, np.array(known)), 0.0
    distinct = {id(value): value for value in values}
    there = {
        key: value.double().reshape(())
        for key, value in distinct.items()
        if isinstance(value, Tensor) and value.device == where.device
    }
    if not there:
        return numbers(where, [*map(float, values)])
    for key in distinct.keys() - there.keys():
        value = float(distinct[key])
        there[key] = torch.full((), value, dtype=torch.float64, device=where.device)
    place = {key: index for index, key in enumerate(there)}
    places = send(where, np.array([place[id(value)] for value in values]))
    return torch.stack(list(there.values()))[places], 0.0


def list_items(
    where: Where, rows: Sequence[int], counts: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """Return the row of each item, and the first item of each row.

    Example: rows 0, 1 and 2 of 2, 0 and 1 items give [0, 0, 2] and [0, 2, 2].
    """
    lengths = np.array(counts, dtype=np.int64)
    items = np.repeat(np.array(rows, dtype=np.int32), lengths)
    return send(where, items), (lengths.cumsum() - lengths).tolist()


def addresses_of(tensors: Sequence[Tensor]) -> Table:
    """Return the addresses of tensors."""
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def are_aligned(addresses: Table) -> bool:
    """Return whether all addresses are multiples of 16 bytes."""
    return not np.bitwise_or.reduce(addresses, axis=None) % 16


def row_of(update: AdamWUpdate, size: int, first: int) -> tuple[int, ...]:
    """Return a parameter's row in the order of the kernels' columns, without the gradient."""
    param, remainder, _, exp_avg, exp_avg_sq, step, _, _, dense, mask, *others = update
    num_words = 0 if mask is None else mask.words.numel()
    words = 0 if mask is None else mask.packed.data_ptr()
    offsets = words + 4 * num_words  # in the same tensor
    tensors = (param, remainder, exp_avg, exp_avg_sq, dense, step, *others)
    found = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return *found[:5], words, offsets, *found[5:], size, num_words, first


_dtype, _nbytes = attrgetter("dtype"), attrgetter("nbytes")
_packed, _sizes = attrgetter("packed"), attrgetter("kept", "numel")


def fingerprint(where: Where, updates: Sequence[AdamWUpdate]) -> list[object]:
    """Return all that decides how updates are done, but for numbers and addresses of gradients.

    Equal fingerprints mean tensors of the same sizes and types at the same addresses. No tensor is
    kept alive. A small model waits for this in each step: ``map`` costs a third of a loop.
    """
    param, remainder, grad, exp_avg, exp_avg_sq, step, _, _, dense, mask, *others = zip(*updates)
    optional = (mask, dense, remainder, *others)
    present = [[part for part in column if part is not None] for column in optional]
    # Which updates have one; where all or none have, the number says it.
    places = [
        [part is None for part in column] if 0 < len(there) < len(updates) else len(there)
        for column, there in zip(optional, present)
    ]
    masks, copies, *_ = present
    state = [*param, *exp_avg, *exp_avg_sq, *chain.from_iterable(present[1:])]
    bits = map(_packed, masks)
    return [
        where,
        places,
        [*map(Tensor.data_ptr, state), *map(Tensor.data_ptr, step), *map(Tensor.data_ptr, bits)],
        [*map(_nbytes, state), *map(_nbytes, grad), *map(_sizes, masks)],
        [*map(_dtype, param), *map(_dtype, grad), *map(_dtype, copies)],
        # Another model may have had the same memory in another layout.
        [*map(Tensor.is_contiguous, (*param, *grad, *copies)), *map(Tensor.get_device, grad)],
    ]
