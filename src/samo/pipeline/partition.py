"""Cut a sequence of layers into stages: imports no torch."""

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf


def partition(costs: Sequence[float], num_stages: int) -> list[tuple[int, int]]:
    """Cut a sequence of layers into stages of one layer or more; exact, by dynamic programming.

    Of all cuts, one whose slowest stage is fastest; among those, one with the smallest sum of
    squared costs, so that the other stages are even.

    Example:
        >>> from samo.pipeline.partition import partition
        >>> partition([1, 1, 1, 5], 2)  # first layer and the one after the last, of each stage
        [(0, 3), (3, 4)]
    """
    count = len(costs)
    if not 1 <= num_stages <= count:
        raise ValueError(
            f"{count} layers cannot be cut into {num_stages} stages; each needs one layer or more"
        )
    total = [0.0, *accumulate(costs)]

    def best(
        cost: Callable[[float], float], join: Callable[[float, float], float]
    ) -> tuple[float, list[int]]:
        # found[stop]: cost and starts of the stages that hold the first `stop` layers.
        found: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
        for stage in range(num_stages):
            found = {
                stop: min(
                    (join(before, cost(total[stop] - total[start])), [*starts, start])
                    for start, (before, starts) in found.items()
                    if start < stop
                )
                for stop in range(stage + 1, count - (num_stages - stage - 1) + 1)
            }
        return found[count]

    # Two passes: the most even start of a cut may have a slower stage than the fastest start.
    slowest, _ = best(lambda own: own, max)
    _, starts = best(lambda own: own * own if own <= slowest else inf, operator.add)
    return list(zip(starts, [*starts[1:], count]))
