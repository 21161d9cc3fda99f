"""Open models from folders: checkpoints of ``samo train``, run folders, Hugging Face models."""

import os
from dataclasses import fields
from pathlib import Path

from torch import nn

from samo.checkpoint import read_manifest
from samo.checkpoint.load import check_shape, load
from samo.errors import CheckpointError
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig

__all__ = ["open_model"]


def open_model(path: str | os.PathLike[str]) -> nn.Module:
    """Load the model in a folder, dense and on the CPU.

    Example:
        >>> from samo.integrations.model_folders import open_model
        >>> open_model("no-such-folder")
        Traceback (most recent call last):
        ...
        samo.errors.CheckpointError: 'no-such-folder' does not exist; name a checkpoint, a run
        folder, or ...

    Args:
        path: A checkpoint of ``samo train``, a run folder (for its last checkpoint), or a folder
            with a Hugging Face ``config.json`` and safetensors weights.

    Raises:
        CheckpointError: There is no model in the folder, or it cannot be read.
    """
    path = Path(path)
    if (path / "run.json").is_file():
        path = path / "checkpoints" / "last"
    if (path / "manifest.json").is_file():
        return _open_checkpoint(path)
    if (path / "config.json").is_file():
        return _open_hugging_face(path)
    found = (
        "holds none of manifest.json, run.json, config.json" if path.exists() else "does not exist"
    )
    raise CheckpointError(
        f"'{path}' {found}; name a checkpoint, a run folder, or a Hugging Face model folder"
    )


def _open_checkpoint(path: Path) -> nn.Module:
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


def _open_hugging_face(path: Path) -> nn.Module:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise CheckpointError(
            f"'{path}' is a Hugging Face model, which needs a package that is not installed: pip "
            "install transformers"
        ) from None
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except Exception as error:  # OSError, ValueError, KeyError, ...
        raise CheckpointError(
            f"'{path}' cannot be read as a Hugging Face model: {str(error).partition(chr(10))[0]}"
        ) from error
    assert isinstance(model, nn.Module)
    return model
