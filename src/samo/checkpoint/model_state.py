"""The tensors of a model as a checkpoint knows them: by name, each once, compressed or dense."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samo import kernels
from samo.checkpoint.manifest import Manifest
from samo.checkpoint.merging import ParamShare
from samo.checkpoint.rows import own_part, own_rows, pieces_of
from samo.checkpoint.tensors import Shards, Source, Spec, check_plain, source_of
from samo.core.modules import CompressedModule, weights_in
from samo.core.ranks import outdate_replicas
from samo.core.weight import STEPPED, Weight
from samo.errors import CheckpointError, nearest
from samo.mask.mask import Mask

__all__ = []


class Entry(NamedTuple):
    """A parameter or a persistent buffer."""

    tensor: Tensor
    weight: Weight | None
    """Whose values it is; None for what is an ordinary tensor."""


class ModelState:
    """What of a model, or of a rank's stage of one, is saved and loaded.

    Args:
        model: The model.
        aliases: Name in the checkpoint of each parameter that another stage holds under that name.
        is_part: Whether the checkpoint holds more tensors than these, those of other stages.
    """

    def __init__(
        self,
        model: nn.Module,
        aliases: Mapping[str, str] = MappingProxyType({}),
        *,
        is_part: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"the model must be a torch.nn.Module, got {type(model).__name__}; the folder comes "
                "first, then the model, then its optimizer"
            )
        self.is_part: Final = is_part
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
                known = first.setdefault(id(tensor), aliases.get(full, full))
                if known != full:
                    self.tied[full] = known
                if known in self.entries:
                    continue
                check_plain(full, tensor)
                # By name: what FSDP2 makes of a weight's values is another parameter.
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
    def has_params(self) -> bool:
        """Whether there is any parameter."""
        return any(isinstance(entry.tensor, nn.Parameter) for entry in self.entries.values())

    def params(self) -> dict[str, ParamShare]:
        """Return type, size and number of kept entries of each parameter, as it is computed with."""
        return {
            name: ParamShare(
                str((weight or tensor).dtype).removeprefix("torch."),
                (weight or tensor).shape.numel(),
                tensor.numel(),
            )
            for name, (tensor, weight) in self.entries.items()
            if isinstance(tensor, nn.Parameter)
        }

    def sources(self) -> dict[str, Source]:
        """Return the tensors to be written."""
        return {name: source_of(name, entry.tensor) for name, entry in self.entries.items()}

    def mask_words(self) -> dict[str, Source]:
        """Return the bits of the masks."""
        return {name: source_of(name, mask.words) for name, mask in self.masks.items()}

    # Loading -------------------------------------------------------------------------------------

    def check_fits(
        self,
        path: str,
        manifest: Manifest,
        masks: Mapping[str, Mask],
        saved: Shards,
        opts: Sequence[Optimizer],
    ) -> None:
        """Refuse a checkpoint of another model, before anything is changed.

        Raises:
            CheckpointError: A name, shape, type or tie differs, masks do and cannot be taken over, or
                the checkpoint is of a dense model and this one is compressed.
        """
        if self.is_compressed and not manifest.is_compressed:
            raise CheckpointError(
                f"'{path}' was saved from a dense model and this one is compressed; load it into the "
                "model first and call samo.compress_(model, masks) afterwards"
            )
        self._check_names(path, saved.specs)
        theirs = manifest.tied
        if self.is_part:
            theirs = {alias: name for alias, name in theirs.items() if alias in self._names}
        if self.tied != theirs:
            alias = sorted(self.tied.items() ^ theirs.items())[0][0]
            raise CheckpointError(
                f"'{path}' does not fit: '{alias}' is tied to '{theirs.get(alias, 'nothing')}' in "
                f"the checkpoint and to '{self.tied.get(alias, 'nothing')}' in the model; tie the same "
                "parameters before loading"
            )
        if self.is_compressed:
            self._check_masks(path, masks, opts)
        is_expanding = manifest.is_compressed and not self.is_compressed
        for name in self.entries:
            spec = saved.specs[name]
            self._check_tensor(path, name, masks.get(name), spec, is_expanding=is_expanding)

    def _check_names(self, path: str, specs: Mapping[str, Spec]) -> None:
        missing = [name for name in self.entries if name not in specs]
        if missing:
            raise CheckpointError(
                f"'{path}' does not fit: it lacks {len(missing)} of the model's {len(self.entries)} "
                f"tensors, the first is '{missing[0]}'{nearest(missing[0], specs)}; load it into the "
                "model it was saved from"
            )
        unknown = [name for name in specs if name not in self.entries]
        if unknown and not self.is_part:
            raise CheckpointError(
                f"'{path}' does not fit: {len(unknown)} of its {len(specs)} tensors are not in the "
                f"model, the first is '{unknown[0]}'{nearest(unknown[0], self.entries)}; load it into "
                "the model it was saved from"
            )

    def _check_masks(self, path: str, masks: Mapping[str, Mask], opts: Sequence[Optimizer]) -> None:
        own = self.masks
        states = [opt.state for one in opts for opt in (one, getattr(one, "optim", one))]
        for name in sorted({*own, *(name for name in masks if name in self.entries)}):
            if (name in own) != (name in masks):
                raise CheckpointError(
                    f"'{path}' does not fit: its mask of '{name}' is {masks.get(name)} and the model's "
                    f"{own.get(name)}; compress the model with samo.load_masks('{path}')"
                )
            if own[name] == masks[name]:
                continue
            if pieces_of(self.entries[name].tensor):
                raise CheckpointError(
                    f"'{path}' has another mask of '{name}', whose values lie on several ranks and keep "
                    f"theirs; compress the model with samo.load_masks('{path}') before fully_shard"
                )
            for opt in STEPPED:
                values = self.entries[name].tensor
                if opt.state.get(values) and not any(opt.state is state for state in states):
                    raise CheckpointError(
                        f"'{path}' has another mask of '{name}', and an optimizer ({type(opt).__name__}) "
                        "that was not given keeps state for the one it has; give it to samo.load, or "
                        "call its state.clear()"
                    )

    def _check_tensor(
        self, path: str, name: str, mask: Mask | None, spec: Spec, *, is_expanding: bool
    ) -> None:
        tensor, weight = self.entries[name]
        shape = tuple((weight or tensor).shape)
        found = spec.shape if mask is None else mask.shape
        if found != shape or (mask is not None and spec.shape != (mask.kept,)):
            raise CheckpointError(
                f"'{path}' does not fit: '{name}' has shape {found} in the checkpoint and {shape} in the "
                "model; load it into the model it was saved from"
            )
        can_cast = is_expanding and spec.dtype.is_floating_point and tensor.is_floating_point()
        if spec.dtype != tensor.dtype and not can_cast:
            raise CheckpointError(
                f"'{path}' does not fit: '{name}' is {spec.dtype} in the checkpoint and {tensor.dtype} "
                "in the model; give the model the type it was saved with"
            )

    def fill(self, masks: Mapping[str, Mask], saved: Shards) -> None:
        """Write the values of a checkpoint that fits into the model, and give it the saved masks."""
        changed = []
        for name, value in saved.read(self.entries):
            tensor, weight = self.entries[name]
            mask = masks.get(name)
            if mask is not None and weight is None:
                if pieces_of(tensor):
                    dense = torch.empty(tensor.shape, dtype=value.dtype)
                    kernels.choose(dense.device).expand_(value, mask.to(dense.device), dense)
                    own_part(tensor).copy_(own_rows(dense, tensor))
                    continue
                mask = mask.to(tensor.device)
                moved = value.to(tensor.device, copy=True)
                kernels.choose(tensor.device).expand_(moved, mask, tensor.detach())
                torch.autograd.graph.increment_version(tensor)
            elif mask is not None and weight is not None and weight.mask != mask:
                if weight.kept != mask.kept:
                    changed.append(tensor)
                weight.take_mask(mask.to(weight.device), value.to(weight.device, copy=True), None)
            else:
                own_part(tensor).copy_(own_rows(value, tensor))
                if weight is not None and weight.dense is not None:
                    weight.refresh()
        outdate_replicas(changed)
