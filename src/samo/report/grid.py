"""The ranks of a run in words: how many, in which grid, and what each of them holds."""

from samo.report.runs import Run
from samo.utils import formatting

__all__ = []


def written(stages: int, replicas: int) -> str:
    """Return a grid of ranks in words; empty for one process.

    Example:
        >>> from samo.report.grid import written
        >>> written(2, 2), written(1, 3), written(1, 1)
        ('4 ranks: 2 stages x 2 replicas', '3 ranks: 3 replicas', '')
    """
    if stages * replicas == 1:
        return ""
    axes = [(stages, "stages"), (replicas, "replicas")]
    parts = " x ".join(f"{number:,} {name}" for number, name in axes if number > 1)
    return f"{stages * replicas:,} ranks: {parts}"


def ranks(run: Run) -> str:
    """Return the grid of a run in words; empty for one process."""
    return written(run.num_stages, run.num_replicas)


def holder(run: Run) -> str:
    """Say which part of many ranks holds the model state of a run; empty for one process."""
    if run.num_stages > 1:
        return f"in {run.num_stages:,} stages together"
    return "on each rank" if run.num_replicas > 1 else ""


def largest(run: Run) -> str:
    """Say what the rank holds that holds most; empty for one process, and where it is not known."""
    sizes = run.state.rank_bytes if run.state is not None else ()
    return f"largest rank {formatting.size(max(sizes))}" if len(sizes) > 1 else ""
