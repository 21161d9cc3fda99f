"""Any torch optimizer on the leaves of a compressed model.

torch calls two hooks around every optimizer's ``step()``. Before it, the leaves borrow their values
from the model; after it, the model takes the new ones. A step that raises leaves the model as it was.
A gradient that is not finite makes the step do nothing, as with `samo.AdamW`, unless gradients come
from a closure; to know it costs one synchronisation with the device, which `samo.AdamW` does without.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from samo.errors import CompressionError
from samo.partners import Team
from samo.weights import Weight, is_orphaned, weight_of

__all__ = []

_NOT_ELEMENTWISE: Final = tuple(
    getattr(torch.optim, name)
    for name in ("Adafactor", "LBFGS", "Muon")
    if hasattr(torch.optim, name)
)
"""Optimizers of torch that need the whole tensor; they differ between its versions."""


@cache  # torch keeps the hooks for the life of the process, so once is enough
def watch_optimizers() -> None:
    """Make torch's optimizers follow compressed models."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def tell_scalers(weights: Iterable[Weight], nonfinite: Tensor) -> None:
    """Let the loss scalers of these weights grow or shrink their scale."""
    for scaler in {id(w.scaler): w.scaler for w in weights if w.scaler is not None}.values():
        scaler.update(nonfinite)


def agree(weights: list[Weight], nonfinite: Tensor) -> Tensor:
    """Return whether the gradients of any rank are not finite, where ranks hold different ones.

    Stages of a pipeline have agreed at the end of the batch; copies of a stage agree now, and so hear of
    every stage of every copy.
    """
    for weight in weights:
        line = weight.whole.line
        if line is not None and line.nonfinite:
            nonfinite = torch.ones_like(nonfinite)
            break
    for team in _teams(weights):
        nonfinite = team.any(nonfinite)
    return nonfinite


def _teams(weights: Iterable[Weight]) -> list[Team]:
    teams = {id(w.replica.team): w.replica.team for w in weights if w.replica is not None}
    return list(teams.values())


def _compressed_weights(optimizer: Optimizer) -> list[Weight]:
    weights = []
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            weight = weight_of(tensor)
            if weight is None:
                if is_orphaned(tensor):
                    raise CompressionError(
                        "the compressed weights of this optimizer no longer exist: the model is gone, or "
                        "its state was sharded anew; build an optimizer on samo.parameters(model)"
                    )
                continue
            if tensor is weight.param:
                raise CompressionError(
                    f"this optimizer was built on model.parameters(), but '{weight.name}' is "
                    "compressed and its gradient is elsewhere; build it on samo.parameters(model)"
                )
            if weight.part is not weight:
                raise CompressionError(
                    f"this optimizer holds all of '{weight.name}', but its state is sharded over "
                    "ranks; build the optimizer on samo.parameters(model) after samo.replicate"
                )
            weights.append(weight)
    return weights


def _check_lengths(optimizer: Optimizer, weights: list[Weight]) -> None:
    """Refuse state of an older mask: of an optimizer that `samo.remap_` was not told of."""
    for weight in weights:
        for key, value in optimizer.state.get(weight.leaf, {}).items():
            if isinstance(value, Tensor) and value.dim() == 1 and value.numel() != weight.kept:
                raise CompressionError(
                    f"{type(optimizer).__name__} has {value.numel():,} entries of '{key}' for "
                    f"'{weight.name}', which keeps {weight.kept:,} weights since its mask has changed; "
                    "pass the optimizer to samo.remap_(model, masks, opt), or build a new one"
                )


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    weights = _compressed_weights(optimizer)
    for weight in weights:
        weight.stepped_by = weakref.ref(optimizer)
        if weight.whole is not weight and isinstance(optimizer, _NOT_ELEMENTWISE):
            raise CompressionError(
                f"{type(optimizer).__name__} updates an entry of '{weight.name}' by all others of its tensor, "
                "of which this rank has a part (shard='state'); use an optimizer that updates each entry by "
                "itself, such as Adam or SGD, or samo.replicate with shard=None"
            )
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    is_ours = getattr(optimizer, "updates_compressed_state", False)
    for team in _teams(weights):
        if closure is not None:
            raise CompressionError(
                f"{type(optimizer).__name__}.step was given a closure, which computes gradients while "
                "the step is under way, out of reach of their reduction over ranks; call "
                "loss.backward() before step()"
            )
        team.before_step(weights)
    if is_ours or not weights:
        return None
    _check_lengths(optimizer, weights)
    if closure is not None:
        for weight in weights:
            weight.lend()
        return args[:1], {**kwargs, "closure": _following(closure, weights)}
    weights = [weight for weight in weights if weight.leaf.grad is not None]
    gradients = [weight.leaf.grad for weight in weights if weight.leaf.grad is not None]
    if not gradients:
        return None
    nonfinite = agree(weights, weights[0].kernels.find_nonfinite(gradients))
    tell_scalers(weights, nonfinite)
    is_skipped = bool(nonfinite)
    for weight in weights:
        weight.was_skipped = nonfinite
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
    weights = _compressed_weights(optimizer)
    if not getattr(optimizer, "updates_compressed_state", False):
        for weight in weights:
            weight.take_back()
    for team in _teams(weights):
        team.after_step(weights)
