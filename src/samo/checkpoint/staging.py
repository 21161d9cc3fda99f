"""Asynchronous saves: tensors are copied to the host, and a thread writes them.

One save is on its way at a time. The next one waits for it, since torch's stager reuses the host
memory of a tensor, which is pinned if the tensor is on a GPU.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, Final, TypeVar

from torch import Tensor

__all__ = []

Result = TypeVar("Result")

_lock: Final = threading.Lock()
_pending: Future[Any] | None = None


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


def stage(tensors: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return copies on the host, which are valid until the next call."""
    # A conjugate is a bit of the tensor, not of the memory that is copied.
    plain = {
        kind: {name: tensor.resolve_conj().resolve_neg() for name, tensor in group.items()}
        for kind, group in tensors.items()
    }
    on_gpu = any(tensor.is_cuda for group in plain.values() for tensor in group.values())
    staged: dict[str, dict[str, Tensor]] = _stager(on_gpu).stage(plain)
    return staged


@cache
def _stager(on_gpu: bool) -> Any:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # slow to load

    options = StagingOptions(
        use_pinned_memory=on_gpu,
        use_non_blocking_copy=on_gpu,
        use_shared_memory=False,
        use_async_staging=False,
    )
    return DefaultStager(options)
