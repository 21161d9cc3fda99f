"""Any torch optimizer on the leaves of a compressed model.

torch calls two hooks around every optimizer's ``step()``. Before it, the leaves borrow their values
from the model; after it, the model takes the new ones. A gradient that is not finite makes the step
do nothing, as with `samo.AdamW`; to know it costs one synchronisation with the device, which
`samo.AdamW` does not need.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

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


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if getattr(optimizer, "updates_compressed_state", False):
        return
    weights = _compressed_weights(optimizer)
    if not weights:
        return
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is not None:
        for weight in weights:
            weight.lend()
        return
    weights = [weight for weight in weights if weight.leaf.grad is not None]
    gradients = [weight.leaf.grad for weight in weights if weight.leaf.grad is not None]
    if not gradients:
        return
    nonfinite = weights[0].kernels.find_nonfinite(gradients)
    tell_scalers(weights, nonfinite)
    if bool(nonfinite):
        for weight in weights:
            weight.leaf.grad = None  # torch's optimizers pass over such a parameter
        return
    for weight in weights:
        weight.lend()


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not getattr(optimizer, "updates_compressed_state", False):
        for weight in _compressed_weights(optimizer):
            weight.take_back()
