"""Helpers for DTensor parameters, as FSDP2 creates them."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from samo.kernels import AdamWUpdate

__all__ = []


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which may be empty, or a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a plain tensor unchanged, or gather a DTensor. Collective for DTensors."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_as(values: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor the way ``like`` is sharded, if it is."""
    if not isinstance(like, DTensor):
        return values
    values = values.to(like.device)
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


def local_update(update: AdamWUpdate) -> AdamWUpdate:
    """Return this rank's part of an update; its tensors may be empty."""
    param, remainder, grad, exp_avg, exp_avg_sq, *_ = update
    placements = param.placements  # type: ignore[attr-defined]
    if isinstance(grad, DTensor) and grad.placements != placements:
        # Tensor parallelism may leave partial sums.
        grad = grad.redistribute(placements=placements)
    return update._replace(
        param=local_of(param),
        remainder=None if remainder is None else local_of(remainder),
        grad=local_of(grad),
        exp_avg=local_of(exp_avg),
        exp_avg_sq=local_of(exp_avg_sq),
    )


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
