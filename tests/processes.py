"""Run one function on several gloo ranks of this machine."""

import datetime
import io
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A spawned rank imports torch anew; one forked from a server that has it loaded starts at once and,
# unlike a plain fork, inherits no threads.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])  # as in launch.py: one server for both


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 60.0,
    may_die: frozenset[int] = frozenset(),
) -> list[Any]:
    """Call ``function(rank, num_ranks, *arguments)`` on every rank; return the results in rank order.

    Ranks in ``may_die`` may end without a word; their result is None. Everyone else's failure is an
    AssertionError with the traceback of the first that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'store'}"  # a file, so no port can be taken
        processes, pipes = [], []
        for rank in range(num_ranks):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            call = (rank, num_ranks, rendezvous, function, arguments, theirs, bool(may_die))
            process = _CONTEXT.Process(target=_main, args=call, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(pipes, time.monotonic() + timeout, may_die)
        finally:
            for rank, process in enumerate(processes):
                process.join(timeout=0.1 if rank in may_die else 2.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _main(
    rank: int,
    num_ranks: int,
    rendezvous: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    pipe: Connection,
    leaves_early: bool,
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=30),
        )
        result = function(rank, num_ranks, *arguments)
        if not leaves_early:
            dist.barrier()  # nobody leaves while another still reads from it
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    else:
        pipe.send((True, _packed(result)))
        if not leaves_early:
            dist.destroy_process_group()


def _packed(result: Any) -> bytes:
    """Pickle by value: torch would pass tensors by a file descriptor that ends with the rank."""
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def _collect(pipes: list[Connection], deadline: float, may_die: frozenset[int]) -> list[Any]:
    results: dict[int, Any] = {}
    pending = {rank: pipe for rank, pipe in enumerate(pipes)}
    while set(pending) - may_die:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(pending)} of {len(pipes)} were not done in time")
        for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
            try:
                is_good, value = pending.pop(rank).recv()
            except EOFError:
                if rank in may_die:
                    continue
                raise AssertionError(f"rank {rank} of {len(pipes)} died without a word") from None
            assert is_good, f"rank {rank} of {len(pipes)} failed:\n{value}"
            results[rank] = torch.load(io.BytesIO(value), weights_only=False)
    return [results.get(rank) for rank in range(len(pipes))]
