"""Choose masks block by block from the inputs that calibration data gives to each weight.

Wanda (Sun et al. 2023, arXiv:2306.11695) keeps the weights with the largest |w_ij| * ||x_j||,
compared within each output. Rows keep the same number of weights; where that number is not whole,
some keep one more, spread evenly, so that the count of the tensor is exact.

OWL (Yin et al. 2023, arXiv:2310.05175) measures a block by the fraction of its weights whose Wanda
score is an outlier: pruning hurts blocks with more of them more. The scores of all matrices of a
block are taken together, on inputs of the dense model.

``sparsegpt.py`` has SparseGPT.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from samo.mask import bitmap
from samo.mask.mask import Mask
from samo.pruning.blocks import BlockModel, Run
from samo.pruning.input_stats import FEW_TOKENS, Inputs, InputStatistics
from samo.pruning.scope import Group
from samo.pruning.sparsegpt import solve_
from samo.pruning.topk import keep_neighbours

CalibratedMethod = Literal["wanda", "sparsegpt"]

_OUTLIER: Final = 5.0  # times the mean score of the block
_logger: Final = logging.getLogger(__name__)


def prune_blocks(
    blocks: BlockModel,
    parameters: Mapping[str, Tensor],
    groups: Sequence[Group],
    method: CalibratedMethod,
    seed: int,
) -> dict[str, Mask]:
    """Return the masks of tensors that are pruned each on its own; SparseGPT changes the model."""
    by_name = {group.names[0]: group for group in groups}
    choose = solve_ if method == "sparsegpt" else _keep_by_inputs
    masks: dict[str, Mask] = {}
    for weights, run in blocks.walk({name: parameters[name] for name in by_name}):
        for name in weights.keys() & masks.keys():  # shared with an earlier block
            masks[name].to(blocks.device).zero_(weights.pop(name))
        statistics = _collect(weights, run, with_products=method == "sparsegpt")
        while statistics:  # one after the other is freed
            name, inputs = statistics.popitem()
            keep = choose(inputs, by_name[name], seed)
            keep = keep.mT if inputs.is_transposed else keep
            mask = Mask.from_bool(keep.reshape(inputs.weight.shape))
            mask.zero_(inputs.weight)
            if method == "sparsegpt":
                parameters[name].detach().copy_(inputs.weight)
            masks[name] = mask.to(parameters[name].device)
            del inputs
    return masks


def outlier_ratios(blocks: BlockModel, parameters: Mapping[str, Tensor]) -> list[float]:
    """Return the fraction of outliers in the block of each tensor."""
    found: dict[str, float] = {}
    for weights, run in blocks.walk(parameters):
        inputs = _collect(weights, run, with_products=False)
        scores = [_scores(one) for one in inputs.values()]
        numel = sum(score.numel() for score in scores)
        mean = sum(float(score.sum()) for score in scores) / max(numel, 1)
        outliers = sum(int((score > _OUTLIER * mean).sum()) for score in scores)
        found |= dict.fromkeys(inputs, outliers / max(numel, 1))
    return [found[name] for name in parameters]


def _collect(weights: Mapping[str, Tensor], run: Run, *, with_products: bool) -> dict[str, Inputs]:
    """Return the inputs of some weights of a block."""
    if not weights:
        return {}
    with InputStatistics(weights, with_products=with_products) as statistics:
        for _ in run():
            pass
    for name, inputs in statistics.inputs.items():
        inputs.check()
        if inputs.num_lacking:
            _logger.warning(
                "fewer than %d tokens reach %d of the %d experts of '%s'; these are pruned by "
                "magnitude. More calibration data gives them statistics",
                FEW_TOKENS,
                inputs.num_lacking,
                len(inputs.tokens),
                name,
            )
    return statistics.inputs


def _scores(inputs: Inputs) -> Tensor:
    """Return |w_ij| * ||x_j||, (matrices, outputs, inputs)."""
    norms = inputs.squares().sqrt()
    return inputs.matrices.abs().to(norms.dtype).contiguous().mul_(norms[:, None, :])


def _keep_by_inputs(inputs: Inputs, group: Group, seed: int) -> Tensor:
    """Return which weights Wanda keeps, (matrices, outputs, inputs)."""
    scores = _scores(inputs)
    rows = scores.flatten(0, 1)
    count, columns = rows.shape
    ends = torch.arange(count + 1, device=rows.device) * group.kept // count
    kept, size = group.pattern or (ends.diff(), columns)
    words = keep_neighbours(inputs.name, rows, 1, size, kept, seed)
    return bitmap.unpack(words, 0, rows.numel()).view(scores.shape)
