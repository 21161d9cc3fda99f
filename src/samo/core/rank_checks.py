"""Checks that replicas and shards have the same parameters and masks on every rank."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samo.core.modules import named_weights
from samo.core.weight import weight_replacing
from samo.errors import CompressionError, MaskError
from samo.mask.mask import Mask
from samo.utils.collectives import all_gather_json

_COMPARED: Final[weakref.WeakKeyDictionary[nn.Module, bool]] = weakref.WeakKeyDictionary()
"""DDP wrappers and FSDP2 models whose masks were compared; False if they were resized since."""


def check_masks_of_ranks(module: nn.Module, args: Any) -> None:
    """Compare masks in the first forward pass under DistributedDataParallel or FSDP2."""
    if torch.compiler.is_compiling():
        return
    replicas = DistributedDataParallel._active_ddp_module
    owner = module if replicas is None else replicas
    if _COMPARED.get(owner):
        return
    if replicas is not None:
        trained = [param for param in replicas._module_parameters if param.requires_grad]
        nbytes = sum(param.nbytes for param in trained)  # DDP does not count others either
        known = replicas._get_ddp_logging_data()["total_parameter_size_bytes"]
        is_older = any(weight_replacing(param) for param in replicas._module_parameters)
        if is_older or replicas in _COMPARED or known != nbytes:
            raise CompressionError(
                "this DistributedDataParallel was built before compress_ or remap_ changed the "
                "parameters; rebuild it: ddp = DistributedDataParallel(ddp.module)"
            )
        groups = [replicas.process_group]
    else:
        mesh = next((weight.mesh for _, weight in named_weights(module)), None)
        if mesh is None:
            return
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    masks = {name: w.mask for name, w in named_weights(module) if w.mask is not None}
    params = [name for name, _ in module.named_parameters()]
    for group in groups:
        compare_masks(masks, group, params)
    _COMPARED[owner] = True


def replicas_of(params: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """Return the DDP wrappers that have run with any of these parameters, oldest first."""
    wanted = {id(param) for param in params}
    return [
        module
        for module in list(_COMPARED)
        if isinstance(module, DistributedDataParallel)
        and any(id(param) in wanted for param in module.parameters())
    ]


def group_of(param: Tensor) -> dist.ProcessGroup | None:
    """Return the process group of the last DDP wrapper that ran with a parameter, if any."""
    found = replicas_of([param])
    return found[-1].process_group if found else None


def invalidate_replicas(params: Iterable[Tensor]) -> None:
    """Make DDP wrappers of resized parameters reject their next forward pass."""
    for replicas in replicas_of(params):
        _COMPARED[replicas] = False


def compare_masks(
    masks: Mapping[str, Mask], group: dist.ProcessGroup | None, params: Sequence[str] = ()
) -> None:
    """Raise MaskError on every rank of a group if their masks differ. Collective.

    The order of ``params`` must not differ either: DDP and FSDP2 pair parameters by it, and mix up
    two of the same size in silence.
    """
    own, here = {name: masks[name].fingerprint() for name in masks}, dist.get_rank(group)
    for rank, (names, other) in enumerate(all_gather_json((params, own), group)):
        for mine, theirs in zip(params, names):
            if mine != theirs:
                raise MaskError(
                    f"the parameters are not in the same order on rank {here} and on rank {rank}: "
                    f"one has '{mine}' where the other has '{theirs}'; add modules in one order "
                    "on all ranks, not in that of a set"
                )
        for name in sorted(own.keys() | other.keys()):
            if own.get(name) != other.get(name):
                raise MaskError(
                    f"the mask of '{name}' is not the same on rank {here} and on rank {rank}; "
                    "prune on one rank and broadcast the masks, or use the same seed"
                )
