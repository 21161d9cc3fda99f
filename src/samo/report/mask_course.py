"""The course of masks through a run, in sentences: when they settled, and how they changed."""

from collections.abc import Sequence

from samo.report.findings import Entry
from samo.report.runs import Run
from samo.utils import formatting

__all__ = []


def ticket_finding(run: Run) -> str:
    """Say when and why the ticket was drawn, or how far it is from that."""
    last = run.observations[-1]
    largest = max(last.recent, default=None)
    apart = "one look so far" if largest is None else f"distance {largest:.3f}"
    if run.prune is None:
        return f"Masks have not settled so far: {apart}, threshold {last.threshold:g}"
    step = formatting.count(run.prune.step)
    if run.prune.reason == "settled":
        return (
            f"The ticket was drawn at step {step}: the last {last.queue} masks agree, {apart} at most, "
            f"threshold {last.threshold:g}"
        )
    return (
        f"The ticket was drawn at step {step}, the limit: masks had not settled, {apart}, threshold "
        f"{last.threshold:g}"
    )


def change_finding(shown: Sequence[Entry]) -> str:
    """Say how the masks of the first of these runs changed."""
    run = shown[0].run
    assert run.prune is not None
    number = f"{len(run.changes):,} change{'' if len(run.changes) == 1 else 's'}"
    last = formatting.count(run.changes[-1].step)
    who = f"{shown[0].label}: " if len(shown) > 1 else ""
    if run.is_pruned_in_steps:
        sparsity = formatting.percent(run.prune.sparsity)
        text = f"{number} of the masks, to {sparsity} sparsity at step {last}"
    else:
        shares = [change.replaced for change in run.changes]
        text = (
            f"{number} of the masks replaced {formatting.percent(shares[0])} of the kept weights at first "
            f"and {formatting.percent(shares[-1])} at step {last}"
        )
        if len(shares) == 1:
            text = f"{number} of the masks replaced {formatting.percent(shares[0])} of the kept weights"
    return who + text
