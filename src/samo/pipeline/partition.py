"""Which layers a stage gets: the contiguous cut whose slowest stage is fastest, under a memory cap."""

from collections.abc import Sequence

__all__ = ["partition"]


def partition(
    costs: Sequence[float],
    num_stages: int,
    *,
    memory: Sequence[float] | None = None,
    activations: Sequence[float] | None = None,
    in_flight: Sequence[int] | None = None,
    cap: float | None = None,
) -> list[tuple[int, int]]:
    """Cut a row of layers into stages, each with one layer or more; exact, by dynamic programming.

    Of all cuts that fit, one whose slowest stage is fastest; among those, one with the smallest sum of
    squared costs, so that the others are even.

    Example:
        >>> from samo.pipeline.partition import partition
        >>> partition([1, 1, 1, 5], 2)
        [(0, 3), (3, 4)]
        >>> partition([1, 1, 1, 1, 1], 2, memory=[9, 1, 1, 1, 1], cap=10)
        [(0, 2), (2, 5)]

    Args:
        costs: Time of each layer, in any unit.
        num_stages: Number of stages.
        memory: Bytes of each layer's state.
        activations: Bytes each layer keeps for a micro-batch in flight.
        in_flight: Micro-batches in flight on each stage; 1 where not given.
        cap: Bytes a stage may hold.

    Returns:
        First layer and the one after the last, for each stage.

    Raises:
        ValueError: There are fewer layers than stages, or nothing fits under the cap.
    """
    count = len(costs)
    if num_stages < 1 or count < num_stages:
        raise ValueError(
            f"{count} layers cannot be cut into {num_stages} stages of one layer or more; use fewer "
            "stages, or cut the layers finer"
        )
    if any(cost < 0 for cost in costs):
        raise ValueError(f"costs must be 0 or more, got {list(costs)}")
    state = _sums(memory if memory is not None else [0.0] * count)
    kept = _sums(activations if activations is not None else [0.0] * count)
    if not len(state) == len(kept) == count + 1:
        raise ValueError(f"costs, memory and activations must be of one length, got {count} costs")
    flights = list(in_flight) if in_flight is not None else [1] * num_stages
    cost = _sums(costs)

    def bytes_of(stage: int, start: int, stop: int) -> float:
        return state[stop] - state[start] + flights[stage] * (kept[stop] - kept[start])

    # best[stop]: slowest stage, sum of squares and cuts of the first layers on the stages so far
    best: list[tuple[float, float, list[int]] | None] = [(0.0, 0.0, [])] + [None] * count
    for stage in range(num_stages):
        new: list[tuple[float, float, list[int]] | None] = [None] * (count + 1)
        for stop in range(stage + 1, count - (num_stages - stage - 1) + 1):
            for start in range(stage, stop):
                before = best[start]
                if before is None or (cap is not None and bytes_of(stage, start, stop) > cap):
                    continue
                own = cost[stop] - cost[start]
                found = (max(before[0], own), before[1] + own * own, [*before[2], start])
                if new[stop] is None or found[:2] < new[stop][:2]:  # type: ignore[index]
                    new[stop] = found
        best = new
    if best[count] is None:
        largest = max(bytes_of(0, i, i + 1) for i in range(count))
        raise ValueError(
            f"no cut of {count} layers into {num_stages} stages holds {cap:,.0f} bytes a stage or less "
            f"(largest layer: {largest:,.0f}, all together: {bytes_of(0, 0, count):,.0f}); use more "
            "stages or a lower in_flight, or raise the cap"
        )
    starts = best[count][2]  # type: ignore[index]
    return list(zip(starts, [*starts[1:], count]))


def _sums(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
