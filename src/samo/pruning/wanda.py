"""Wanda: keep the weights with the largest |w_ij| * ||x_j||, compared within each output.

Sun et al. 2023, arXiv:2306.11695. Rows keep the same number of weights; where that number is not
whole, some keep one more, spread evenly, so that the count of the tensor is exact.
"""

import math

import torch
from torch import Tensor

from samo.mask import bitmap
from samo.pruning.inputs import Inputs
from samo.pruning.nm import keep_pattern, scores_of
from samo.pruning.scope import Group
from samo.pruning.topk import Entries

__all__ = []


def scores(inputs: Inputs) -> Tensor:
    """Return |w_ij| * ||x_j||, (matrices, outputs, inputs)."""
    norms = inputs.squares().sqrt()
    return inputs.matrices.abs().to(norms.dtype).contiguous().mul_(norms[:, None, :])


def keep_by_inputs(inputs: Inputs, group: Group, seed: int) -> Tensor:
    """Return which weights to keep, (matrices, outputs, inputs)."""
    found = scores(inputs)
    rows = found.flatten(0, 1)
    entries = Entries(inputs.name, rows, "magnitude", rows.dtype, seed)
    if group.pattern is not None:
        words = keep_pattern(entries, group.pattern, input_dim=1)
    else:
        words = _keep_in_rows(entries, group.kept)
    return bitmap.unpack(words, 0, rows.numel()).view(found.shape)


def _keep_in_rows(entries: Entries, kept: int) -> Tensor:
    """Return the words of a mask that keeps the largest of each row, ``kept`` in all."""
    rows, columns = entries.dense.shape
    device = entries.dense.device
    shares = torch.arange(rows + 1, device=device).mul_(kept).div_(rows, rounding_mode="floor")
    shares = shares.diff()[:, None]
    places = torch.arange(columns, device=device)
    words = torch.empty(bitmap.num_words(rows * columns), dtype=torch.int32, device=device)
    unit = math.lcm(columns, 2 * bitmap.WORD_BITS)  # whole rows, and whole pairs of words
    for start, stop in bitmap.chunks(rows * columns, unit):
        found = scores_of(entries, start, stop, (-1, columns, 1)).squeeze(2)
        order = found.sort(dim=1, descending=True, stable=True).indices
        share = shares[start // columns : stop // columns]
        keep = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, places < share)
        bitmap.pack(keep.view(-1), words, start)
    return words
