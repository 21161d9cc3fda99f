"""Checks that replicas and shards have the same masks on every rank."""

import hashlib
import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samo.errors import CompressionError, MaskError

__all__ = []

_SEEN: Final[weakref.WeakKeyDictionary[DistributedDataParallel, bool]] = weakref.WeakKeyDictionary()
"""DDP wrappers whose masks were compared; False if their parameters were resized since."""


def check_masks_of_ranks(module: nn.Module, args: Any) -> None:
    """Compare masks in the first forward pass under DistributedDataParallel or FSDP2.

    Raises:
        MaskError: They differ; on every rank.
        CompressionError: Parameters were resized after the wrapper allocated its buffers.
    """
    if torch.compiler.is_compiling():
        return
    replicas = DistributedDataParallel._active_ddp_module
    if replicas is None:
        _check_masks_of_shards(module)
        return
    if _SEEN.get(replicas):
        return
    nbytes = sum(param.nbytes for param in replicas._module_parameters)
    if (
        replicas in _SEEN
        or replicas._get_ddp_logging_data()["total_parameter_size_bytes"] != nbytes
    ):
        raise CompressionError(
            "new masks changed the lengths of parameters after this DistributedDataParallel was built, and "
            "it would no longer reduce their gradients; rebuild it: "
            "ddp = DistributedDataParallel(ddp.module)"
        )
    from samo.core.compress import masks

    compare_masks(masks(module), replicas.process_group)
    _SEEN[replicas] = True


def _check_masks_of_shards(module: nn.Module) -> None:
    """Compare masks in the first forward pass of an FSDP2 model."""
    from samo.core.compress import masks
    from samo.core.modules import named_weights

    if module in _COMPARED:
        return
    mesh = next((weight.mesh for _, weight in named_weights(module)), None)
    if mesh is not None:
        for dim in range(mesh.ndim):
            compare_masks(masks(module), mesh.get_group(dim))
        _COMPARED.add(module)


_COMPARED: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
"""Sharded models whose masks were compared."""


def replicas_of(params: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """Return the DDP wrappers that have run with any of these parameters, oldest first."""
    wanted = {id(param) for param in params}
    return [r for r in list(_SEEN) if any(id(param) in wanted for param in r.parameters())]


def group_of(param: Tensor) -> dist.ProcessGroup | None:
    """Return the process group of the last DDP wrapper that ran with a parameter, if any."""
    found = replicas_of([param])
    return found[-1].process_group if found else None


def outdate_replicas(params: Iterable[Tensor]) -> None:
    """Make DDP wrappers of resized parameters reject their next forward pass."""
    for replicas in replicas_of(params):
        _SEEN[replicas] = False


def compare_masks(masks: Any, group: dist.ProcessGroup | None) -> None:
    """Check that masks are equal on all ranks of a group. Collective.

    Raises:
        MaskError: They differ.
    """
    names = sorted(masks)
    digests = [hashlib.sha256(masks[name].fingerprint().encode()).digest()[:8] for name in names]
    has_gloo = "gloo" in dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl" by default
    device = "cpu" if has_gloo else torch.cuda.current_device()
    own = torch.frombuffer(bytearray(b"".join(digests) or b"\0" * 8), dtype=torch.int64).to(device)
    lengths = _gather(torch.tensor([own.numel()], device=device), group)
    if len({int(length) for length in lengths}) > 1:
        raise MaskError(
            f"ranks have masks for {sorted({int(length) for length in lengths})} weights; compress the "
            "model with the same masks on all of them"
        )
    for rank, other in enumerate(_gather(own, group)):
        if not torch.equal(own, other):
            name = names[int((own != other).nonzero()[0])]
            raise MaskError(
                f"the mask of '{name}' is not the same on rank {dist.get_rank(group)} and on rank {rank} "
                "of the replicas; draw masks on one rank and broadcast them, or prune with one seed"
            )


def _gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor, group=group)
    return found
