"""Run a function on several ranks of this machine, each a process of its own.

Ranks are forked from a server that has torch and samo loaded: they start in some hundredths of a
second and inherit no threads. Where there is a GPU, which a forked process cannot use, each starts
by itself. The ranks' store is held here, as torchrun holds it, so it outlives any of them.
"""

import datetime
import gc
import io
import multiprocessing
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import torch
import torch.distributed as dist

_processes: Final = multiprocessing.get_context(
    "spawn" if torch.cuda.is_available() else "forkserver"
)
multiprocessing.set_forkserver_preload(["tests.preloaded"])


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    lost: Collection[int] = (),
    timeout_s: float = 60.0,
) -> list[Any]:
    """Call ``function(rank, num_ranks, *args)`` on every rank and return the results in order.

    Ranks in ``lost`` may be killed or hang; they return None, and are killed at the end. If one of
    them raises instead, that is an error as on any other rank.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends: dict[int, Connection] = {}
    started = []
    for rank in range(num_ranks):
        here, there = _processes.Pipe(duplex=False)
        process = _processes.Process(
            target=_work,
            args=(rank, num_ranks, store.port, function, args, there, bool(lost)),
            daemon=True,
        )
        process.start()
        there.close()
        ends[rank] = here
        started.append(process)
    try:
        results = _collect(ends, {*lost}, timeout_s)
        return [results.get(rank) for rank in range(num_ranks)]
    finally:
        hanging = []
        for rank, process in enumerate(started):
            process.join(timeout=0 if rank in lost else 5)
            if process.is_alive():
                hanging.append(rank)
                process.kill()
                process.join()
        assert set(hanging) <= {*lost}, f"ranks {hanging} were done and did not end"


def _work(
    rank: int,
    num_ranks: int,
    port: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    answer: Connection,
    is_cut_short: bool,
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=30),
        )
        # Who is connected may leave at once, while another still connects to it and would fail.
        store.set(f"{rank} is connected", "")
        store.wait([f"{other} is connected" for other in range(num_ranks)])
        result = function(rank, num_ranks, *args)
        if not is_cut_short:
            dist.barrier()  # nobody leaves while another still talks to it
            gc.collect()  # a DDP that frees its group itself, with the GIL, may wait for ever
            dist.destroy_process_group()
    except BaseException:
        answer.send((False, traceback.format_exc()))
    else:
        answer.send((True, _packed(result)))


def _packed(result: Any) -> bytes:
    """Pickle by value: torch would pass tensors by a file descriptor that ends with the rank."""
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def _collect(ends: dict[int, Connection], lost: set[int], timeout_s: float) -> dict[int, Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: list[str] = []
    while ends:
        wanted = ends.keys() - lost
        left_s = max(0.0, deadline - time.monotonic()) if wanted else 0.0
        ready = wait(list(ends.values()), timeout=left_s)
        if not ready:
            if wanted:
                failures.append(f"ranks {sorted(wanted)} were not done after {timeout_s:g} s")
            break
        for rank in [rank for rank, end in ends.items() if end in ready]:
            try:
                is_good, value = ends.pop(rank).recv()
            except EOFError:
                if rank in lost:
                    continue
                is_good, value = False, "it ended without a word"
            if is_good:
                results[rank] = torch.load(io.BytesIO(value), weights_only=False)
            else:
                failures.append(f"rank {rank}: {value}")
                deadline = min(deadline, time.monotonic() + 3.0)  # what do the others say?
    assert not failures, "\n".join(failures)
    return results
