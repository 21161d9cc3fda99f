"""Pack examples into rows of limited length, none of them split.

Best fit, decreasing: the longest example comes first, and each goes into the row that it fills
best. Which of equal length go together is drawn from the seed. The result depends on the sizes and
the seed alone, so every rank, and a run that resumes, finds the same rows.

    sizes 2 5 4 6 1 4, rows of 8    [6 2] [5 1] [4 4]
"""

from bisect import bisect_left, insort
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack(sizes: NDArray[Any], room: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of examples row by row, and where each row starts and the last ends.

    ``sizes`` are the tokens of each example, at least 1 and at most ``room``.

    Example:
        >>> order, starts = pack(np.array([2, 5, 4, 6, 1, 4]), room=8, seed=0)
        >>> [row.tolist() for row in np.split(order, starts[1:-1])]
        [[3, 0], [1, 4], [2, 5]]
    """
    order = np.random.default_rng(seed).permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    rows = np.empty(len(sizes), dtype=np.int64)
    open_rows: dict[int, list[int]] = defaultdict(list)  # by the room left
    rooms: list[int] = []  # its keys with a row, sorted
    count = 0
    for place, size in enumerate(sizes[order].tolist()):
        found = bisect_left(rooms, size)
        if found < len(rooms):
            left = rooms[found]
            row = open_rows[left].pop()
            if not open_rows[left]:
                del rooms[found]
        else:
            left, row = room, count
            count += 1
        rows[place] = row
        if left > size:
            if not open_rows[left - size]:
                insort(rooms, left - size)
            open_rows[left - size].append(row)
    starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=count), out=starts[1:])
    return order[np.argsort(rows, kind="stable")], starts
