"""Open models from folders: run folders, checkpoints and Hugging Face models.

Every function takes any of these:

    a run folder           of samo train or samo finetune, for its last checkpoint
    a checkpoint           of such a run
    a Hugging Face folder  dense, compressed by samo, or in the layout sparse-bitmask

A run of samo finetune has its model's config.json and tokenizer in RUN/hugging-face.
"""

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from samo.checkpoint import read_manifest, verify
from samo.checkpoint.load import check_shape, load, load_masks
from samo.checkpoint.manifest import NAME
from samo.checkpoint.tensors import SavedTensors
from samo.core.compress import compress_
from samo.core.modules import BITMAP, to_bytes
from samo.errors import CheckpointError
from samo.integrations import folder_files, hugging_face
from samo.integrations.folder_files import CONFIG, MASKS, METHOD
from samo.mask.masks import Masks
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig

__all__ = ["open_compressed", "open_masks", "open_model", "tokenizer_folder"]

HUGGING_FACE: Final = "hugging-face"
"""Folder of a run of samo finetune that has all of its model but the weights."""


class Place(NamedTuple):
    """Where the parts of a model are: in one folder, or in a checkpoint and the run's folder."""

    checkpoint: Path | None
    hugging_face: Path | None


def find(path: str | os.PathLike[str]) -> Place:
    """Return where the model of a folder is. Nothing in a Hugging Face folder is a link."""
    path = Path(path)
    if (path / "run.json").is_file():
        path = path / "checkpoints" / "last"
    if (path / NAME).is_file():
        beside = path.parent.parent / HUGGING_FACE
        is_own = path.parent.name == "checkpoints" and (beside / CONFIG).is_file()
        if is_own:
            folder_files.check_entries(beside)
        return Place(path, beside if is_own else None)
    if (path / CONFIG).is_file():
        folder_files.check_entries(path)
        return Place(None, path)
    if name := _hub_name(path):
        raise CheckpointError(
            f"'{path}' does not exist, and samo reads local folders only; download the model with: "
            f"hf download {name} --local-dir {path.name}"
        )
    found = f"holds none of {NAME}, run.json, {CONFIG}"
    if not path.is_dir():
        found = "is a file, and a model is a folder" if path.exists() else "does not exist"
    raise CheckpointError(
        f"'{path}' {found}; name a checkpoint, a run folder, or a Hugging Face model folder"
    )


def _hub_name(path: Path) -> str:
    """Return the name of a model on the hub that somebody may mean by a path; "" if none."""
    here = Path.cwd()
    near = path.relative_to(here) if path.is_relative_to(here) else path
    is_name = len(near.parts) == 2 and not near.is_absolute() and near.parts[0] not in (".", "..")
    return str(near) if is_name and not path.parent.exists() else ""


