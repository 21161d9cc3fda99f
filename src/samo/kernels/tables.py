"""What the Triton kernels are told of many weights at once: tables of addresses on the device.

All weights of an AdamW step go into a few launches, whatever their number. A table has a row of
addresses for each weight, and a list of items says which weight a program works on. Both are sent anew
only when an address or a size has changed, and nothing waits for the device.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, reduce
from itertools import chain
from operator import or_
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from samo.kernels import AdamWUpdate

__all__ = []

Where = tuple[torch.device, int]
"""A device and a stream: what was sent on one stream is not there yet for another."""


def where_of(device: torch.device) -> Where:
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


_HERE: Final = nullcontext()


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the device of ``tensor`` the current one, if it is not: Triton launches there."""
    # Asked of the tensor, at every launch: a device spells out its type anew each time.
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device_of(tensor)


@lru_cache(maxsize=64)
def items(where: Where, sizes: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """Return the weight of each item, and the first item of each weight.

    Example: weights of 2, 0 and 1 items give [0, 0, 2] and [0, 2, 2].
    """
    counts = np.array(sizes, dtype=np.int64)
    items = torch.from_numpy(np.repeat(np.arange(len(sizes), dtype=np.int32), counts))
    return _send(items, where), (counts.cumsum() - counts).tolist()


@lru_cache(maxsize=16)
def rows(where: Where, rows: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return a table on the device, sent anew only when a number in it has changed."""
    return _send(torch.from_numpy(np.array(rows, dtype=np.int64)), where)


def lr_scales(updates: Sequence[AdamWUpdate]) -> Tensor | None:
    """Return the factors on the learning rates of some weights on their device; None if all are 1."""
    scales = tuple([update.lr_scale for update in updates])
    if scales.count(1.0) == len(scales):
        return None
    return _numbers(where_of(updates[0].dense.device), scales)


@lru_cache(maxsize=16)
def _numbers(where: Where, numbers: tuple[float, ...]) -> Tensor:
    return _send(torch.tensor(numbers, dtype=torch.float64, device="cpu"), where)


def _send(tensor: Tensor, where: Where) -> Tensor:
    """Copy to the device without waiting, which takes pinned memory."""
    device = where[0]
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _row(update: AdamWUpdate, first: int) -> tuple[int, ...]:
    """Return what the kernels have to know of one weight, in the order of their columns."""
    dense, mask, rest_Z, grad_Z, exp_avg_Z, exp_avg_sq_Z, step, _ = update
    return (
        dense.data_ptr(),
        0 if mask is None else mask.words.data_ptr(),
        0 if mask is None else mask.offsets.data_ptr(),
        0 if rest_Z is None else rest_Z.data_ptr(),
        grad_Z.data_ptr(),
        exp_avg_Z.data_ptr(),
        exp_avg_sq_Z.data_ptr(),
        step.data_ptr(),
        dense.numel() if mask is None else mask.words.numel() // 2,
        first,
    )


def are_aligned(addresses: Iterable[int]) -> bool:
    """Return whether all addresses are multiples of 16 bytes."""
    return not reduce(or_, addresses, 0) % 16


class Kind(NamedTuple):
    """Weights of one kind go into one launch."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    is_whole: bool
    """Whether there is no mask."""


class Launch(NamedTuple):
    """The weights of one kind."""

    kind: Kind
    members: list[int]
    items: Tensor
    is_aligned: bool
    """Whether all addresses are multiples of 16 bytes."""


def plan(
    updates: Sequence[AdamWUpdate], num_items: Callable[[AdamWUpdate], int]
) -> tuple[Tensor, list[Launch]]:
    """Return the table of some weights, and what is launched for which of them."""
    where = where_of(updates[0].dense.device)
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    for index, update in enumerate(updates):
        kind = update.dense.dtype, update.grad_Z.dtype, update.mask is None
        kinds.setdefault(kind, []).append(index)
    on_host: list[tuple[int, ...]] = [()] * len(updates)
    launches = []
    for kind, members in kinds.items():
        sizes = [0] * len(updates)
        for index in members:
            sizes[index] = num_items(updates[index])
        found, firsts = items(where, tuple(sizes))
        for index in members:
            on_host[index] = _row(updates[index], firsts[index])
        if found.numel():
            columns = [*zip(*[on_host[index] for index in members])]
            is_aligned = are_aligned(chain(columns[0], *columns[3:7]))
            launches.append(Launch(Kind(*kind), members, found, is_aligned))
    return rows(where, tuple(on_host)), launches


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
