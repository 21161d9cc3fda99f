"""Asynchronous saves: tensors are copied to the host, and a thread writes them.

One save is on its way at a time: the next one waits for it, and takes over the memory of its
copies. Fresh memory would take several times as long, since the system clears it first. torch's
own stager spends 20 us of Python on each tensor, more than the copy itself.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

__all__ = []

Result = TypeVar("Result")
Tensors = dict[str, dict[str, Tensor]]

_lock: Final = threading.Lock()
_pending: Future[Any] | None = None
_copies: Tensors = {}


def submit(stage: Callable[[], Callable[[], Result]]) -> Future[Result]:
    """Call ``stage`` after the save before it, and in a thread what that returns."""
    global _pending
    with _lock:
        wait_for_pending()
        write = stage()
        # A new thread for each save: after a fork, the child would wait for one of its parent.
        executor = ThreadPoolExecutor(1, thread_name_prefix="samo-save")
        _pending = future = executor.submit(write)
        executor.shutdown(wait=False)
        return future


def wait_for_pending() -> None:
    """Wait for an asynchronous save; its error is that of its future."""
    if _pending is not None:
        wait([_pending])


def stage(tensors: Tensors) -> Tensors:
    """Return copies on the host, which are valid until the next call."""
    global _copies
    old, _copies = _copies, {}
    for kind, group in tensors.items():
        before = old.pop(kind, {})
        _copies[kind] = {
            name: _room(tensor, before.pop(name, None)) for name, tensor in group.items()
        }
        before.clear()  # frees memory before the next kind takes some
        if group:
            torch._foreach_copy_([*_copies[kind].values()], [*group.values()], non_blocking=True)
    if any(tensor.is_cuda for group in tensors.values() for tensor in group.values()):
        torch.cuda.synchronize()
    return _copies


def _room(tensor: Tensor, before: Tensor | None) -> Tensor:
    """Return memory for a copy: what was there before, if it fits."""
    if before is not None and (before.dtype, before.shape) == (tensor.dtype, tensor.shape):
        return before
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
