"""Clip gradients by their norm over all ranks."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samo.leaves import named_parameters, parameters
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
    counted once; where it is not finite, gradients become NaN on all stages, so that all skip the step.

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
        ValueError: ``norm_type`` is not over 0, or infinite for a pipeline.
        RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be over 0, got {norm_type}")
    if isinstance(model, Pipeline):
        return _clip_stages(model, max_norm, norm_type, error_if_nonfinite)
    leaves = list(parameters(model))
    team = team_of(model)
    if team is None or team.settings.shard is None or team.group.size == 1:
        return nn.utils.clip_grad_norm_(leaves, max_norm, norm_type, error_if_nonfinite)
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None and leaf.grad.numel()]
    device = leaves[0].device
    # In fp64: powers of many small entries are summed, here and over ranks.
    norms = torch.zeros(len(gradients) + 1, dtype=torch.float64, device=device)
    for i, gradient in enumerate(gradients):
        norms[i] = torch.linalg.vector_norm(gradient, norm_type, dtype=leaves[0].dtype)
    largest = norm_type == float("inf")
    total = norms.max() if largest else norms.pow(norm_type).sum()
    team.group.all_reduce(
        total,
        op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM,
        kind="norm",
        what="the norm of the gradients",
    ).wait()
    norm = (total if largest else total.pow(1.0 / norm_type)).to(leaves[0].dtype)
    _refuse_nonfinite(norm, error_if_nonfinite)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch does
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    for bucket in team.buckets:
        bucket.accept()
    return norm


def _clip_stages(
    pipeline: Pipeline, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    if norm_type == float("inf"):
        raise ValueError(
            "norm_type is inf, and stages add up powers of their entries; use 2, or another finite one"
        )
    module = pipeline.module
    named = dict(named_parameters(module) if owned_weights(module) else module.named_parameters())
    gradients = {name: leaf.grad for name, leaf in named.items() if leaf.grad is not None}
    elsewhere = pipeline.tied_elsewhere()
    total = torch.zeros((), dtype=torch.float64, device=pipeline.device)
    for name, gradient in gradients.items():
        if name not in elsewhere and gradient.numel():
            power = torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64)
            total += power.pow(norm_type)
    team = team_of(module)
    if team is not None and team.settings.shard is not None:
        team.group.all_reduce(total, kind="norm", what="the norm of the gradients").wait()
    pipeline.add_up(total)
    norm = total.pow(1.0 / norm_type)
    _refuse_nonfinite(norm, error_if_nonfinite)
    factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), math.nan)
    for gradient in gradients.values():
        gradient.mul_(factor.to(gradient.dtype))
    for bucket in [] if team is None else team.buckets:
        bucket.accept()
    return norm.float()


def _refuse_nonfinite(norm: Tensor, is_refused: bool) -> None:
    if is_refused and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of the gradients is {float(norm)}, so they cannot be clipped; pass "
            "error_if_nonfinite=False to let the optimizer skip the step"
        )
