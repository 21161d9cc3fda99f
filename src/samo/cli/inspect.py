"""``samo inspect``: the content of a path, or this machine."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samo.cli.commands import Inspect
from samo.cli.console import PatientConsole, facts, mask_table
from samo.errors import CheckpointError, ConfigError
from samo.mask.masks import Masks
from samo.utils.formatting import count, duration, loss, size

__all__ = []

Facts = dict[str, Any]
"""What is shown, by name; a tuple of text and JSON value where they differ."""


def run(command: Inspect) -> int:
    """Show a path, or this machine."""
    path, masks = command.path, None
    if command.verify and (path is None or path.is_file()):
        raise ConfigError("--verify needs a checkpoint or a run folder")
    if path is None:
        found = _machine()
    elif (path / "run.json").is_file():
        found = _run(path, verify=command.verify)
    elif (path / "manifest.json").is_file():
        found, masks = _checkpoint(path, verify=command.verify)
    elif (path / "config.json").is_file():
        return _model(path, command)
    elif path.is_file():
        masks = Masks.load(path)
        found = {"masks": str(path), "fingerprint": masks.fingerprint()}
    else:
        names = "run.json, manifest.json or config.json"
        what = f"has no {names}" if path.exists() else "does not exist"
        raise CheckpointError(
            f"'{path}' {what}; pass a mask file, a checkpoint, a run or a Hugging Face folder"
        )
    if command.json:
        json.dump(_records(found, masks), sys.stdout, default=str)
        sys.stdout.write("\n")
        return 0
    console = PatientConsole()
    console.print(facts({k: v[0] if isinstance(v, tuple) else v for k, v in found.items()}))
    if masks is not None:
        console.print(mask_table(masks))
    return 0


def _model(path: Path, command: Inspect) -> int:
    from samo.cli import model_facts
    from samo.integrations.inspection import inspect_folder

    if command.verify:
        raise ConfigError(f"--verify needs a checkpoint or a run folder, and '{path}' has no sums")
    found = inspect_folder(path)
    if command.json:
        json.dump(model_facts.records(path, found), sys.stdout)
        sys.stdout.write("\n")
        return 0
    console = PatientConsole()
    console.print(facts(model_facts.rows(path, found)))
    for table in model_facts.tables(found):
        console.print(table)
    return 0


def _records(found: Facts, masks: Masks | None) -> Mapping[str, Any]:
    values = {k: v[1] if isinstance(v, tuple) else v for k, v in found.items()}
    records = {name.replace(" ", "_"): value for name, value in values.items()}
    if masks is not None:
        records["tensors"] = [
            {"name": name, "shape": list(mask.shape), "kept": mask.kept, "numel": mask.numel}
            for name, mask in masks.items()
        ]
    return records


def _machine() -> Facts:
    import torch

    from samo import kernels
    from samo.utils.environment import hardware, versions

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
            shown += f", {about['cores']} cores, {about['threads']} threads"
        found[str(device)] = shown, {**about, "kernels": name}
    return found


def _run(path: Path, *, verify: bool) -> Facts:
    from samo import checkpoint
    from samo.report import findings
    from samo.report.runs import read_run

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
        "time of training": (duration(run.elapsed_s), run.elapsed_s),
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
    return found


def _checkpoint(path: Path, *, verify: bool) -> tuple[Facts, Masks | None]:
    from samo import checkpoint
    from samo.checkpoint.load import load_masks

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
    return found, load_masks(path) if manifest.is_compressed else None
