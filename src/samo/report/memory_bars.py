"""The bars of the memory figure: dense training, the formula of the SAMO paper, and each run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from samo.memory.predict import KINDS
from samo.report.runs import Run
from samo.train.events import Accounted

__all__ = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar of the memory figure."""

    label: str
    kinds: Mapping[str, int]
    """Bytes by kind; "whole" where only their sum is known."""
    num_params: int
    place: int | None = None
    """The place of the run that measured it; None for arithmetic."""

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.kinds.values())


def bars(runs: Sequence[Run]) -> list[Bar]:
    """Return the baselines, then each run.

    Baselines that several runs share are shown once, and a prediction only where it differs from
    the measurement.
    """
    stated = [(run, run.state) for run in runs if run.state]
    found = [
        *_baseline("dense training", stated, dense_kinds),
        *_baseline("SAMO paper", stated, paper_kinds),
    ]
    for run, state in stated:
        name, number = holder(run, len(stated)), state.num_params
        if state.predicted_bytes != state.measured_bytes:
            kinds = _checked(state.predicted, state.predicted_bytes)
            found.append(Bar(label=f"{name}, predicted", kinds=kinds, num_params=number))
        kinds = _checked(state.measured, state.measured_bytes)
        label = f"{name}, measured"
        found.append(Bar(label=label, kinds=kinds, num_params=number, place=run.place))
    return found


def _baseline(
    label: str,
    stated: Sequence[tuple[Run, Accounted]],
    kinds_of: Callable[[Run, Accounted], Mapping[str, int]],
) -> list[Bar]:
    different: dict[int, Bar] = {}
    for run, state in stated:
        kinds = kinds_of(run, state)
        bar = Bar(label=f"{label}, {run.label}", kinds=kinds, num_params=state.num_params)
        if bar.total:
            different.setdefault(bar.total, bar)
    if len(different) == 1:
        return [
            Bar(label=label, kinds=b.kinds, num_params=b.num_params) for b in different.values()
        ]
    return list(different.values())


def holder(run: Run, num_stated: int) -> str:
    """Name what holds the state: samo, if it is the only run with an account and compressed."""
    is_compressed = run.mode == "samo" and run.prune is not None
    return "samo" if is_compressed and num_stated == 1 else run.label


def dense_kinds(run: Run, state: Accounted) -> Mapping[str, int]:
    """Split the bytes of dense training with Adam by kind."""
    sizes = {"dense": 4, "gradients": 4, "moments": 8}
    if run.dtype in ("bfloat16", "float16"):  # fp32 master weights, gradients in both types
        sizes = {"dense": 2, "values": 4, "gradients": 2 + 4, "moments": 8}
    kinds = {kind: size * state.num_params for kind, size in sizes.items()}
    return _checked(kinds, state.dense_bytes)


def paper_kinds(run: Run, state: Accounted) -> Mapping[str, int]:
    """Split the paper's 2 + 24f bytes by kind.

    Each kept weight has an index of 4 bytes, gradients of 2 + 4, an fp32 master of 4 and its 16-bit
    copy of 2, and moments of 8. Unpruned tensors are trained densely: weights 2, gradients 2 + 4,
    master 4, moments 8.
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
