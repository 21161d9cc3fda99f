"""The weights of a model whose masks change: matrices with a mask that are being trained."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samo.candidates import matrices
from samo.core.compress import masks, named_weights
from samo.core.weight import Weight
from samo.errors import CompressionError, MaskError
from samo.mask import Mask
from samo.model_masks import Masks

__all__ = []


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
