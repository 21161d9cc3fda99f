"""Open models from folders: run folders, checkpoints and Hugging Face models.

Every function takes any of these:

    a run folder           of samo train or samo finetune, for its last checkpoint
    a checkpoint           of such a run
    a Hugging Face folder  dense, compressed by samo, or in the layout sparse-bitmask
"""

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from samo.checkpoint import read_manifest, verify
from samo.checkpoint.load import check_shape, checkpoint_masks, load
from samo.checkpoint.manifest import NAME
from samo.checkpoint.tensors import SavedTensors
from samo.core.compress import compress_
from samo.core.modules import BITMAP, to_bytes
from samo.errors import CheckpointError, MaskError
from samo.integrations import checked_loading, folder_files
from samo.integrations.folder_files import CONFIG, MASKS
from samo.mask.masks import Masks
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig

HUGGING_FACE: Final = "hugging-face"
"""Folder of a run of samo finetune with its model's configs and tokenizer."""


class Place(NamedTuple):
    """Where the parts of a model are."""

    weights: Path
    """A checkpoint, or a Hugging Face folder."""
    hugging_face: Path | None
    """The folder with config.json: the same, or that of a run; None for a GPT of samo train."""

    @property
    def is_checkpoint(self) -> bool:
        """Whether the weights are in a checkpoint."""
        return self.weights != self.hugging_face

    def is_compressed(self) -> bool:
        """Return whether the weights are stored compressed."""
        if self.is_checkpoint:
            return read_manifest(self.weights).is_compressed
        return checked_loading.is_compressed(self.weights)


def find(path: str | os.PathLike[str]) -> Place:
    """Return where the model of a folder is. Nothing in a Hugging Face folder is a link."""
    path = Path(path)
    if (path / "run.json").is_file():
        path = path / "checkpoints" / "last"
    place = Place(path, path)
    if os.path.lexists(path / NAME):
        beside = path.parent.parent / HUGGING_FACE
        is_own = path.parent.name == "checkpoints" and (beside / CONFIG).is_file()
        place = Place(path, beside if is_own else None)
    elif not (path / CONFIG).is_file():
        raise _not_found(path)
    if place.hugging_face is not None:
        folder_files.check_entries(place.hugging_face)
    return place


def _not_found(path: Path) -> CheckpointError:
    if name := _hub_name(path):
        return CheckpointError(
            f"'{path}' does not exist, and samo reads local folders only; download the model with: "
            f"hf download {name} --local-dir {path.name}"
        )
    found = f"holds none of {NAME}, run.json, {CONFIG}"
    if not path.is_dir():
        found = "is a file, and a model is a folder" if path.exists() else "does not exist"
    return CheckpointError(
        f"'{path}' {found}; name a checkpoint, a run folder, or a Hugging Face model folder"
    )


