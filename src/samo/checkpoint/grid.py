"""Which ranks a model lies on, and what of it this one has: read off a pipeline, a mesh or replicas."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from samo.distributed.links import Links
from samo.errors import CheckpointError
from samo.pipeline.pipeline import Pipeline

__all__ = []


class Grid(NamedTuple):
    """A model, or this rank's stage of one, and its place among the ranks."""

    module: nn.Module
    links: Links | None
    """To the other ranks, stage after stage; None in one process."""
    is_first: bool
    """Whether this is the first replica of its stage."""
    is_part: bool
    """Whether other ranks have other layers."""
    is_in_rows: bool
    """Whether other ranks have other rows of its tensors."""
    order: Sequence[str]
    """Names of the whole model's tensors, where they are known."""
    aliases: Mapping[str, str]
    """Tied names, to the one that the checkpoint knows."""


def grid_of(
    model: nn.Module | Pipeline, mesh: DeviceMesh | None, timeout_s: float, what: str
) -> Grid:
    """Return how a model lies on ranks.

    Args:
        model: A model, also as DistributedDataParallel or FSDP2 has made it, or a pipeline.
        mesh: All ranks; by default those of the pipeline's mesh, of DistributedDataParallel or of DTensors.
        timeout_s: How long a rank is waited for.
        what: Who asks, for errors.

    Raises:
        TypeError: The mesh is none, or the model is none.
        ValueError: The timeout is out of range.
        CheckpointError: The mesh lacks ranks that hold a part of the model.
    """
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be over 0, got {timeout_s}")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a DeviceMesh, got {type(mesh).__name__}; build one with samo.mesh()"
        )
    module: Any = model
    order: Sequence[str] = ()
    aliases: dict[str, str] = {}
    if isinstance(model, Pipeline):
        module, order = model.module, model.names
        mesh = model.mesh if mesh is None else mesh
        places = {name: place for place, name in enumerate(order)}
        for group in model.tied:
            first = min(group, key=lambda name: places[name])
            aliases |= {name: first for name in group if name != first}
    replicas: list[int] = []
    if isinstance(module, DistributedDataParallel):
        replicas = dist.get_process_group_ranks(module.process_group)
        module = module.module
    sharded = _mesh_of_rows(module)
    if sharded is not None:
        replicas = sharded.mesh.flatten().tolist()
    stages = [replicas] if mesh is None else _stages(mesh)
    ranks = [rank for stage in stages for rank in stage]
    if not set(replicas) <= set(ranks):
        raise CheckpointError(
            f"the model lies on ranks {replicas} and the mesh has ranks {ranks} alone; give {what} all of "
            "them: mesh=samo.mesh(pipe, data)"
        )
    if len(ranks) <= 1:
        return Grid(module, None, True, False, False, order, aliases)
    here = dist.get_rank()
    number = next((i for i, stage in enumerate(stages) if here in stage), None)
    if number is None:
        raise CheckpointError(
            f"rank {here} is not in the mesh, which has ranks {ranks}; only its ranks call {what}"
        )
    return Grid(
        module,
        Links(ranks, timeout_s=timeout_s),
        here == stages[number][0],
        len(stages) > 1,
        sharded is not None,
        order,
        aliases,
    )


def _mesh_of_rows(module: Any) -> DeviceMesh | None:
    """Return the mesh of a model's DTensors, once FSDP2 has put them back in the place of whole ones."""
    if not isinstance(module, nn.Module) or not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.fsdp import FSDPModule  # which takes its time to load
    from torch.distributed.tensor import DTensor

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    found = (param for param in module.parameters() if isinstance(param, DTensor))
    return next((param.device_mesh for param in found), None)


def _stages(mesh: DeviceMesh) -> list[list[int]]:
    """Return the ranks of each stage, in the order of the mesh."""
    names = mesh.mesh_dim_names or ()
    ranks = mesh.mesh
    if "pipe" not in names:
        return [ranks.flatten().tolist()]
    place = names.index("pipe")
    rows: list[list[int]] = ranks.movedim(place, 0).reshape(ranks.shape[place], -1).tolist()
    return rows