def open_model(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> nn.Module:
    """Load the model in a folder, dense and on the CPU.

    Example:
        >>> from samo.integrations.model_folders import open_model
        >>> open_model("no-such-folder")
        Traceback (most recent call last):
        ...
        samo.errors.CheckpointError: 'no-such-folder' does not exist; name a checkpoint, a run
        folder, or ...

    Args:
        path: A checkpoint of a run, a run folder (for its last checkpoint), or a folder with a
            Hugging Face ``config.json`` and safetensors weights.
        dtype: Dtype of the weights; by default that in which they were saved.

    Raises:
        CheckpointError: There is no model in the folder, or it cannot be read.
    """
    checkpoint, folder = find(path)
    if checkpoint is None:
        assert folder is not None
        return hugging_face.open_dense(folder, dtype)
    if folder is not None:
        saved, masks = _read_checkpoint(checkpoint)
        dense = {name: _dense(saved, name, masks) for name in saved.specs}
        return hugging_face.from_state(folder, dense, dtype)
    model = GPT(_gpt_config(checkpoint))
    load(checkpoint, model)
    return model if dtype is None else model.to(dtype)


def open_empty(path: str | os.PathLike[str]) -> nn.Module | None:
    """Return the Hugging Face model of a folder on the meta device, if it is stored compressed."""
    checkpoint, folder = find(path)
    if folder is None:
        return None
    if checkpoint is not None:
        manifest = read_manifest(checkpoint)
        size = len(SavedTensors(manifest, "weights").specs)
        return hugging_face.empty_model(folder, size) if manifest.is_compressed else None
    if hugging_face.method_of(folder) != METHOD:
        return None
    size = len(folder_files.read_specs(folder_files.weight_files(folder)))
    return hugging_face.empty_model(folder, size)


def open_compressed(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    weights: Literal["resident", "streamed"] | int = "resident",
    grad_dtype: torch.dtype | None = None,
    value_dtype: torch.dtype | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Load the model in a folder, compressed and on the CPU, without a dense one on the way.

    A dense folder can only be compressed once it is loaded.

    Args:
        path: As for `open_model`; a run must have pruned its model.
        dtype: Compute dtype; by default that of the model when it was saved.
        weights: As in `samo.compress_`.
        grad_dtype: As in `samo.compress_`.
        value_dtype: As in `samo.compress_`.
        prepare: Is called with the model before it is compressed, to freeze parameters.

    Raises:
        CheckpointError: There is no model in the folder, or it cannot be read.
        MaskError: The model is not pruned.
    """
    checkpoint, folder = find(path)
    options: Any = {"weights": weights, "grad_dtype": grad_dtype, "value_dtype": value_dtype}
    if checkpoint is None:
        assert folder is not None
        if hugging_face.method_of(folder) == METHOD:
            return hugging_face.open_compressed(folder, dtype, **options, prepare=prepare)
        model = hugging_face.open_dense(folder, dtype)
        masks = open_masks(path, model)
        if prepare is not None:
            prepare(model)
        return compress_(model, Masks.from_zeros(model) if masks is None else masks, **options)
    load_masks(checkpoint)  # raises an error for a dense model
    saved, masks = _read_checkpoint(checkpoint)
    manifest = read_manifest(checkpoint)
    dtype = dtype or getattr(torch, manifest.dtype)
    if folder is not None:
        state = {name: saved.read(name).clone() for name in saved.specs}
        state |= {name + BITMAP: to_bytes(mask) for name, mask in masks.items()}
        tied = {alias: name for alias, name in manifest.tied.items() if name in masks}
        state |= {alias + BITMAP: state[name + BITMAP] for alias, name in tied.items()}
        return hugging_face.from_state(folder, state, dtype, masks, **options, prepare=prepare)
    with torch.device("meta"):
        gpt = GPT(_gpt_config(checkpoint))
    if value_dtype is None and torch.bfloat16 in {saved.specs[name].dtype for name in masks}:
        options["value_dtype"] = torch.bfloat16
    if prepare is not None:
        prepare(gpt)
    compress_(gpt, masks, dtype=dtype, **options)
    gpt.to_empty(device="cpu")
    load(checkpoint, gpt)
    return gpt


def open_masks(path: str | os.PathLike[str], model: nn.Module) -> Masks | None:
    """Return the exact masks of a folder, if it has any; else its zeros are all there is to know.

    Raises:
        CheckpointError: The folder cannot be read.
        MaskError: Its masks are damaged or do not fit the model.
    """
    checkpoint, folder = find(path)
    if checkpoint is not None:
        if not read_manifest(checkpoint).is_compressed:
            return None
        masks = load_masks(checkpoint)
    else:
        assert folder is not None
        if hugging_face.method_of(folder) == METHOD:
            masks = hugging_face.read_masks(folder, model)
        elif (folder / MASKS).is_file():
            masks = Masks.load(folder / MASKS)
        else:
            return None
    masks.parameters_of(model)
    return masks


def tokenizer_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder with the tokenizer of a model.

    Raises:
        CheckpointError: The folder has none, as that of a model that reads bytes.
    """
    checkpoint, folder = find(path)
    names = folder_files.TOKENIZER_FILES
    if folder is not None and any((folder / name).is_file() for name in names):
        return folder
    raise CheckpointError(
        f"'{folder or checkpoint}' has no tokenizer: none of {', '.join(names[:2])}, ... is there"
    )


# Checkpoints ------------------------------------------------------------------------------------


def _gpt_config(path: Path) -> GPTConfig:
    """Return the shape of the GPT in a checkpoint, which its files have too."""
    try:
        config = GPTConfig(**read_manifest(path).extra["model"])
        for field in fields(config):
            if type(getattr(config, field.name)) is not type(field.default):
                raise TypeError
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"'{path}' was not saved by samo train, so its model is not known; build the model in "
            "Python, and load the checkpoint with samo.load(path, model)"
        ) from None
    check_shape(path, config)
    return config


def _read_checkpoint(path: Path) -> tuple[SavedTensors, Masks]:
    """Return the tensors and masks of a checkpoint, whose every byte is checked."""
    manifest = verify(path)
    masks = load_masks(path) if manifest.is_compressed else Masks({})
    saved = SavedTensors(manifest, "weights")
    for name, mask in masks.items():
        spec = saved.specs.get(name)
        if spec is None or spec.shape != (mask.kept,):
            raise CheckpointError(
                f"'{path}' does not fit: its mask of '{name}' keeps {mask.kept:,} values, and it "
                f"has {None if spec is None else spec.shape}"
            )
    return saved, masks


def _dense(saved: SavedTensors, name: str, masks: Masks) -> Tensor:
    """Return a tensor of a checkpoint, in memory of its own, with zeros where it is pruned."""
    values = saved.read(name)
    if name not in masks:
        return values.clone()
    dense = values.new_zeros(masks[name].shape)
    dense[masks[name].to_bool()] = values
    return dense
