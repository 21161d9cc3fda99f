"""Which layers a stage gets: the contiguous cut whose slowest stage is fastest, and what layers cost."""

from collections.abc import Sequence
from itertools import accumulate

from torch import nn

from samo.pipeline.layers import Layers

__all__ = ["parameter_costs", "partition"]


def parameter_costs(layers: Layers) -> list[float]:
    """Return a model of each layer's time: the weights that are multiplied with, and 1 % of the rest.

    Example:
        >>> import torch
        >>> from samo.pipeline.partition import parameter_costs
        >>> from samo.pipeline.layers import take_apart
        >>> parameter_costs(take_apart(torch.nn.Sequential(torch.nn.Linear(10, 5, bias=False))))
        [50.0]
    """
    costs = []
    for unit in layers.units:
        cost = 0.0
        for module in unit.modules.values():
            for part in module.modules():
                is_looked_up = isinstance(part, nn.Embedding)
                for param in part.parameters(recurse=False):
                    is_factor = param.dim() >= 2 and not is_looked_up
                    cost += param.numel() * (1.0 if is_factor else 0.01)
        costs.append(cost)
    return costs


def partition(costs: Sequence[float], num_stages: int) -> list[tuple[int, int]]:
    """Cut a row of layers into stages, each with one layer or more; exact, by dynamic programming.

    Of all cuts, one whose slowest stage is fastest; among those, one with the smallest sum of
    squared costs, so that the others are even.

    Example:
        >>> from samo.pipeline.partition import partition
        >>> partition([1, 1, 1, 5], 2)
        [(0, 3), (3, 4)]

    Args:
        costs: Time of each layer, in any unit.
        num_stages: Number of stages.

    Returns:
        First layer and the one after the last, for each stage.

    Raises:
        ValueError: There are fewer layers than stages, or a cost is negative.
    """
    count = len(costs)
    if num_stages < 1 or count < num_stages:
        raise ValueError(
            f"{count} layers cannot be cut into {num_stages} stages of one layer or more; use fewer "
            "stages, or cut the layers finer"
        )
    if any(cost < 0 for cost in costs):
        raise ValueError(f"costs must be 0 or more, got {list(costs)}")
    cost = [0.0, *accumulate(costs)]
    # best[stop]: slowest stage, sum of squares and cuts of the first layers on the stages so far
    best: list[tuple[float, float, list[int]] | None] = [(0.0, 0.0, [])] + [None] * count
    for stage in range(num_stages):
        new: list[tuple[float, float, list[int]] | None] = [None] * (count + 1)
        for stop in range(stage + 1, count - (num_stages - stage - 1) + 1):
            for start in range(stage, stop):
                before = best[start]
                if before is None:
                    continue
                own = cost[stop] - cost[start]
                found = (max(before[0], own), before[1] + own * own, [*before[2], start])
                if new[stop] is None or found[:2] < new[stop][:2]:  # type: ignore[index]
                    new[stop] = found
        best = new
    starts = best[count][2]  # type: ignore[index]
    return list(zip(starts, [*starts[1:], count]))
