"""Clock, machine and result rows, shared by all benchmarks."""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samo.bench.rows import Table, environment, markdown
from samo.bench.timing import in_turns, spread
from samo.utils import atomic_io

__all__ = [
    "Row",
    "arguments",
    "held_bytes",
    "in_turns",
    "is_installed",
    "read_lines",
    "show",
    "spread",
    "time_ms",
    "write_lines",
    "write_rows",
]

Row = dict[str, Any]


def time_ms(run: Callable[[], object]) -> float:
    """Run once and return the milliseconds it took."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def is_installed(peer: str) -> bool:
    """Return whether a peer is there; if not, say that it is left out."""
    try:
        is_there = importlib.util.find_spec(peer) is not None
    except ValueError:  # it was set to None in sys.modules, to be left out
        is_there = False
    if not is_there:
        print(f"{peer} is not installed; left out")
    return is_there


def held_bytes(*values: Any) -> int:
    """Sum the storages of all tensors inside of models, optimizers and containers, each once.

    Example:
        >>> layer = nn.Linear(10, 10, bias=False)
        >>> layer(torch.ones(1, 10)).sum().backward()
        >>> held_bytes(layer)
        800
    """
    storages = [tensor.untyped_storage() for tensor in _tensors(values)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors inside of a value; of tensor subclasses and other objects, their attributes."""
    inside: Iterable[Any] = ()
    if isinstance(value, nn.Module):
        params = list(value.parameters())
        inside = [*params, *(param.grad for param in params), *value.buffers()]
    elif isinstance(value, torch.optim.Optimizer):
        inside = value.state.values()
    elif isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            inside = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
        else:
            yield value
    elif isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    else:
        attributes = getattr(value, "__dict__", {}).values()
        inside = [entry for entry in attributes if isinstance(entry, Tensor)]
    for entry in inside:
        yield from _tensors(entry)


def write_rows(path: Path | None, rows: Iterable[Row]) -> None:
    """Write rows, each with machine, versions, date and commit; nothing without a path."""
    if path is not None:
        about = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        write_lines(path, [row | about for row in rows])


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object a line, in place of the file there was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_io.write_bytes(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def read_lines(path: Path) -> list[Row]:
    """Return what `write_lines` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def show(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Print rows as a Markdown table."""
    lines = [tuple(_cell(row.get(column, "")) for column in columns) for row in rows]
    print(markdown(Table(tuple(columns), lines)))


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="file for the raw rows, JSON lines")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, only to see that it runs")
    return parser


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"
