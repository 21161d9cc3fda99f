"""Have masks settled? A queue of the newest masks, and the distances of each new one to it.

    queue of 5     m3 m4 m5 m6 | m7 arrives; m2 has left
    distances of m7          0.31 0.18 0.09 0.04      to m3, m4, m5, m6
    settled        if the queue is full and none of them is over the threshold

Nothing here knows where masks come from. Rows of distances are kept for all observations, the masks
for the queue alone, or for all of them with ``keeps_all``.
"""

from collections.abc import Sequence
from typing import Literal

from samo.mask.masks import Masks

__all__ = []

Distance = Literal["kept", "hamming"]


class Settling:
    """Masks in the order of their observation, and their distances.

    Args:
        queue: Length of the queue, the newest mask counted.
        threshold: Largest distance at which masks count as the same.
        distance: ``"kept"``: share of the kept entries not in common; ``"hamming"``: share of all entries
            that differ.
        keeps_all: Whether masks that leave the queue are kept, and new ones compared with them too.
    """

    def __init__(
        self, queue: int, threshold: float, distance: Distance, *, keeps_all: bool
    ) -> None:
        self.queue = queue
        self.threshold = threshold
        self.distance: Distance = distance
        self.keeps_all = keeps_all
        self.masks: list[Masks] = []
        # For each observation its distances to the ones before it, oldest first, as far as known.
        self.rows: list[list[float]] = []

    def add(self, masks: Masks) -> bool:
        """Take a new mask, and return whether masks have settled."""
        measure = Masks.distance if self.distance == "kept" else Masks.hamming
        older = self.masks if self.keeps_all else self.masks[-(self.queue - 1) :]
        row = [measure(masks, other) for other in older]  # before anything changes: it may raise
        self.masks = [*older, masks]
        self.rows.append(row)
        return self.has_settled

    @property
    def recent(self) -> list[float]:
        """Distances of the newest mask to the others in the queue, oldest first."""
        return self.rows[-1][-(self.queue - 1) :] if self.rows else []

    @property
    def has_settled(self) -> bool:
        """Whether the queue is full and the newest mask within the threshold of every other."""
        return len(self.recent) == self.queue - 1 and max(self.recent) <= self.threshold

    @property
    def verdict(self) -> str:
        """Why the newest mask is drawn, for masks that have settled."""
        how = f"distances {_describe(self.recent)}, threshold {self.threshold}"
        return f"settled at observation {len(self.rows):,}: {how}"

    @property
    def state(self) -> str:
        """How far masks are from settling."""
        held, recent = min(len(self.rows), self.queue), self.recent
        if held < self.queue:
            known = f", distances {_describe(recent)}" if recent else ""
            return f"the queue holds {held} of {self.queue} masks{known}"
        others = f"the {self.queue - 1} masks before"
        return f"distances {_describe(recent)} to {others}, threshold {self.threshold}"

    def drop_masks(self) -> None:
        """Forget the masks, unless all are to be kept; distances stay."""
        if not self.keeps_all:
            self.masks = []

    def matrix(self) -> list[list[float | None]]:
        """Return all distances as a square; None where two masks were never compared."""
        size = len(self.rows)
        square: list[list[float | None]] = [[None] * size for _ in range(size)]
        for i, row in enumerate(self.rows):
            square[i][i] = 0.0
            for j, distance in enumerate(row, start=i - len(row)):
                square[i][j] = square[j][i] = distance
        return square


def _describe(distances: Sequence[float]) -> str:
    return ", ".join(f"{distance:.3f}" for distance in distances)
