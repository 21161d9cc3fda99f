"""The bars of the memory figure: dense training, the formula of the SAMO paper, and each run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from samo.memory.predict import KINDS
from samo.report.runs import Run

__all__ = []

PARTS: Final = (*KINDS, "whole")
"""Kinds of bytes, in the order of a bar; "whole" where only the sum is known."""


@dataclass(frozen=True)
class Bar:
    """One bar of the memory figure."""

    label: str
    kinds: Mapping[str, int]
    num_params: int
    place: int | None = None  # of the run that measured it; None for arithmetic

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def bars(runs: Sequence[Run]) -> list[Bar]:
    """Return the baselines, each different one once, then the runs.

    A prediction is shown only where it differs from the measurement.
    """
    found: list[Bar] = []
    accounts = [(run, run.state) for run in runs if run.state]
    for label, name in (("dense training", "dense_bytes"), ("SAMO paper", "paper_bytes")):
        sizes = {getattr(state, name): (run, state) for run, state in reversed(accounts)}
        sizes.pop(None, None)  # a dense run has no size by the paper
        for size, (run, state) in reversed(sizes.items()):
            title = label if len(sizes) == 1 else f"{label}, {run.label}"
            found.append(Bar(title, {"whole": size}, state.num_params))
    for run, state in accounts:
        name, number = holder(run, len(accounts)), state.num_params
        if state.predicted_bytes != state.measured_bytes:
            found.append(Bar(f"{name}, predicted", state.predicted, number))
        found.append(Bar(f"{name}, measured", state.measured, number, run.place))
    return found


def holder(run: Run, num_accounts: int) -> str:
    """Return "samo" for a compressed run that is the only one with an account, or its label."""
    is_compressed = run.mode == "samo" and run.prune is not None
    return "samo" if is_compressed and num_accounts == 1 else run.label
