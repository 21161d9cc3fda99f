"""`load`: fill a model, its optimizer and its scaler from a checkpoint, after all checks."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from samo.checkpoint.folder import check_file, check_size, verify
from samo.checkpoint.gathering import agree
from samo.checkpoint.grid import Grid, grid_of
from samo.checkpoint.manifest import NAME, Manifest, damaged, read_manifest
from samo.checkpoint.model_state import ModelState
from samo.checkpoint.optim_state import OptimizerState, check_all
from samo.checkpoint.save import Scaler
from samo.checkpoint.tensors import Shards
from samo.errors import CheckpointError, MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.pipeline.pipeline import Pipeline
from samo.utils.validation import optimizers_of

__all__ = ["load", "load_masks"]


@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    model: nn.Module | Pipeline,
    opt: Optimizer | Iterable[Optimizer] | None = None,
    *,
    scaler: Scaler | None = None,
    mesh: DeviceMesh | None = None,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """Fill a model, and what is given beside it, from a checkpoint; training goes on exactly.

    Everything is checked before anything is changed: every byte, and that names, shapes, types and
    groups fit. A compressed checkpoint goes into a compressed model (``samo.load_masks(path)`` reads its
    masks), or, without ``opt``, into an ordinary one, with zeros for what is pruned. Where masks have
    moved since the model was compressed, it gets those of the checkpoint. Tensors go to the device that
    the model is on.

    Where a model lies on several ranks (`samo.Pipeline`, DistributedDataParallel, which is given as it
    is, or FSDP2's ``fully_shard``), all of them call it, in whatever layout the checkpoint was saved. Each
    reads its own part; if one refuses, all do.

    Example:
        >>> import tempfile, torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> model = samo.compress_(model, samo.prune(model, 0.5))
        >>> opt = samo.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     samo.save(folder, model, opt, extra={"step": 100})
        ...     again = torch.nn.Sequential(torch.nn.Linear(8, 8))
        ...     again = samo.compress_(again, samo.load_masks(folder))
        ...     again_opt = samo.AdamW(again.parameters())
        ...     samo.load(folder, again, again_opt)
        {'step': 100}
        >>> torch.equal(model[0].weight, again[0].weight)
        True

    Args:
        path: The folder given to `samo.save`.
        model: The model to be filled, in place, or a `samo.Pipeline`.
        opt: Its optimizer, or several in the order in which they were saved; without any the saved
            state is left out.
        scaler: Its loss scaler.
        mesh: All ranks that hold a part of the model or a copy of it. By default those of
            `samo.Pipeline`, of DistributedDataParallel or of DTensors; one process otherwise.
        timeout_s: Seconds after which a rank that does not answer is given up.

    Returns:
        What was given to `samo.save` as ``extra``; tensors on the CPU.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or does not fit, here or on another rank.
        PeerError: Another rank is gone or does not answer.
    """
    grid = grid_of(model, mesh, timeout_s, "samo.load")
    fill: Callable[[], dict[str, Any]] | None = None
    failure: BaseException | None = None
    try:
        fill = _checked(path, grid, opt, scaler)
    except BaseException as error:
        failure = error
    agree(grid.links, failure, f"whether '{os.fspath(path)}' fits everywhere")
    assert fill is not None, "a failure was raised"
    extra: dict[str, Any] = {}
    try:
        extra = fill()
    except BaseException as error:
        failure = error
    agree(grid.links, failure, f"whether '{os.fspath(path)}' was read everywhere")
    return extra


def load_masks(path: str | os.PathLike[str]) -> Masks:
    """Read the masks of a checkpoint, or a file written by ``Masks.save``, onto the CPU.

    Example:
        >>> import tempfile, torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> model = samo.compress_(model, samo.prune(model, 0.5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     samo.save(folder, model)
        ...     samo.load_masks(folder).sparsity
        0.5

    Raises:
        MaskError: The checkpoint is of a dense model, or the file is missing or damaged.
        CheckpointError: The checkpoint is damaged.
    """
    folder = Path(path)
    if not (folder / NAME).exists():
        return Masks.load(folder)
    manifest = read_manifest(folder)
    if not manifest.is_compressed:
        raise MaskError(
            f"checkpoint '{folder}' has no masks: it was saved from a dense model; load it with "
            "samo.load(path, model) and prune that with samo.prune(model, sparsity)"
        )
    return Masks(_masks(folder, manifest, is_checked=False))


def _checked(
    path: str | os.PathLike[str],
    grid: Grid,
    opt: Optimizer | Iterable[Optimizer] | None,
    scaler: Scaler | None,
) -> Callable[[], dict[str, Any]]:
    """Check everything, and return what fills model, optimizers and scaler."""
    folder, shown = Path(path), os.fspath(path)
    state = ModelState(grid.module, grid.aliases, is_part=grid.is_part)
    opts = [] if opt is None else optimizers_of(opt)
    optimizers = [OptimizerState(one, state) for one in opts]
    manifest = _sized(folder) if grid.is_part else verify(folder)
    is_dense = not state.is_compressed and state.has_params
    if optimizers and manifest.is_compressed and is_dense:
        raise CheckpointError(
            f"'{shown}' has the optimizer state of a compressed model and this one is not compressed; "
            f"call samo.compress_(model, samo.load_masks('{shown}')) first, or load with opt=None"
        )
    masks = _masks(folder, manifest, is_checked=not grid.is_part)
    saved = Shards(folder, manifest, "weights")
    moments = Shards(folder, manifest, "optimizer")
    if grid.is_part:
        own = {*state.entries}
        for optimizer, entry in zip(optimizers, manifest.optimizers):
            own.update(optimizer.tensors_of(entry))
        _verify_part(folder, manifest, [saved, moments], own)
    extra = _extra(folder, manifest)
    state.check_fits(shown, manifest, masks, saved, opts)
    if optimizers:
        check_all(shown, manifest, optimizers, masks, moments)
    _check_scaler(shown, manifest, scaler, is_training=bool(optimizers))

    @torch.no_grad()
    def fill() -> dict[str, Any]:
        state.fill(masks, saved)
        for optimizer, entry in zip(optimizers, manifest.optimizers):
            optimizer.fill(entry, moments)
        if scaler is not None and manifest.scaler is not None:
            scaler.load_state_dict(manifest.scaler)
        return extra

    return fill


def _sized(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files have the right sizes."""
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        check_size(folder / manifest.data / name, entry)
    return manifest


def _verify_part(folder: Path, manifest: Manifest, read: list[Shards], names: set[str]) -> None:
    """Compare the files that a stage reads with their checksums; other stages look at the others."""
    files = {spec.file for shards in read for name, spec in shards.specs.items() if name in names}
    files |= {folder / manifest.data / name for name in manifest.files_of("extra")}
    for file in sorted(files):
        check_file(file, manifest.files[file.name])


def _masks(folder: Path, manifest: Manifest, *, is_checked: bool) -> dict[str, Mask]:
    masks: dict[str, Mask] = {}
    for name, entry in manifest.files_of("masks").items() if manifest.is_compressed else ():
        file = folder / manifest.data / name
        if not is_checked:
            check_file(file, entry)
        try:
            masks.update(Masks.load(file))
        except MaskError as error:
            raise damaged(file, str(error)) from error
    return masks


def _extra(folder: Path, manifest: Manifest) -> dict[str, Any]:
    shards = Shards(folder, manifest, "extra")
    if set(shards.specs) != set(manifest.extra_tensors):
        raise CheckpointError(
            f"'{folder}' is damaged: its extra tensors are not those that its manifest names; take "
            "another copy of the checkpoint"
        )
    return manifest.extra | {name: tensor.clone() for name, tensor in shards.read()}


def _check_scaler(
    path: str, manifest: Manifest, scaler: Scaler | None, *, is_training: bool
) -> None:
    if scaler is None:
        if is_training and manifest.scaler is not None:
            raise CheckpointError(
                f"'{path}' has the state of a loss scaler, without which training would not go on as "
                "it was; give scaler=, or load with opt=None"
            )
        return
    if manifest.scaler is None:
        raise CheckpointError(f"'{path}' was saved without a loss scaler; load it with scaler=None")
    expected = scaler.state_dict()
    is_same = set(manifest.scaler) == set(expected) and all(
        type(value) in (bool, int, float) for value in manifest.scaler.values()
    )
    if not is_same:
        raise CheckpointError(
            f"'{path}' has the state of another loss scaler, {manifest.scaler} in place of {expected}; "
            "build the scaler it was saved with"
        )
