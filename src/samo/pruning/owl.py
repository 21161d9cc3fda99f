"""OWL's measure of a block: the fraction of its weights whose Wanda score is an outlier.

Yin et al. 2023, arXiv:2310.05175. Blocks with more outliers suffer more from pruning. The scores of
all matrices of a block are taken together, on inputs of the dense model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from torch import Tensor

from samo.pruning import wanda
from samo.pruning.blocks import BlockModel
from samo.pruning.calibrated import collect

__all__ = []

_OUTLIER: Final = 5.0  # times the mean score of the block


def outlier_ratios(
    blocks: BlockModel,
    parameters: Mapping[str, Tensor],
    names: Sequence[str],
    progress: Callable[[], None],
) -> list[float]:
    """Return the fraction of outliers in the block of each named tensor."""
    wanted = {id(parameters[name]): name for name in names}
    blocks.check_names(wanted)
    found: dict[str, float] = {}
    for block in blocks.walk():
        inputs = collect(block, wanted, with_products=False)
        scores = [wanda.scores(one) for one in inputs.values()]
        numel = sum(score.numel() for score in scores)
        mean = sum(float(score.sum()) for score in scores) / max(numel, 1)
        outliers = sum(int((score > _OUTLIER * mean).sum()) for score in scores)
        found |= dict.fromkeys(inputs, outliers / max(numel, 1))
        progress()
    return [found[name] for name in names]
