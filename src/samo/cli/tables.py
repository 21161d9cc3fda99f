"""Tables that several commands print."""

from collections.abc import Iterable, Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from samo.mask.masks import Masks
from samo.utils.formatting import count, percent, plain

__all__ = []


def facts(rows: Mapping[str, object]) -> Table:
    """Return names and what they are, without lines around."""
    table = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(plain(str(value))))  # a Text: brackets in a path are no markup
    return table


def mask_table(masks: Masks) -> Table:
    """Return the masks, a line for each tensor and one for all."""
    table = columns("weight", "shape", "kept", "of", "sparsity")
    for name, mask in masks.items():
        shape = " x ".join(map(str, mask.shape))
        table.add_row(
            Text(name), shape, count(mask.kept), count(mask.numel), percent(mask.sparsity)
        )
    table.add_section()
    tensors = f"{len(masks)} tensors"
    table.add_row("all", tensors, count(masks.kept), count(masks.numel), percent(masks.sparsity))
    return table


def columns(first: str, *others: str) -> Table:
    """Return an empty table: names on the left, numbers on the right."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold")
    for title in others:
        table.add_column(title, justify="right")
    return table


def mask_records(masks: Masks) -> list[dict[str, object]]:
    """Return the same for machines."""
    return [_record(name, mask.shape, mask.kept, mask.numel) for name, mask in masks.items()]


def _record(name: str, shape: Iterable[int], kept: int, numel: int) -> dict[str, object]:
    return {"name": name, "shape": list(shape), "kept": kept, "numel": numel}
