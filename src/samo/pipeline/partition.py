"""Which layers a stage gets: the contiguous cut whose slowest stage is fastest."""

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["partition"]


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
