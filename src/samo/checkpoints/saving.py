"""`save`: write a model, its optimizer and what else belongs to a run as one checkpoint."""

import os
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samo import __version__, mask_files
from samo.checkpoints import values
from samo.checkpoints.folder import publish
from samo.checkpoints.manifest import (
    FORMAT,
    VERSION,
    DataFile,
    describe_files,
    encode_manifest,
)
from samo.checkpoints.model_state import ModelState
from samo.checkpoints.optimizer_state import OptimizerState
from samo.checkpoints.shards import Source, source_of, write_shards, write_tensors
from samo.mask_files import MaskFile
from samo.masks import Masks

__all__ = ["save"]


class Scaler(Protocol):
    """A loss scaler: `samo.LossScaler` or torch's ``GradScaler``."""

    def state_dict(self) -> dict[str, Any]:
        """Return its numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved numbers."""


@torch.no_grad()
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    opt: Optimizer | None = None,
    *,
    scaler: Scaler | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint, compressed as the model is: whole, or not at all.

    A compressed model's checkpoint has kept values only, its masks, and what 16-bit weights need to
    go on exactly. An ordinary model is saved as it is. Killed at any moment, or with the disk full,
    the folder holds the checkpoint it held before, or the new one. Gradients are not saved.

    Example:
        >>> import tempfile, torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> model = samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
        >>> opt = samo.AdamW(samo.parameters(model))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     samo.save(f"{folder}/last", model, opt, extra={"step": 100})
        ...     samo.load(f"{folder}/last", model, opt)
        {'step': 100}

    Args:
        path: A folder, made if it does not exist. A checkpoint in it is replaced.
        model: A compressed model or an ordinary one.
        opt: Its optimizer: `samo.AdamW`, or one of torch.
        scaler: Its loss scaler.
        extra: Anything else, by name: tensors, or JSON values (numbers, strings, booleans, None, lists
            and dicts of them). Tuples come back as lists.

    Raises:
        TypeError: ``extra`` has a value of another kind.
        CheckpointError: A file cannot be written, or the optimizer belongs to another model.
    """
    state = ModelState(model)
    _warn_of_extra_state(model)
    optimizer, moments = (None, {}) if opt is None else OptimizerState(opt, state).describe()
    extra_values, extra_tensors = _encode_extra(extra or {})
    scaler_state = None if scaler is None else values.encode(scaler.state_dict(), "scaler")
    masks = state.masks
    tensors: dict[str, dict[str, Source]] = {
        "weights": state.sources(),
        "rest": state.rests(),
        "optimizer": moments,
        "extra": extra_tensors,
    }

    def write(folder: Path) -> bytes:
        files: dict[str, DataFile] = {}
        for kind, sources in tensors.items():
            files |= write_tensors(folder, kind, sources)
        sizes = {name: mask.words.nbytes for name, mask in masks.items()}
        files |= write_shards(folder, "masks", sizes, encode_masks)
        return encode_manifest(
            {
                "format": FORMAT,
                "version": VERSION,
                "samo": __version__,
                "time": datetime.now(UTC).isoformat(),
                "data": folder.name,
                "files": describe_files(files),
                "model": state.describe(),
                "optimizer": optimizer,
                "scaler": scaler_state,
                "extra": extra_values,
            }
        )

    def encode_masks(names: list[str]) -> list[bytes]:
        part = Masks({name: masks[name] for name in names})
        shapes = {name: mask.shape for name, mask in part.items()}
        words = {name: mask.words for name, mask in part.items()}
        return [mask_files.encode(MaskFile(words, shapes, part.fingerprint()))]

    publish(Path(path), write)


def _warn_of_extra_state(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            warnings.warn(
                f"module '{path}' ({type(module).__name__}) has state beside its tensors "
                "(get_extra_state), which a checkpoint does not hold; give it in extra=, and call "
                "set_extra_state after loading",
                stacklevel=4,
            )


def _encode_extra(extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Source]]:
    tensors: dict[str, Source] = {}

    def name_tensor(value: Any, where: str) -> str | None:
        name = names.get(where)
        if name is None or not isinstance(value, Tensor):
            return None
        tensors[name] = source_of(where, value)
        return name

    # Tensors stand at the top only, so that a reader of the manifest sees all JSON values whole.
    names = {f"extra/{name}": name for name in extra}
    return values.encode(dict(extra), "extra", name_tensor=name_tensor), tensors
