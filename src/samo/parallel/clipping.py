"""Clip gradients by their norm over all ranks."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samo.leaves import parameters
from samo.owners import owned_weights
from samo.parallel.replicas import team_of

__all__ = ["clip_grad_norm_"]


class Stages(Protocol):
    """What clipping needs of a pipeline."""

    @property
    def module(self) -> nn.Module:
        """The layers of this stage."""

    def counted_elsewhere(self) -> list[Tensor]:
        """Return the parameters that an earlier stage holds as well."""

    def of_all_stages(self, number: float) -> Tensor:
        """Return a number of each stage."""


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module | Stages,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale a compressed model's gradients so that their norm is at most ``max_norm``; return the norm.

    As ``torch.nn.utils.clip_grad_norm_(samo.parameters(model), max_norm)``, which does the same wherever
    a rank holds whole gradients. With ``shard="state"`` it holds a part of them, and only this function
    is right. Given a `samo.Pipeline`, on every rank, it clips by the norm over all stages, where a weight
    that two stages use counts once.

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
        model: A compressed model, or a pipeline, whether compressed or not.
        max_norm: The norm is at most this afterwards.
        norm_type: 2, another power, or ``math.inf`` for the largest magnitude.
        error_if_nonfinite: Whether a norm that is not finite is an error.

    Raises:
        CompressionError: The model is not compressed.
        ValueError: ``norm_type`` is not over 0.
        RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be over 0, got {norm_type}")
    stages = None if isinstance(model, nn.Module) else model
    module = model if isinstance(model, nn.Module) else model.module
    is_plain = stages is not None and not owned_weights(module)
    leaves = list(module.parameters() if is_plain else parameters(module))
    team = team_of(module)
    is_parted = team is not None and team.settings.shard is not None and team.group.size > 1
    if stages is None and not is_parted:
        return nn.utils.clip_grad_norm_(leaves, max_norm, norm_type, error_if_nonfinite)
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None and leaf.grad.numel()]
    elsewhere = {id(leaf) for leaf in stages.counted_elsewhere()} if stages is not None else set()
    counted = [
        leaf.grad
        for leaf in leaves
        if leaf.grad is not None and leaf.grad.numel() and id(leaf) not in elsewhere
    ]
    first = leaves[0] if leaves else torch.zeros(())
    # In fp64: powers of many small entries are summed, here and over ranks.
    norms = torch.zeros(len(counted) + 1, dtype=torch.float64, device=first.device)
    for i, gradient in enumerate(counted):
        norms[i] = torch.linalg.vector_norm(gradient, norm_type, dtype=first.dtype)
    largest = norm_type == float("inf")
    total = norms.max() if largest else norms.pow(norm_type).sum()
    if team is not None and is_parted:
        team.group.all_reduce(
            total,
            op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM,
            kind="norm",
            what="the norm of the gradients",
        ).wait()
    if stages is not None:
        everyones = stages.of_all_stages(float(total))
        total = (everyones.max() if largest else everyones.sum()).to(first.device)
    norm = (total if largest else total.pow(1.0 / norm_type)).to(first.dtype)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of the gradients is {float(norm)}, so they cannot be clipped; pass "
            "error_if_nonfinite=False to let the optimizer skip the step"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch does
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    if team is not None:
        for bucket in team.buckets:
            bucket.accept()
    return norm
