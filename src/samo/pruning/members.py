"""The weights of a model whose masks change: matrices with a mask that are being trained.

Masks with a structure, n:m and channels, are refused where entries would move alone and dissolve it.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samo.core.compress import masks
from samo.core.modules import named_weights
from samo.core.weight import Weight
from samo.errors import CompressionError, MaskError
from samo.mask import bitmap
from samo.mask.layouts import layouts
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import matrices

__all__ = []

_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_GROUPS: Final = (2, 4, 8, 16, 32)
_LEAST_GROUPS: Final = 64
"""By chance one group of a random mask has the count of the next at most half the time."""


def moving_weights(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Weight]:
    """Return the weights whose masks may change now, by name.

    Frozen weights and those that none of the optimizers updates would lose entries and gain zeros that
    nothing trains. Norms and biases have masks as parts of a channel, with which they come and go.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    tensors = {id(named[name]) for name in matrices(model)}
    held = {
        id(param) for opt in optimizers for group in opt.param_groups for param in group["params"]
    }
    return {
        name: weight
        for name, weight in named_weights(model)
        if weight.mask is not None
        and weight.values.requires_grad
        and id(weight.values) in held & tensors
    }


def check_moving(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Weight]:
    """Return the weights whose masks may change, of which there must be one.

    Raises:
        CompressionError: The model is not compressed, or none of its weights has a mask.
        MaskError: None of those with a mask is trained.
    """
    pruned = masks(model)
    if not pruned:
        raise CompressionError(
            "no parameter of the model has a mask that could change; call samo.compress_(model, masks) "
            "first, with masks of samo.prune(model, sparsity), or samo.Masks.whole(model) to start dense"
        )
    found = moving_weights(model, optimizers)
    if not found:
        raise MaskError(
            f"none of the {len(pruned)} tensors with a mask can change it: each is frozen, "
            "is no matrix, or is in no group of the optimizer; pass the optimizers that train them"
        )
    return found


def with_others(model: nn.Module, changed: Mapping[str, Mask]) -> Masks:
    """Return the masks of the whole model, of which some have changed."""
    return Masks({name: changed.get(name, mask) for name, mask in masks(model).items()})


def finite_values(name: str, weight: Weight) -> Tensor:
    """Return the kept values, which are to be compared by magnitude.

    Raises:
        ValueError: One of them is NaN or infinite.
    """
    weight.sync_written()
    values = weight.values.detach()
    bad = int(torch.count_nonzero(~values.isfinite()))
    if bad:
        raise ValueError(
            f"{bad:,} of the {values.numel():,} kept weights of '{name}' are NaN or infinite and have no "
            "magnitude to compare; go back to a checkpoint from before that"
        )
    return values


def check_free(model: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Refuse masks of which it can be told that they have a structure.

    Raises:
        MaskError: A weight keeps n of every m neighbours, or the channels of a BatchNorm are pruned.
    """
    for name, scale in named_weights(model):
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, _BATCH_NORMS) and scale.mask is not None and scale.mask.sparsity:
            raise MaskError(
                f"'{name}' keeps {scale.mask.kept:,} of {scale.mask.numel:,} channels, and entries "
                "that grow in a pruned channel would never get a gradient; use masks without channels, "
                "such as those of samo.prune"
            )
    found = layouts(model)
    for name, weight in weights.items():
        layout = found.get(name)
        if layout is None or layout.input_dim is None or weight.mask is None:
            continue
        pattern = pattern_of(weight.mask, layout.input_dim)
        if pattern is not None:
            raise MaskError(
                f"the mask of '{name}' has the pattern {pattern}, which entries that move one by one would "
                "dissolve; keep it as it is, or prune without a pattern"
            )


def pattern_of(mask: Mask, input_dim: int) -> str | None:
    """Return ``"n:m"`` if the first entries of a mask, 2**20 at most or a few rows, keep to it.

    Example:
        >>> import torch
        >>> pattern_of(Mask.from_bool(torch.tensor([True, False] * 128).view(2, 128)), 1)
        '1:2'
    """
    inputs, after = mask.shape[input_dim], math.prod(mask.shape[input_dim + 1 :])
    for group in _GROUPS:
        unit = group * after
        if inputs % group or not unit or mask.numel < _LEAST_GROUPS * group:
            continue
        stop = min(mask.numel, max(unit, 2**20 // unit * unit))
        counts = bitmap.unpack(mask.words, 0, stop).view(-1, group, after).sum(1)
        kept = int(counts.view(-1)[0])
        if 0 < kept < group and bool((counts == kept).all()):
            return f"{kept}:{group}"
    return None
