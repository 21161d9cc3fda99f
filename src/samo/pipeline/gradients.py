"""Gradients after a batch: mean over replicas, a found-inf shared by all stages, and the norm."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _take_tensors
from torch.distributed.distributed_c10d import _coalescing_manager

_BUCKET_BYTES: Final = 2**20
"""Small gradients of one all-reduce; larger ones go alone, since gloo copies what it bundles."""

Wait = Callable[[dist.Work], object]
"""Waits for a collective: on the host or, with NCCL, in the current stream."""


@torch.no_grad()
def average_gradients(params: Iterable[nn.Parameter], group: dist.ProcessGroup, wait: Wait) -> None:
    """Replace gradients by their mean over replicas. One that no replica has stays None."""
    params = [param for param in params if param.requires_grad]
    if not params:
        return
    used = [param.grad is not None for param in params]
    counts = torch.tensor(used, dtype=torch.float32).to(params[0].device, non_blocking=True)
    wait(dist.all_reduce(counts, group=group, async_op=True))
    if not all(used):  # the one case in which the host waits for the device
        used = (counts > 0).tolist()
    grads = []
    for param in (param for param, is_used in zip(params, used) if is_used):
        if param.grad is None:
            param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
        # Embeddings may have sparse gradients, of other rows on each replica.
        param.grad = param.grad.to_dense().contiguous()
        grads.append(param.grad)
    works: list[Any] = []
    if params[0].is_cuda and dist.get_backend(group) == "gloo":  # which bundles no CUDA tensors
        works = [dist.all_reduce(grad, group=group, async_op=True) for grad in grads]
    else:
        for bucket in _take_tensors(grads, _BUCKET_BYTES):
            with _coalescing_manager(group, async_ops=True) as bundle:
                for grad in bucket:
                    dist.all_reduce(grad, group=group)
            works += bundle.works
    for work in works:
        wait(work)
    if grads:
        torch._foreach_div_(grads, group.size())


@torch.no_grad()
def sync_found_inf(
    params: Iterable[nn.Parameter], group: dist.ProcessGroup, device: torch.device, wait: Wait
) -> None:
    """Put a NaN into every gradient of all stages if any of them has one that is not finite.

    Optimizers and gradient scalers then skip the same steps on all stages. The host does not wait
    for a GPU.
    """
    grads = [param.grad for param in params if param.grad is not None]
    # Embeddings may have sparse gradients.
    entries = [grad._values() if grad.is_sparse else grad for grad in grads]
    found = [one for one in entries if one.numel()]
    is_bad = torch.zeros((), device=device)
    if found:
        largest = nn.utils.get_total_norm(found, math.inf)
        is_bad = (~largest.isfinite()).to(device, torch.float32)
    wait(dist.all_reduce(is_bad, dist.ReduceOp.MAX, group=group, async_op=True))
    if found and (is_bad.is_cuda or is_bad):
        factor = torch.where(is_bad > 0, math.nan, 1.0)
        torch._foreach_mul_([one.as_strided((1,), (1,)) for one in found], factor)


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
