"""Choose masks block by block from the inputs that calibration data gives to each weight."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

from torch import Tensor

from samo.mask.mask import Mask
from samo.pruning.blocks import Block, BlockModel
from samo.pruning.inputs import FEW_TOKENS, Inputs, InputStatistics
from samo.pruning.scope import Group
from samo.pruning.sparsegpt import solve_
from samo.pruning.wanda import keep_by_inputs

__all__ = []

CalibratedMethod = Literal["wanda", "sparsegpt"]

_logger: Final = logging.getLogger(__name__)


def prune_blocks(
    blocks: BlockModel,
    parameters: Mapping[str, Tensor],
    groups: Sequence[Group],
    method: CalibratedMethod,
    seed: int,
    progress: Callable[[], None],
) -> dict[str, Mask]:
    """Return the masks of tensors that are pruned each on its own; SparseGPT changes the model."""
    by_name = {group.names[0]: group for group in groups}
    wanted = {id(parameters[name]): name for name in by_name}
    blocks.check_names(wanted)
    masks: dict[str, Mask] = {}
    for block in blocks.walk():
        own = {wanted[id(p)]: name for name, p in block.parameters() if id(p) in wanted}
        for name in own.keys() & masks.keys():  # shared with an earlier block
            masks[name].to(blocks.device).zero_(block.state[own[name]])
        open_ = {key: name for key, name in wanted.items() if name not in masks}
        statistics = collect(block, open_, with_products=method == "sparsegpt")
        while statistics:  # one after the other is freed
            name, inputs = statistics.popitem()
            mask = _choose_(inputs, by_name[name], method, seed)
            if method == "sparsegpt":
                parameters[name].detach().copy_(inputs.weight)
            masks[name] = mask.to(parameters[name].device)
            del inputs
        progress()
    return masks


def _choose_(inputs: Inputs, group: Group, method: CalibratedMethod, seed: int) -> Mask:
    """Return the mask of a weight, which is pruned in place."""
    choose = solve_ if method == "sparsegpt" else keep_by_inputs
    keep = choose(inputs, group, seed)
    keep = keep.mT if inputs.is_transposed else keep
    mask = Mask.from_bool(keep.reshape(inputs.weight.shape))
    mask.zero_(inputs.weight)
    return mask


def collect(block: Block, wanted: Mapping[int, str], *, with_products: bool) -> dict[str, Inputs]:
    """Return the inputs of the wanted parameters of a block, whose names are given by identity."""
    weights = {
        wanted[id(p)]: block.state[name] for name, p in block.parameters() if id(p) in wanted
    }
    if not weights:
        return {}
    with InputStatistics(weights, with_products=with_products) as statistics:
        for _ in block.run():
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
