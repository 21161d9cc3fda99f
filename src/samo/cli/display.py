"""The progress of a run: a live bar in a terminal, plain lines anywhere else."""

import time
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from samo.train import events
from samo.train.events import Event
from samo.utils.formatting import duration, size

__all__ = []

_SECONDS_BETWEEN_LINES: Final = 5.0


class Display:
    """Shows the events of one run after the other; a context manager.

    Args:
        console: Where to print.
        title: Printed before the bar and the lines, if there are several runs.
    """

    def __init__(self, console: Console, title: str = "") -> None:
        self.title = title
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._numbers = ""
        self._state = ""
        self._where = ""
        self._masks = ""
        self._changed_at = self._change_every = 0
        self._phase = ""
        self._steps = 0
        self._began = (0, 0.0)
        self._line_at = 0.0
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(compact=True),
                console=console,
            )

    def __enter__(self) -> "Display":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def on(self, event: Event) -> None:
        """Show an event."""
        match event:
            case events.Started():
                self._start(event)
            case events.Ticked():
                if self._progress is not None and self._task is not None:
                    self._progress.update(self._task, completed=event.step)
            case events.Stepped():
                self._step(event)
            case events.Compiling():
                self._compile(event)
            case events.Compiled():
                self._say(event.step, f"blocks were compiled in {event.seconds:,.1f} s")
            case events.Evaluated():
                self._say(
                    event.step,
                    f"validation loss {event.valid_loss:.3f}, perplexity {event.perplexity:,.2f}",
                )
            case events.Observed() if event.largest is not None:
                self._masks = f"masks differ by {event.largest:.3f}  "
            case events.Pruned():
                self._masks, self._state = "", ""  # its size is known after the next step
                self._changed_at, self._change_every = event.step, 0
                self._say(event.step, _pruned(event))
            case events.Remapped():
                self._masks = f"{event.sparsity:.1%} pruned  "
                if event.grown:
                    self._masks = f"{event.replaced:.1%} replaced  "
                    self._change_every = event.step - self._changed_at
                    self._changed_at = event.step
            case events.Accounted():
                self._state = f"state {size(event.rank_bytes[0])}{_streamed(event.weights)} of "
                self._where = " on the first rank" if len(event.rank_bytes) > 1 else ""
            case events.NotSaved():
                self._say(event.step, f"NOT SAVED: {event.reason}")

    def _start(self, event: events.Started) -> None:
        self._steps = event.steps
        self._began = (event.step, time.monotonic())
        self._state = self._where = self._masks = ""  # of the run before
        self._changed_at, self._change_every = event.step, 0
        self._line_at = 0.0
        if isinstance(event, events.Resumed):
            is_over = event.step >= event.steps
            self._say(
                event.step, "the run is complete; extend it with --steps" if is_over else "resumed"
            )
        if self._progress is not None:
            self._task = self._progress.add_task(
                self.title or "train", total=event.steps, completed=event.step, numbers=""
            )

    def _compile(self, event: events.Compiling) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=f"{self.title} compiling".strip())
        else:
            self._say(event.step, "compiling blocks: the next step takes longer than others")

    def _step(self, event: events.Stepped) -> None:
        speed = f"{event.tokens_per_s:,.0f} tokens/s"
        if self._change_every and event.step > self._changed_at + self._change_every:
            self._masks, self._change_every = "", 0  # the last change was the last of all
        self._numbers = (
            f"loss {event.loss:.3f}  {self._masks}{speed}  "
            f"{self._state}{size(event.memory_bytes)} in all{self._where}"
        )
        if self._progress is not None and self._task is not None:
            is_same = self.title == event.phase
            description = self.title if is_same else f"{self.title} {event.phase}".strip()
            self._progress.update(self._task, description=description, numbers=self._numbers)
            return
        now = time.monotonic()
        if event.step < self._steps and now - self._line_at < _SECONDS_BETWEEN_LINES:
            return
        self._line_at = now
        first, began = self._began
        left = (now - began) / max(event.step - first, 1) * (self._steps - event.step)
        self._say(event.step, f"{event.phase:<6}  {self._numbers}  left {duration(left)}")

    def _say(self, step: int, what: str) -> None:
        title = f"{self.title}  " if self.title else ""
        width = len(f"{self._steps:,}")
        self._console.print(
            f"{title}step {step:>{width},}/{self._steps:,}  {what}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _pruned(event: events.Pruned) -> str:
    """Return the line of the draw: what is kept, and with early-bird why now."""
    text = f"pruned {event.sparsity:.1%}: {event.kept:,} of {event.numel:,} weights kept"
    if event.sparsity == 0:
        text = f"compressed; {event.numel:,} weights are pruned from here on, step by step"
    if event.threshold is None:
        return text
    how = "masks have settled" if event.reason == "settled" else "limit reached, masks not settled"
    distances = ", ".join(f"{distance:.3f}" for distance in event.distances)
    return f"{text}; {how}: distances {distances}, threshold {event.threshold}"


def _streamed(weights: str | int | None) -> str:
    """Return a note about dense weights that are streamed."""
    if weights in (None, "resident"):
        return ""
    but = "" if isinstance(weights, str) else f" but for {size(weights)}"
    return f" (weights streamed{but})"
