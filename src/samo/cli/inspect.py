"""``samo inspect``: the content of a path, or this machine."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from samo.cli.commands import Inspect
from samo.cli.tables import facts, mask_records, mask_table
from samo.errors import CheckpointError, ConfigError
from samo.utils.formatting import count, duration, loss, percent, size

__all__ = []


def run(command: Inspect) -> int:
    """Show what a path holds."""
    path = command.path
    pictures: list[Table] = []
    if path is None:
        found = _machine()
    elif not path.exists():
        raise CheckpointError(f"'{path}' does not exist; name a mask file, a checkpoint or a run")
    elif (path / "run.json").is_file():
        found = _run(path)
    elif (path / "manifest.json").is_file():
        found, pictures = _checkpoint(path, verify=command.verify)
    elif path.is_file():
        _check_no_text(path)
        found, pictures = _masks(path)
    else:
        raise CheckpointError(
            f"'{path}' is not a run, checkpoint or mask file: it holds neither run.json nor manifest.json; "
            "a Hugging Face model is read by samo prune"
        )
    if command.verify and (path is None or not (path / "manifest.json").is_file()):
        raise ConfigError("--verify checks a checkpoint; name one, such as RUN/checkpoints/last")
    if command.json:
        json.dump(found.records, sys.stdout, default=str)
        sys.stdout.write("\n")
        return 0
    console = Console()
    console.print(facts(found.rows))
    for picture in pictures:
        console.print(picture)
    return 0


class _Found:
    """The same facts for people and for machines."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}
        self.records: dict[str, Any] = {}

    def add(self, name: str, shown: str, value: Any = None) -> None:
        self.rows[name] = shown
        self.records[name.replace(" ", "_")] = shown if value is None else value


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
    from samo.report.findings import change_finding, held, ranks, ticket_finding, tokens_per_s
    from samo.report.runs import read_run

    run = read_run(path)
    found = _Found()
    found.add("run", run.name)
    found.add("command", str(run.about.get("command", "")))
    found.add("started", str(run.about.get("started", "")))
    settings = run.section("config").get("run")
    steps = settings.get("steps") if isinstance(settings, dict) else None
    status = run.end or "running, or killed"
    found.add("status", f"{status}, step {run.last_step:,} of {count(steps)}", status)
    found.records["step"] = run.last_step
    found.add("mode", f"{run.mode}, {run.dtype}")
    if run.num_ranks > 1:
        found.add("ranks", ranks(run), run.num_ranks)
    found.add("parameters", count(run.num_params), run.num_params)
    if run.prune is not None and run.masks is not None:
        when = f"from step {run.prune.step:,} on"
        if run.is_pruned_in_steps:
            when = f"pruned from step {run.prune.step:,} to {run.changes[-1].step:,}"
        shown = f"{percent(run.masks.sparsity)} of {run.masks.numel:,} weights, {when}"
        found.add("sparsity", shown, run.masks.sparsity)
    if run.observations:
        found.add("ticket", ticket_finding(run))
    if run.changes:
        found.add("masks", change_finding(run))
    if run.last_eval is not None:
        shown = f"{loss(run.last_eval.valid_loss)} at step {run.last_eval.step:,}"
        found.add("validation loss", shown, run.last_eval.valid_loss)
    if run.state is not None:
        found.add("model state", held(run), run.state.measured_bytes)
    found.add("tokens per second", count(tokens_per_s(run)), tokens_per_s(run))
    found.add("time of training", duration(run.elapsed_s), run.elapsed_s)
    for name in ("last", "best"):
        checkpoint = path / "checkpoints" / name
        if (checkpoint / "manifest.json").is_file():
            found.add(f"{name} checkpoint", str(checkpoint))
    return found


def _checkpoint(path: Path, *, verify: bool) -> tuple[_Found, list[Table]]:
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
        found.add("checksums", "all right", True)
    if not manifest.is_compressed:
        return found, []
    masks = load_masks(path)
    found.records["tensors"] = mask_records(masks)
    return found, [mask_table(masks)]


def _check_no_text(path: Path) -> None:
    """Refuse a text file: a mask file begins with a length, which has bytes of 0."""
    with open(path, "rb") as file:
        start = file.read(512)
    if start and b"\0" not in start:
        raise CheckpointError(
            f"'{path}' is a text file; samo inspect takes a mask file, a checkpoint or a run folder"
        )


def _masks(path: Path) -> tuple[_Found, list[Table]]:
    from samo.checkpoint.load import load_masks

    masks = load_masks(path)
    found = _Found()
    found.add("masks", str(path))
    found.add("fingerprint", masks.fingerprint())
    found.records["tensors"] = mask_records(masks)
    return found, [mask_table(masks)]
