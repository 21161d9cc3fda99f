"""``samo export``: a run, a checkpoint or a Hugging Face folder, as a Hugging Face folder."""

from pathlib import Path

import torch
from torch import nn

from samo.checkpoint import read_manifest
from samo.cli.commands import Export
from samo.cli.console import PatientConsole, facts, say
from samo.core.compress import masks as masks_of
from samo.core.modules import CompressedModule
from samo.data.tokenizers import ByteTokenizer
from samo.errors import CheckpointError, ConfigError, MaskError
from samo.integrations import model_folders
from samo.integrations.export import check_free, export
from samo.integrations.folder_files import CONFIG, read_json
from samo.mask.masks import Masks
from samo.train.config import AUTO
from samo.train.launch_env import prune_command
from samo.train.resolve import DTYPES
from samo.utils.formatting import counted, percent, size


def run(command: Export) -> int:
    """Write the folder, and say what is in it."""
    out = command.out or Path(f"{_name(command.source)}-{command.format}")
    check_free(out)
    tokenizer = _tokenizer(command.source)
    model, masks, dtype = _open(command.source)
    if command.dtype != AUTO:
        dtype = getattr(torch, DTYPES.get(command.dtype, command.dtype))
    try:
        export(model, out, format=command.format, dtype=dtype, source=tokenizer, masks=masks)
    except MaskError as error:
        why = str(error).partition(";")[0]  # the rest is for Python
        raise ConfigError(
            f"'{command.source}' cannot be written as {command.format}: {why}; prune it with: "
            f"{prune_command(command.source)}"
        ) from error
    found = masks_of(model) if isinstance(model, CompressedModule) else masks
    rows = {"format": command.format, "dtype": read_json(out / CONFIG)["dtype"]}
    rows["bytes"] = size(sum(file.stat().st_size for file in out.iterdir()))
    if found:
        rows["sparsity"] = f"{percent(found.sparsity)} of {counted(len(found), 'tensor')}"
    console = PatientConsole()
    console.print(facts(rows))
    say(console, f"written to {out}")
    if command.format == "bitmask":
        say(
            console,
            "transformers up to 4.55 load it, with compressed-tensors up to 0.14; convert it back "
            f"with: samo export {out} --format dense",
        )
    return 0


def _name(source: Path) -> str:
    """Return the name of a model: that of its run, if it is a checkpoint or the model of one."""
    path = source.resolve()
    if path.parent.name == "checkpoints":
        return path.parent.parent.name
    is_of_run = path.name == "model" and (path.parent / "run.json").is_file()
    return (path.parent if is_of_run else path).name


def _open(source: Path) -> tuple[nn.Module, Masks | None, torch.dtype | None]:
    """Return a model, its masks if it is dense and has some, and the dtype it computes in.

    What is compressed stays so, and becomes dense only to be written dense.
    """
    place = model_folders.find(source)
    dtype = model_folders.dtype_of(place.weights) if place.is_checkpoint else None
    if place.is_compressed():
        return model_folders.open_compressed(source, weights="streamed"), None, dtype
    model = model_folders.open_model(source)
    return model, model_folders.open_masks(source, model), dtype


def _tokenizer(source: Path) -> Path | None:
    """Return the folder of a model's tokenizer; None for bytes, and if there is none to copy."""
    try:
        return model_folders.tokenizer_folder(source)
    except CheckpointError:
        place = model_folders.find(source)
    name = read_manifest(place.weights).extra.get("tokenizer") if place.is_checkpoint else None
    is_folder = isinstance(name, str) and name != ByteTokenizer.name and Path(name).is_dir()
    return Path(str(name)) if is_folder else None
