"""The weights of a model whose masks change: matrices with a mask that are being trained."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samo.candidates import matrices
from samo.errors import CompressionError, MaskError
from samo.mask import Mask
from samo.masks import Masks
from samo.owners import owned_weights, put_back_taps
from samo.weights import Weight

__all__ = []


def pruned_weights(model: nn.Module) -> dict[str, Weight]:
    """Return the weights with a mask by name.

    Raises:
        CompressionError: The model is not compressed.
        MaskError: No weight has a mask.
    """
    weights = owned_weights(model)
    if not weights:
        raise CompressionError(
            "the model is not compressed; call samo.compress_(model, masks) first"
        )
    pruned = {name: weight for name, weight in weights.items() if weight.mask is not None}
    if not pruned:
        raise MaskError(
            f"none of the {len(weights)} parameters of the model has a mask that could change; compress "
            "it with samo.prune(model, sparsity), or samo.Masks.whole(model) to start dense"
        )
    return pruned


def moving_weights(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Weight]:
    """Return the weights whose masks may change now, by name.

    Frozen weights and those that none of the optimizers updates would lose entries and gain zeros that
    nothing trains. Norms and biases have masks as parts of a channel, with which they come and go.

    Raises:
        CompressionError: The model is not compressed.
        MaskError: No weight has a mask.
    """
    put_back_taps(model)
    pruned = pruned_weights(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    tensors = {id(named[name]) for name in matrices(model)}
    held = {
        id(leaf) for opt in optimizers for group in opt.param_groups for leaf in group["params"]
    }
    return {
        name: weight
        for name, weight in pruned.items()
        if weight.param.requires_grad
        and id(weight.part.leaf) in held
        and id(weight.param) in tensors
    }


def check_moving(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Weight]:
    """Return the weights whose masks may change, of which there must be one.

    Raises:
        CompressionError: The model is not compressed.
        MaskError: No weight has a mask, or none of those is trained.
    """
    found = moving_weights(model, optimizers)
    if not found:
        raise MaskError(
            f"none of the {len(pruned_weights(model))} tensors with a mask can change it: each is frozen, "
            "is no matrix, or is in no group of the optimizer; pass the optimizers that train them"
        )
    return found


def with_others(model: nn.Module, changed: Mapping[str, Mask]) -> Masks:
    """Return the masks of the whole model, of which some have changed."""
    masks: dict[str, Mask] = {}
    for name, weight in pruned_weights(model).items():
        assert weight.mask is not None
        masks[name] = changed.get(name, weight.mask)
    return Masks(masks)


def finite_masters(name: str, weight: Weight) -> Tensor:
    """Return the kept values, which are to be compared by magnitude.

    Raises:
        ValueError: One of them is NaN or infinite.
    """
    masters = weight.masters()
    bad = int(torch.count_nonzero(~masters.isfinite()))
    if bad:
        raise ValueError(
            f"{bad:,} of the {masters.numel():,} kept weights of '{name}' are NaN or infinite and have no "
            "magnitude to compare; go back to a checkpoint from before that"
        )
    return masters
