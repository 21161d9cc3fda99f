"""Sections of the page about masks in time: the ticket of early-bird, and masks that change."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

from samo.report.findings import Entry
from samo.report.mask_course import change_finding, ticket_finding
from samo.report.mask_events import Observation
from samo.report.mask_figures import AGREE, DIFFER, change_figure, ticket_figure
from samo.report.parts import figure, listed, run_key, section

__all__ = []

_MOST_TICKETS: Final = 3


def tickets(shown: Sequence[Entry]) -> Iterable[str]:
    """Show how masks settled, once for runs that saw the same."""
    different: dict[tuple[Observation, ...], list[Entry]] = {}
    for entry in shown:
        if entry.run.observations:
            different.setdefault(tuple(entry.run.observations), []).append(entry)
    for number, owners in enumerate(list(different.values())[:_MOST_TICKETS]):
        run = owners[0].run
        whose = f" of {listed([entry.label for entry in owners])}" if len(shown) > 1 else ""
        finding = ticket_finding(run)
        caption = (
            "Each cell compares the masks that pruning would have given at two steps: green within the "
            "threshold, blue beyond it, the stronger the further apart. Framed: the comparisons of the "
            "last look, which decide. Looks begin after the warm-up of the learning rate."
        )
        if len(run.observations[-1].distances) < len(run.observations) - 1:
            caption += " Masks that were not in the queue together were not compared."
        yield from section(
            f"Early-Bird ticket{whose}",
            finding,
            figure(f"ticket{number}", finding, partial(ticket_figure, run)),
            key=[
                f'<li><i style="--colour:var(--{AGREE})"></i>masks agree</li>',
                f'<li><i style="--colour:var(--{DIFFER})"></i>masks differ</li>',
            ],
            caption=caption,
        )


def changes(shown: Sequence[Entry]) -> Iterable[str]:
    """Show how masks changed after they were drawn."""
    changing = [entry for entry in shown if entry.run.changes]
    for is_sparser in (True, False):
        group = [entry for entry in changing if entry.run.is_pruned_in_steps == is_sparser]
        if not group:
            continue
        name = "sparser" if is_sparser else "replaced"
        finding = change_finding(group)
        caption = (
            "Fraction of the weights in the pruned matrices that is 0."
            if is_sparser
            else "At each change, the smallest kept weights are dropped and as many others kept anew; those "
            "that were dropped and chosen again are not counted."
        )
        yield from section(
            "Changing masks",
            finding,
            figure(name, finding, partial(change_figure, group)),
            key=run_key(group) if len(group) > 1 else [],
            caption=caption,
        )
