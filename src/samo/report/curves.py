"""Curves made ready to draw: smoothed, and their labels moved apart."""

import itertools
from collections.abc import Sequence

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


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move labels apart until no two are closer than ``gap``, keeping their order.

    Example:
        >>> from samo.report.curves import spread
        >>> spread([5.0, 5.0, 9.0, 10.0], gap=2.0, low=0.0, high=10.0)
        [4.0, 6.0, 8.0, 10.0]
    """
    gap = min(gap, (high - low) / max(len(values), 1))
    order = sorted(range(len(values)), key=values.__getitem__)
    places = [min(max(value, low), high) for value in values]
    for below, i in itertools.pairwise(order):
        places[i] = max(places[i], places[below] + gap)
    limit = high
    for i in reversed(order):
        places[i] = min(places[i], limit)
        limit = places[i] - gap
    return places
