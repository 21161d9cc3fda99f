"""`save` and `async_save`: a model, its optimizer and what belongs to a run, as one checkpoint."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from samo import __version__
from samo.checkpoint import json_values, staging
from samo.checkpoint.folder import draft, publish, save_errors
from samo.checkpoint.layout import Layout, layout_of
from samo.checkpoint.manifest import FORMAT, KINDS, VERSION, encode_manifest
from samo.checkpoint.model_state import ModelState
from samo.checkpoint.optim_state import OptimizerState
from samo.checkpoint.tensors import name_tensors, rows_metadata, write_tensors
from samo.core.shards import local_of
from samo.distributed.ranks import LookAfter
from samo.errors import CheckpointError
from samo.mask.masks import Masks
from samo.utils import atomic_io

if TYPE_CHECKING:
    from samo.pipeline.pipeline import Pipeline


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
        extra: Tensors, numbers, strings, bools, None, and lists, tuples and dicts of them, by name.
            That of the first rank is saved.
        mesh: All ranks with a part or a copy of the model. By default those of `samo.Pipeline`, of
            DistributedDataParallel or of DTensors; otherwise one process.
        timeout_s: Seconds to wait for a rank while none writes.

    Raises:
        CheckpointError: A file cannot be written, the optimizer belongs to another model, or
            another rank failed.
        PeerError: Another rank does not answer.
    """
    staging.wait_for_pending()
    options: SaveOptions = {"scaler": scaler, "extra": extra, "mesh": mesh, "timeout_s": timeout_s}
    stage(path, model, opt, **options, copies=False)()
    _warn_of_extra_state(model)


class SaveOptions(TypedDict, total=False):
    """The keyword arguments of `save`."""

    scaler: torch.amp.GradScaler | None
    extra: Mapping[str, Any] | None
    mesh: DeviceMesh | None
    timeout_s: float


def async_save(
    path: str | os.PathLike[str],
    model: "nn.Module | Pipeline",
    opt: Optimizer | None = None,
    **options: Unpack[SaveOptions],
) -> Future[None]:
    """Save as `samo.save` does, in a thread: training continues once the state is copied.

    The copy takes as much host memory as the checkpoint, of a model on a GPU up to twice as much,
    and is reused by the next save. That one waits for this save to end; so does a process that
    exits. The first save takes longer, since its memory is new, unless
    ``samo.checkpoint.save.prepare(model, opt)`` was called after the first step.

    Example:
        >>> import tempfile, torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saving = samo.async_save(folder, model, extra={"step": 100})
        ...     # ... the next steps ...
        ...     saving.result()  # raises what went wrong
        ...     samo.load(folder, model)
        {'step': 100}

    Returns:
        Done when the checkpoint is complete. Its ``result()`` raises what `samo.save` would.
    """
    saving = staging.submit(lambda: stage(path, model, opt, **options))
    _warn_of_extra_state(model)
    return saving


@torch.no_grad()
def prepare(
    model: "nn.Module | Pipeline", opt: Optimizer | None = None, *, mesh: DeviceMesh | None = None
) -> None:
    """Take the memory of `async_save` in a thread, so that the first one is as short as others.

    Call it, on all ranks, once the optimizer has its state: after the first step.
    """
    with suppress(Exception):  # the save itself will raise it
        part = _Part(Path(), layout_of(model, mesh, 1.0, "samo.checkpoint.save.prepare"))
        part.describe(opt, None, {})
        staging.prepare(part.tensors)


@torch.no_grad()
def stage(
    path: str | os.PathLike[str],
    model: "nn.Module | Pipeline",
    opt: Optimizer | None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    extra: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    timeout_s: float = 600.0,
    copies: bool = True,
    look_after: LookAfter = lambda ranks: None,
) -> Callable[[], None]:
    """Copy what `save` would write, and return a function that writes it, for `staging.submit`.

    Without ``copies``, the model must not change until that function has returned. ``look_after``
    is called every few seconds with the ranks that this one waits for, and may raise.
    """
    layout = layout_of(model, mesh, timeout_s, "samo.save", look_after)
    part = _Part(Path(path), layout)
    try:
        part.describe(opt, scaler, extra or {})
        if copies:
            part.tensors = staging.stage(part.tensors)
    except Exception as error:  # raised in save(), on all ranks; Ctrl-C is for this thread
        part.error = error
    return part.save


class _Part:
    """What a rank writes of a checkpoint; on the first rank also the manifest."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder: Final = folder
        self.layout: Final = layout
        self.draft: Final = ExitStack()
        self.tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
        self.metadata: Final[dict[str, dict[str, str]]] = {kind: {} for kind in KINDS}
        self.content: Final[dict[str, Any]] = {}  # of the manifest, on the first rank
        self.share: dict[str, Any] | None = None  # of this rank's stage in it
        self.error: Exception | None = None

    def describe(
        self,
        opt: Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        extra: Mapping[str, Any],
    ) -> None:
        """Collect the tensors that this rank writes, and the share of its stage, if it is first."""
        layout, tensors = self.layout, self.tensors
        if layout.ranks.place == 0:
            self.content["scaler"] = None if scaler is None else scaler.state_dict()
            self.content["extra"] = json_values.encode(
                dict(extra), "extra", name_tensors(tensors["extra"])
            )
        if layout.is_first or layout.is_sharded:
            model = ModelState(layout)
            tensors["weights"] = own = model.tensors
            masks = Masks({name: mask for name, mask in sorted(model.masks.items()) if name in own})
            tensors["masks"] = {name: mask.words for name, mask in masks.items()}
            self.metadata["masks"] = masks.file_metadata()
            optimizer = None
            if opt is not None:
                optimizer = OptimizerState(opt, model).describe(tensors["optimizer"])
            if layout.is_first:
                self.share = {
                    "is_compressed": model.is_compressed,
                    "params": model.params,
                    "tensors": list(own),
                    "tied": model.tied,
                    "optimizer": optimizer,
                }
        for kind, group in tensors.items():
            held = {name: tensor for name, tensor in group.items() if layout.writes(tensor)}
            self.metadata[kind] |= rows_metadata(held)
            tensors[kind] = {name: local_of(tensor).detach() for name, tensor in held.items()}

    def save(self) -> None:
        """Write the checkpoint together with the other ranks."""
        ranks, folder = self.layout.ranks, self.folder
        with self.draft:
            data = ranks.run_all(f"what goes into '{folder}'", self.described, self.begin)
            ranks.run_all(f"the files of '{folder}'", lambda: self.write(data), self.publish)

    def described(self) -> dict[str, Any] | None:
        """Return the share of this rank's stage, from its first replica."""
        if self.error is not None:
            raise self.error
        return self.share

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
                name = f"{kind}{tag}.safetensors"
                if tensors:
                    file, metadata = self.folder / data / name, self.metadata[kind]
                    files[name] = write_tensors(file, tensors, metadata, ranks.note_progress)
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


def _warn_of_extra_state(model: "nn.Module | Pipeline") -> None:
    """Warn of state that is not saved; called last, since a warning may be raised as an error."""
    module = model if isinstance(model, nn.Module) else model.module
    for path, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            warnings.warn(
                f"the checkpoint lacks the extra state of module '{path}' "
                f"({type(part).__name__}.get_extra_state); give it in extra=",
                stacklevel=3,
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
    merged, *others = [entry for entry in given.values() if entry is not None] or [None]
    for entry in others:  # stages may repeat settings: groups are matched by the names in them
        merged["groups"] += entry["groups"]
        merged["state"] |= entry["state"]
    return {"model": model, "optimizer": merged}
