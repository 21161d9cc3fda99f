"""Masks with a structure that entries which move alone would dissolve: n:m and channels."""

import math
from collections.abc import Mapping
from typing import Final

from torch import nn

from samo import bitmap
from samo.core.compress import named_weights
from samo.core.weight import Weight
from samo.errors import MaskError
from samo.layouts import layouts
from samo.mask import Mask

__all__ = []

_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_GROUPS: Final = (2, 4, 8, 16, 32)
_LEAST_GROUPS: Final = 64
"""By chance one group of a random mask has the count of the next at most half the time."""


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
