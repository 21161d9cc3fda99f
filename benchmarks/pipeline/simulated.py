"""Orders and limits against 1f1b in the simulator, and a picture of three timelines.

Everything is seeded: the same table on every machine.
"""

import functools
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Row, arguments, show, write_rows
from benchmarks.pipeline.picture import draw
from samo.pipeline.engine import Action, Engine
from samo.pipeline.timeline import Pass
from samo.planner.simulator import Duration, simulate

STAGES: Final = 4
SEEDS: Final = 40


class BackwardFirst(Engine):
    """Takes every backward pass that is possible before any forward pass."""

    def next(self) -> Action:
        """Decide, as if the last pass had not been a backward pass."""
        self._was_backward = False
        return super().next()


class OneForwardOneBackward(Engine):
    """Goes forward up to its limit, then in turns, and waits if the next message is late."""

    def next(self) -> Action:
        """Decide: the next pass of the order, if its message is there."""
        (one,) = self.stages.values()
        if one.backwards == one.num_micro_batches:
            return Action("step")
        is_full = one.forwards - one.backwards == one.in_flight
        if is_full or one.forwards == one.num_micro_batches:
            return one.backward() if one.can_go_backward else Action("receive")
        return one.forward() if one.can_go_forward else Action("receive")


ONE_F_ONE_B: Final[dict[str, Any]] = {"engine": OneForwardOneBackward, "in_flight": [4, 3, 2, 1]}
CONTENDERS: Final[dict[str, dict[str, Any]]] = {
    "backward first, 4": {"engine": BackwardFirst},
    "alternate, 4": {},
    "alternate, 4 3 2 1": {"in_flight": [4, 3, 2, 1]},
    "alternate, 5": {"in_flight": 5},
    "alternate, 6": {"in_flight": 6},
    "1f1b, 5": {**ONE_F_ONE_B, "in_flight": [5, 4, 3, 2]},
}
Factor = Callable[[random.Random], float]


def log_normal(sigma: float, draw_: random.Random) -> float:
    """Draw a factor of mean 1."""
    return draw_.lognormvariate(-(sigma**2) / 2, sigma)


CASES: Final[dict[str, Factor]] = {
    "nothing": lambda draw_: 1.0,
    "+-50 %, uniform": lambda draw_: draw_.uniform(0.5, 1.5),
    "+-80 %, uniform": lambda draw_: draw_.uniform(0.2, 1.8),
    "log-normal, 0.5": functools.partial(log_normal, 0.5),
    "log-normal, 0.8": functools.partial(log_normal, 0.8),
    "log-normal, 1.2": functools.partial(log_normal, 1.2),
    "one in ten takes 5 times as long": lambda draw_: 5.0 if draw_.random() < 0.1 else 1.0,
}


def durations(seed: int, factor: Factor) -> Duration:
    """Return times of passes that depend on the place alone, so that all contenders have the same."""

    @functools.cache
    def duration(stage: int, what: Pass, micro_batch: int) -> float:
        draw_ = random.Random(f"{seed} {stage} {what} {micro_batch}")
        return (1.0 if what == "forward" else 2.0) * factor(draw_)

    return duration


def run(*, seeds: int, micro_batches: int) -> list[Row]:
    """Return a row for each case."""
    rows = []
    for case, factor in CASES.items():
        ratios: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for seed in range(seeds):
            times = durations(seed, factor)
            base = simulate(STAGES, micro_batches, duration=times, **ONE_F_ONE_B).span
            for name, settings in CONTENDERS.items():
                span = simulate(STAGES, micro_batches, duration=times, **settings).span
                ratios[name].append(span / base)
        medians = {name: round(statistics.median(values), 3) for name, values in ratios.items()}
        rows.append({"passes vary by": case, **medians, "seeds": seeds})
    return rows


def picture() -> bytes:
    """Draw 1f1b and two limits, for passes of log-normal times."""
    simulated = functools.partial(
        simulate, STAGES, 8, duration=durations(0, functools.partial(log_normal, 0.6))
    )
    return draw(
        {
            "1f1b": simulated(**ONE_F_ONE_B),
            "message-driven, 4 in flight": simulated(),
            "message-driven, 5 in flight": simulated(in_flight=5),
        }
    )


def main() -> None:
    """Print the table and write the picture."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=SEEDS, help="seeds of each case")
    parser.add_argument("--picture", type=Path, help="file for the picture, PNG")
    options = parser.parse_args()
    rows = run(seeds=options.rounds, micro_batches=4 if options.toy else 16)
    show(rows, ["passes vary by", *CONTENDERS])
    write_rows(options.out, rows)
    if options.picture is not None:
        options.picture.write_bytes(picture())


if __name__ == "__main__":
    main()
