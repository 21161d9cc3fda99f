"""Refuse to prune a model less than it is already: which zeros to keep would be arbitrary."""

from collections.abc import Mapping

import torch
from torch import nn

from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters, matrices

__all__ = []


@torch.no_grad()
def count_nonzero(model: nn.Module) -> dict[str, int]:
    """Return the nonzero weights of each matrix; before pruning, which may change them."""
    params = dense_parameters(model)
    return {name: int(params[name].count_nonzero()) for name in matrices(model)}


def check_nonzero(masks: Masks, nonzero: Mapping[str, int], *, otherwise: str) -> None:
    """Raise a ValueError if masks keep more weights of a matrix than were nonzero."""
    for name, mask in masks.items():
        found = nonzero.get(name, mask.kept)
        if found < mask.kept:
            raise ValueError(
                f"'{name}' has only {found:,} nonzero weights, and {mask.kept:,} would be kept: "
                f"the model is pruned already; {otherwise}, or raise "
                f"--sparsity above {1 - found / mask.numel:.3f}"
            )
