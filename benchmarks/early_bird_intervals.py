"""When do tickets settle, by the interval of looks and the threshold? Numbers of docs/masks.md.

    python -m benchmarks.early_bird_intervals
    python -m benchmarks.early_bird_intervals --steps 300 --every 1

``samo train --method early-bird`` with the defaults of shape tiny on text of this Python's library,
but with a threshold of 0, so that no ticket settles and every fifth step (``--every``) is looked at
to the end, and a queue of all looks, so that the distances between all masks are in its metrics.
From them follows for each interval and threshold the step at which five masks in a row would have
settled, and how many of the weights kept then are not kept at the last look.
"""

import argparse
import json
import tempfile
from pathlib import Path

from samo.data.standard_library import write_library_text
from samo.train.config import DataConfig, OptimConfig, PruneConfig, RunConfig, TrainConfig
from samo.train.rules import first_observation
from samo.train.trainer import train

QUEUE = 5
INTERVALS = (1, 2, 5)
"""In looks."""
THRESHOLDS = (0.1, 0.15, 0.2)


def main() -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps, rows = observe(
            Path(folder), arguments.steps, arguments.batch_size, every=arguments.every
        )
    print(f"| looks every | {' | '.join(f'threshold {t}' for t in THRESHOLDS)} |")
    print(f"| --- |{' --- |' * len(THRESHOLDS)}")
    for interval in INTERVALS:
        cells = [describe(steps, rows, interval, threshold) for threshold in THRESHOLDS]
        print(f"| {interval * arguments.every} steps | {' | '.join(cells)} |")


def observe(
    folder: Path, steps: int, batch_size: int, *, every: int
) -> tuple[list[int], list[list[float]]]:
    """Train, and return the steps of all looks, and the distances of each to those before it."""
    training, validation = write_library_text(folder / "text")
    warmup = steps // 20
    config = TrainConfig(
        data=DataConfig(train=(training,), valid=(validation,)),
        prune=PruneConfig(
            method="early-bird",
            threshold=0.0,
            queue=1 + (steps - 1 - first_observation(every, warmup)) // every,
            mask_every=every,
            dense_steps=steps - 1,
        ),
        optim=OptimConfig(warmup_steps=warmup),
        run=RunConfig(steps=steps, batch_size=batch_size, eval_every=steps, sample_tokens=0),
    )
    train(config, folder / "run")
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    looks = [line for line in map(json.loads, lines) if line["event"] == "observe"]
    return [look["step"] for look in looks], [look["distances"] for look in looks]


def describe(steps: list[int], rows: list[list[float]], interval: int, threshold: float) -> str:
    """Return when masks settle, and the share of the ticket that is not kept at the last look."""
    for place in range((QUEUE - 1) * interval, len(rows), interval):
        recent = rows[place][place - (QUEUE - 1) * interval : place : interval]
        if max(recent) <= threshold:
            later = rows[-1][place] if place < len(rows) - 1 else 0.0
            return f"{steps[place]:,}, {later:.0%}"
    return "never"


if __name__ == "__main__":
    main()
