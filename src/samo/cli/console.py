"""Lines and tables that several commands print."""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from samo.errors import RunError, first_words
from samo.mask.masks import Masks
from samo.report.runs import Run
from samo.utils.environment import is_out_of_memory
from samo.utils.formatting import count, duration, percent, plain, shortened

_SECONDS_BETWEEN_LINES: Final = 5.0
_NUMBER: Final = re.compile(r"\.\d+(?=\.)")


class PatientConsole(Console):
    """A console that goes quiet when its pipe is closed, as in ``samo train notes.txt | head``.

    rich would exit the process.
    """

    def on_broken_pipe(self) -> None:
        """Print nothing any more, also when the process exits and flushes its buffers."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


@contextmanager
def out_of_memory(advice: str) -> Iterator[None]:
    """Turn the errors of a full memory into one that says what to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(f"out of memory: {first_words(error)}; {advice}") from error


@contextmanager
def steps_done(console: Console, what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many of how many are done: a bar, or lines in a file."""
    started = line_at = time.monotonic()
    bar = Progress(
        TextColumn(what),
        BarColumn(bar_width=24),
        TextColumn(unit + " {task.completed}/{task.total}"),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not console.is_terminal,
    )

    def show(done: int, total: int) -> None:
        nonlocal line_at
        if not bar.task_ids:
            bar.add_task("", total=total)
        bar.update(bar.task_ids[0], completed=done)
        now = time.monotonic()
        if not console.is_terminal and now - line_at >= _SECONDS_BETWEEN_LINES:
            line_at = now
            left = (now - started) / done * (total - done)
            say(console, f"{unit} {done}/{total}  left {duration(left)}")

    with bar:
        yield show


def say(console: Console, text: str) -> None:
    """Print text as it is: no colours, no markup such as [b], no line breaks added."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def facts(rows: Mapping[str, object]) -> Table:
    """Return a table of names and values, without lines."""
    table = Table(box=None, show_header=False, padding=(0, 3, 0, 0), pad_edge=False)
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


class Pruned(Protocol):
    """A pruned tensor: its mask, or what a file says of it."""

    @property
    def kept(self) -> int | None: ...
    @property
    def numel(self) -> int: ...
    @property
    def sparsity(self) -> float: ...


def kind_of(name: str) -> str:
    """Return the name of a weight without the number of its layer, and without ``.weight``."""
    return _NUMBER.sub(".*", name).removesuffix(".weight")


def layer_of(name: str) -> str:
    """Return the layer of a weight, such as ``model.layers.3``."""
    number = _NUMBER.search(name)
    return name[: number.end()] if number else name.removesuffix(".weight")


def group_table(
    title: str, tensors: Iterable[tuple[str, Pruned]], key: Callable[[str], str]
) -> Table:
    """Return a table of pruned tensors with a row for each group, layers in their order.

    Layers that are alike share a row.
    """
    groups: dict[str, list[Pruned]] = {}
    for name, tensor in tensors:
        groups.setdefault(key(name), []).append(tensor)
    rows: list[tuple[list[str], tuple[str, ...]]] = []  # names that have the same cells
    for name in sorted(groups, key=_natural):
        group = groups[name]
        ends = [percent(end(t.sparsity for t in group)) for end in (min, max)]
        whole = percent(1 - _kept(group) / max(sum(t.numel for t in group), 1))
        spread = whole if ends[0] == ends[1] else f"{whole} ({ends[0]} to {ends[1]})"
        cells = *_counts(group), spread
        if rows and rows[-1][1] == cells and _stem(rows[-1][0][0]) == _stem(name) != name:
            rows[-1][0].append(name)
        else:
            rows.append(([name], cells))
    table = columns(title, "tensors", "kept", "of", "sparsity")
    for names, shared in rows:
        last = names[-1].removeprefix(_stem(names[0]))
        label = f"{names[0]}-{last}, each" if len(names) > 1 else names[0]
        table.add_row(Text(plain(label)), *shared)
    return table


def _stem(name: str) -> str:
    """Return a name without the number at its end."""
    return name.rstrip("0123456789")


def mask_table(masks: Masks) -> Table:
    """Return a table of masks, with a row for each kind of weight and a total."""
    table = group_table("weight", masks.items(), kind_of)
    table.add_section()
    table.add_row("all", *_counts([*masks.values()]), percent(masks.sparsity))
    return table


def _kept(group: Sequence[Pruned]) -> int:
    return sum(tensor.kept or 0 for tensor in group)


def _counts(group: Sequence[Pruned]) -> tuple[str, str, str]:
    return count(len(group)), count(_kept(group)), count(sum(tensor.numel for tensor in group))


def _natural(name: str) -> list[str | int]:
    """Return what sorts names with numbers as people do: layers.2 before layers.10."""
    parts: list[str | int] = [*re.split(r"(\d+)", name)]
    parts[1::2] = [int(str(digits)[:20]) for digits in parts[1::2]]  # a stranger's may be long
    return parts


def show_sample(console: Console, run: Run) -> None:
    """Print the text that a model generated, if it did, and its prompt."""
    if run.sample is not None:
        say(console, f'\nThe model continues "{shortened(run.sample.prompt, 60)}":\n')
        say(console, plain(run.sample.text))
