"""Helpers for DTensor parameters, as FSDP2 creates them."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from samo.kernels import AdamWUpdate

__all__ = []


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which may be empty; a plain tensor as it is."""
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
    """Return the part of an update that is this rank's; its tensors may be empty."""
    param, remainder, grad, exp_avg, exp_avg_sq, *_ = update
    if isinstance(grad, DTensor) and grad.placements != param.placements:  # type: ignore[attr-defined]
        # Tensor parallelism may leave a sum over ranks to be done.
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return update._replace(
        param=local_of(param),
        remainder=None if remainder is None else local_of(remainder),
        grad=local_of(grad),
        exp_avg=local_of(exp_avg),
        exp_avg_sq=local_of(exp_avg_sq),
    )


def shard_groups(params: Iterable[DTensor]) -> dict[dist.ProcessGroup, str]:
    """Return the ranks that have other shards of any of these parameters, and the type of their device.

    Replicas, such as hybrid sharding has, are left out: they hold the same gradients.
    """
    return {
        mesh.get_group(dim): mesh.device_type
        for mesh, placements in dict.fromkeys((p.device_mesh, p.placements) for p in params)
        for dim, placement in enumerate(placements)
        if not placement.is_replicate()
    }
