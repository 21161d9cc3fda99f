"""``samo train``: a run from the settings to the report."""

import json
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

import torch
from rich.console import Console

from samo.cli import Train
from samo.cli.display import Display
from samo.cli.tables import facts
from samo.errors import RunError, SamoError
from samo.report.findings import held, ranks as mesh_of
from samo.report.runs import read_run
from samo.train.config import TrainConfig
from samo.train.events import Event, Listener, Resumed, Started
from samo.train.folder import RunFolder, free_folder
from samo.train.launches import is_first_rank, is_restarted, num_ranks, restarted_folder
from samo.train.loop import Result, resume, train
from samo.train.ranks import Ranks
from samo.train.starting import on_this_machine
from samo.train.typed import go_on_line
from samo.utils.formatting import loss, plain

__all__ = []


def run(command: Train) -> int:
    """Train, or go on with a run."""
    console = Console()
    config = TrainConfig(
        **{entry.name: getattr(command, entry.name) for entry in fields(TrainConfig)}
    )
    display = Display(console)
    try:
        with display if is_first_rank() else nullcontext():
            result = _train(command, config, console, display)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, SamoError):
            raise
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            if num_ranks() == 1:
                raise
            # A backend's own error, such as that of a torch schedule whose neighbour is gone.
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RunError(
                f"stopped by {type(error).__name__}: {said}; look at what the other ranks say, and go on "
                "with --resume"
            ) from error
        raise RunError(
            f"out of memory: {str(error).partition('. ')[0]}; lower --batch-size and raise "
            "--accumulate by as much, use --checkpointing, or a shorter --context"
        ) from error
    if not is_first_rank():
        return 0 if result.signal is None else 128 + result.signal
    if result.signal is not None:
        saved = result.saved_step == result.step
        what = "and saved" if saved else "but NOT saved: it will go on from an older checkpoint"
        console.print(
            f"interrupted at step {result.step:,}, {what}. To go on:\n"
            f"  {go_on_line(result.folder)}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
        return 128 + result.signal
    summarise(console, result)
    return 0


def _train(command: Train, config: TrainConfig, console: Console, display: Display) -> Result:
    listeners: list[Listener] = [display] if is_first_rank() else []
    if command.resume is not None:
        path = command.resume
        if is_first_rank():
            listeners.insert(0, Headline(console, RunFolder.find(path).path, is_new=False))
        if is_restarted():  # the checkpoint it was first told to go on from is the oldest by now
            path = RunFolder.find(path).path
        return resume(path, config=config, listeners=listeners)
    config = on_this_machine(config)  # so that nothing is made for settings that cannot be run
    ranks = Ranks.join(config.mesh, config.run.device)
    name, runs = config.data.train[0].stem, Path("runs")
    before = restarted_folder(command.out, runs, name) if is_restarted() else None
    out = command.out or before or free_folder(runs, name)
    text = ranks.texts("the run folder", json.dumps([str(out), before is not None]))[0]
    chosen, goes_on = json.loads(text)
    if goes_on:
        recorded = RunFolder.find(Path(chosen)).config()
        config = replace(recorded, mesh=config.mesh)
        return resume(Path(chosen), config=config, listeners=listeners, ranks=ranks)
    if ranks.is_first:
        listeners.insert(0, Headline(console, Path(chosen), is_new=True))
    return train(config, Path(chosen), listeners=listeners, ranks=ranks)


class Headline:
    """Says where a run lies and on how many ranks it goes, once nothing can refuse it any more.

    Args:
        console: Where to.
        folder: The run folder.
        is_new: Whether the run is made now, and not gone on with.
    """

    def __init__(self, console: Console, folder: Path, *, is_new: bool) -> None:
        self._console = console
        self._folder = folder
        self._is_new = is_new

    def on(self, event: Event) -> None:
        """Speak at the start."""
        if not isinstance(event, Started):
            return
        lines = [f"run folder: {self._folder}"] if self._is_new else []
        if not self._is_new and not isinstance(event, Resumed):
            lines.append("no checkpoint was written before: the run begins anew at its first step")
        if layout := mesh_of(read_run(self._folder)):
            lines.append(layout)
        for line in lines:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def summarise(console: Console, result: Result) -> None:
    """Say what came out, and where it lies."""
    from samo.report.page import write_report  # it loads matplotlib, for the end of the run alone

    try:
        page = str(write_report([result.folder], result.folder / "report.html"))
    except RunError as error:
        page = f"none: {error}"
    run = read_run(result.folder)
    rows = {"validation loss": loss(result.valid_loss)}
    if run.num_ranks > 1:
        rows["ranks"] = mesh_of(run)
    if run.state is not None:
        rows["model state"] = held(run)
    rows["checkpoints"] = str(result.folder / "checkpoints")
    rows["report"] = page
    console.print()
    console.print(facts(rows))
    if result.sample:
        console.print("\nthe model writes:\n", highlight=False)
        console.print(plain(result.sample), markup=False, highlight=False, soft_wrap=True)
