"""The weights of a model whose masks can change."""

from torch import nn

from samo.errors import CompressionError, MaskError
from samo.owners import owned_weights
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
