"""Lines and tables that several commands print."""

import os
import sys
from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samo.mask.masks import Masks
from samo.report.runs import Run
from samo.utils.formatting import count, percent, plain, shortened

__all__ = []


class PatientConsole(Console):
    """A console that goes quiet when its pipe is closed, as in ``samo train notes.txt | head``.

    rich would exit the process.
    """

    def on_broken_pipe(self) -> None:
        """Print nothing any more, also when the process exits and flushes its buffers."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(console: Console, text: str) -> None:
    """Print text as it is: no colours, no markup such as [b], no line breaks added."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def facts(rows: Mapping[str, object]) -> Table:
    """Return a table of names and values, without lines."""
    table = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(plain(str(value))))  # a Text: brackets in a path are not markup
    return table


def columns(first: str, *others: str) -> Table:
    """Return an empty table: names on the left, numbers on the right."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold")
    for title in others:
        table.add_column(title, justify="right")
    return table


def mask_table(masks: Masks) -> Table:
    """Return a table of masks, with a row for each tensor and a total."""
    table = columns("weight", "shape", "kept", "of", "sparsity")
    for name, mask in masks.items():
        shape = " x ".join(map(str, mask.shape))
        table.add_row(
            Text(plain(name)), shape, count(mask.kept), count(mask.numel), percent(mask.sparsity)
        )
    table.add_section()
    tensors = f"{len(masks)} tensors"
    table.add_row("all", tensors, count(masks.kept), count(masks.numel), percent(masks.sparsity))
    return table


def show_sample(console: Console, run: Run) -> None:
    """Print the text that a model generated, if it did, and its prompt."""
    if run.sample is not None:
        say(console, f'\nThe model continues "{shortened(run.sample.prompt, 60)}":\n')
        say(console, plain(run.sample.text))
