"""Curves made ready to draw: smoothed within their phase, thinned out without losing spikes."""

import itertools
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = []

Floats = NDArray[np.float64]

_WINDOWS: Final = 50
"""A smoothed curve averages over a fiftieth of it at a time,"""
_SMALLEST: Final = 5
"""and over no fewer points than this."""


def thin(x: Floats, y: Floats, points: int) -> tuple[Floats, Floats]:
    """Take at most ``points`` of a curve: the lowest and the highest of each stretch.

    Example:
        >>> import numpy as np
        >>> from samo.report.curves import thin
        >>> y = np.zeros(100_000); y[777] = 9.0
        >>> x, y = thin(np.arange(100_000.0), y, 2000)
        >>> len(y) <= 2000, float(y.max())
        (True, 9.0)
    """
    if len(x) <= points:
        return x, y
    edges = np.linspace(0, len(x), points // 2 + 1).astype(int)
    chosen: list[int] = []
    for start, stop in itertools.pairwise(edges):
        part = y[start:stop]
        if np.isnan(part).all():
            chosen.append(int(start))
        else:
            chosen += sorted({int(start + np.nanargmin(part)), int(start + np.nanargmax(part))})
    return x[chosen], y[chosen]


def smooth(y: Floats, spans: Iterable[tuple[int, int]]) -> Floats:
    """Average a curve over a running window that never reaches into another span.

    A loss jumps where a model is pruned; an average across that step would hide the jump.

    Example:
        >>> import numpy as np
        >>> from samo.report.curves import smooth
        >>> jump = np.repeat([1.0, 2.0], 100)
        >>> bool((smooth(jump, [(0, 100), (100, 200)]) == jump).all())
        True
    """
    out = np.full(len(y), np.nan)
    for start, stop in spans:
        out[start:stop] = _running_mean(y[start:stop], max(_SMALLEST, len(y) // _WINDOWS) // 2)
    return out


def _running_mean(y: Floats, half: int) -> Floats:
    finite = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    place = np.arange(len(y))
    # The window shrinks towards both ends so that it stays centred, but not to a single noisy point.
    reach = np.maximum(np.minimum(half, np.minimum(place, len(y) - 1 - place)), half // 4)
    low, high = np.maximum(place - reach, 0), np.minimum(place + reach + 1, len(y))
    number = counts[high] - counts[low]
    mean: Floats = np.divide(
        sums[high] - sums[low], number, out=np.full(len(y), np.nan), where=number > 0
    )
    return mean


def spread(values: list[float], gap: float, low: float, high: float) -> list[float]:
    """Move the places of labels apart until no two are closer than ``gap``.

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
