"""Which learning rate each contender gets: the first seed walks up until the loss is worse.

A pruned model wants a larger rate than the dense one it was cut from, and a small one a larger rate
than a large one. With one rate for all, the table would say whom that rate suits.
"""

from collections.abc import Sequence
from typing import Final

from benchmarks.measure import Row
from benchmarks.quality.runs import Job

USUAL: Final = (3e-4, 1e-3, 3e-3, 1e-2)
"""About half a power of ten apart."""


def plan(
    rows: Sequence[Row], *, names: Sequence[str], seeds: Sequence[int], lrs: Sequence[float]
) -> list[Job]:
    """Return the runs that are wanted, given the rows of those that are done.

    Example: losses 1.4, 1.1, 1.2 of a first seed at rates 1, 3, 10: the other seeds are wanted at
    3.
    """
    walking, rest = [], []
    for name in names:
        lr, is_known = _walk(rows, name, seeds[0], lrs)
        walking.append(Job(name, seeds[0], lr))
        if is_known:
            rest += [Job(name, seed, lr) for seed in seeds[1:]]
    return walking + rest


def best(rows: Sequence[Row]) -> float:
    """Return the rate with the lowest loss, by the first seed, of the rows of one contender."""
    first = min(row["seed"] for row in rows)
    return min((r for r in rows if r["seed"] == first), key=_loss)["lr"]


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of each contender at its best rate."""
    found = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        mine = [row for row in rows if row["contender"] == name]
        lr = best(mine)
        found += [row for row in mine if row["lr"] == lr]
    return found


def _walk(rows: Sequence[Row], name: str, seed: int, lrs: Sequence[float]) -> tuple[float, bool]:
    """Return the rate to try next and False, or the best one and True."""
    losses = {
        row["lr"]: _loss(row) for row in rows if (row["contender"], row["seed"]) == (name, seed)
    }
    tried: list[float] = []
    for lr in sorted(set(lrs)):
        if lr not in losses:
            return lr, False
        tried.append(lr)
        if len(tried) > 1 and not losses[lr] < losses[tried[-2]]:
            break
    return min(tried, key=losses.__getitem__), True


def _loss(row: Row) -> float:
    """Return a loss to compare: that of a run which came apart is infinite."""
    loss = float(row["valid_loss"])
    return loss if loss == loss else float("inf")
