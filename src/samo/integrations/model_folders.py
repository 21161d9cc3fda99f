"""Open models from folders: run folders, checkpoints and Hugging Face models.

Every function takes any of these:

    a run folder           of samo train or samo finetune, for its last checkpoint
    a checkpoint           of such a run
    a Hugging Face folder  dense, compressed by samo, or in the layout sparse-bitmask

A run of samo finetune has its model's config.json and tokenizer in RUN/hugging-face.
"""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from samo.checkpoint import read_manifest
from samo.checkpoint.load import check_shape, load, load_masks
from samo.checkpoint.manifest import NAME
from samo.errors import CheckpointError
from samo.integrations import folder_files
from samo.integrations.folder_files import CONFIG, MASKS
from samo.mask.masks import Masks
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig

__all__ = ["open_masks", "open_model", "tokenizer_folder"]

HUGGING_FACE: Final = "hugging-face"
"""Folder of a run of samo finetune that has all of its model but the weights."""


class Place(NamedTuple):
    """Where the parts of a model are: in one folder, or in a checkpoint and the run's folder."""

    checkpoint: Path | None
    hugging_face: Path | None


def find(path: str | os.PathLike[str]) -> Place:
    """Return where the model of a folder is."""
    path = Path(path)
    if (path / "run.json").is_file():
        path = path / "checkpoints" / "last"
    if (path / NAME).is_file():
        beside = path.parent.parent / HUGGING_FACE
        is_own = path.parent.name == "checkpoints" and (beside / CONFIG).is_file()
        return Place(path, beside if is_own else None)
    if (path / CONFIG).is_file():
        return Place(None, path)
    found = f"holds none of {NAME}, run.json, {CONFIG}" if path.exists() else "does not exist"
    raise CheckpointError(
        f"'{path}' {found}; name a checkpoint, a run folder, or a Hugging Face model folder"
    )


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
    if folder is not None:
        folder_files.check_entries(folder)
    if checkpoint is None:
        assert folder is not None
        return _open_hugging_face(folder, dtype)
    model = _open_gpt(checkpoint) if folder is None else _open_finetuned(checkpoint, folder)
    return model if dtype is None else model.to(dtype)


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
        folder_files.check_entries(folder)
        if not (folder / MASKS).is_file():
            return None
        masks = Masks.load(folder / MASKS)
    masks.parameters_of(model)
    return masks


def tokenizer_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder with the tokenizer of a model.

    Raises:
        CheckpointError: The folder has none, as that of a model that reads bytes.
    """
    checkpoint, folder = find(path)
    if folder is not None:
        folder_files.check_entries(folder)
        if any((folder / name).is_file() for name in folder_files.TOKENIZER_FILES):
            return folder
    raise CheckpointError(
        f"'{folder or checkpoint}' has no tokenizer: none of "
        f"{', '.join(folder_files.TOKENIZER_FILES[:2])}, ... is there"
    )


# The kinds --------------------------------------------------------------------------------------


def _open_gpt(path: Path) -> nn.Module:
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
    model = GPT(config)
    load(path, model)
    return model


def _open_finetuned(checkpoint: Path, folder: Path) -> nn.Module:
    auto = _transformers(folder)
    try:
        config = auto.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = auto.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if (folder / "generation_config.json").is_file():
            model.generation_config = auto.GenerationConfig.from_pretrained(folder)
    except Exception as error:  # OSError, ValueError, KeyError, ...
        raise _unreadable(folder, error) from error
    load(checkpoint, model)
    assert isinstance(model, nn.Module)
    return model.eval()


def _open_hugging_face(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    auto = _transformers(folder)
    folder_files.read_json(folder / CONFIG)
    folder_files.read_specs(folder_files.weight_files(folder))
    options = {} if dtype is None else {"dtype": dtype}
    try:
        model = auto.AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            **options,
        )
    except Exception as error:  # OSError, ValueError, KeyError, ...
        raise _unreadable(folder, error) from error
    assert isinstance(model, nn.Module)
    return model


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    first = str(error).partition("\n")[0]
    return CheckpointError(f"'{folder}' cannot be read as a Hugging Face model: {first}")


def _transformers(folder: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            f"'{folder}' is a Hugging Face model, which needs a package that is not installed: pip "
            "install transformers"
        ) from None
    return transformers
