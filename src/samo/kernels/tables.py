"""Tables of addresses on the device: how one launch of a Triton kernel works on many tensors.

All parameters of an AdamW step go into a few launches, whatever their number. A table has a row of
addresses and sizes for each one, and a list of items says which one a program works on:

    parameters of 5,000 and 100 entries, 4,096 to an item     items [0, 0, 1], first items 0 and 2

Both are sent again only when something in them has changed, and nothing waits for the device.

While a CUDA graph is captured, copies are only recorded, for each replay: its tables are its own,
in the graph's memory, and what they are copied from is kept.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, reduce
from operator import attrgetter, or_
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from samo.kernels.protocol import AdamWUpdate

__all__ = []

Table = np.ndarray[Any, np.dtype[np.int64]]


class Where(NamedTuple):
    """A device and a stream: what was sent on one stream is not there yet for another."""

    device: torch.device
    stream: int
    is_captured: bool
    """Whether what is sent becomes part of a CUDA graph."""


def where_of(device: torch.device) -> Where:
    if device.type != "cuda":
        return Where(device, 0, False)
    stream = torch.cuda.current_stream(device).cuda_stream
    return Where(device, stream, torch.cuda.is_current_stream_capturing())


_HERE: Final = nullcontext()


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the device of ``tensor`` the current one, if it is not: Triton launches there."""
    # Asks the tensor, since this runs at every launch: a device builds its type's name each time.
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device_of(tensor)


# Sending -----------------------------------------------------------------------------------------


def send(where: Where, array: np.ndarray[Any, Any]) -> Tensor:
    """Return an array on the device; the same tensor as before if it was sent already.

    A graph gets a tensor of its own: it reads it at each replay, when this cache has long let it
    go, and what was recorded for a graph is not there yet for a step outside of it.
    """
    if where.is_captured:
        return _send(where, array.tobytes(), array.dtype.str, array.shape)
    return _sent(where, array.tobytes(), array.dtype.str, array.shape)


def _send(where: Where, content: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Copy to the device without waiting, which takes pinned memory."""
    tensor = torch.from_numpy(np.frombuffer(bytearray(content), dtype=dtype).reshape(shape))
    if where.device.type != "cuda":
        return tensor
    pinned = tensor.pin_memory()
    if where.is_captured:
        hold(pinned)
    return pinned.to(where.device, non_blocking=True)


_sent: Final = lru_cache(maxsize=64)(_send)

_HELD: Final[list[Tensor]] = []


def hold(*tensors: Tensor) -> None:
    """Keep what a graph reads at each replay, for good: nothing tells when a graph is gone."""
    _HELD.extend(tensors)


def numbers(where: Where, values: Sequence[float]) -> tuple[Tensor | None, float]:
    """Return numbers on the device, in fp64; or None and the number that they all are."""
    if values.count(values[0]) == len(values):
        return None, values[0]
    return send(where, np.array(values, dtype=np.float64)), 0.0


def list_items(
    where: Where, rows: Sequence[int], counts: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """Return the row of each item, and the first item of each row.

    Example: rows 0, 1 and 2 of 2, 0 and 1 items give [0, 0, 2] and [0, 2, 2].
    """
    lengths = np.array(counts, dtype=np.int64)
    items = np.repeat(np.array(rows, dtype=np.int32), lengths)
    return send(where, items), (lengths.cumsum() - lengths).tolist()


def with_addresses(where: Where, table: Table, column: int, addresses: list[int]) -> Tensor:
    """Return a table on the device with addresses filled in."""
    whole = table.copy()
    whole[:, column] = addresses
    return send(where, whole)


def are_aligned(addresses: Iterable[int]) -> bool:
    """Return whether all addresses are multiples of 16 bytes."""
    return not reduce(or_, addresses, 0) % 16


# What a parameter's row says ---------------------------------------------------------------------


def row_of(update: AdamWUpdate, size: int, first: int) -> tuple[int, ...]:
    """Return a parameter's row, in the order of the kernels' columns; its gradient's address is 0."""
    mask, lr = update.mask, update.lr
    return (
        update.param.data_ptr(),
        _address(update.remainder),
        0,
        update.exp_avg.data_ptr(),
        update.exp_avg_sq.data_ptr(),
        _address(update.dense),
        0 if mask is None else mask.words.data_ptr(),
        0 if mask is None else mask.offsets.data_ptr(),
        update.step.data_ptr(),
        lr.data_ptr() if isinstance(lr, Tensor) else 0,
        _address(update.age),
        _address(update.exp_avg_scale),
        _address(update.exp_avg_sq_scale),
        size,
        0 if mask is None else mask.words.numel(),
        first,
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def rate_type(update: AdamWUpdate) -> torch.dtype | None:
    """Return the type of a learning rate on the parameter's device; None if the host knows it."""
    lr = update.lr
    if isinstance(lr, Tensor) and lr.dtype in RATE_TYPES and lr.device == update.param.device:
        return lr.dtype
    return None


RATE_TYPES: Final = (torch.float32, torch.float64)


# What stays the same from step to step -----------------------------------------------------------

_dtype, _nbytes = attrgetter("dtype"), attrgetter("nbytes")


def fingerprint(where: Where, updates: Sequence[AdamWUpdate]) -> list[object]:
    """Return all that decides how updates are done, except the addresses of their gradients.

    Two lists of updates with equal fingerprints have tensors of the same sizes and types at the
    same addresses. It holds no tensor alive. A small model waits for this function in each step:
    columns of tensors go through ``map``, which costs a third of a loop.
    """
    param, remainder, grad, exp_avg, exp_avg_sq, step, lr, _, dense, mask, *others = zip(*updates)
    state = [*param, *exp_avg, *exp_avg_sq]
    copies: list[Tensor] = []
    found: list[object] = [where, len(updates)]
    for column in (remainder, dense, *others):
        present = [tensor is not None for tensor in column]
        if True in present:
            found += present
            there = [tensor for tensor in column if tensor is not None]
            state += there
            if column is dense:
                copies = there
    found += map(Tensor.data_ptr, state)
    found += map(Tensor.data_ptr, step)
    found += map(_nbytes, state)
    found += map(_nbytes, grad)
    found += map(Tensor.get_device, grad)
    for tensors in (param, grad, copies):
        found += map(_dtype, tensors)
        found += map(Tensor.is_contiguous, tensors)
    for each in mask:
        if each is None:
            found.append(None)
        else:
            found += (each.words.data_ptr(), each.offsets.data_ptr(), each.kept, each.numel)
    # Few rates for many parameters: each one is looked at once.
    rates = {id(rate): rate for rate in lr}
    kinds = {
        key: (rate.data_ptr(), rate.dtype, rate.device) if isinstance(rate, Tensor) else None
        for key, rate in rates.items()
    }
    found += map(kinds.__getitem__, map(id, lr))
    return found


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
