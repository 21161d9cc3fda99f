"""What the settings of a pipeline come to: places, cuts and links; nothing is computed here."""

import dataclasses
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from samo.pipeline.layers import Layers
from samo.pipeline.partition import parameter_costs, partition
from samo.pipeline.stage import Chunk, Stage
from samo.pipeline.tied import Tie
from samo.pipeline.transport.base import Transport
from samo.pipeline.transport.gloo import GlooTransport
from samo.pipeline.transport.nccl import NcclTransport

__all__ = []


def pipe_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the ranks of the axis `pipe`; None for one process."""
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or ()
    if "pipe" not in names:
        raise ValueError(
            f"the mesh has dimensions {names}, none of them 'pipe'; build it with "
            "init_device_mesh(device, (4,), mesh_dim_names=('pipe',))"
        )
    return mesh["pipe"].get_group()


def data_groups(
    mesh: DeviceMesh | None, timeout_s: float
) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """Return the replicas of this stage, the ranks of the axis `data`, where it has several.

    For gradients, and for what is compared on the host: nobody waits for a GPU to learn of a mask.
    """
    if mesh is None or "data" not in (mesh.mesh_dim_names or ()) or mesh["data"].size() == 1:
        return None
    ranks = dist.get_process_group_ranks(mesh["data"].get_group())
    # Not the mesh's own, which wait for half an hour.
    group = _new_group(ranks, backend := dist.get_backend(mesh["data"].get_group()), timeout_s)
    return group, group if backend == "gloo" else _new_group(ranks, "gloo", timeout_s)


def connected(ties: list[Tie], group: dist.ProcessGroup | None, timeout_s: float) -> list[Tie]:
    """Return the tied weights with groups of their ranks; all stages call it.

    A stage without a tied weight makes a group of itself alone: torch names groups by how many a rank has
    made, and ranks that have made different numbers never meet.
    """
    if group is None:
        return ties
    stages, own = dist.get_process_group_ranks(group), dist.get_rank()
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for tie in ties:
        if tie.ranks not in groups:
            ranks = [stages[stage] for stage in tie.ranks]
            ranks = ranks if own in ranks else [own]
            groups[tie.ranks] = _new_group(ranks, dist.get_backend(group), timeout_s)
    return [dataclasses.replace(tie, group=groups[tie.ranks]) for tie in ties]


def _new_group(ranks: list[int], backend: str, timeout_s: float) -> dist.ProcessGroup:
    made = dist.new_group(
        ranks,
        timeout=timedelta(seconds=2 * timeout_s + 5),  # a neighbour is given up before that
        backend=backend,
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup), "this rank is one of the ranks"
    return made


def device_of(device: torch.device | str | None, mesh: DeviceMesh | None) -> torch.device:
    """Return where a stage computes."""
    if device is not None:
        return torch.device(device)
    if mesh is None or mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.cuda.current_device())


def cuts_of(
    cuts: Sequence[tuple[int, int]] | None, layers: Layers, num_stages: int
) -> list[tuple[int, int]]:
    """Return first layer and the one after the last of each stage."""
    if cuts is None:
        return partition(parameter_costs(layers), num_stages)
    found = [(start, stop) for start, stop in cuts]
    ends = [0, *(stop for _, stop in found)]
    is_row = all(start == end and start < stop for end, (start, stop) in zip(ends, found))
    if len(found) != num_stages or not is_row or ends[-1] != len(layers.units):
        raise ValueError(
            f"cuts must be {num_stages} ranges that follow each other from layer 0 to "
            f"{len(layers.units)}, got {found}"
        )
    return found


def chunks_of(module: Stage, cuts: list[tuple[int, int]]) -> list[Chunk]:
    """Return the pieces of the model that a rank holds."""
    chunks, place = [], 0
    for start, stop in cuts:
        chunks.append(Chunk(module, place, place + stop - start))
        place += stop - start
    return chunks


def transport_of(
    group: dist.ProcessGroup | None, device: torch.device, timeout_s: float
) -> Transport:
    """Return the links of this rank to its neighbours."""
    if group is None:
        return Transport()
    is_nccl = device.type == "cuda" and dist.get_backend(group) == "nccl"
    return (NcclTransport if is_nccl else GlooTransport)(group, device, timeout_s=timeout_s)
