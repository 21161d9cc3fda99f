"""Asynchronous saves: tensors are copied to the host, and a thread writes them.

One save is on its way at a time: the next one waits for it, and takes over the memory of its
copies. Fresh memory would take several times as long, since the system clears it first; `prepare`
takes that of the first save ahead of it. torch's own stager spends 20 us of Python on each tensor,
more than the copy itself.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Tensors = dict[str, dict[str, Tensor]]

_lock = threading.Lock()
_pending: Future[Any] | None = None
_copies: Tensors = {}


def submit(stage: Callable[[], Callable[[], Result]]) -> Future[Result]:
    """Call ``stage`` after the save before it, and in a thread what that returns."""
    global _pending
    with _lock:
        wait_for_pending()
        write = stage()
        executor = ThreadPoolExecutor(1, thread_name_prefix="samo-save")
        _pending = future = executor.submit(write)
        executor.shutdown(wait=False)
        future.add_done_callback(_forget)  # its error holds the model
        return future


def _forget(future: Future[Any]) -> None:
    global _pending
    if _pending is future:
        _pending = None


def _reset() -> None:
    """Reset a forked process, which does not have the thread of its parent."""
    global _lock, _pending, _copies
    _lock, _pending, _copies = threading.Lock(), None, {}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)


def wait_for_pending() -> None:
    """Wait for an asynchronous save; its error is that of its future."""
    if (pending := _pending) is not None:
        wait([pending])


def prepare(tensors: Tensors) -> None:
    """Take memory for copies of such tensors, in a thread."""

    def take() -> None:
        for group in _make_room(tensors).values():
            for room in group.values():
                if not room.is_pinned():
                    room.zero_()  # the system gives memory only when it is written

    submit(lambda: take)


def stage(tensors: Tensors) -> Tensors:
    """Return copies on the host, which are valid until the next call."""
    copies = _make_room(tensors)
    for kind, group in tensors.items():
        if group:
            on_gpu = any(tensor.is_cuda for tensor in group.values())
            torch._foreach_copy_([*copies[kind].values()], [*group.values()], non_blocking=on_gpu)
    for device in {t.device for group in tensors.values() for t in group.values() if t.is_cuda}:
        torch.cuda.synchronize(device)
    return copies


def release() -> None:
    """Give back the memory of the copies, after the save that reads them."""
    wait_for_pending()
    _copies.clear()


def _make_room(tensors: Tensors) -> Tensors:
    """Return memory for copies: what was there before, where it fits."""
    global _copies
    old, _copies = _copies, {}
    for kind, group in tensors.items():
        before = old.pop(kind, {})
        _copies[kind] = {
            name: _room(tensor, before.pop(name, None)) for name, tensor in group.items()
        }
        before.clear()  # frees memory before the next kind takes some
    return _copies


def _room(tensor: Tensor, before: Tensor | None) -> Tensor:
    if before is not None and (before.dtype, before.shape) == (tensor.dtype, tensor.shape):
        return before
    pinned = tensor.is_cuda
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
