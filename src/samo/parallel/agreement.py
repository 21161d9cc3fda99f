"""What must be the same on all ranks before they train together: masks, types, settings and values."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from samo.errors import CompressionError, MaskError
from samo.parallel.collectives import Group
from samo.weights import Weight, weight_of

__all__ = []


def check_same(group: Group, weights: Mapping[str, Weight], settings: Mapping[str, Any]) -> None:
    """Compare names, types, masks and settings over the ranks; every rank raises the same error.

    Raises:
        MaskError: A mask differs; the message names the rank and the tensor.
        CompressionError: Something else does.
    """
    ours = {
        "settings": {name: str(value) for name, value in settings.items()},
        "weights": {name: _types(weight) for name, weight in weights.items()},
        "masks": {
            name: "" if weight.mask is None else weight.mask.fingerprint()
            for name, weight in weights.items()
        },
    }
    # A digest first: with thousands of ranks, all fingerprints of all of them would be much.
    digest = hashlib.sha256(json.dumps(ours).encode()).hexdigest()
    what = "the fingerprints of the masks"
    if len(set(group.exchange(digest, what=what))) == 1:
        return
    found = [json.loads(text) for text in group.exchange(json.dumps(ours), what=what)]
    first = found[0]
    for rank, other in zip(group.ranks[1:], found[1:]):
        for part in ("settings", "weights", "masks"):
            for name in first[part].keys() | other[part].keys():
                a, b = first[part].get(name), other[part].get(name)
                if a != b and part == "masks":
                    raise MaskError(
                        f"the mask of '{name}' on rank {rank} is not that of rank {group.ranks[0]}, so "
                        "their compressed gradients do not belong together; give all ranks the same "
                        "masks, for example Masks.save on one and Masks.load on all"
                    )
                if a != b:
                    raise CompressionError(
                        f"'{name}' is {b} on rank {rank} and {a} on rank {group.ranks[0]}; build the "
                        "model and call samo.replicate alike on all ranks"
                    )


@torch.no_grad()
def broadcast_values(group: Group, model: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Give all ranks the weights, remainders and buffers of the group's first rank."""
    if group.size == 1:
        return
    for name, weight in weights.items():
        what = f"the values of '{name}'"
        values = weight.values()
        group.broadcast(values, what=what)
        weight.kernels.expand_(values, weight.mask, weight.param)
        weight.changed()
        if weight.rest is not None:
            group.broadcast(weight.rest, what=what)
    others = [param for param in model.parameters() if weight_of(param) is None]
    for tensor in [*others, *model.buffers()]:
        received = tensor.detach().contiguous()
        group.broadcast(received, what="the model's buffers")
        if received.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(received)


def _types(weight: Weight) -> str:
    trained = "trained" if weight.param.requires_grad else "frozen"
    return f"{trained} {weight.dtype} {weight.shape} with gradients of {weight.grad_dtype}"
