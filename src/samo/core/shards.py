"""Parameters that several ranks hold in shards: DTensors, as FSDP2 makes them of a model's parameters."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from samo.kernels import AdamWUpdate

__all__ = []


def local_update(update: AdamWUpdate) -> AdamWUpdate:
    """Return the part of an update that is this rank's; its tensors may be empty."""
    param, rest, grad, exp_avg, exp_avg_sq, *_ = update
    if isinstance(grad, DTensor) and grad.placements != param.placements:  # type: ignore[attr-defined]
        # Tensor parallelism may leave a sum over ranks to be done.
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return update._replace(
        param=_local(param),
        rest=None if rest is None else _local(rest),
        grad=_local(grad),
        exp_avg=_local(exp_avg),
        exp_avg_sq=_local(exp_avg_sq),
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
