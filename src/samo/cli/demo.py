"""``samo demo``: all of samo on a laptop, on text that every machine has.

Two runs on the source code of Python's standard library, equal until one is pruned: with samo, and
dense throughout. All numbers are measured in these runs.
"""

import time
from pathlib import Path
from typing import Final

from rich.console import Console

from samo.cli.commands import Demo
from samo.cli.display import Display
from samo.cli.tables import columns
from samo.data.library import write_library_text
from samo.report.findings import saved, tokens_per_s
from samo.report.page import write_report
from samo.report.runs import read_run
from samo.train.config import (
    DataConfig,
    Mode,
    ModelConfig,
    OptimConfig,
    PruneConfig,
    RunConfig,
    TrainConfig,
)
from samo.train.run_dir import check_free, free_dir
from samo.train.trainer import Result, train
from samo.utils.formatting import count, duration, loss, percent, plain, size

__all__ = []

STEPS: Final = 600
DENSE_STEPS: Final = 200
TITLES: Final[dict[Mode, str]] = {"samo": "samo", "dense": "dense, not pruned"}


def run(command: Demo) -> int:
    """Train twice, and compare."""
    console = Console()
    out = command.out or free_dir(Path("runs"), "demo")
    check_free(out)
    text = write_library_text(out / "text")
    console.print(
        f"A GPT of 0.9 million parameters learns the source code of Python's standard library: "
        f"{DENSE_STEPS} steps dense, then 90 % of its weights are pruned, then {STEPS - DENSE_STEPS} "
        "more. Then once again without pruning, for comparison.\n",
        highlight=False,
    )
    began = time.monotonic()
    results: dict[Mode, Result] = {}
    with Display(console) as display:
        for mode in TITLES:
            display.title = mode
            results[mode] = train(_config(mode, *text), out / mode, listeners=[display])
            if results[mode].signal is not None:
                console.print("interrupted")
                return 128 + (results[mode].signal or 0)
    page = write_report([out / mode for mode in TITLES], out / "report.html")
    _show(console, results)
    took = duration(time.monotonic() - began)
    console.print(
        f"\nThis took {took}. The report, with curves and masks: {page}\n"
        "Now your own text: samo train notes.txt",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0


def _config(mode: Mode, training: Path, validation: Path) -> TrainConfig:
    return TrainConfig(
        data=DataConfig(train=(training,), valid=(validation,)),
        model=ModelConfig(shape="tiny"),
        prune=PruneConfig(dense_steps=0 if mode == "dense" else DENSE_STEPS),
        optim=OptimConfig(warmup_steps=30),
        run=RunConfig(
            mode=mode,
            steps=STEPS,
            batch_size=8,
            device="cpu",
            eval_every=100,
            eval_batches=10,
            save_every=STEPS,
            log_every=5,
            sample_tokens=240 if mode == "samo" else 0,
        ),
    )


def _show(console: Console, results: dict[Mode, Result]) -> None:
    console.print("\nWhere the bytes of samo's model state are, measured and predicted:\n")
    console.print(str(results["samo"].ledger), highlight=False)
    table = columns("run", "validation loss", "model state", "saved", "tokens/s")
    for mode, title in TITLES.items():
        run = read_run(results[mode].folder)
        table.add_row(
            title,
            loss(results[mode].valid_loss),
            size(run.state.measured_bytes if run.state else None),
            percent(saved(run)),
            count(tokens_per_s(run)),
        )
    console.print()
    console.print(table)
    console.print("The model that samo trained writes:\n")
    console.print(
        plain(results["samo"].sample or ""), markup=False, highlight=False, soft_wrap=True
    )
