"""`load`: fill a model, its optimizer and its scaler from a checkpoint, after all checks."""

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from samo.checkpoint.folder import check_file
from samo.checkpoint.layout import Layout, layout_of
from samo.checkpoint.manifest import read_manifest
from samo.checkpoint.model_state import ModelState
from samo.checkpoint.optim_state import OptimizerState
from samo.checkpoint.reader import Checkpoint, read_masks
from samo.checkpoint.tensors import SavedTensors
from samo.errors import CheckpointError, MaskError
from samo.mask.masks import Masks
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig

if TYPE_CHECKING:
    from samo.pipeline.pipeline import Pipeline


@torch.inference_mode(False)
@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    model: "nn.Module | Pipeline",
    opt: Optimizer | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    mesh: DeviceMesh | None = None,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """Fill a model, its optimizer and its scaler from a checkpoint, to resume training exactly.

    A compressed checkpoint goes into a model compressed with its masks (see `samo.load_masks`), or,
    without ``opt``, into an ordinary one, with zeros where pruned. Tensors go to the device of the
    model.

    An error leaves model, optimizer and scaler as they were. Everything is checked before anything
    is changed; a failure after that is undone, from a copy that is kept on the host meanwhile.

    On several ranks, all call it, in any layout. Each reads its part; if one fails, all do.

    Example:
        >>> import tempfile, torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> model = samo.compress_(model, samo.prune(model, 0.5))
        >>> opt = samo.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     samo.save(folder, model, opt, extra={"step": 100})
        ...     again = torch.nn.Sequential(torch.nn.Linear(8, 8))
        ...     again = samo.compress_(again, samo.load_masks(folder))
        ...     samo.load(folder, again, samo.AdamW(again.parameters()))
        {'step': 100}
        >>> torch.equal(model[0].weight, again[0].weight)
        True

    Args:
        path: The folder given to `samo.save`.
        model: The model to fill in place, or a `samo.Pipeline`.
        opt: Its optimizer; by default no optimizer state is loaded.
        scaler: Its loss scaler.
        mesh: All ranks, as for `samo.save`.
        timeout_s: Seconds to wait for a rank while none reads.

    Returns:
        What was given to `samo.save` as ``extra``; tensors on the CPU.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or does not fit, here or on another
            rank.
        PeerError: Another rank does not answer.
    """
    layout = layout_of(model, mesh, timeout_s, "samo.load")
    task = _Load(Path(path), layout, opt, scaler)
    layout.ranks.run_all(f"whether '{path}' fits everywhere", task.check)
    # What is filled is first copied to the host, to undo it all if anything fails on any rank. To
    # read the checkpoint into memory instead would take as much, and not undo a failed copy.
    with ExitStack() as undo:
        layout.ranks.run_all(f"'{path}' to be read everywhere", lambda: task.fill(undo))
        undo.pop_all()
    return task.extra


def checkpoint_masks(path: str | os.PathLike[str]) -> Masks:
    """Read the masks of a checkpoint onto the CPU."""
    manifest = read_manifest(path)
    if not manifest.is_compressed:
        raise MaskError(
            f"'{path}' has no masks: it was saved from a dense model; name one of a pruned model"
        )
    for file in manifest.files_of("masks"):
        check_file(file, manifest.files[file.name])
    return Masks(read_masks(manifest))


def check_shape(path: str | os.PathLike[str], config: GPTConfig) -> None:
    """Refuse a checkpoint of another GPT, by the headers of its files, before one takes memory."""
    manifest = read_manifest(path)
    for name, entry in manifest.files.items():
        check_file(manifest.data / name, entry, size_only=True)
    specs = SavedTensors(manifest, "weights").specs
    masks = read_masks(manifest)
    found = {name: masks[name].shape if name in masks else specs[name].shape for name in specs}
    own: dict[str, tuple[int, ...]] = {}
    with suppress(OverflowError, RuntimeError, TypeError), torch.device("meta"):  # sizes over 2**63
        if config.num_layers <= len(found):
            own = {name: tuple(value.shape) for name, value in GPT(config).state_dict().items()}
    for name in sorted(found.keys() | own.keys() - manifest.tied.keys()):
        if found.get(name) != own.get(name):
            raise CheckpointError(
                f"'{path}' does not fit: '{name}' has shape {found.get(name)} in the checkpoint, "
                f"{own.get(name)} in a {config}"
            )


@dataclass
class _Load:
    """Checks everything, then fills model, optimizer and scaler."""

    folder: Path
    layout: Layout
    opt: Optimizer | None
    scaler: torch.amp.GradScaler | None

    def check(self) -> None:
        self.model = model = ModelState(self.layout)
        self.optimizer = None if self.opt is None else OptimizerState(self.opt, model)
        self.saved = saved = Checkpoint(self.folder, self.layout.ranks)
        is_expanding = saved.manifest.is_compressed and not model.is_compressed
        if self.optimizer is not None and is_expanding and model.params:
            raise saved.misfit(
                "it has the optimizer state of a compressed model; call "
                f"samo.compress_(model, samo.load_masks('{self.folder}')), or load with opt=None"
            )
        model.check_fits(saved)
        if self.optimizer is not None:
            self.optimizer.check_fits(saved)
        own = {} if self.scaler is None else self.scaler.state_dict()  # {} if disabled, too
        found = saved.manifest.scaler or {}
        is_same = own.keys() == found.keys() and all(
            isinstance(found.get(key, 0), int) for key in ("growth_interval", "_growth_tracker")
        )
        if not is_same and (self.opt is not None or self.scaler is not None):
            raise saved.misfit(
                f"it was saved with loss scaler {found} and this one is {own}; give the same "
                "scaler=, or load with opt=None and scaler=None"
            )
        self.extra = saved.read_extra()

    def fill(self, undo: ExitStack) -> None:
        self.model.fill(self.saved, undo)
        if self.optimizer is not None:
            self.optimizer.fill(self.saved, undo)
        if self.scaler is not None:
            undo.callback(self.scaler.load_state_dict, self.scaler.state_dict())
            self.scaler.load_state_dict(self.saved.manifest.scaler or {})
