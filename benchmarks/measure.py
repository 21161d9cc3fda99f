"""Clock, machine and result rows, shared by all benchmarks."""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import samo
from samo.bench.rows import commit
from samo.bench.timing import in_turns, spread
from samo.utils.environment import hardware

__all__ = [
    "Row",
    "arguments",
    "environment",
    "held_bytes",
    "in_turns",
    "is_installed",
    "keep_freed_memory",
    "show",
    "spread",
    "time_ms",
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


def keep_freed_memory() -> None:
    """Restart with glibc set to keep freed memory, as a GPU's allocator does.

    By default it is returned to the system at the end of a step and fetched back, page by page, in
    the next one, by some contenders more than by others.
    """
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        large = str(2**32)
        settings = {"MALLOC_TRIM_THRESHOLD_": large, "MALLOC_MMAP_THRESHOLD_": large}
        os.execve(sys.executable, sys.orig_argv, os.environ | settings)


def environment() -> Row:
    """Describe machine, versions and commit."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": hardware(torch.device("cpu"))["device_name"],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "malloc": {k: v for k, v in os.environ.items() if k.startswith(("MALLOC_", "LD_PRELOAD"))},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "samo": samo.__version__,
        "commit": commit(),
    }


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
    """Write one JSON object a line, each with the environment."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for row in rows:
            file.write(json.dumps(row | environment()) + "\n")


def show(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Print rows as a Markdown table."""
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="file for the raw rows, JSON lines")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, only to see that it runs")
    return parser


def _cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 10
        else (f"{value:.1f}" if isinstance(value, float) else str(value))
    )
