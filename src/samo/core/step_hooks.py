"""Hooks around the step of any optimizer: what `samo.AdamW` does by itself, for all others."""

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import record_function

from samo.core.weight import ORIGINS, RETIRED, Weight, weight_of, weight_replacing
from samo.errors import CompressionError

STEPPED: Final[weakref.WeakSet[Optimizer]] = weakref.WeakSet()
"""Optimizers that have made a step: their state must follow when masks change."""


SHAPED: Final = (
    *("exp_avg", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "momentum_buffer", "sum"),
    *("acc_delta", "grad_avg", "square_avg"),
)
"""State with the parameter's shape, which fused kernels do not check."""


def _weights_of(opt: Optimizer) -> list[Weight]:
    found = (weight_of(param) for group in opt.param_groups for param in group["params"])
    return [weight for weight in found if weight is not None]


@torch.compiler.disable
def _before_step(opt: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check that parameters and state are in use, and apply writes to ``module.weight``."""
    if ORIGINS or RETIRED:
        for group in opt.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    _check_in_use(opt, param)
    is_first = opt not in STEPPED
    STEPPED.add(opt)
    if is_first or not hasattr(opt, "refreshes_dense_weights"):
        for weight in _weights_of(opt):
            if is_first:
                _check_lengths(opt, weight)
            weight.sync_written()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None or hasattr(opt, "refreshes_dense_weights"):
        return None
    closure = _refreshing(closure, opt)
    if "closure" in kwargs:
        return args, kwargs | {"closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def _refreshing(closure: Callable[[], Any], opt: Optimizer) -> Callable[[], Any]:
    """Let compiled code see that LBFGS, say, has moved the values since the last call."""

    def refreshed() -> Any:
        for weight in _weights_of(opt):
            weight.refresh()
        return closure()

    return refreshed


def _check_in_use(opt: Optimizer, param: Tensor) -> None:
    weight = weight_replacing(param)
    if weight is not None or param in RETIRED:
        name = RETIRED[param] if weight is None else weight.name
        what = "decompress_ or fully_shard" if weight is None else "compress_"
        raise CompressionError(
            f"this {type(opt).__name__} was built before {what} and holds a tensor that '{name}' "
            "no longer uses; rebuild it on model.parameters()"
        )


def _check_lengths(opt: Optimizer, weight: Weight) -> None:
    """Check state that was loaded before `samo.remap_`: torch would write past its end."""
    for key in SHAPED:
        found = (opt.state.get(weight.values) or {}).get(key)
        if isinstance(found, Tensor) and found.shape != weight.values.shape:
            STEPPED.discard(opt)
            raise CompressionError(
                f"{type(opt).__name__} has '{key}' of {tuple(found.shape)} for '{weight.name}' of "
                f"{tuple(weight.values.shape)}: the state of another mask; pass the optimizer to "
                "samo.remap_(model, masks, opt), or load matching state"
            )


@torch.compiler.disable
def _after_step(opt: Optimizer, args: object, kwargs: object) -> None:
    """Refresh dense weights, because ZeroRedundancyOptimizer, for one, bumps no version."""
    if not hasattr(opt, "refreshes_dense_weights") and (weights := _weights_of(opt)):
        with record_function("samo.refresh"):
            for weight in weights:
                if weight.expansions:  # which go by the version
                    torch.autograd.graph.increment_version(weight.values)
                weight.refresh()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
