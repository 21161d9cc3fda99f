"""`load`: fill a model, its optimizer and its scaler from a checkpoint, after all checks."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from samo.checkpoint.distributed import Layout, layout_of
from samo.checkpoint.folder import check_file
from samo.checkpoint.manifest import NAME, Manifest, damaged, read_manifest
from samo.checkpoint.model_state import ModelState
from samo.checkpoint.optim_state import OptimizerState, check_all
from samo.checkpoint.save import Scaler
from samo.checkpoint.tensors import Checkpoint, SavedTensors
from samo.errors import CheckpointError, MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.utils.validation import optimizers_of

if TYPE_CHECKING:
    from samo.pipeline.pipeline import Pipeline

__all__ = ["load", "load_masks"]


@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    model: "nn.Module | Pipeline",
    opt: Optimizer | Iterable[Optimizer] | None = None,
    *,
    scaler: Scaler | None = None,
    mesh: DeviceMesh | None = None,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """Fill a model, its optimizer and its scaler from a checkpoint, so that training resumes exactly.

    Everything is checked before anything is changed: every byte, and that names, shapes, types and
    groups fit. A compressed checkpoint goes into a compressed model (``samo.load_masks(path)``
    reads its masks), or, without ``opt``, into an ordinary one, with zeros for what is pruned.
    Where masks have moved since the model was compressed, it gets those of the checkpoint. Tensors
    go to the device of the model.

    Where a model lies on several ranks, as for `samo.save`, all of them call it, in whatever layout
    the checkpoint was saved. Each reads its own part; if one refuses, all do.

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
        opt: Its optimizer, or several in the order in which they were saved; by default their saved
            state is left out.
        scaler: Its loss scaler.
        mesh: All ranks, as for `samo.save`.
        timeout_s: Seconds to wait for a rank while none reads.

    Returns:
        What was given to `samo.save` as ``extra``; tensors on the CPU.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or does not fit, here or on another
            rank.
        PeerError: Another rank does not answer.
    """
    layout, folder = layout_of(model, mesh, timeout_s, "samo.load"), Path(path)
    ranks = layout.ranks
    fill = ranks.run_all(
        f"whether '{folder}' fits everywhere", lambda: _checked(folder, layout, opt, scaler)
    )
    extra: dict[str, Any] = ranks.run_all(f"whether '{folder}' was read everywhere", fill)
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
    for name, file in manifest.files_of("masks").items():
        check_file(folder / manifest.data / name, file)
    return Masks(_masks(folder, manifest))


def _checked(
    folder: Path,
    layout: Layout,
    opt: Optimizer | Iterable[Optimizer] | None,
    scaler: Scaler | None,
) -> Callable[[], dict[str, Any]]:
    """Check everything, and return what fills model, optimizers and scaler."""
    state = ModelState(layout)
    opts = [] if opt is None else optimizers_of(opt)
    optimizers = [OptimizerState(one, state) for one in opts]
    manifest, ranks = read_manifest(folder), layout.ranks
    for i, (name, file) in enumerate(manifest.files.items()):
        # One rank compares the bytes of a file, in turn, so that no file is read by all of them.
        is_mine = i % len(ranks.ranks) == ranks.place
        check_file(folder / manifest.data / name, file, size_only=not is_mine)
        ranks.note_progress()
    if optimizers and manifest.is_compressed and not state.is_compressed and state.params:
        raise CheckpointError(
            f"'{folder}' has the optimizer state of a compressed model and this one is not compressed; "
            f"call samo.compress_(model, samo.load_masks('{folder}')) first, or load with opt=None"
        )
    saved = Checkpoint(
        folder,
        manifest,
        _masks(folder, manifest),
        SavedTensors(folder, manifest, "weights"),
        SavedTensors(folder, manifest, "optimizer"),
    )
    extra = _extra(folder, manifest)
    state.check_fits(saved, opts)
    if optimizers:
        check_all(saved, optimizers)
    _check_scaler(saved, scaler, is_training=bool(optimizers))

    @torch.no_grad()
    def fill() -> dict[str, Any]:
        state.fill(saved)
        for optimizer, entry in zip(optimizers, manifest.optimizers):
            optimizer.fill(saved, entry)
        if scaler is not None and manifest.scaler is not None:
            scaler.load_state_dict(manifest.scaler)
        return extra

    return fill


def _masks(folder: Path, manifest: Manifest) -> dict[str, Mask]:
    masks: dict[str, Mask] = {}
    for name in manifest.files_of("masks") if manifest.is_compressed else ():
        file = folder / manifest.data / name
        try:
            masks.update(Masks.load(file))
        except MaskError as error:
            raise damaged(file, str(error)) from error
    return masks


def _extra(folder: Path, manifest: Manifest) -> dict[str, Any]:
    saved = SavedTensors(folder, manifest, "extra")
    if set(saved.specs) != set(manifest.extra_tensors):
        raise CheckpointError(
            f"'{folder}' is damaged: its extra tensors are not those that its manifest names; take "
            "another copy of the checkpoint"
        )
    return manifest.extra | {name: saved.read(name).clone() for name in saved.specs}


def _check_scaler(saved: Checkpoint, scaler: Scaler | None, *, is_training: bool) -> None:
    found = saved.manifest.scaler
    if scaler is None:
        if is_training and found is not None:
            raise CheckpointError(
                f"'{saved.path}' has the state of a loss scaler, without which training would not resume "
                "as it was; give scaler=, or load with opt=None"
            )
        return
    if found is None:
        raise CheckpointError(
            f"'{saved.path}' was saved without a loss scaler; load it with scaler=None"
        )
    expected = scaler.state_dict()
    if set(found) != set(expected) or any(
        type(v) not in (bool, int, float) for v in found.values()
    ):
        raise CheckpointError(
            f"'{saved.path}' has the state of another loss scaler, {found} in place of {expected}; build "
            "the scaler it was saved with"
        )
