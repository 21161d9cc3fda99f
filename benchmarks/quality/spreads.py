"""Rows of several seeds taken together: means, spreads, and differences seed by seed."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from benchmarks.measure import Row

_STUDENT: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom."""


class Spread(NamedTuple):
    """Mean and standard deviation (of the sample; 0 of a single value)."""

    mean: float
    deviation: float
    number: int

    def text(self, form: str = ".3f") -> str:
        """Write it: the mean, and the deviation if there is more than one value."""
        return f"{self.mean:{form}}" + (
            f" +- {self.deviation:{form.removeprefix('+')}}" if self.number > 1 else ""
        )

    @property
    def is_clear(self) -> bool:
        """Whether the 95 % interval of the mean leaves out 0 (Student's t); never of a single value."""
        if self.number < 2:
            return False
        quantile = _STUDENT[min(self.number - 2, len(_STUDENT) - 1)]
        return abs(self.mean) > quantile * self.deviation / math.sqrt(self.number)


def of(values: Sequence[float]) -> Spread:
    """Return the spread of some values."""
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return Spread(mean, math.sqrt(squares / max(len(values) - 1, 1)), len(values))


def against(rows: Sequence[Row], base: Sequence[Row], figure: str) -> Spread | None:
    """Return the spread of the differences to another contender, seed by seed; None without a common seed.

    Runs of one seed begin with the same weights and read the same batches, so much of what seeds do
    to them cancels out.
    """
    values = {row["seed"]: row[figure] for row in base}
    found = [row[figure] - values[row["seed"]] for row in rows if row["seed"] in values]
    return of(found) if found else None


def by_contender(rows: Sequence[Row], contenders: Sequence[str]) -> dict[str, list[Row]]:
    """Return the rows of each contender, by seed; contenders without rows are left out."""
    found = {
        name: sorted((r for r in rows if r["contender"] == name), key=lambda r: r["seed"])
        for name in contenders
    }
    return {name: several for name, several in found.items() if several}
