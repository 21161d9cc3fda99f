"""What the Triton kernels are told of many weights at once: tables of addresses on the device.

All parameters of an AdamW step go into a few launches, whatever their number. A table has a row of
addresses for each one, and a list of items says which one a program works on. Both are sent anew
only when an address or a size has changed, and nothing waits for the device.

While a CUDA graph is captured, copies are only noted down, for each replay: its tables are its own, in
the graph's memory, and what they are copied from stays.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, reduce, update_wrapper
from itertools import chain
from operator import or_
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from samo.kernels import AdamWUpdate
from samo.kernels.triton_parts import GRAD
from samo.mask.mask import Mask

__all__ = []

T = TypeVar("T")


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
    # Asked of the tensor, at every launch: a device spells out its type anew each time.
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device_of(tensor)


class _SentOnce(Generic[T]):
    """A function that sends something, and remembers what it sent; for a graph it sends all anew.

    A graph reads its tables as long as it is replayed, when a memory of this size has let them go. And
    what was noted down for a graph is nowhere yet for a step outside of it.
    """

    def __init__(self, send: Callable[..., T], maxsize: int) -> None:
        self._send = send
        self._remembered = lru_cache(maxsize=maxsize)(send)
        self.cache_info: Final = self._remembered.cache_info
        update_wrapper(self, send)

    def __call__(self, where: Where, *args: Any) -> T:
        return (self._send if where.is_captured else self._remembered)(where, *args)


def _sent_once(maxsize: int) -> Callable[[Callable[..., T]], _SentOnce[T]]:
    return lambda send: _SentOnce(send, maxsize)


@_sent_once(maxsize=64)
def items(where: Where, sizes: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """Return the weight of each item, and the first item of each weight.

    Example: weights of 2, 0 and 1 items give [0, 0, 2] and [0, 2, 2].
    """
    counts = np.array(sizes, dtype=np.int64)
    items = torch.from_numpy(np.repeat(np.arange(len(sizes), dtype=np.int32), counts))
    return _send(items, where), (counts.cumsum() - counts).tolist()


@_sent_once(maxsize=16)
def rows(where: Where, rows: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return a table on the device, sent anew only when a number in it has changed."""
    return _send(torch.from_numpy(np.array(rows, dtype=np.int64)), where)


def numbers(where: Where, values: list[float]) -> tuple[Tensor | None, float]:
    """Return numbers on the device, in fp64; or none and the number that they all are."""
    if values.count(values[0]) == len(values):
        return None, values[0]
    return _numbers(where, tuple(values)), 0.0


@_sent_once(maxsize=16)
def _numbers(where: Where, values: tuple[float, ...]) -> Tensor:
    return _send(torch.tensor(values, dtype=torch.float64, device="cpu"), where)


def _send(tensor: Tensor, where: Where) -> Tensor:
    """Copy to the device without waiting, which takes pinned memory."""
    if where.device.type != "cuda":
        return tensor
    pinned = tensor.pin_memory()
    if where.is_captured:
        hold(pinned)
    return pinned.to(where.device, non_blocking=True)


_HELD: Final[list[Tensor]] = []


def hold(*tensors: Tensor) -> None:
    """Keep what a graph reads at each replay: nobody tells when a graph is gone."""
    _HELD.extend(tensors)


def rate_type(update: AdamWUpdate) -> torch.dtype | None:
    """Return the type of a learning rate on the parameter's device; None if the host knows it."""
    lr = update.lr
    if isinstance(lr, Tensor) and lr.dtype in RATE_TYPES and lr.device == update.param.device:
        return lr.dtype
    return None


RATE_TYPES: Final = (torch.float32, torch.float64)


def by_rate(updates: Sequence[T], update_of: Callable[[T], AdamWUpdate]) -> Iterable[list[T]]:
    """Return what goes into launches of its own: rates of the host, and of each type on the device."""
    found: dict[torch.dtype | None, list[T]] = {}
    for update in updates:
        found.setdefault(rate_type(update_of(update)), []).append(update)
    return found.values()


def _row(update: AdamWUpdate, mask: Mask | None, first: int) -> tuple[int, ...]:
    """Return what the kernels have to know of one parameter, in the order of their columns."""
    param, rest, _, exp_avg, exp_avg_sq, step, lr, _, dense, _ = update
    return (
        param.data_ptr(),
        0 if rest is None else rest.data_ptr(),
        0,  # the gradient's
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        0 if dense is None else dense.data_ptr(),
        0 if mask is None else mask.words.data_ptr(),
        0 if mask is None else mask.offsets.data_ptr(),
        step.data_ptr(),
        lr.data_ptr() if isinstance(lr, Tensor) else 0,
        param.numel() if mask is None else mask.words.numel() // 2,
        first,
    )


