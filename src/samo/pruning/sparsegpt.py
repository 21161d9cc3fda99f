"""SparseGPT: prune column after column, and let the columns to the right make up for the error.

Frantar and Alistarh 2023, arXiv:2301.00774. With H = X^T X + damping and U the upper Cholesky
factor of its inverse, pruning w_ij costs w_ij**2 / U_jj**2, and the other weights of the row change
by -w_ij / U_jj * U_j. Masks are chosen for 128 columns at a time, so that they know of the changes.

Each range of columns keeps its share of the tensor's count, exactly: column c ends with
``kept * c // columns`` kept to its left.
"""

from typing import Final

import torch
from torch import Tensor

from samo.mask import bitmap
from samo.pruning.input_stats import Inputs
from samo.pruning.pattern import Pattern
from samo.pruning.scope import Group
from samo.pruning.topk import largest, largest_of

_COLUMNS: Final = 128
_DAMPING: Final = 0.01  # of the mean of H's diagonal


def solve_(inputs: Inputs, group: Group, seed: int) -> Tensor:
    """Prune a weight and change what it keeps; return which, (matrices, outputs, inputs)."""
    matrices = inputs.matrices
    keep = torch.empty(matrices.shape, dtype=torch.bool, device=matrices.device)
    for place, matrix in enumerate(matrices):
        before, upto = (group.kept * end // len(matrices) for end in (place, place + 1))
        hessian = inputs.take_products(place)
        work = matrix.to(hessian.dtype, copy=True)
        name = inputs.name if len(matrices) == 1 else f"{inputs.name}[{place}]"
        factor = _factor_(hessian, work, inputs.name)
        keep[place] = _prune_(work, factor, upto - before, group.pattern, name, seed)
        matrix.copy_(work)
    return keep


def _factor_(hessian: Tensor, weight: Tensor, name: str) -> Tensor:
    """Return U of the damped ``hessian``; overwrites it, and columns without input with 0."""
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    weight[:, dead] = 0
    damping = _DAMPING * diagonal.mean()
    for _ in range(3):
        diagonal += damping
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and upper.isfinite().all():
                return upper
        damping = 10 * damping  # rounding has made H indefinite: 1 %, then 11 %, then 111 %
    raise ValueError(
        f"the inputs of '{name}' are too nearly dependent for method='sparsegpt'; use more or more "
        "varied calibration data, or method='wanda'"
    )


def _prune_(
    weight: Tensor, factor: Tensor, kept: int, pattern: Pattern | None, name: str, seed: int
) -> Tensor:
    """Prune ``weight`` (outputs, inputs) in place, and return which entries are kept."""
    columns = weight.shape[1]
    keep = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    width = _COLUMNS if pattern is None else max(1, _COLUMNS // pattern.group) * pattern.group
    for start in range(0, columns, width):
        stop = min(start + width, columns)
        part, part_keep = weight[:, start:stop], keep[:, start:stop]
        upper = factor[start:stop, start:stop]
        diagonal = upper.diagonal()
        errors = torch.empty_like(part)
        if pattern is None:
            share = kept * stop // columns - kept * start // columns
            words = largest(f"{name}:{start}", part / diagonal, share, seed)
            part_keep.copy_(bitmap.unpack(words, 0, part.numel()).view(part.shape))
        for column in range(stop - start):
            if pattern is not None and column % pattern.group == 0:
                group = slice(column, column + pattern.group)
                costs = (part[:, group] / diagonal[group]).abs_()
                part_keep[:, group] = largest_of(costs[:, :, None], pattern.kept).squeeze(2)
            error = part[:, column].masked_fill(part_keep[:, column], 0).div_(diagonal[column])
            # Also makes a pruned entry 0, and leaves a kept one as it is.
            part[:, column:].addr_(error, upper[column, column:], alpha=-1)
            errors[:, column] = error
        part.masked_fill_(~part_keep, 0)  # not w - w / d * d
        weight[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    return keep
