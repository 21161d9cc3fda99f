"""Which part of a model this rank has: all of it, a stage, or rows of its tensors."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from samo.checkpoint.tensors import rows_of
from samo.distributed.ranks import LookAfter, Ranks
from samo.errors import CheckpointError

if TYPE_CHECKING:
    from samo.pipeline.pipeline import Pipeline


class Layout(NamedTuple):
    """A model, or this rank's stage of one, and its place among the ranks."""

    module: nn.Module
    ranks: Ranks
    first: int = 0  # the first replica of this stage
    is_part: bool = False  # other ranks have other layers
    is_sharded: bool = False  # other ranks have other rows of its tensors
    aliases: Mapping[str, str] = MappingProxyType({})  # tied names, to the one that is saved

    @property
    def is_first(self) -> bool:
        """Whether this is the first replica of its stage."""
        return self.ranks.rank == self.first

    def writes(self, tensor: Tensor) -> bool:
        """Return whether this rank writes a tensor, or its rows of it."""
        rows = rows_of(tensor)
        return self.is_first if rows is None or self.ranks.is_alone else self.first in rows.ranks


def layout_of(
    model: "nn.Module | Pipeline",
    mesh: DeviceMesh | None,
    timeout_s: float,
    caller: str,
    look_after: LookAfter = lambda ranks: None,
) -> Layout:
    """Return how a model lies on ranks; the arguments are those of `samo.save`, the caller."""
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be over 0, got {timeout_s}")
    module: Any = model
    aliases: dict[str, str] = {}
    if not isinstance(model, nn.Module):
        from samo.pipeline.pipeline import Pipeline  # which one process does not need

        if not isinstance(model, Pipeline):
            raise TypeError(f"model must be a Module or a Pipeline, got {type(model).__name__}")
        module = model.module
        mesh = model.mesh if mesh is None else mesh
        for first, *others in model.tied:
            aliases |= dict.fromkeys(others, first)
    replicas: list[int] = []
    while True:
        if isinstance(module, DistributedDataParallel):
            replicas = dist.get_process_group_ranks(module.process_group)
            module = module.module
        elif "_orig_mod" in module._modules:  # as torch.compile wraps it
            module = module._orig_mod
        else:
            break
    sharded = _mesh_of_shards(module)
    if sharded is not None:
        replicas = sharded.mesh.flatten().tolist()
    stages = [replicas] if mesh is None else _stages(mesh)
    ranks = [rank for stage in stages for rank in stage]
    if not set(replicas) <= set(ranks):
        raise CheckpointError(
            f"the model is on ranks {replicas} but the mesh has only ranks {ranks}; give {caller} "
            "mesh=samo.mesh(pipe, data)"
        )
    if len(ranks) <= 1:
        return Layout(module, Ranks(), aliases=aliases)
    here = dist.get_rank()
    for stage in stages:
        if here in stage:
            together = Ranks(ranks, caller, timeout_s, look_after)
            return Layout(module, together, stage[0], len(stages) > 1, sharded is not None, aliases)
    raise CheckpointError(f"rank {here} called {caller}, but the mesh has only ranks {ranks}")


def _mesh_of_shards(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh of a model's DTensors, after FSDP2 has put them back in place."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.fsdp import FSDPModule  # slow to load

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    params = module.parameters()
    return next((param.device_mesh for param in params if isinstance(param, DTensor)), None)


def _stages(mesh: DeviceMesh) -> list[list[int]]:
    """Return the ranks of each stage, in the order of the mesh."""
    names, ranks = mesh.mesh_dim_names or (), mesh.mesh
    if "pipe" not in names:
        return [ranks.flatten().tolist()]
    axis = names.index("pipe")
    stages: list[list[int]] = ranks.movedim(axis, 0).reshape(ranks.shape[axis], -1).tolist()
    return stages
