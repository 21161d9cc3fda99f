"""What ``samo inspect`` shows of a Hugging Face folder."""

from pathlib import Path
from typing import Any

from rich.table import Table

from samo.cli.console import columns, group_table, kind_of, layer_of
from samo.integrations.inspection import FolderFacts
from samo.utils.formatting import count, percent, size

__all__ = []


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
        pruned = [(tensor.name, tensor) for tensor in found.pruned]
        made.append(group_table("weight", pruned, kind_of))
        made.append(group_table("layer", pruned, layer_of))
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
        table.add_row("to train, bfloat16, lean state", "", *lean)
    table.caption = "without activations and the KV cache"
    return table
