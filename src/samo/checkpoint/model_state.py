"""The tensors of a model as a checkpoint knows them: by name, each once, compressed or dense."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samo import kernels
from samo.checkpoint.distributed import Layout
from samo.checkpoint.tensors import Checkpoint, check_plain, local, rows_of
from samo.core.modules import CompressedModule, weights_in
from samo.core.rank_checks import outdate_replicas
from samo.core.step_hooks import STEPPED
from samo.core.weight import Weight
from samo.errors import CheckpointError, nearest
from samo.mask.mask import Mask

__all__ = []


class Entry(NamedTuple):
    """A parameter or a persistent buffer."""

    tensor: Tensor
    weight: Weight | None
    """The compressed weight whose values the tensor is, if it is one's."""


class ModelState:
    """What of a model, or of a rank's stage of one, is saved and loaded."""

    def __init__(self, layout: Layout) -> None:
        model = layout.module
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"the model must be a torch.nn.Module, got {type(model).__name__}; the folder comes "
                "first, then the model, then its optimizer"
            )
        self.layout: Final = layout
        self.is_compressed: Final = any(isinstance(m, CompressedModule) for m in model.modules())
        self.entries: Final[dict[str, Entry]] = {}
        self.tied: Final[dict[str, str]] = {}
        self._names: Final[set[str]] = set()
        first: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or name in module._non_persistent_buffers_set:
                    continue
                full = f"{path}.{name}" if path else name
                self._names.add(full)
                known = first.setdefault(id(tensor), layout.aliases.get(full, full))
                if known != full:
                    self.tied[full] = known
                if known in self.entries:
                    continue
                check_plain(full, tensor)
                # By name: FSDP2 replaces the parameter of a weight's values by another one.
                self.entries[known] = Entry(tensor, weights_in(module).get(name))
        for entry in self.entries.values():
            if entry.weight is not None:
                entry.weight.sync_written()

    @property
    def masks(self) -> dict[str, Mask]:
        """The masks of the pruned parameters."""
        return {
            name: entry.weight.mask
            for name, entry in self.entries.items()
            if entry.weight is not None and entry.weight.mask is not None
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are this stage's to save: of a tied weight, the first stage's alone."""
        return {name: e.tensor for name, e in self.entries.items() if name in self._names}

    @property
    def params(self) -> dict[str, tuple[str, int, int]]:
        """Type that each parameter of `tensors` is computed with, its entries and its kept entries."""
        found = {}
        for name, tensor in self.tensors.items():
            if isinstance(tensor, nn.Parameter):
                dense = self.entries[name].weight or tensor
                dtype = str(dense.dtype).removeprefix("torch.")
                found[name] = (dtype, dense.shape.numel(), tensor.numel())
        return found

    # Loading -------------------------------------------------------------------------------------

    def check_fits(self, saved: Checkpoint, opts: Sequence[Optimizer]) -> None:
        """Refuse a checkpoint of another model, before anything is changed.

        Raises:
            CheckpointError: A name, shape, type or tie differs, masks do and cannot be taken over,
                or the checkpoint is of a dense model and this one is compressed.
        """
        if self.is_compressed and not saved.manifest.is_compressed:
            raise CheckpointError(
                f"'{saved.path}' was saved from a dense model and this one is compressed; load it into the "
                "model first and call samo.compress_(model, masks) afterwards"
            )
        self._check_names(saved)
        theirs = saved.manifest.tied
        if self.layout.is_part:
            theirs = {alias: name for alias, name in theirs.items() if alias in self._names}
        if self.tied != theirs:
            alias = sorted(self.tied.items() ^ theirs.items())[0][0]
            raise saved.misfit(
                f"'{alias}' is tied to '{theirs.get(alias, 'nothing')}' in the checkpoint and to "
                f"'{self.tied.get(alias, 'nothing')}' in the model; tie the same parameters before loading"
            )
        if self.is_compressed:
            self._check_masks(saved, opts)
        for name in self.entries:
            self._check_tensor(saved, name)

    def _check_names(self, saved: Checkpoint) -> None:
        specs = saved.weights.specs
        missing = [name for name in self.entries if name not in specs]
        if missing:
            raise saved.misfit(
                f"it lacks {len(missing)} of the model's {len(self.entries)} tensors, the first is "
                f"'{missing[0]}'{nearest(missing[0], specs)}; load it into the model it was saved from"
            )
        unknown = [name for name in specs if name not in self.entries]
        if unknown and not self.layout.is_part:
            raise saved.misfit(
                f"{len(unknown)} of its {len(specs)} tensors are not in the model, the first is "
                f"'{unknown[0]}'{nearest(unknown[0], self.entries)}; load it into the model it was saved "
                "from"
            )

    def _check_masks(self, saved: Checkpoint, opts: Sequence[Optimizer]) -> None:
        own, masks, path = self.masks, saved.masks, saved.path
        states = [opt.state for one in opts for opt in (one, getattr(one, "optim", one))]
        for name in sorted({*own, *(name for name in masks if name in self.entries)}):
            if (name in own) != (name in masks):
                raise saved.misfit(
                    f"its mask of '{name}' is {masks.get(name)} and the model's {own.get(name)}; compress "
                    f"the model with samo.load_masks('{path}')"
                )
            if own[name] == masks[name]:
                continue
            values = self.entries[name].tensor
            if rows_of(values) is not None:
                raise CheckpointError(
                    f"'{path}' has another mask of '{name}', whose values are sharded over ranks and keep "
                    f"theirs; compress the model with samo.load_masks('{path}') before fully_shard"
                )
            for opt in STEPPED:
                if opt.state.get(values) and not any(opt.state is state for state in states):
                    raise CheckpointError(
                        f"'{path}' has another mask of '{name}', and an optimizer ({type(opt).__name__}) "
                        "that was not given keeps state for the one it has; give it to samo.load, or "
                        "call its state.clear()"
                    )

    def _check_tensor(self, saved: Checkpoint, name: str) -> None:
        (tensor, weight), spec, mask = (
            self.entries[name],
            saved.weights.specs[name],
            saved.masks.get(name),
        )
        shape = tuple((weight or tensor).shape)
        found = spec.shape if mask is None else mask.shape
        if found != shape or (mask is not None and spec.shape != (mask.kept,)):
            raise saved.misfit(
                f"'{name}' has shape {found} in the checkpoint and {shape} in the model; load it into the "
                "model it was saved from"
            )
        is_expanding = saved.manifest.is_compressed and not self.is_compressed
        can_cast = is_expanding and spec.dtype.is_floating_point and tensor.is_floating_point()
        if spec.dtype != tensor.dtype and not can_cast:
            raise saved.misfit(
                f"'{name}' is {spec.dtype} in the checkpoint and {tensor.dtype} in the model; give the "
                "model the type it was saved with"
            )

    def fill(self, saved: Checkpoint) -> None:
        """Write the values of a checkpoint that fits into the model, and give it the saved masks."""
        changed = []
        for name, (tensor, weight) in self.entries.items():
            mask = saved.masks.get(name)
            if mask is not None and weight is None:
                _expand(tensor, mask, saved.weights.read(name))
            elif mask is not None and weight is not None and weight.mask != mask:
                if weight.kept != mask.kept:
                    changed.append(tensor)
                values = saved.weights.read(name).to(weight.device, copy=True)
                weight.take_mask(mask.to(weight.device), values, None)
            else:
                local(tensor).copy_(saved.weights.read(name, rows_of(tensor)))
                if weight is not None and weight.dense is not None:
                    weight.refresh()
            self.layout.ranks.note_progress()
        outdate_replicas(changed)


def _expand(tensor: Tensor, mask: Mask, values: Tensor) -> None:
    """Fill a dense parameter with kept values, and zeros between them."""
    rows = rows_of(tensor)
    if rows is None:
        mask, values = mask.to(tensor.device), values.to(tensor.device, copy=True)
        kernels.choose(tensor.device).expand_(values, mask, tensor.detach())
        torch.autograd.graph.increment_version(tensor)
    else:
        dense = torch.empty(tensor.shape, dtype=values.dtype)
        kernels.choose(dense.device).expand_(values, mask.to(dense.device), dense)
        local(tensor).copy_(dense[rows.start : rows.stop])
