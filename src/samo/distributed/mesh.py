"""The mesh of ranks: torch's `DeviceMesh` with axes named ``pipe`` and ``data``."""

import logging
import os
from datetime import timedelta
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from samo.errors import ConfigError

_logger: Final = logging.getLogger(__name__)


def mesh(
    pipe: int = 1,
    data: int | None = None,
    *,
    device: Literal["cpu", "cuda"] | None = None,
    timeout_s: float = 600.0,
) -> DeviceMesh:
    """Return the mesh of ranks, ``pipe`` stages of ``data`` replicas each.

    Initializes torch.distributed from torchrun's environment if that has not been done; a process
    that torchrun did not start is a mesh of one rank. The replicas of a stage have consecutive
    ranks: rank ``stage * data + replica``.

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
        device: ``"cuda"`` for NCCL and a GPU for each rank, ``"cpu"`` for gloo; by default
            ``"cuda"`` if there is one. If a machine has fewer GPUs than ranks, they share them over
            gloo: good to try a layout, but slow.
        timeout_s: How long a rank waits for the others, in seconds.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be over 0, got {timeout_s}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_joined = dist.is_initialized()
    num_ranks = dist.get_world_size() if is_joined else int(os.environ.get("WORLD_SIZE", "1"))
    sizes = check_sizes(pipe, data, num_ranks)
    if not is_joined:
        timeout = timedelta(seconds=timeout_s)
        is_launched = "RANK" in os.environ or num_ranks > 1
        join(device, timeout, rendezvous(timeout) if is_launched else None)
    return init_device_mesh(device, sizes, mesh_dim_names=("pipe", "data"))


def check_sizes(pipe: int, data: int | None, num_ranks: int) -> tuple[int, int]:
    """Return the sizes of both axes; by default ``data`` is what ``pipe`` leaves."""
    for name, size in (("pipe", pipe), ("data", data)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be 1 or more, got {size}")
    replicas = num_ranks // pipe if data is None else data
    if pipe * replicas != num_ranks:
        asked = f"pipe={pipe}" if data is None else f"pipe={pipe} x data={data}"
        pipes = [pipe for pipe in range(1, num_ranks + 1) if num_ranks % pipe == 0]
        fitting = ", ".join(f"pipe={pipe} x data={num_ranks // pipe}" for pipe in pipes)
        ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
        raise ValueError(f"{asked} does not make up {ranks}; these do: {fitting}")
    return pipe, replicas


def rendezvous(timeout: timedelta) -> Any:
    """Return the store through which the ranks of torchrun or samo launch find each other."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(
            f"the environment of this rank lacks {', '.join(missing)}; start ranks with torchrun "
            "or samo launch, which set them"
        )
    store, _, _ = next(torch_rendezvous("env://", timeout=timeout))
    # A launcher may keep its store over restarts, with the addresses of ranks that have ended.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"samo/attempt_{attempt}", store)  # type: ignore[attr-defined]


def join(device: str, timeout: timedelta, store: Any) -> None:
    """Initialize torch.distributed over the store of the ranks; without one, for this process."""
    backend = "gloo"
    if device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_gpus = torch.cuda.device_count()
        backend = "nccl" if num_local <= num_gpus else "gloo"  # NCCL needs a GPU for each rank
        torch.cuda.set_device(local_rank % num_gpus)
        torch.cuda.init()  # otherwise torch's mesh chooses a GPU by the local rank
        if backend == "gloo" and local_rank == 0:
            text = "%d ranks share %d GPU(s) over gloo: good to try a layout, but slow"
            _logger.warning(text, num_local, num_gpus)
    rank, num_ranks = 0, 1
    if store is None:
        store = dist.HashStore()  # type: ignore[attr-defined]
    else:
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
