"""What a run says of its masks: how far they had settled, when they were drawn, how they changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from samo.report.fields import count, number, numbers, text

__all__ = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """A look of early-bird at the masks."""

    step: int
    distances: tuple[float, ...]
    """To the masks before, the newest of them last."""
    threshold: float
    queue: int

    @property
    def recent(self) -> tuple[float, ...]:
        """Distances to the others in the queue."""
        return self.distances[-(self.queue - 1) :]

    @property
    def has_settled(self) -> bool:
        """Whether the queue was full and all of it within the threshold."""
        return len(self.recent) == self.queue - 1 and max(self.recent) <= self.threshold


@dataclass(frozen=True, kw_only=True, slots=True)
class Prune:
    """The moment the masks were drawn, and what they keep at the end of the file."""

    step: int
    kept: int
    numel: int
    sparsity: float
    evals_before: int
    """How many evaluations came before it; the next ones are of pruned weights."""
    reason: str
    """Why then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of the masks."""

    step: int
    sparsity: float
    replaced: float
    """Weights kept anew, as a share of those kept before."""
    dropped: float
    """Weights no longer kept, as a share of those kept before."""


def observation(step: int, record: Mapping[str, object]) -> Observation | None:
    """Read an "observe" line."""
    queue, threshold = count(record.get("queue")), number(record.get("threshold"))
    distances = numbers(record.get("distances"))
    if queue is None or queue < 2 or not threshold >= 0:
        return None
    return Observation(step=step, distances=distances, threshold=threshold, queue=queue)


def prune(step: int, record: Mapping[str, object], evals_before: int) -> Prune | None:
    """Read a "prune" line."""
    kept, numel = count(record.get("kept")), count(record.get("numel"))
    if kept is None or not numel:
        return None
    return Prune(
        step=step,
        kept=kept,
        numel=numel,
        sparsity=1.0 - kept / numel,
        evals_before=evals_before,
        reason=text(record.get("reason")),
    )


def change(
    step: int, record: Mapping[str, object], before: Prune | None
) -> tuple[Change, Prune] | None:
    """Read a "remap" line, and return the change and what is kept from there on."""
    kept, numel = count(record.get("kept")), count(record.get("numel"))
    if before is None or kept is None or not numel:
        return None
    grown, dropped = count(record.get("grown")) or 0, count(record.get("dropped")) or 0
    sparsity, number_before = 1.0 - kept / numel, max(before.kept, 1)
    return (
        Change(
            step=step,
            sparsity=sparsity,
            replaced=grown / number_before,
            dropped=dropped / number_before,
        ),
        replace(before, kept=kept, numel=numel, sparsity=sparsity),
    )


def square(observations: Sequence[Observation]) -> list[list[float | None]]:
    """Return the distances of all observations to those before; None where they were not compared.

    Example:
        >>> from samo.report.mask_events import Observation, square
        >>> about = {"threshold": 0.1, "queue": 2}
        >>> rows = [(), (0.3,), (0.2,)]
        >>> square([Observation(step=i, distances=row, **about) for i, row in enumerate(rows)])
        [[None, None, None], [0.3, None, None], [None, 0.2, None]]
    """
    size = len(observations)
    cells: list[list[float | None]] = [[None] * size for _ in range(size)]
    for i, seen in enumerate(observations):
        known = seen.distances[-i:] if i else ()
        cells[i][i - len(known) : i] = known
    return cells
