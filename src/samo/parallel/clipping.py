"""Clip gradients by their norm over all ranks."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samo.kernels.rounding import master_dtype
from samo.leaves import named_parameters
from samo.owners import owned_weights
from samo.parallel.replicas import team_of
from samo.pipeline.api import Pipeline

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module | Pipeline,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale a compressed model's gradients so that their norm is at most ``max_norm``; return the norm.

    As ``torch.nn.utils.clip_grad_norm_(samo.parameters(model), max_norm)``, which does the same wherever
    a rank holds whole gradients. With ``shard="state"`` it holds a part of them, and only this function
    is right. Of a `samo.Pipeline` all ranks call it, and the norm is that of all stages, a tied weight
    counted once. Where a norm over ranks is not finite, gradients become NaN on all of them, so that all
    skip the step.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
        >>> model = samo.compress_(model, samo.prune(model, 0.5))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> samo.clip_grad_norm_(model, max_norm=1.0)
        tensor(2.8284)
        >>> next(samo.parameters(model)).grad.norm()
        tensor(1.0000)

    Args:
        model: A compressed model; or a pipeline, of a compressed model or an ordinary one.
        max_norm: The norm is at most this afterwards.
        norm_type: 2, another power, or ``math.inf`` for the largest magnitude.
        error_if_nonfinite: Whether a norm that is not finite is an error.

    Raises:
        CompressionError: The model is not compressed.
        ValueError: ``norm_type`` is not over 0.
        RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
        PeerError: Another rank did not come.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be over 0, got {norm_type}")
    pipeline = model if isinstance(model, Pipeline) else None
    module = model.module if isinstance(model, Pipeline) else model
    is_plain = pipeline is not None and not owned_weights(module)
    leaves = dict(module.named_parameters() if is_plain else named_parameters(module))
    team = team_of(module)
    is_parted = team is not None and team.settings.shard is not None and team.group.size > 1
    if pipeline is None and not is_parted:
        return nn.utils.clip_grad_norm_(leaves.values(), max_norm, norm_type, error_if_nonfinite)
    held = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    elsewhere = set() if pipeline is None else pipeline.tied_elsewhere()
    first = next(iter(leaves.values()), torch.zeros(()))
    # In fp64: powers of many small entries are summed, here and over ranks.
    norms = [
        torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64)
        for name, gradient in held.items()
        if gradient.numel() and name not in elsewhere
    ]
    each = torch.stack([torch.zeros((), dtype=torch.float64, device=first.device), *norms])
    is_largest = norm_type == math.inf
    total = each.max() if is_largest else each.pow(norm_type).sum()
    if team is not None and is_parted:
        if is_largest:
            total = total.nan_to_num(math.inf, math.inf)  # a maximum over ranks may lose a NaN
        team.group.all_reduce(
            total,
            op=dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM,
            kind="norm",
            what="the norm of the gradients",
        ).wait()
    if pipeline is not None:
        everyones = pipeline.of_all_stages(float(total))
        total = (everyones.max() if is_largest else everyones.sum()).to(first.device)
    norm = total if is_largest else total.pow(1.0 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of the gradients is {float(norm)}, so they cannot be clipped; pass "
            "error_if_nonfinite=False to let the optimizer skip the step"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch does
    factor = torch.where(norm.isfinite(), factor, math.nan)
    for gradient in held.values():
        gradient.mul_(factor.to(gradient.dtype))
    for bucket in [] if team is None else team.buckets:
        bucket.accept()
    return norm.to(master_dtype(first.dtype))
