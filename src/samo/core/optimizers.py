"""Any optimizer of a compressed model: its parameter groups, and hooks around its step."""

import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import record_function

from samo.core.modules import named_weights
from samo.core.weight import ORIGINS, RETIRED, Weight, weight_of, weight_replacing
from samo.errors import CompressionError
from samo.mask.prunable import matching

__all__ = ["param_groups"]


def param_groups(
    model: nn.Module,
    *,
    lr: float | Tensor | None = None,
    weight_decay: float = 0.0,
    density_power: float = 0.0,
    no_decay: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Return plain parameter groups: matrices with weight decay, norms and biases without.

    ``p.dim() >= 2`` would take the 1-D values of pruned weights for biases; this looks at the dense
    shape.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.LayerNorm(10))
        >>> model = samo.compress_(model, samo.prune(model, sparsity=0.9))
        >>> groups = samo.param_groups(model, lr=1e-3, weight_decay=0.1)
        >>> [(group["weight_decay"], len(group["params"])) for group in groups]
        [(0.1, 1), (0.0, 3)]
        >>> opt = torch.optim.AdamW(groups)

    Args:
        model: A model, compressed or not.
        lr: Learning rate; by default the optimizer's own.
        weight_decay: Decay of the parameters with two dimensions or more.
        density_power: Multiply the learning rate of a pruned weight by its density to this power,
            from -3 to 3, and leave its decay as it is. With -1, a weight at 90 % sparsity learns 10
            times as fast, which helps models that are pruned early.
        no_decay: Shell-style patterns of further names without decay, such as ``"wte.*"``.
    """
    if not isinstance(density_power, int | float) or not -3 <= density_power <= 3:
        raise ValueError(f"density_power must be a number from -3 to 3, got {density_power!r}")
    if density_power and lr is None:
        raise ValueError(
            f"density_power={density_power} scales a learning rate; pass lr= here as well"
        )
    parameters = dict(model.named_parameters())
    exempt = matching(no_decay, parameters, "no_decay")
    # By name: FSDP2 replaces the values by another parameter.
    weights = dict(named_weights(model, remove_duplicate=False))
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, param in parameters.items():
        weight = weights.get(name)
        mask = None if weight is None else weight.mask
        scale = 1.0 if mask is None or not mask.kept else (mask.kept / mask.numel) ** density_power
        decays = len(param.shape if weight is None else weight.shape) >= 2 and name not in exempt
        group: dict[str, Any] = {
            "params": [],
            "weight_decay": weight_decay / scale if decays else 0.0,
        }
        if lr is not None:
            group["lr"] = lr * scale if scale != 1.0 else lr
        groups.setdefault((scale, decays), group)["params"].append(param)
    return list(groups.values())


# Before and after a step ------------------------------------------------------------------------

STEPPED: Final[weakref.WeakSet[Optimizer]] = weakref.WeakSet()
"""Optimizers that have made a step: their state must follow when masks change."""


def _weights_of(opt: Optimizer) -> list[Weight]:
    found = (weight_of(param) for group in opt.param_groups for param in group["params"])
    return [weight for weight in found if weight is not None]


@torch.compiler.disable
def _before_step(opt: Optimizer, args: object, kwargs: object) -> None:
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
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum"):
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
                weight.refresh()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
