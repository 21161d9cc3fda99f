"""``samo inspect``: the content of a path, or this machine."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from samo.cli.commands import Inspect
from samo.cli.console import facts, mask_table
from samo.errors import CheckpointError, ConfigError
from samo.mask.masks import Masks
from samo.utils.formatting import count, duration, loss, size

__all__ = []


def run(command: Inspect) -> int:
    """Show a path, or this machine."""
    path = command.path
    if command.verify and (path is None or not (path / "manifest.json").is_file()):
        raise ConfigError("--verify needs a checkpoint, such as RUN/checkpoints/last")
    if path is None:
        found = _machine()
    elif (path / "run.json").is_file():
        found = _run(path)
    elif (path / "manifest.json").is_file():
        found = _checkpoint(path, verify=command.verify)
    elif path.is_file():
        found = _masks(path)
    else:
        what = "has no run.json or manifest.json" if path.exists() else "does not exist"
        raise CheckpointError(f"'{path}' {what}; pass a mask file, a checkpoint or a run folder")
    if command.json:
        json.dump(found.records, sys.stdout, default=str)
        sys.stdout.write("\n")
        return 0
    console = Console()
    console.print(facts(found.rows))
    if found.table is not None:
        console.print(found.table)
    return 0


class _Found:
    """The same facts for people and for machines."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}
        self.records: dict[str, Any] = {}
        self.table: Table | None = None

    def add(self, name: str, shown: str, value: Any = None) -> None:
        self.rows[name] = shown
        self.records[name.replace(" ", "_")] = shown if value is None else value

    def add_masks(self, masks: Masks) -> None:
        self.records["tensors"] = [
            {"name": name, "shape": list(mask.shape), "kept": mask.kept, "numel": mask.numel}
            for name, mask in masks.items()
        ]
        self.table = mask_table(masks)


def _machine() -> _Found:
    import torch

    from samo import kernels
    from samo.utils.environment import hardware, versions

    found = _Found()
    for package, version in versions().items():
        found.add(package, version)
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        about = hardware(device)
        chosen = kernels.choose(device)
        module = getattr(chosen, "__name__", type(chosen).__name__).rpartition(".")[2]
        name = module.partition("_")[0]  # triton_launch: triton
        shown = f"{about['device_name']}, {size(about['memory_bytes'])}, kernels: {name}"
        if device.type == "cpu":
            shown += f", {about['cores']} cores, {about['threads']} threads"
        found.add(str(device), shown, {**about, "kernels": name})
    return found


def _run(path: Path) -> _Found:
    from samo.report import findings
    from samo.report.runs import read_run

    run = read_run(path)
    found = _Found()
    found.add("run", run.name)
    for name in ("command", "started"):
        found.add(name, str(run.about.get(name, "")))
    status = run.end or "running, or killed"
    found.add("status", f"{status}, step {run.last_step:,} of {run.planned_steps}", status)
    found.records["step"] = run.last_step
    found.add("mode", ", ".join(filter(None, [run.mode, run.dtype, findings.ranks(run)])))
    found.add("parameters", count(run.num_params), run.num_params)
    if run.masks is not None:
        found.add("sparsity", findings.pruned(run), run.masks.sparsity)
    if run.observations:
        found.add("early-bird", findings.ticket_finding(run))
    if run.changes:
        found.add("masks", findings.change_finding(run))
    if run.last_eval is not None:
        shown = f"{loss(run.last_eval.valid_loss)} at step {run.last_eval.step:,}"
        found.add("validation loss", shown, run.last_eval.valid_loss)
    if run.state is not None:
        found.add("model state", findings.held(run), run.state.measured_bytes)
    rate = findings.tokens_per_s(run)
    found.add("tokens per second", count(rate), rate)
    found.add("time of training", duration(run.elapsed_s), run.elapsed_s)
    for name in ("last", "best"):
        checkpoint = path / "checkpoints" / name
        if (checkpoint / "manifest.json").is_file():
            found.add(f"{name} checkpoint", str(checkpoint))
    return found


def _checkpoint(path: Path, *, verify: bool) -> _Found:
    from samo import checkpoint
    from samo.checkpoint.load import load_masks

    manifest = checkpoint.verify(path) if verify else checkpoint.read_manifest(path)
    found = _Found()
    found.add("checkpoint", str(path))
    found.add("written", f"{manifest.time:%Y-%m-%d %H:%M:%S} UTC by samo {manifest.samo_version}")
    found.add("parameters", count(manifest.num_params), manifest.num_params)
    kind = "compressed" if manifest.is_compressed else "dense"
    found.add("state", f"{kind}, {manifest.dtype}")
    found.add("parameters kept", count(manifest.kept), manifest.kept)
    found.add("files", f"{len(manifest.files)}, {size(manifest.num_bytes)}", manifest.num_bytes)
    progress = manifest.extra.get("progress")
    if isinstance(progress, dict) and isinstance(progress.get("step"), int):
        found.add("step", count(progress["step"]), progress["step"])
    if verify:
        found.add("checksums", "correct", True)
    if manifest.is_compressed:
        found.add_masks(load_masks(path))
    return found


def _masks(path: Path) -> _Found:
    masks = Masks.load(path)
    found = _Found()
    found.add("masks", str(path))
    found.add("fingerprint", masks.fingerprint())
    found.add_masks(masks)
    return found
