"""The bars of the memory figure: dense training, the formula of the SAMO paper, and each run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from samo.memory.predict import KINDS
from samo.report.runs import Run
from samo.train.events import Accounted

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
    for label, kinds_of in (("dense training", dense_kinds), ("SAMO paper", paper_kinds)):
        baselines: dict[int, Bar] = {}
        for run, state in accounts:
            bar = Bar(f"{label}, {run.label}", kinds_of(run, state), state.num_params)
            baselines.setdefault(bar.total, bar)
        baselines.pop(0, None)
        shared = len(baselines) == 1
        found += [replace(bar, label=label) if shared else bar for bar in baselines.values()]
    for run, state in accounts:
        name, number = holder(run, len(accounts)), state.num_params
        if state.predicted_bytes != state.measured_bytes:
            kinds = _checked(state.predicted, state.predicted_bytes)
            found.append(Bar(f"{name}, predicted", kinds, number))
        kinds = _checked(state.measured, state.measured_bytes)
        found.append(Bar(f"{name}, measured", kinds, number, run.place))
    return found


def holder(run: Run, num_accounts: int) -> str:
    """Return "samo" for a compressed run that is the only one with an account, or its label."""
    is_compressed = run.mode == "samo" and run.prune is not None
    return "samo" if is_compressed and num_accounts == 1 else run.label


def dense_kinds(run: Run, state: Accounted) -> Mapping[str, int]:
    """Split the bytes of dense training with Adam by kind."""
    sizes = {"dense": 4, "gradients": 4, "moments": 8}
    if run.dtype in ("bfloat16", "float16"):  # fp32 master weights, gradients in both types
        sizes = {"dense": 2, "values": 4, "gradients": 2 + 4, "moments": 8}
    kinds = {kind: size * state.num_params for kind, size in sizes.items()}
    return _checked(kinds, state.dense_bytes)


def paper_kinds(run: Run, state: Accounted) -> Mapping[str, int]:
    """Split the paper's 2 + 24f bytes by kind; unpruned tensors take 20.

    Each kept weight has an index of 4 bytes, gradients of 2 + 4, an fp32 master of 4 and its 16-bit
    copy of 2, and moments of 8.
    """
    if run.masks is None or state.paper_bytes is None:
        return {}
    kept, unpruned = run.masks.kept, state.num_params - run.masks.numel
    kinds = {
        "dense": 2 * state.num_params,
        "bitmap": 4 * kept,
        "values": 6 * kept + 4 * unpruned,
        "gradients": 6 * (kept + unpruned),
        "moments": 8 * (kept + unpruned),
    }
    return _checked(kinds, state.paper_bytes)


def _checked(kinds: Mapping[str, int], total: int) -> Mapping[str, int]:
    """Return the kinds if they are known and add up to the recorded total, else the total alone."""
    is_whole = sum(kinds.values()) == total and set(kinds) <= set(KINDS)
    return kinds if is_whole else {"whole": total}
