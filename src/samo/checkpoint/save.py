"""`save`: write a model, its optimizer and what else belongs to a run as one checkpoint."""

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from samo import __version__
from samo.checkpoint import json_values
from samo.checkpoint.distributed import Layout, layout_of
from samo.checkpoint.folder import Draft, draft, save_errors
from samo.checkpoint.manifest import FORMAT, KINDS, VERSION, encode_manifest
from samo.checkpoint.model_state import ModelState
from samo.checkpoint.optim_state import OptimizerState
from samo.checkpoint.tensors import check_plain, write_tensors
from samo.errors import CheckpointError
from samo.mask import mask_files
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.utils import atomic_io
from samo.utils.validation import optimizers_of

if TYPE_CHECKING:
    from samo.pipeline.pipeline import Pipeline

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
    model: "nn.Module | Pipeline",
    opt: Optimizer | Iterable[Optimizer] | None = None,
    *,
    scaler: Scaler | None = None,
    extra: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Write a checkpoint, compressed as the model is, and replace the one before it atomically.

    It holds what ``model.state_dict()`` does (of a compressed model the kept values, and its masks)
    and the state of the optimizers, but no gradients. Killed at any moment, or with the disk full,
    the folder has the checkpoint before it, or the new one.

    Where a model lies on several ranks (`samo.Pipeline`, DistributedDataParallel as it is, or
    FSDP2's ``fully_shard``), all of them call it. Each writes what it alone holds, in parallel, and
    a failure on any rank is raised on all. A checkpoint loads into any other layout. Call
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
        path: A folder, made if it does not exist, and visible to all ranks.
        model: A compressed model or an ordinary one, or a `samo.Pipeline`.
        opt: Its optimizer, `samo.AdamW` or any of torch's, or several of them.
        scaler: Its loss scaler; that of the first rank counts.
        extra: Anything else, by name: tensors, or JSON values (numbers, strings, booleans, None,
            lists and dicts of them). Tuples come back as lists. That of the first rank counts.
        mesh: All ranks that hold a part of the model or a copy of it. By default those of
            `samo.Pipeline`, of DistributedDataParallel or of DTensors; one process otherwise.
        timeout_s: Seconds to wait for a rank while none writes.

    Raises:
        TypeError: ``extra`` has a value of another type.
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
        _warn_of_extra_state(layout.module)  # at last: where warnings are errors, ranks would wait


class _Part:
    """What a rank writes of a checkpoint; on the first rank also what the manifest says."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder: Final = folder
        self.layout: Final = layout
        self.draft: Final = ExitStack()
        self.tensors: Final[dict[str, dict[str, Tensor]]] = {kind: {} for kind in KINDS}
        self.masks: dict[str, Mask] = {}
        self.content: Final[dict[str, Any]] = {}
        self._new: Draft | None = None

    def describe(
        self,
        opt: Optimizer | Iterable[Optimizer] | None,
        scaler: Scaler | None,
        extra: Mapping[str, Any],
    ) -> dict[str, Any] | None:
        """Find out what this rank writes; return the share of a stage, from its first replica."""
        layout, tensors = self.layout, self.tensors
        if layout.ranks.place == 0:
            self.content["scaler"] = None
            if scaler is not None:
                self.content["scaler"] = json_values.encode(scaler.state_dict(), "scaler")
            self.content["extra"] = _encode_extra(extra, tensors["extra"])
        if not layout.is_first and not layout.is_sharded:
            return None
        model = ModelState(layout)
        tensors["weights"] = model.tensors
        self.masks = model.masks
        own = sorted(self.masks.keys() & tensors["weights"].keys())
        tensors["masks"] = {name: self.masks[name].words for name in own}
        optimizers = [
            OptimizerState(one, model).describe(
                f"optimizer {i}/" if i else "", tensors["optimizer"]
            )
            for i, one in enumerate([] if opt is None else optimizers_of(opt))
        ]
        if not layout.is_first:
            return None
        return {
            "is_compressed": model.is_compressed,
            "params": model.params,
            "tensors": list(tensors["weights"]),
            "tied": model.tied,
            "optimizers": optimizers,
        }

    def begin(self, shares: list[Any]) -> str:
        """Lock the folder, and return the name of the new one for data."""
        by_rank = zip(self.layout.ranks.ranks, shares)
        self.content.update(merge({rank: share for rank, share in by_rank if share is not None}))
        self._new = self.draft.enter_context(draft(self.folder))
        return self._new.data.name

    def write(self, data: str) -> dict[str, Any]:
        """Write this rank's files, and return their entries in the manifest."""
        ranks = self.layout.ranks
        files: dict[str, Any] = {}
        tag = "" if ranks.is_alone else f"-rank{ranks.rank:05}"
        with save_errors(self.folder):
            for kind, tensors in self.tensors.items():
                files |= write_tensors(
                    self.folder / data,
                    kind + tag,
                    {name: t for name, t in tensors.items() if self.layout.writes(t)},
                    metadata=self._mask_metadata if kind == "masks" else None,
                    on_file=ranks.note_progress,
                )
            if files:
                atomic_io.sync_folder(self.folder / data)
        return files

    def publish(self, files: list[Any]) -> None:
        """Write the manifest over the old one, and remove the old tensors."""
        assert self._new is not None
        header = {
            "format": FORMAT,
            "version": VERSION,
            "samo": __version__,
            "time": datetime.now(UTC).isoformat(),
            "data": self._new.data.name,
            "files": {name: entry for part in files for name, entry in part.items()},
        }
        self._new.publish(encode_manifest(header | self.content))
        self.draft.close()  # here, and not after other ranks are told and look at the folder

    def _mask_metadata(self, names: list[str]) -> dict[str, str]:
        masks = Masks({name: self.masks[name] for name in names})
        return mask_files.metadata(masks, masks.fingerprint())


def _warn_of_extra_state(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            warnings.warn(
                f"module '{path}' ({type(module).__name__}) has state beside its tensors "
                "(get_extra_state), which a checkpoint does not hold; give it in extra=, and call "
                "set_extra_state after loading",
                stacklevel=4,
            )


def _encode_extra(extra: Mapping[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Return the JSON of extra, and add its tensors."""

    def name_tensor(value: Any, where: str) -> str | None:
        name = names.get(where)
        if name is None or not isinstance(value, Tensor):
            return None
        check_plain(name, value)
        tensors[name] = value
        return name

    # Tensors are at the top only, so that a reader of the manifest sees all JSON values whole.
    names = {f"extra/{name}": name for name in extra}
    return json_values.encode(dict(extra), "extra", name_tensor=name_tensor)


def merge(shares: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the manifest's entries ``model`` and ``optimizers`` of what stages hold.

    Args:
        shares: By rank, in the order of stages: ``is_compressed``, ``params`` (name to type, number
            of entries and of kept ones), ``tensors`` (all names), ``tied`` and ``optimizers``.

    Raises:
        CheckpointError: Shares do not belong together.
    """
    holders: dict[str, int] = {}
    sizes: Counter[str] = Counter()
    kept = 0
    for rank, share in shares.items():
        for name in share["tensors"]:
            if holders.setdefault(name, rank) != rank:
                raise CheckpointError(
                    f"ranks {holders[name]} and {rank}, of different stages, both hold '{name}', and it "
                    "is not a tied weight; give samo.save the samo.Pipeline, or a mesh whose axis 'pipe' "
                    "is that of the stages"
                )
        for dtype, numel, num_kept in share["params"].values():
            sizes[dtype] += numel
            kept += num_kept
    model = {
        "is_compressed": any(share["is_compressed"] for share in shares.values()),
        "dtype": max(sizes, key=lambda dtype: sizes[dtype], default="float32"),
        "num_params": sizes.total(),
        "kept": kept,
        "tied": {alias: name for share in shares.values() for alias, name in share["tied"].items()},
    }
    return {"model": model, "optimizers": _merge_optimizers(shares)}


def _merge_optimizers(shares: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    given = {rank: share["optimizers"] for rank, share in shares.items() if share["optimizers"]}
    first, expected = next(iter(given.items()), (0, []))
    for rank, share in shares.items():
        found = share["optimizers"]
        if len(found) != len(expected) and (found or share["params"]):
            raise CheckpointError(
                f"samo.save was given {len(expected)} optimizers on rank {first} and {len(found)} on rank "
                f"{rank}; give the same ones on all ranks, and where a stage has none of one's parameters "
                "build that on an empty group, [{'params': []}]"
            )
        for one, other in zip(expected, found):
            if one["class"] != other["class"]:
                raise CheckpointError(
                    f"rank {first} has a {one['class']} and rank {rank} a {other['class']}; build the same "
                    "optimizer on all ranks"
                )
    # Groups are matched by the names in them: it does not matter that stages repeat their settings.
    return [
        {
            "class": entries[0]["class"],
            "groups": [group for entry in entries for group in entry["groups"]],
            "more": entries[0]["more"],
            "state": {name: state for e in entries for name, state in e["state"].items()},
        }
        for entries in zip(*given.values())
    ]
