"""The ranks of a benchmark: processes of this machine that talk over gloo."""

import json
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run(
    num_ranks: int, work: Callable[..., Any], *args: Any, preload: Sequence[str] = ("samo",)
) -> Any:
    """Call ``work(rank, num_ranks, *args)`` on every rank and return what rank 0 returns, by JSON.

    Modules in ``preload`` are imported once, before the ranks part.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        port = _free_port()
        ranks = [
            context.Process(target=_rank, args=(rank, num_ranks, port, answer, work, args))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
        if failed:
            raise RuntimeError(f"ranks {failed} of {num_ranks} failed; see their output above")
        return json.loads(answer.read_text())


def _rank(
    rank: int, num_ranks: int, port: int, answer: Path, work: Callable[..., Any], args: Any
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    found = work(rank, num_ranks, *args)
    if rank == 0:
        answer.write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
