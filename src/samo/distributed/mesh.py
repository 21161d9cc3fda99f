"""The grid of ranks: torch's `DeviceMesh` with axes named ``pipe`` and ``data``."""

import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from math import prod
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["mesh"]

_logger: Final = logging.getLogger(__name__)


def mesh(
    pipe: int = 1,
    data: int | None = None,
    *,
    device: Literal["cpu", "cuda"] | None = None,
    timeout_s: float = 600.0,
) -> DeviceMesh:
    """Return the grid of ranks, ``pipe`` stages of ``data`` replicas each.

    Reads torchrun's environment where torch.distributed is not initialised yet; a process that was not
    started by torchrun is a grid of one rank. Ranks of one replica group are neighbours: rank
    ``stage * data + replica``.

    Example:
        >>> import samo, torch.distributed as dist
        >>> mesh = samo.mesh()
        >>> mesh.mesh_dim_names, tuple(mesh.shape)
        (('pipe', 'data'), (1, 1))
        >>> mesh["data"].size()
        1
        >>> dist.destroy_process_group()

    Args:
        pipe: Stages of the pipeline.
        data: Replicas of each stage; by default as many as there are ranks for.
        device: ``"cuda"`` for NCCL and a GPU for each rank, ``"cpu"`` for gloo; by default ``"cuda"``
            where there is one. More ranks than GPUs on a machine share them, over gloo, with a warning:
            a way to try a layout, not to be fast.
        timeout_s: How long a rank waits for the others, in seconds.

    Raises:
        ValueError: The sizes do not make up the number of ranks, or a setting is out of range.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be over 0, got {timeout_s}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():  # sizes first: nothing is begun that cannot be
        check_sizes({"pipe": pipe, "data": data}, int(os.environ.get("WORLD_SIZE", "1")))
        join(device, timedelta(seconds=timeout_s), launcher_store(timedelta(seconds=timeout_s)))
    sizes = check_sizes({"pipe": pipe, "data": data}, dist.get_world_size())
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def check_sizes(sizes: Mapping[str, int | None], num_ranks: int) -> dict[str, int]:
    """Return the sizes of all axes; one of them may be None and takes what is left.

    Example: pipe=2, data=None with 8 ranks gives data=4.

    Raises:
        ValueError: They do not make up the number of ranks; the message lists sizes that do.
    """
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be 1 or more, got {size}")
    given = prod(size for size in sizes.values() if size is not None)
    full = {name: num_ranks // given if size is None else size for name, size in sizes.items()}
    if prod(full.values()) != num_ranks:
        asked = " x ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
        fitting = ", ".join(
            f"pipe={pipe} x data={num_ranks // pipe}"
            for pipe in range(1, num_ranks + 1)
            if num_ranks % pipe == 0
        )
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        raise ValueError(f"{asked} does not make up {ranks}; these do: {fitting}")
    return full


def gpu_of(local_rank: int, num_local: int, num_gpus: int) -> tuple[int, str]:
    """Return which GPU of its machine a rank takes, and the backend of a machine with so many ranks.

    Example: rank 3 of 4 on 2 GPUs takes the second one, with gloo, as NCCL wants one for each rank.
    """
    return local_rank % num_gpus, "nccl" if num_local <= num_gpus else "gloo"


def launcher_store(timeout: timedelta) -> Any:
    """Return the store that the launcher holds for this start of the ranks; None if it holds none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "RANK" not in os.environ:
        return None
    # The launcher keeps its store over restarts, with the addresses of ranks that are gone.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout
    )
    return dist.PrefixStore(f"samo/attempt_{attempt}", store)  # type: ignore[attr-defined]


def join(device: str, timeout: timedelta, store: Any) -> None:
    """Initialise torch.distributed, over the launcher's store where there is one."""
    backend = "gloo"
    if device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_gpus = torch.cuda.device_count()
        index, backend = gpu_of(local_rank, num_local, num_gpus)
        torch.cuda.set_device(index)
        torch.cuda.init()  # or torch's mesh would choose a GPU by the local rank
        if backend == "gloo" and local_rank == 0:
            _logger.warning(
                "%d ranks share %d GPU%s and talk over gloo, through host memory: good to try a layout, "
                "slower than one rank for each GPU",
                num_local,
                num_gpus,
                "s" if num_gpus > 1 else "",
            )
    if store is not None:
        dist.init_process_group(
            backend,
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timeout,
        )
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=timeout,
        )
