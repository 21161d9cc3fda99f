"""``samo inspect``: the content of a path, or this machine."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from rich.table import Table

from samo import checkpoint
from samo.checkpoint.load import checkpoint_masks
from samo.cli.commands import Inspect
from samo.cli.console import (
    PatientConsole,
    facts,
    group_table,
    kind_of,
    layer_of,
    mask_table,
)
from samo.errors import CheckpointError, ConfigError, MaskError
from samo.integrations.inspection import FolderFacts, inspect_folder
from samo.mask.masks import Masks
from samo.report import findings
from samo.report.runs import read_run
from samo.train.launch_env import prune_command
from samo.utils.environment import hardware, versions
from samo.utils.formatting import count, counted, duration, loss, percent, size

Facts = dict[str, Any]
"""What is shown, by name; a tuple of text and JSON value where they differ."""


class Page(NamedTuple):
    """What is known of a path."""

    facts: Facts
    tables: tuple[Table, ...] = ()
    records: Mapping[str, Any] = MappingProxyType({})
    """More names and values for JSON."""


def run(command: Inspect) -> int:
    """Show a path, or this machine."""
    found = _page(command.path, verify=command.verify)
    if command.json:
        values = {k: v[1] if isinstance(v, tuple) else v for k, v in found.facts.items()}
        records = {name.replace(" ", "_"): value for name, value in values.items()}
        json.dump({**records, **found.records}, sys.stdout, default=str)
        sys.stdout.write("\n")
        return 0
    console = PatientConsole()
    console.print(facts({k: v[0] if isinstance(v, tuple) else v for k, v in found.facts.items()}))
    for table in found.tables:
        console.print(table)
    return 0


def _page(path: Path | None, *, verify: bool) -> Page:
    if path is not None and (path / "run.json").is_file():
        return _run(path, verify=verify)
    if path is not None and (path / "manifest.json").is_file():
        return _checkpoint(path, verify=verify)
    if verify:
        raise ConfigError("--verify needs a checkpoint or a run folder; leave it out")
    if path is None:
        return _machine()
    if (path / "config.json").is_file():
        return _model(path, inspect_folder(path))
    why = f"'{path}' does not exist"
    if path.is_dir():
        why = f"'{path}' has no run.json, manifest.json or config.json"
    elif path.exists():
        try:
            masks = Masks.load(path)
            return _with_masks({"masks": str(path), "fingerprint": masks.fingerprint()}, masks)
        except MaskError as error:
            why = str(error).partition(";")[0]  # the rest is for Python
    raise CheckpointError(f"{why}; pass a mask file, a checkpoint, a run or a Hugging Face folder")


def _with_masks(found: Facts, masks: Masks) -> Page:
    tensors = [
        {"name": name, "shape": list(mask.shape), "kept": mask.kept, "numel": mask.numel}
        for name, mask in masks.items()
    ]
    return Page(found, (mask_table(masks),), {"tensors": tensors})


def _machine() -> Page:
    from samo import kernels  # loads numba

    found: Facts = dict(versions())
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        about = hardware(device)
        chosen = kernels.choose(device)
        module = getattr(chosen, "__name__", type(chosen).__name__).rpartition(".")[2]
        name = module.partition("_")[0]  # triton_launch: triton
        shown = f"{about['device_name']}, {size(about['memory_bytes'])}, kernels: {name}"
        if device.type == "cpu":
            shown += f", {counted(about['cores'], 'core')}, {counted(about['threads'], 'thread')}"
        found[str(device)] = shown, {**about, "kernels": name}
    return Page(found)


def _run(path: Path, *, verify: bool) -> Page:
    run = read_run(path)
    rate = findings.tokens_per_s(run)
    found: Facts = {
        "run": run.name,
        "command": run.about.get("command", ""),
        "started": run.about.get("started", ""),
        "status": run.end or "running, or killed",
        "step": (f"{run.last_step:,} of {run.planned_steps}", run.last_step),
        "mode": ", ".join(filter(None, [run.mode, run.dtype, findings.ranks(run)])),
        "parameters": (count(run.num_params), run.num_params),
        "tokens per second": (count(rate), rate),
        "training time": (duration(run.elapsed_s), run.elapsed_s),
    }
    if run.masks is not None:
        found["sparsity"] = findings.pruned(run), run.masks.sparsity
    if run.observations:
        found["early-bird"] = findings.ticket_finding(run)
    if run.changes:
        found["masks"] = findings.change_finding(run)
    if run.last_eval is not None:
        shown = f"{loss(run.last_eval.valid_loss)} at step {run.last_eval.step:,}"
        found["validation loss"] = shown, run.last_eval.valid_loss
    if run.state is not None:
        found["model state"] = findings.held(run), run.state.measured_bytes
    for name in ("last", "best"):
        folder = path / "checkpoints" / name
        if (folder / "manifest.json").is_file():
            if verify:
                checkpoint.verify(folder)
            found[f"{name} checkpoint"] = f"{folder}{', checksums correct' if verify else ''}"
    if verify and "last checkpoint" not in found:
        raise CheckpointError(f"the run '{path}' has no checkpoint to verify yet")
    return Page(found)


def _checkpoint(path: Path, *, verify: bool) -> Page:
    manifest = checkpoint.verify(path) if verify else checkpoint.read_manifest(path)
    kind = "compressed" if manifest.is_compressed else "dense"
    found: Facts = {
        "checkpoint": str(path),
        "written": f"{manifest.time:%Y-%m-%d %H:%M:%S} UTC by samo {manifest.samo_version}",
        "parameters": (count(manifest.num_params), manifest.num_params),
        "state": f"{kind}, {manifest.dtype}",
        "parameters kept": (count(manifest.kept), manifest.kept),
        "files": (f"{len(manifest.files)}, {size(manifest.num_bytes)}", manifest.num_bytes),
    }
    progress = manifest.extra.get("progress")
    if isinstance(progress, dict) and isinstance(progress.get("step"), int):
        found["step"] = count(progress["step"]), progress["step"]
    if verify:
        found["checksums"] = "correct", True
    return _with_masks(found, checkpoint_masks(path)) if manifest.is_compressed else Page(found)


def _model(path: Path, found: FolderFacts) -> Page:
    numel = sum(tensor.numel for tensor in found.tensors)
    prunable = sum(tensor.numel for tensor in found.pruned)
    kept = sum(tensor.kept or 0 for tensor in found.pruned)
    pruned = f"nothing; choose what to keep with: {prune_command(path)}"
    tables = []
    if found.pruned:
        share = f"{percent(1 - kept / max(prunable, 1))} of {count(prunable)}"
        pruned = f"{share} in {counted(len(found.pruned), 'tensor')}, by {found.masks}"
        named = [(tensor.name, tensor) for tensor in found.pruned]
        tables.append(group_table("weight", named, kind_of))
        tables.append(group_table("layer", named, layer_of))
    kinds = ", ".join(filter(None, [found.kind, found.model_type, found.dtype]))
    shown: Facts = {
        "model": str(path),
        "kind": (kinds, found.kind),
        "parameters": (count(numel), numel),
        "pruned": (pruned, prunable - kept),
        "on disk": (size(found.num_bytes), found.num_bytes),
    }
    for name, needs in (("to run", found.run_bytes()), ("to train", found.train_bytes())):
        parts = "; ".join(f"{how} {size(value)}" for how, value in needs.items())
        shown[name] = f"{parts}; and activations", needs
    records = {
        **{name: getattr(found, name) for name in ("model_type", "dtype", "masks")},
        "prunable": prunable,
        "kept": kept,
        "tensors": [
            {**tensor._asdict(), "numel": tensor.numel, "sparsity": tensor.sparsity}
            for tensor in found.tensors
        ],
    }
    return Page(shown, tuple(tables), records)