def _hub_name(path: Path) -> str:
    """Return the name of a model on the hub that somebody may mean by a path; "" if none."""
    here = Path.cwd()
    near = path.relative_to(here) if path.is_relative_to(here) else path
    is_name = (
        len(near.parts) == 2 and not near.is_absolute() and near.parts[0] not in (".", "..", "runs")
    )
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
        path: A run folder, a checkpoint of a run, or a Hugging Face folder.
        dtype: Dtype of the weights; by default that in which they were saved.

    Raises:
        CheckpointError: There is no model in the folder, or it cannot be read.
    """
    place = find(path)
    if place.hugging_face is None:
        gpt = GPT(_gpt_config(place.weights))
        load(place.weights, gpt)
        return gpt if dtype is None else gpt.to(dtype)
    if not place.is_checkpoint:
        return checked_loading.open_dense(place.hugging_face, dtype)
    saved, masks = _read_checkpoint(place.weights)
    dense = {name: _dense(saved, name, masks) for name in saved.specs}
    return checked_loading.from_state(place.hugging_face, dense, dtype)


def open_empty(path: str | os.PathLike[str]) -> nn.Module | None:
    """Return the Hugging Face model of a folder on the meta device, if it is stored compressed."""
    place = find(path)
    if place.hugging_face is None or not place.is_compressed():
        return None
    if place.is_checkpoint:
        size = len(SavedTensors(read_manifest(place.weights), "weights").specs)
    else:
        size = len(folder_files.read_specs(folder_files.weight_files(place.weights)))
    return checked_loading.empty_model(place.hugging_face, size)


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
    place = find(path)
    options: Any = {"weights": weights, "grad_dtype": grad_dtype, "value_dtype": value_dtype}
    if place.is_checkpoint:
        return _open_compressed_checkpoint(place, dtype, options, prepare)
    if place.is_compressed():
        return checked_loading.open_compressed(place.weights, dtype, **options, prepare=prepare)
    model = checked_loading.open_dense(place.weights, dtype)
    masks = open_masks(path, model)
    if prepare is not None:
        prepare(model)
    return compress_(model, Masks.from_zeros(model) if masks is None else masks, **options)


def load_masks(path: str | os.PathLike[str]) -> Masks:
    """Read masks onto the CPU: of a checkpoint, a run, a Hugging Face folder, or a mask file.

    Example:
        >>> import tempfile, torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> model = samo.compress_(model, samo.prune(model, 0.5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     samo.save(folder, model)
        ...     samo.load_masks(folder).sparsity
        0.5

    Raises:
        MaskError: There are no masks, as of a dense model, or they are damaged.
        CheckpointError: The folder cannot be read.
    """
    if not os.path.lexists(path):
        raise MaskError(
            f"'{path}' does not exist; name a checkpoint, a run folder, a Hugging Face folder or a "
            "mask file"
        )
    if not os.path.isdir(path):
        return Masks.load(path)
    folder, hugging_face = find(path)
    if folder != hugging_face:
        return checkpoint_masks(folder)
    if checked_loading.is_compressed(folder):
        specs = folder_files.read_specs(folder_files.weight_files(folder))
        return folder_files.read_masks(checked_loading.empty_model(folder, len(specs)), specs)
    if (folder / MASKS).is_file():
        return Masks.load(folder / MASKS)
    raise MaskError(
        f"'{path}' has no masks, only zeros if it is pruned; read those with "
        "samo.Masks.from_zeros(model), or samo prune --method zeros"
    )


def open_masks(path: str | os.PathLike[str], model: nn.Module) -> Masks | None:
    """Return the exact masks of a folder, if it has any; else its zeros are all there is to know.

    Raises:
        CheckpointError: The folder cannot be read.
        MaskError: Its masks are damaged or do not fit the model.
    """
    place = find(path)
    folder = place.weights
    if not place.is_compressed():
        if place.is_checkpoint or not (folder / MASKS).is_file():
            return None
        masks = Masks.load(folder / MASKS)
    elif place.is_checkpoint:
        masks = checkpoint_masks(folder)
    else:
        specs = folder_files.read_specs(folder_files.weight_files(folder))
        masks = folder_files.read_masks(model, specs)
    masks.parameters_of(model)
    return masks


def tokenizer_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder with the tokenizer of a model.

    Raises:
        CheckpointError: The folder has none, as that of a model that reads bytes.
    """
    place = find(path)
    names, folder = folder_files.TOKENIZER_FILES, place.hugging_face
    if folder is not None and any((folder / name).is_file() for name in names):
        return folder
    missing = f"none of {', '.join(names[:2])}, ... is there"
    raise CheckpointError(f"'{folder or place.weights}' has no tokenizer: {missing}")


# Checkpoints ------------------------------------------------------------------------------------


def _open_compressed_checkpoint(
    place: Place,
    dtype: torch.dtype | None,
    options: dict[str, Any],
    prepare: Callable[[nn.Module], None] | None,
) -> nn.Module:
    path, folder = place.weights, place.hugging_face
    checkpoint_masks(path)  # raises an error for a dense model
    saved, masks = _read_checkpoint(path)
    manifest = read_manifest(path)
    dtype = dtype or dtype_of(path)
    if folder is not None:
        state = {name: saved.read(name).clone() for name in saved.specs}
        state |= {name + BITMAP: to_bytes(mask) for name, mask in masks.items()}
        tied = {alias: name for alias, name in manifest.tied.items() if name in masks}
        state |= {alias + BITMAP: state[name + BITMAP] for alias, name in tied.items()}
        return checked_loading.from_state(folder, state, dtype, masks, **options, prepare=prepare)
    with torch.device("meta"):
        gpt = GPT(_gpt_config(path))
    if torch.bfloat16 in {saved.specs[name].dtype for name in masks}:
        options = {**options, "value_dtype": options["value_dtype"] or torch.bfloat16}
    if prepare is not None:
        prepare(gpt)
    compress_(gpt, masks, dtype=dtype, **options)
    gpt.to_empty(device="cpu")
    load(path, gpt)
    return gpt


def dtype_of(path: Path) -> torch.dtype:
    """Return the dtype in which the model of a checkpoint computes."""
    name = read_manifest(path).dtype
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"'{path / NAME}' is damaged: its dtype is {name!r}; use another copy"
        )
    return found


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
    masks = checkpoint_masks(path) if manifest.is_compressed else Masks({})
    saved = SavedTensors(manifest, "weights")
    for name, mask in masks.items():
        shape = saved.specs[name].shape if name in saved.specs else None
        if shape != (mask.kept,):
            raise CheckpointError(
                f"'{path}' does not fit: its mask of '{name}' keeps {mask.kept:,} values, and it "
                f"has {shape}"
            )
        if not saved.specs[name].dtype.is_floating_point:
            raise CheckpointError(
                f"'{path}' is damaged: '{name}' is {saved.specs[name].dtype}; use another copy"
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
