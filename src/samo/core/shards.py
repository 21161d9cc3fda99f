"""Parameters that FSDP2 has sharded: DTensors, and the ranks that share one."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which may be empty, or a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a plain tensor unchanged, or gather a DTensor. Collective for DTensors."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(values: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor the way ``like`` is sharded, if it is."""
    if not isinstance(like, DTensor):
        return values
    values = values.to(like.device)
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


def shard_groups(params: Iterable[DTensor]) -> dict[dist.ProcessGroup, str]:
    """Return the process groups that shard these parameters, and the type of their devices.

    Without groups of replicas, as in hybrid sharding: they have the same gradients.
    """
    return {
        mesh.get_group(dim): mesh.device_type
        for mesh, placements in dict.fromkeys((p.device_mesh, p.placements) for p in params)
        for dim, placement in enumerate(placements)
        if not placement.is_replicate()
    }


def any_rank(flag: Tensor, group: dist.ProcessGroup, device_type: str) -> Tensor:
    """Return whether a flag is set on any rank. Collective, on tensors of a device type."""
    shared = flag.to(torch.int32)
    if flag.device.type != device_type:  # not "cuda" for "cuda:1": that is the current device
        shared = shared.to(device_type)
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    return shared.to(flag.device, torch.bool)
