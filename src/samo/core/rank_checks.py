"""Checks that replicas and shards have the same masks on every rank."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samo.core.modules import named_weights
from samo.errors import CompressionError, MaskError
from samo.mask.mask import Mask
from samo.utils.collectives import all_gather_json

__all__ = []

_SEEN: Final[weakref.WeakKeyDictionary[DistributedDataParallel, bool]] = weakref.WeakKeyDictionary()
"""DDP wrappers whose masks were compared; False if their parameters were resized since."""


def check_masks_of_ranks(module: nn.Module, args: Any) -> None:
    """Compare masks in the first forward pass under DistributedDataParallel or FSDP2.

    Raises:
        MaskError: They differ; on every rank.
        CompressionError: Parameters were resized after DDP allocated its buckets.
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
    known = replicas._get_ddp_logging_data()["total_parameter_size_bytes"]
    if replicas in _SEEN or known != nbytes:
        raise CompressionError(
            "masks changed the length of parameters after this DistributedDataParallel was built; "
            "rebuild it: ddp = DistributedDataParallel(ddp.module)"
        )
    compare_masks(_masks(module), replicas.process_group)
    _SEEN[replicas] = True


def _check_masks_of_shards(module: nn.Module) -> None:
    """Compare masks in the first forward pass of an FSDP2 model."""
    if module in _COMPARED:
        return
    mesh = next((weight.mesh for _, weight in named_weights(module)), None)
    if mesh is not None:
        for dim in range(mesh.ndim):
            compare_masks(_masks(module), mesh.get_group(dim))
        _COMPARED.add(module)


def _masks(module: nn.Module) -> dict[str, Mask]:
    return {name: w.mask for name, w in named_weights(module) if w.mask is not None}


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


def compare_masks(masks: Mapping[str, Mask], group: dist.ProcessGroup | None) -> None:
    """Raise MaskError on every rank of a group if their masks differ. Collective."""
    own = {name: masks[name].fingerprint() for name in masks}
    for rank, other in enumerate(all_gather_json(own, group)):
        for name in sorted(own.keys() | other.keys()):
            if own.get(name) != other.get(name):
                raise MaskError(
                    f"the mask of '{name}' is not the same on rank {dist.get_rank(group)} and on "
                    f"rank {rank}; prune on one rank and broadcast the masks, or use the same seed"
                )
