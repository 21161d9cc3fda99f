"""`save`: write a model, its optimizer and what else belongs to a run as one checkpoint."""

import os
import warnings
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from samo import __version__
from samo.checkpoint import values
from samo.checkpoint.folder import publish
from samo.checkpoint.gathering import fetched, follow, lead
from samo.checkpoint.grid import Grid, grid_of
from samo.checkpoint.manifest import (
    FORMAT,
    VERSION,
    DataFile,
    describe_files,
    encode_manifest,
)
from samo.checkpoint.merging import Whole, merge
from samo.checkpoint.model_state import ModelState
from samo.checkpoint.optim_state import OptimizerState
from samo.checkpoint.tensors import Source, dtype_name, source_of, write_shards, write_tensors
from samo.mask import mask_files
from samo.mask.mask import Mask
from samo.mask.mask_files import MaskFile
from samo.mask.masks import Masks
from samo.pipeline.pipeline import Pipeline
from samo.utils.validation import optimizers_of

__all__ = ["save"]


class Scaler(Protocol):
    """A loss scaler, such as ``torch.amp.GradScaler``."""

    def state_dict(self) -> dict[str, Any]:
        """Return its numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved numbers."""


@torch.no_grad()
def save(
    path: str | os.PathLike[str],
    model: nn.Module | Pipeline,
    opt: Optimizer | Iterable[Optimizer] | None = None,
    *,
    scaler: Scaler | None = None,
    extra: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Write a checkpoint, compressed as the model is: whole, or not at all.

    It has what ``model.state_dict()`` has, of a compressed model the kept values and its masks, and the
    state of the optimizers. Killed at any moment, or with the disk full, the folder holds the
    checkpoint it held before, or the new one. Gradients are not saved.

    Where a model lies on several ranks (`samo.Pipeline`, DistributedDataParallel, which is given as it
    is, or FSDP2's ``fully_shard``), all of them call it. The first writes what one process would have
    written, whatever the layout, and holds one tensor at a time for it, on the host; a failure on any rank
    is raised on all. The state that ZeroRedundancyOptimizer has spread
    over ranks is brought to the first one before, by its ``consolidate_state_dict()``.

    Example:
        >>> import tempfile, torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> model = samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
        >>> opt = samo.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     samo.save(f"{folder}/last", model, opt, extra={"step": 100})
        ...     samo.load(f"{folder}/last", model, opt)
        {'step': 100}

    Args:
        path: A folder, made if it does not exist. A checkpoint in it is replaced.
        model: A compressed model or an ordinary one, or a `samo.Pipeline`.
        opt: Its optimizer, `samo.AdamW` or any of torch's, or several of them.
        scaler: Its loss scaler. That of the first rank counts.
        extra: Anything else, by name: tensors, or JSON values (numbers, strings, booleans, None, lists
            and dicts of them). Tuples come back as lists. That of the first rank is saved.
        mesh: All ranks that hold a part of the model or a copy of it. By default those of
            `samo.Pipeline`, of DistributedDataParallel or of DTensors; one process otherwise.
        timeout_s: Seconds after which a rank that does not answer is given up.

    Raises:
        TypeError: ``extra`` has a value of another kind.
        CheckpointError: A file cannot be written, the optimizer belongs to another model, or another
            rank failed.
        PeerError: Another rank is gone or does not answer.
    """
    grid = grid_of(model, mesh, timeout_s, "samo.save")
    links = grid.links
    if links is not None and not links.is_leader:
        follow(links, lambda: _own_share(grid, opt), f"the rank that writes '{os.fspath(path)}'")
        if grid.is_first:
            _warn_of_extra_state(grid.module)
        return
    own: dict[str, dict[str, Source]] = {}

    def describe() -> dict[str, Any]:
        share, sources = _share(grid, opt)
        own.update(sources)
        return share

    def write(shares: Mapping[int, Mapping[str, Any]]) -> None:
        whole = merge(shares, grid.order)
        tensors = {
            kind: {
                name: fetched(links, kind, name, origin, own) for name, origin in origins.items()
            }
            for kind, origins in whole.tensors.items()
        }
        extra_values, tensors["extra"] = _encode_extra(extra or {})
        scaler_state = None if scaler is None else values.encode(scaler.state_dict(), "scaler")
        publish(
            Path(path), lambda folder: _write(folder, whole, tensors, scaler_state, extra_values)
        )

    if links is None:
        write({0: describe()})
    else:
        lead(links, describe, write, "its share")
    _warn_of_extra_state(grid.module)  # at last: where warnings are errors, other ranks would wait


def _write(
    folder: Path,
    whole: Whole,
    tensors: dict[str, dict[str, Source]],
    scaler: Any,
    extra: dict[str, Any],
) -> bytes:
    """Write all tensors, each made when its turn comes, and return the manifest."""
    files: dict[str, DataFile] = {}
    for kind in ("weights", "optimizer", "extra"):
        files |= write_tensors(folder, kind, tensors[kind])
    words = tensors["masks"]

    def encode_masks(names: list[str]) -> list[bytes]:
        part = Masks(
            {name: Mask(tuple(whole.mask_shapes[name]), words[name].make()) for name in names}
        )
        shapes = {name: mask.shape for name, mask in part.items()}
        bits = {name: mask.words for name, mask in part.items()}
        return [mask_files.encode(MaskFile(bits, shapes, part.fingerprint()))]

    sizes = {name: source.num_bytes for name, source in words.items()}
    files |= write_shards(folder, "masks", sizes, encode_masks)
    return encode_manifest(
        {
            "format": FORMAT,
            "version": VERSION,
            "samo": __version__,
            "time": datetime.now(UTC).isoformat(),
            "data": folder.name,
            "files": describe_files(files),
            "model": whole.model,
            "optimizers": whole.optimizers,
            "scaler": scaler,
            "extra": extra,
        }
    )


def _own_share(
    grid: Grid, opt: Optimizer | Iterable[Optimizer] | None
) -> tuple[dict[str, Any] | None, dict[str, dict[str, Source]]]:
    """Return what a rank gives that does not write: its stage, its rows of tensors, or nothing."""
    if grid.is_first:
        return _share(grid, opt)
    return (None, _share(grid, opt)[1]) if grid.is_in_rows else _nothing()


def _nothing() -> tuple[None, dict[str, dict[str, Source]]]:
    """Return what a replica gives to a checkpoint, of a stage that another rank gives."""
    return None, {}


def _share(
    grid: Grid, opt: Optimizer | Iterable[Optimizer] | None
) -> tuple[dict[str, Any], dict[str, dict[str, Source]]]:
    """Return what this stage gives to a checkpoint: in words, and the tensors themselves."""
    state = ModelState(grid.module, grid.aliases, is_part=grid.is_part)
    opts = [] if opt is None else optimizers_of(opt)
    moments: dict[str, Source] = {}
    optimizers = [
        OptimizerState(one, state).describe(f"optimizer {i}/" if i else "", moments)
        for i, one in enumerate(opts)
    ]
    tensors = {"weights": state.sources(), "optimizer": moments, "masks": state.mask_words()}
    share = {
        "is_compressed": state.is_compressed,
        "has_params": state.has_params,
        "params": state.params(),
        "tied": state.tied,
        "shared": sorted(set(grid.aliases.values())),
        "mask_shapes": {name: list(mask.shape) for name, mask in state.masks.items()},
        "tensors": {
            kind: {
                name: [dtype_name(source.dtype), list(source.shape), list(source.pieces)]
                for name, source in sources.items()
            }
            for kind, sources in tensors.items()
        },
        "optimizers": optimizers,
    }
    return share, tensors


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
