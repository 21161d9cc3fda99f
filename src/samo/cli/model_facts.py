"""What ``samo inspect`` shows of a Hugging Face folder."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from samo.cli.console import columns
from samo.integrations.inspection import FolderFacts, TensorFacts
from samo.utils.formatting import count, percent, plain, size

__all__ = []

_NUMBER: Final = re.compile(r"\.\d+(?=\.)")


def records(path: Path, found: FolderFacts) -> dict[str, Any]:
    """Return everything for JSON."""
    return {
        "model": str(path),
        **{name: getattr(found, name) for name in ("kind", "model_type", "dtype", "masks")},
        **_counts(found),
        "num_bytes": found.num_bytes,
        "run_bytes": found.run_bytes(),
        "train_bytes": found.train_bytes(),
        "tensors": [
            {**tensor._asdict(), "numel": tensor.numel, "sparsity": tensor.sparsity}
            for tensor in found.tensors
        ],
    }


def rows(path: Path, found: FolderFacts) -> dict[str, str]:
    """Return what is shown above the tables."""
    counts = _counts(found)
    shown = {
        "model": str(path),
        "kind": ", ".join(filter(None, [found.kind, found.model_type, found.dtype])),
        "parameters": count(counts["num_params"]),
    }
    if found.pruned:
        kept, pruned = counts["kept"], counts["prunable"]
        shown["pruned"] = (
            f"{percent(1 - kept / pruned)} of {count(pruned)} in {len(found.pruned)} tensors, by "
            f"{found.masks}"
        )
    else:
        shown["pruned"] = f"nothing; choose what to keep with: samo prune {path}"
    shown["on the disk"] = size(found.num_bytes)
    return shown


def tables(found: FolderFacts) -> list[Table]:
    """Return the memory that the model takes, and its pruned weights by name and by layer."""
    made = [_memory(found)]
    if found.pruned:
        made.append(_groups("weight", found.pruned, lambda name: _NUMBER.sub(".*", name)))
        made.append(_groups("layer", found.pruned, _layer))
    return made


def _counts(found: FolderFacts) -> dict[str, int]:
    return {
        "num_params": sum(tensor.numel for tensor in found.tensors),
        "prunable": sum(tensor.numel for tensor in found.pruned),
        "kept": sum(tensor.kept or 0 for tensor in found.pruned),
    }


def _memory(found: FolderFacts) -> Table:
    table = columns("weights and state, in memory", "dense", "resident", "streamed")
    run, train = found.run_bytes(), found.train_bytes()
    names = ("dense", "resident", "streamed")
    table.add_row(f"to run, {found.dtype}", *(size(run.get(name)) for name in names))
    table.add_row(
        "to train, bfloat16",
        *(size(train.get(name)) for name in ("dense", "exact_resident", "exact_streamed")),
    )
    if found.pruned:
        lean = (size(train[name]) for name in ("lean_resident", "lean_streamed"))
        table.add_row("to train, lean state", "", *lean)
    table.caption = "without activations and the KV cache"
    return table


def _layer(name: str) -> str:
    number = _NUMBER.search(name)
    return name[: number.end()] if number else name


def _groups(title: str, tensors: Iterable[TensorFacts], key: Callable[[str], str]) -> Table:
    groups: dict[str, list[TensorFacts]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor.name), []).append(tensor)
    table = columns(title, "tensors", "kept", "of", "sparsity")
    for name, group in groups.items():
        kept, numel = sum(t.kept or 0 for t in group), sum(t.numel for t in group)
        ends = [percent(end(t.sparsity for t in group)) for end in (min, max)]
        whole = percent(1 - kept / numel)
        spread = whole if ends[0] == ends[1] else f"{whole} ({ends[0]} to {ends[1]})"
        table.add_row(Text(plain(name)), str(len(group)), count(kept), count(numel), spread)
    return table
