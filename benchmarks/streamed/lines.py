"""What is measured of streamed and of compiled weights."""

from dataclasses import replace
from typing import Final, NamedTuple

from samo.bench.settings import StepConfig


class Line(NamedTuple):
    """A call of ``benchmarks.step``."""

    title: str
    config: StepConfig


_THREE: Final = ("masked,samo,streamed",)

# Many steps in turns: where the host is the limit, some are twice as slow as others.
_SMALL_BATCH: Final = StepConfig(
    shape="gpt3-2.7b", batch_size=2, only=_THREE, repeats=25, rounds=5, compile="blocks"
)
_350M: Final = StepConfig(
    shape="gpt3-350m", batch_size=4, only=_THREE, repeats=180, rounds=9, compile="blocks"
)

LINES: Final[dict[str, Line]] = {
    "eager": Line(
        "2.7B, 8 x 1,024, eager",
        StepConfig(shape="gpt3-2.7b", only=_THREE, repeats=9),
    ),
    "graphs-125m": Line(
        "125M, 8 x 1,024, whole model with CUDA graphs",
        StepConfig(
            shape="gpt3-125m", only=_THREE, repeats=15, compile="graphs", checkpointed=False
        ),
    ),
    "blocks": Line(
        "2.7B, 8 x 1,024, compiled blocks",
        StepConfig(shape="gpt3-2.7b", only=_THREE, repeats=9, compile="blocks"),
    ),
    "blocks-small": Line("2.7B, 2 x 1,024, compiled blocks", _SMALL_BATCH),
    "blocks-350m": Line("350M, 4 x 1,024, compiled blocks", _350M),
    "graphs-small": Line(
        "2.7B, 2 x 1,024, whole model with CUDA graphs",
        replace(_SMALL_BATCH, compile="graphs", rounds=1),
    ),
    "graphs-350m": Line(
        "350M, 4 x 1,024, whole model with CUDA graphs",
        replace(_350M, compile="graphs", repeats=25, rounds=1),
    ),
    "13b": Line(
        "13B, 8 x 1,024, eager",
        StepConfig(shape="gpt3-13b", only=("streamed",), repeats=3),
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
    ),
}
