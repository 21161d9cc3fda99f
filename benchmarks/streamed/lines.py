"""What is measured of streamed and of compiled weights, and what it should come to."""

from dataclasses import replace
from typing import Final, NamedTuple

from samo.bench.settings import StepConfig

__all__ = ["LINES", "Goal", "Line"]


class Goal(NamedTuple):
    """The most that a contender should take, over masked dense training in the same mode."""

    step: float
    peak: float | None = None


class Line(NamedTuple):
    """A call of ``benchmarks.step``."""

    title: str
    config: StepConfig
    goals: dict[str, Goal]


_THREE: Final = ("masked,samo,streamed",)
_BOTH: Final = ("samo", "streamed")

# Five rounds of five steps: where the host is the limit, one run says little.
_SMALL_BATCH: Final = StepConfig(
    shape="gpt3-2.7b", batch_size=2, only=_THREE, repeats=25, rounds=5, compile="blocks"
)
_350M: Final = StepConfig(
    shape="gpt3-350m", batch_size=4, only=_THREE, repeats=25, rounds=5, compile="blocks"
)
_HOST_BOUND: Final = {"samo": Goal(1.05), "streamed": Goal(1.15)}
_REPLAYED: Final = dict.fromkeys(_BOTH, Goal(1.0))

LINES: Final[dict[str, Line]] = {
    "eager": Line(
        "2.7B, 8 x 1,024, eager",
        StepConfig(shape="gpt3-2.7b", only=_THREE, repeats=9),
        {"streamed": Goal(0.96, 0.18)},
    ),
    "graphs-125m": Line(
        "125M, 8 x 1,024, whole model with CUDA graphs",
        StepConfig(
            shape="gpt3-125m", only=_THREE, repeats=15, compile="graphs", checkpointed=False
        ),
        dict.fromkeys(_BOTH, Goal(0.95)),
    ),
    "blocks": Line(
        "2.7B, 8 x 1,024, compiled blocks",
        StepConfig(shape="gpt3-2.7b", only=_THREE, repeats=9, compile="blocks"),
        dict.fromkeys(_BOTH, Goal(0.95)),
    ),
    "blocks-small": Line("2.7B, 2 x 1,024, compiled blocks", _SMALL_BATCH, _HOST_BOUND),
    "blocks-350m": Line("350M, 4 x 1,024, compiled blocks", _350M, _HOST_BOUND),
    "graphs-small": Line(
        "2.7B, 2 x 1,024, whole model with CUDA graphs",
        replace(_SMALL_BATCH, compile="graphs", rounds=1),
        _REPLAYED,
    ),
    "graphs-350m": Line(
        "350M, 4 x 1,024, whole model with CUDA graphs",
        replace(_350M, compile="graphs", rounds=1),
        _REPLAYED,
    ),
    "13b": Line(
        "13B, 8 x 1,024, eager",
        StepConfig(shape="gpt3-13b", only=("streamed",), repeats=3),
        {},
    ),
    "frontier": Line(
        "2.7B, 8 x 1,024, eager, one at a time",
        StepConfig(
            shape="gpt3-2.7b",
            only=(
                "masked,autocast,samo,lean,streamed,streamed-lean,flashoptim,flashoptim-release",
                "budget-25%,budget-50%,budget-75%,budget-25%-lean,budget-50%-lean,budget-75%-lean",
            ),
            repeats=6,
            rounds=1,
        ),
        {},
    ),
}
