"""Any torch optimizer on the leaves of a compressed model.

torch calls two hooks around every optimizer's ``step()``. Before it, the leaves borrow their values
from the model; after it, the model takes the new ones. A step that raises leaves the model as it was.
A gradient that is not finite makes the step do nothing, as with `samo.AdamW`, unless gradients come
from a closure; to know it costs one synchronisation with the device, which `samo.AdamW` does without.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from samo.errors import CompressionError
from samo.weights import Weight, weight_of

__all__ = []


@cache  # torch keeps the hooks for the life of the process, so once is enough
def watch_optimizers() -> None:
    """Make torch's optimizers follow compressed models."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def tell_scalers(weights: Iterable[Weight], nonfinite: Tensor) -> None:
    """Let the loss scalers of these weights grow or shrink their scale."""
    for scaler in {id(w.scaler): w.scaler for w in weights if w.scaler is not None}.values():
        scaler.update(nonfinite)


def _compressed_weights(optimizer: Optimizer) -> list[Weight]:
    weights = []
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            weight = weight_of(tensor)
            if weight is None:
                continue
            if tensor is weight.param:
                raise CompressionError(
                    f"this optimizer was built on model.parameters(), but '{weight.name}' is "
                    "compressed and its gradient is elsewhere; build it on samo.parameters(model)"
                )
            weights.append(weight)
    return weights


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if getattr(optimizer, "updates_compressed_state", False):
        return None
    weights = _compressed_weights(optimizer)
    if not weights:
        return None
    for weight in weights:
        weight.stepped_by = weakref.ref(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is not None:
        for weight in weights:
            weight.lend()
        return args[:1], {**kwargs, "closure": _following(closure, weights)}
    weights = [weight for weight in weights if weight.leaf.grad is not None]
    gradients = [weight.leaf.grad for weight in weights if weight.leaf.grad is not None]
    if not gradients:
        return None
    nonfinite = weights[0].kernels.find_nonfinite(gradients)
    tell_scalers(weights, nonfinite)
    is_skipped = bool(nonfinite)
    for weight in weights:
        if is_skipped:
            weight.leaf.grad = None  # torch's optimizers pass over such a parameter
        else:
            weight.lend()
    return None


def _following(closure: Callable[[], Any], weights: list[Weight]) -> Callable[[], Any]:
    """Return a closure that computes with the weights its optimizer has stepped to."""

    def follow() -> Any:
        with torch.no_grad():
            for weight in weights:
                weight.write_lent()
        return closure()

    return follow


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not getattr(optimizer, "updates_compressed_state", False):
        for weight in _compressed_weights(optimizer):
            weight.take_back()
