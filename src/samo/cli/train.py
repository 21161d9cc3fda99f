"""``samo train``: a run from the settings to the report."""

import shlex
from dataclasses import fields
from pathlib import Path

import torch
from rich.console import Console

from samo.cli import Train
from samo.cli.display import Display
from samo.cli.tables import facts
from samo.config import TrainConfig, resolve
from samo.errors import RunError
from samo.report.amounts import loss, percent, plain, size
from samo.report.findings import saved
from samo.report.runs import read_run
from samo.training.folder import free_folder
from samo.training.loop import Result, resume, train

__all__ = []


def run(command: Train) -> int:
    """Train, or go on with a run."""
    console = Console()
    config = TrainConfig(
        **{entry.name: getattr(command, entry.name) for entry in fields(TrainConfig)}
    )
    display = Display(console)
    try:
        with display:
            if command.resume is not None:
                result = resume(command.resume, config=config, listeners=[display])
            else:
                resolve(config)  # so that nothing is made for settings that cannot be run
                out = command.out or free_folder(Path("runs"), config.data.train[0].stem)
                console.print(f"run folder: {out}", highlight=False, markup=False, soft_wrap=True)
                result = train(config, out, listeners=[display])
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise RunError(
            f"out of memory: {str(error).partition('. ')[0]}; lower --batch-size and raise "
            "--accumulate by as much, use --checkpointing, or a shorter --context"
        ) from error
    if result.signal is not None:
        saved = result.saved_step == result.step
        what = "and saved" if saved else "but NOT saved: it will go on from an older checkpoint"
        console.print(
            f"interrupted at step {result.step:,}, {what}. To go on:\n"
            f"  samo train --resume {shlex.quote(str(result.folder))}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
        return 128 + result.signal
    summarise(console, result)
    return 0


def summarise(console: Console, result: Result) -> None:
    """Say what came out, and where it lies."""
    from samo.report.page import write_report  # it loads matplotlib, for the end of the run alone

    try:
        page = str(write_report([result.folder], result.folder / "report.html"))
    except RunError as error:
        page = f"none: {error}"
    run = read_run(result.folder)
    less = saved(run)
    rows = {"validation loss": loss(result.valid_loss)}
    if run.state is not None:
        against = f", {percent(less)} less than dense training" if less and less > 0 else ""
        rows["model state"] = f"{size(run.state.measured_bytes)}{against}"
    rows["checkpoints"] = str(result.folder / "checkpoints")
    rows["report"] = page
    console.print()
    console.print(facts(rows))
    if result.sample:
        console.print("\nthe model writes:\n", highlight=False)
        console.print(plain(result.sample), markup=False, highlight=False, soft_wrap=True)
