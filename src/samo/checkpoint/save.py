"""`save`: write a model, its optimizer and what else belongs to a run as one checkpoint."""

import os
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from samo import __version__
from samo.checkpoint import json_values
from samo.checkpoint.folder import draft, publish, save_errors
from samo.checkpoint.layout import Layout, layout_of
from samo.checkpoint.manifest import FORMAT, KINDS, VERSION, encode_manifest
from samo.checkpoint.model_state import ModelState
from samo.checkpoint.optim_state import OptimizerState
from samo.checkpoint.tensors import name_tensors, write_tensors
from samo.errors import CheckpointError
from samo.mask import mask_files
from samo.mask.masks import Masks
from samo.utils import atomic_io

if TYPE_CHECKING:
    from samo.pipeline.pipeline import Pipeline

__all__ = ["save"]


@torch.no_grad()
def save(
    path: str | os.PathLike[str],
    model: "nn.Module | Pipeline",
    opt: Optimizer | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    extra: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Save a model and its optimizer, compressed as they are, but no gradients.

    An old checkpoint is replaced atomically: after a kill at any moment, or with a full disk, the
    folder has the old one or the new one.

    On several ranks (`samo.Pipeline`, DistributedDataParallel, FSDP2), all ranks call it, each
    writes its part, and a failure on one is raised on all. Any layout can load the result. Call
    ``ZeroRedundancyOptimizer.consolidate_state_dict()`` before.

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
        path: A folder that all ranks see; created if it does not exist.
        model: A compressed or ordinary model, or a `samo.Pipeline`.
        opt: Its optimizer, `samo.AdamW` or any of torch's.
        scaler: Its loss scaler; that of the first rank is saved.
        extra: Anything else by name: tensors, numbers, strings, bools, None, and lists, tuples and
            dicts of them. That of the first rank is saved.
        mesh: All ranks with a part or a copy of the model. By default those of `samo.Pipeline`, of
            DistributedDataParallel or of DTensors; otherwise one process.
        timeout_s: Seconds to wait for a rank while none writes.

    Raises:
        CheckpointError: A file cannot be written, the optimizer belongs to another model, or
            another rank failed.
        PeerError: Another rank does not answer.
    """
    layout, folder = layout_of(model, mesh, timeout_s, "samo.save"), Path(path)
    part = _Part(folder, layout)
    with part.draft:
        data = layout.ranks.run_all(
            f"what goes into '{folder}'",
            lambda: part.describe(opt, scaler, extra or {}),
            part.begin,
        )
        layout.ranks.run_all(f"the files of '{folder}'", lambda: part.write(data), part.publish)
    if layout.is_first:
        _warn_of_extra_state(layout.module)  # last: where warnings are errors, ranks would wait


class _Part:
    """What a rank writes of a checkpoint; on the first rank also the manifest."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder: Final = folder
        self.layout: Final = layout
        self.draft: Final = ExitStack()
        self.tensors: Final[dict[str, dict[str, Tensor]]] = {kind: {} for kind in KINDS}
        self.metadata: Final[dict[str, dict[str, str]]] = {}
        self.content: Final[dict[str, Any]] = {}

    def describe(
        self,
        opt: Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        extra: Mapping[str, Any],
    ) -> dict[str, Any] | None:
        """Find what this rank writes; return the share of its stage, from the first replica."""
        layout, tensors = self.layout, self.tensors
        if layout.ranks.place == 0:
            self.content["scaler"] = None if scaler is None else scaler.state_dict()
            self.content["extra"] = json_values.encode(
                dict(extra), "extra", name_tensors(tensors["extra"])
            )
        if not layout.is_first and not layout.is_sharded:
            return None
        model = ModelState(layout)
        tensors["weights"] = model.tensors
        masks = {n: mask for n, mask in sorted(model.masks.items()) if n in model.tensors}
        tensors["masks"] = {name: mask.words for name, mask in masks.items()}
        self.metadata["masks"] = mask_files.metadata(masks, Masks(masks).fingerprint())
        optimizer = None
        if opt is not None:
            optimizer = OptimizerState(opt, model).describe(tensors["optimizer"])
        if not layout.is_first:
            return None
        return {
            "is_compressed": model.is_compressed,
            "params": model.params,
            "tensors": list(tensors["weights"]),
            "tied": model.tied,
            "optimizer": optimizer,
        }

    def begin(self, shares: list[Any]) -> str:
        """Lock the folder, and return the name of the new data folder."""
        self.content.update(merge(dict(zip(self.layout.ranks.ranks, shares))))
        self.content["data"] = self.draft.enter_context(draft(self.folder)).name
        return str(self.content["data"])

    def write(self, data: str) -> dict[str, Any]:
        """Write this rank's files, and return their entries in the manifest."""
        ranks = self.layout.ranks
        tag = "" if ranks.is_alone else f"-rank{ranks.rank:05}"
        files: dict[str, Any] = {}
        with save_errors(self.folder):
            for kind, tensors in self.tensors.items():
                own = {name: t for name, t in tensors.items() if self.layout.writes(t)}
                name = f"{kind}{tag}.safetensors"
                if own:
                    file, metadata = self.folder / data / name, self.metadata.get(kind, {})
                    files[name] = write_tensors(file, own, metadata, ranks.note_progress)
            if files:
                atomic_io.sync_folder(self.folder / data)
        return files

    def publish(self, files: list[dict[str, Any]]) -> None:
        """Replace the manifest, and remove the old tensors."""
        header = {
            "format": FORMAT,
            "version": VERSION,
            "samo": __version__,
            "time": datetime.now(UTC).isoformat(),
            "files": {name: entry for part in files for name, entry in part.items()},
        }
        publish(self.folder / self.content["data"], encode_manifest(header | self.content))
        self.draft.close()  # here: other ranks may look at the folder once they are told


def _warn_of_extra_state(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            warnings.warn(
                f"the checkpoint lacks the extra state of module '{path}' "
                f"({type(module).__name__}.get_extra_state); give it in extra=",
                stacklevel=4,
            )


def merge(shares: Mapping[int, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return the manifest's entries ``model`` and ``optimizer``, from the shares of ranks."""
    stages = {rank: share for rank, share in shares.items() if share is not None}
    holders: dict[str, int] = {}
    sizes: Counter[str] = Counter()
    kept = 0
    tied: dict[str, str] = {}
    for rank, share in stages.items():
        for name in share["tensors"]:
            if holders.setdefault(name, rank) != rank:
                raise CheckpointError(
                    f"ranks {holders[name]} and {rank} are different stages but both have "
                    f"'{name}', which is not tied; give samo.save the Pipeline, or a mesh with "
                    "axis 'pipe'"
                )
        for dtype, numel, num_kept in share["params"].values():
            sizes[dtype] += numel
            kept += num_kept
        tied |= share["tied"]
    model = {
        "is_compressed": any(share["is_compressed"] for share in stages.values()),
        "dtype": max(sizes, key=lambda dtype: sizes[dtype], default="float32"),
        "num_params": sizes.total(),
        "kept": kept,
        "tied": tied,
    }
    # A stage without parameters needs no optimizer.
    given = {r: s["optimizer"] for r, s in stages.items() if s["optimizer"] or s["params"]}
    classes = {rank: entry and entry["class"] for rank, entry in given.items()}
    if len({*classes.values()}) > 1:
        raise CheckpointError(
            f"the ranks have different optimizers, {classes}; give the same one on all ranks"
        )
    merged = None
    for entry in given.values():
        if merged is None or entry is None:
            merged = entry
        else:  # groups are matched by the names in them: stages may repeat their settings
            merged["groups"] += entry["groups"]
            merged["state"] |= entry["state"]
    return {"model": model, "optimizer": merged}
