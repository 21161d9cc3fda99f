"""Dense gradients and values over ranks: what a run sends before its model is compressed."""

from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor, nn

from samo.parallel.collectives import Group

__all__ = []

_BUCKET_BYTES: Final = 25_000_000
"""Gradients that are copied together and summed at a time, as torch's DistributedDataParallel does."""


@torch.no_grad()
def add_up_gradients(group: Group, params: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its sum over the ranks; all ranks have the same parameters in use."""
    gradients = [param.grad for param in params if param.grad is not None]
    under_way = []
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        pending = group.all_reduce(flat, kind="gradients", what="dense gradients")
        under_way.append((bucket, flat, pending))
    for bucket, flat, pending in under_way:
        pending.wait()
        for gradient, summed in zip(bucket, flat.split([gradient.numel() for gradient in bucket])):
            gradient.copy_(summed.view_as(gradient))


@torch.no_grad()
def broadcast_weights(group: Group, model: nn.Module) -> None:
    """Give all ranks the weights and buffers of the group's first rank."""
    for tensor in (*model.parameters(), *model.buffers()):
        group.broadcast(tensor.detach(), what="the first weights")


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Divide gradients into groups of one type, the last ones first, as they come."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in reversed(gradients):
        if bucket and (size + gradient.nbytes > _BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
