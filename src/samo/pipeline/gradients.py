"""Gradients after a batch: the mean over replicas, a found-inf shared by all stages, and their norm."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["average_gradients", "partial_norm", "sync_found_inf"]

_BUCKET_BYTES: Final = 2**26
"""Gradients that are copied into one buffer and reduced together."""


@torch.no_grad()
def average_gradients(params: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace gradients by their mean over replicas. One that no replica has stays None."""
    for bucket in _buckets([param for param in params if param.requires_grad]):
        grads = [_dense_grad(param) for param in bucket]
        used = [param.grad is not None for param in bucket]
        counts = torch.tensor(used, dtype=grads[0].dtype).to(grads[0].device, non_blocking=True)
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), counts])
        dist.all_reduce(flat, group=group)
        flat.div_(group.size())
        *means, counts = flat.split([*(grad.numel() for grad in grads), len(bucket)])
        if not all(used):  # the one case in which the host waits for the device
            used = (counts > 0).tolist()
        for param, grad, mean, is_used in zip(bucket, grads, means, used):
            param.grad = grad.copy_(mean.view_as(grad)) if is_used else None


@torch.no_grad()
def sync_found_inf(
    params: Iterable[nn.Parameter], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Put a NaN into every gradient of all stages if any of them has one that is not finite.

    Optimizers and gradient scalers then skip the same steps on all stages. The host does not wait for the
    device.
    """
    found = [_entries(grad) for param in params if (grad := param.grad) is not None]
    found = [entries for entries in found if entries.numel()]
    is_bad = torch.zeros((), device=device)
    if found:
        largest = nn.utils.get_total_norm(found, math.inf)
        is_bad = (~largest.isfinite()).to(device, torch.float32)
    dist.all_reduce(is_bad, dist.ReduceOp.MAX, group=group)
    if found:
        factor = torch.where(is_bad > 0, math.nan, 1.0)
        torch._foreach_mul_([entries.as_strided((1,), (1,)) for entries in found], factor)


@torch.no_grad()
def partial_norm(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return a stage's term of a norm's sum, or its largest magnitude; in fp64."""
    norms = [
        torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
        for grad in grads
        if grad.numel()
    ]
    each = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *norms])
    if norm_type == math.inf:
        return each.max().nan_to_num(math.inf, math.inf)  # a maximum over ranks may lose a NaN
    return each.pow(norm_type).sum()


def _buckets(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters with gradients of one dtype, in an order that is the same on all replicas."""
    open_buckets: dict[torch.dtype, list[nn.Parameter]] = {}
    for param in params:
        dtype = _grad_dtype(param)
        bucket = open_buckets.setdefault(dtype, [])
        bucket.append(param)
        if sum(param.numel() for param in bucket) * dtype.itemsize >= _BUCKET_BYTES:
            yield open_buckets.pop(dtype)
    yield from open_buckets.values()


def _grad_dtype(param: nn.Parameter) -> torch.dtype:
    return (param.grad_dtype or param.dtype) if param.grad is None else param.grad.dtype


def _dense_grad(param: nn.Parameter) -> Tensor:
    """Return a gradient, or zeros in its place."""
    if param.grad is None:
        return torch.zeros_like(param, dtype=_grad_dtype(param))
    return param.grad.to_dense() if param.grad.is_sparse else param.grad


def _entries(grad: Tensor) -> Tensor:
    """Return the entries of a gradient, which an embedding may have made sparse."""
    return grad._values() if grad.is_sparse else grad
