"""The progress of a run: a live bar in a terminal, plain lines anywhere else."""

import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from samo.cli.console import say
from samo.report.runs import read_run
from samo.train import events
from samo.train.events import Event
from samo.utils.formatting import counted, duration, loss, percent, perplexity, size

_SECONDS_BETWEEN_LINES: Final = 5.0


class Display:
    """Shows the events of one run after the other; a context manager."""

    def __init__(self, console: Console) -> None:
        self.title = ""  # before the bar and the lines, if there are several runs
        self.folder: Path | None = None  # printed when the run starts
        self._console = console
        self._state = self._masks = self._of = ""
        self._steps = 0
        self._line_at = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def on(self, event: Event) -> None:
        """Show an event."""
        match event:
            case events.Started():
                self._start(event)
            case events.Ticked():
                self._update(completed=event.step)
            case events.Stepped():
                self._step(event)
            case events.Opened():
                size_of = f"{event.tokens:,} tokens in {counted(event.sequences, 'sequence')}"
                say(self._console, f"data: {size_of}; {event.valid_tokens:,} tokens held out")
            case events.Chosen():
                say(self._console, f"memory: {event.reason}")
            case events.Compiling():
                self._say(event.step, "compiling: the next step takes longer")
            case events.Evaluated():
                found = loss(event.valid_loss), perplexity(event.valid_loss)
                self._say(event.step, "validation loss {}, perplexity {}".format(*found))
            case events.Observed() if event.largest is not None:
                self._masks = f"masks differ by {event.largest:.3f}  "
            case events.Pruned():
                self._masks, self._state = "", ""  # its size is known after the next step
                self._say(event.step, _pruned(event))
            case events.Remapped():
                self._masks = f"{percent(event.sparsity)} pruned  "
            case events.Accounted():
                which = "rank 0: " if len(event.rank_bytes) > 1 else ""
                self._state = f"  {which}state {size(event.rank_bytes[0])}"

    def _start(self, event: events.Started) -> None:
        run = None if self.folder is None else read_run(self.folder, last_bytes=2**20)
        if run is not None:
            say(self._console, f"run folder: {self.folder}")
            self._of = " (text and teacher)" if run.has_teacher else ""
        self._steps = event.steps
        self._state = self._masks = ""  # of the run before
        self._line_at = 0.0
        if run is not None and run.state is not None:
            self.on(run.state)  # as before the run was interrupted
        if isinstance(event, events.Resumed):
            self._say(event.step, "resumed")
        name = self.title or "train"
        self._progress.add_task(name, total=event.steps, completed=event.step, numbers="")

    def _step(self, event: events.Stepped) -> None:
        found = f"loss {loss(event.loss)}{self._of}"
        numbers = f"{found}  {self._masks}{event.tokens_per_s:,.0f} tokens/s{self._state}"
        title = "" if self.title == event.phase else self.title
        description = f"{title} {event.phase}".strip()
        self._update(description=description, completed=event.step, numbers=numbers)
        now = time.monotonic()
        is_due = event.step >= self._steps or now - self._line_at >= _SECONDS_BETWEEN_LINES
        if is_due and not self._console.is_terminal:
            self._line_at = now
            left = duration(self._progress.tasks[-1].time_remaining)
            self._say(event.step, f"{event.phase:<6}  {numbers}  left {left}")

    def _update(self, **changes: object) -> None:
        self._progress.update(self._progress.task_ids[-1], **changes)  # type: ignore[arg-type]

    def _say(self, step: int, what: str) -> None:
        title = f"{self.title}  " if self.title else ""
        width = len(f"{self._steps:,}")
        say(self._console, f"{title}step {step:>{width},}/{self._steps:,}  {what}")


def _pruned(event: events.Pruned) -> str:
    """Return the line about pruning: what is kept, and with early-bird why now."""
    if event.sparsity == 0:
        return f"compressed; {event.numel:,} weights will be pruned step by step"
    why = {"settled": "masks have settled: ", "limit": "limit reached, masks not settled: "}
    kept = f"{event.kept:,} of {event.numel:,} weights kept"
    return f"{why.get(event.reason, '')}pruned {percent(event.sparsity)}: {kept}"