def are_aligned(addresses: Iterable[int]) -> bool:
    """Return whether all addresses are multiples of 16 bytes."""
    return not reduce(or_, addresses, 0) % 16


class Kind(NamedTuple):
    """Parameters of one kind go into one launch."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    copy_dtype: torch.dtype | None
    is_whole: bool
    """Whether there is no mask to look at."""


class Launch(NamedTuple):
    """The parameters of one kind."""

    kind: Kind
    members: list[int]
    items: Tensor
    is_aligned: bool
    """Whether all addresses are multiples of 16 bytes."""


def plan(
    updates: Sequence[AdamWUpdate],
    mask_of: Callable[[AdamWUpdate], Mask | None],
    num_items: Callable[[int, bool], int],
) -> tuple["np.ndarray[Any, np.dtype[np.int64]]", list[Launch]]:
    """Return the table of some parameters, and what is launched for which of them.

    ``mask_of`` says whose blocks a parameter is updated by, and ``num_items`` how many items so many
    entries are, without a mask or with one. Gradients are left out: `with_gradients`.
    """
    where = where_of(updates[0].param.device)
    masks = [mask_of(update) for update in updates]
    kinds: dict[tuple[torch.dtype, torch.dtype, torch.dtype | None, bool], list[int]] = {}
    for index, (update, mask) in enumerate(zip(updates, masks)):
        dense = update.dense
        kind = (
            update.param.dtype,
            update.grad.dtype,
            None if dense is None else dense.dtype,
            mask is None,
        )
        kinds.setdefault(kind, []).append(index)
    on_host: list[tuple[int, ...]] = [()] * len(updates)
    launches = []
    for kind, members in kinds.items():
        sizes = [0] * len(updates)
        for index in members:
            mask = masks[index]
            numel = updates[index].param.numel() if mask is None else mask.numel
            sizes[index] = num_items(numel, mask is None)
        found, firsts = items(where, tuple(sizes))
        for index in members:
            on_host[index] = _row(updates[index], masks[index], firsts[index])
        if found.numel():
            columns = [*zip(*[on_host[index] for index in members])]
            is_aligned = are_aligned(chain(*columns[:6]))
            launches.append(Launch(Kind(*kind), members, found, is_aligned))
    return np.array(on_host, dtype=np.int64), launches


def with_gradients(
    where: Where, table: "np.ndarray[Any, np.dtype[np.int64]]", addresses: list[int]
) -> Tensor:
    """Return a table on the device with the addresses of gradients, sent anew only if it has changed."""
    whole = table.copy()
    whole[:, GRAD.value] = addresses
    return _table(where, whole.tobytes(), table.shape[1])


@_sent_once(maxsize=16)
def _table(where: Where, content: bytes, columns: int) -> Tensor:
    rows = np.frombuffer(bytearray(content), dtype=np.int64).reshape(-1, columns)
    return _send(torch.from_numpy(rows), where)


def signature(updates: Sequence[AdamWUpdate]) -> tuple[object, ...]:
    """Return all that decides how updates are done, but for the addresses of their gradients."""
    found: list[object] = [where_of(updates[0].param.device)] if updates else []
    for param, rest, grad, exp_avg, exp_avg_sq, step, lr, _, dense, mask in updates:
        found += (
            param.data_ptr(),
            param.numel(),
            param.dtype,
            grad.numel(),
            grad.dtype,
            grad.is_contiguous(),
            grad.get_device(),
            exp_avg.data_ptr(),
            exp_avg.numel(),
            exp_avg.dtype,
            exp_avg_sq.data_ptr(),
            exp_avg_sq.numel(),
            exp_avg_sq.dtype,
            step.data_ptr(),
        )
        if rest is not None:
            found += (rest.data_ptr(), rest.numel(), rest.dtype)
        if dense is not None:
            found += (dense.data_ptr(), dense.numel(), dense.dtype, dense.stride())
        if mask is not None:
            found += (mask.words.data_ptr(), mask.offsets.data_ptr(), mask.kept, mask.numel)
        if isinstance(lr, Tensor):
            found += (lr.data_ptr(), lr.dtype, lr.get_device())
        found.append(None)
    return tuple(found)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
