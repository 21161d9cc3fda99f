"""Curves made ready to draw: smoothed, and their labels moved apart."""

import numpy as np
from numpy.typing import NDArray

__all__ = []

Floats = NDArray[np.float64]


def smooth(y: Floats, window: int) -> Floats:
    """Average a curve over a centred window that skips NaN and shrinks towards both ends.

    Example:
        >>> import numpy as np
        >>> from samo.report.curves import smooth
        >>> smooth(np.array([1.0, 2.0, 9.0, 4.0, 5.0]), window=3)
        array([1., 4., 5., 6., 5.])
    """
    finite = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    place, half = np.arange(len(y)), window // 2
    # Not down to a single noisy point.
    reach = np.maximum(np.minimum(half, np.minimum(place, len(y) - 1 - place)), half // 4)
    low, high = np.maximum(place - reach, 0), np.minimum(place + reach + 1, len(y))
    number = counts[high] - counts[low]
    mean: Floats = np.divide(
        sums[high] - sums[low], number, out=np.full(len(y), np.nan), where=number > 0
    )
    return mean


def spread(values: list[float], gap: float, low: float, high: float) -> list[float]:
    """Move labels apart until no two are closer than ``gap``, keeping their order.

    Example:
        >>> from samo.report.curves import spread
        >>> spread([5.0, 5.0, 9.0], gap=2.0, low=0.0, high=10.0)
        [4.0, 6.0, 9.0]
    """
    if not values:
        return []
    gap = min(gap, (high - low) / len(values))
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    groups: list[tuple[float, int]] = []  # centre and number of labels that touch each other
    for i in order:
        centre, size = min(max(values[i], low), high), 1
        while groups and groups[-1][0] + gap * (groups[-1][1] + size) / 2 > centre:
            before, number = groups.pop()
            centre = (before * number + centre * size) / (number + size)
            size += number
            half = gap * (size - 1) / 2
            centre = min(max(centre, low + half), high - half)
        groups.append((centre, size))
    places = [centre + gap * (k - (size - 1) / 2) for centre, size in groups for k in range(size)]
    moved = [0.0] * len(values)
    for i, place in zip(order, places):
        moved[i] = place
    return moved
