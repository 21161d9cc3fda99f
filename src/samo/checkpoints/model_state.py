"""The tensors of a model as a checkpoint knows them: by name, each once, compressed or dense."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from samo import kernels
from samo.checkpoints.manifest import Manifest
from samo.checkpoints.merging import ParamShare
from samo.checkpoints.shards import Place, Shards, Source, Spec, check_plain, source_of
from samo.errors import CheckpointError, CompressionError, nearest
from samo.kernels.rounding import convert_rest, rest_dtype
from samo.masks import Mask
from samo.owners import owned_weights, put_back_taps
from samo.weights import Weight, weight_of

__all__ = []


class Entry(NamedTuple):
    """A parameter or a persistent buffer."""

    tensor: Tensor
    weight: Weight | None
    """Its compressed state; None in an ordinary model, and for buffers."""


class SavedModel(NamedTuple):
    """The files with a model's tensors."""

    weights: Shards
    rests: Shards


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
        put_back_taps(model)
        self.is_part: Final = is_part
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
                self.entries[known] = Entry(tensor, weight_of(tensor))
        self.weights: Final = {
            name: entry.weight for name, entry in self.entries.items() if entry.weight is not None
        }
        self._check_weights(model)

    def _check_weights(self, model: nn.Module) -> None:
        found = {id(weight) for weight in self.weights.values()}
        for name, weight in owned_weights(model).items():
            if id(weight) not in found:
                raise CompressionError(
                    f"parameter '{name}' was replaced after compress_; change it in place, or compress "
                    "the model after the change"
                )
            weight.check()
            weight.reclaim()

    @property
    def is_compressed(self) -> bool:
        """Whether the model trains on compressed state."""
        return bool(self.weights)

    @property
    def masks(self) -> dict[str, Mask]:
        """The masks of the pruned parameters."""
        return {name: w.mask for name, w in self.weights.items() if w.mask is not None}

    @property
    def has_params(self) -> bool:
        """Whether there is any parameter."""
        return any(isinstance(entry.tensor, nn.Parameter) for entry in self.entries.values())

    def params(self) -> dict[str, ParamShare]:
        """Return type, size and number of kept entries of each parameter."""
        masks = self.masks
        return {
            name: ParamShare(
                str(entry.tensor.dtype).removeprefix("torch."),
                entry.tensor.numel(),
                masks[name].kept if name in masks else entry.tensor.numel(),
            )
            for name, entry in self.entries.items()
            if isinstance(entry.tensor, nn.Parameter)
        }

    def sources(self) -> dict[str, Source]:
        """Return the values to be written: vectors of kept ones, all others in their own shape."""
        return {
            name: _kept_values(entry.weight, entry.weight.mask)
            if entry.weight is not None and entry.weight.mask is not None
            else source_of(name, entry.tensor)
            for name, entry in self.entries.items()
        }

    def rests(self) -> dict[str, Source]:
        """Return what rounding to 16 bits left over, where something is kept of it."""
        return {
            name: source_of(name, weight.part.rest, place_of(weight))
            for name, weight in self.weights.items()
            if weight.part.rest is not None
        }

    def mask_words(self) -> dict[str, Source]:
        """Return the bits of the masks."""
        return {name: source_of(name, mask.words) for name, mask in self.masks.items()}

    # Loading -------------------------------------------------------------------------------------

    def check_fits(
        self, path: str, manifest: Manifest, masks: Mapping[str, Mask], saved: SavedModel
    ) -> None:
        """Refuse a checkpoint of another model, before anything is changed.

        Raises:
            CheckpointError: A name, shape, type, tie or mask differs, or the checkpoint is of a dense
                model and this one is compressed.
        """
        if self.is_compressed and not manifest.is_compressed:
            raise CheckpointError(
                f"'{path}' was saved from a dense model and this one is compressed; load it into the "
                "model first and call samo.compress_(model, masks) afterwards"
            )
        self._check_names(path, saved.weights.specs)
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
            self._check_masks(path, masks)
        is_expanding = manifest.is_compressed and not self.is_compressed
        for name in self.entries:
            spec = saved.weights.specs[name]
            self._check_tensor(path, name, masks.get(name), spec, is_expanding=is_expanding)
        self._check_rests(path, saved.rests.specs)

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

    def _check_masks(self, path: str, masks: Mapping[str, Mask]) -> None:
        own = self.masks
        for name in sorted({*own, *(name for name in masks if name in self.entries)}):
            if own.get(name) != masks.get(name):
                raise CheckpointError(
                    f"'{path}' does not fit: its mask of '{name}' ({masks.get(name)}) is not the "
                    f"model's ({own.get(name)}); compress the model with samo.Masks.load('{path}')"
                )

    def _check_tensor(
        self, path: str, name: str, mask: Mask | None, spec: Spec, *, is_expanding: bool
    ) -> None:
        entry = self.entries[name]
        shape = tuple(entry.tensor.shape)
        found = spec.shape if mask is None else mask.shape
        if found != shape or (mask is not None and spec.shape != (mask.kept,)):
            raise CheckpointError(
                f"'{path}' does not fit: '{name}' has shape {found} in the checkpoint and {shape} in the "
                "model; load it into the model it was saved from"
            )
        dtype = entry.tensor.dtype
        can_cast = is_expanding and spec.dtype.is_floating_point and dtype.is_floating_point
        if spec.dtype != dtype and not can_cast:
            raise CheckpointError(
                f"'{path}' does not fit: '{name}' is {spec.dtype} in the checkpoint and {dtype} in the "
                "model; give the model the type it was saved with"
            )

    def _check_rests(self, path: str, specs: Mapping[str, Spec]) -> None:
        for name, spec in specs.items():
            weight = self.weights.get(name)
            if weight is None and self.is_part and name not in self.entries:
                continue
            if self.is_compressed and (
                weight is None
                or spec.dtype not in _rest_dtypes(weight)
                or spec.shape != (weight.kept,)
            ):
                raise CheckpointError(
                    f"'{spec.file}' does not fit: the remainder of '{name}' is {spec.dtype} of shape "
                    f"{spec.shape}, which belongs to no weight of this model; take another copy"
                )

    def fill(self, masks: Mapping[str, Mask], saved: SavedModel) -> None:
        """Write the values of a checkpoint that fits into the model, in place."""
        for name, value in saved.weights.read(self.entries):
            tensor, weight = self.entries[name]
            mask = masks.get(name)
            if mask is None:
                tensor.copy_(value)
            elif weight is not None:
                weight.kernels.expand_(value.to(weight.device, copy=True), weight.mask, tensor)
            else:
                moved = value.to(tensor.device, tensor.dtype, copy=True)
                chosen = kernels.choose(tensor.device)
                chosen.expand_(moved, mask.to(tensor.device), tensor)
                torch.autograd.graph.increment_version(tensor)
            if weight is not None:
                weight.changed()
                if weight.replica is not None:
                    weight.replica.adopted()  # a part starts with the rest of new values
                if weight.rest is not None and name not in saved.rests.specs:
                    _start_rest(weight, weight.rest, value)
        if not self.is_compressed:
            return
        for name, value in saved.rests.read(self.weights):
            weight = self.weights[name]
            part, owned = weight.part, owned_by(weight)
            value = value if owned is None else value[slice(*owned)]
            if part.rest is None:
                part.rest = value.to(weight.device, copy=True)
            else:
                part.rest.copy_(convert_rest(value, part.rest.dtype))


def owned_by(weight: Weight) -> tuple[int, int] | None:
    """Return where this rank's part of a weight begins and ends; None if it has all of it."""
    return None if weight.replica is None else weight.replica.owned


def place_of(weight: Weight) -> Place | None:
    """Return where the state that this rank holds of a weight lies; None if it has all of it."""
    owned = owned_by(weight)
    return None if owned is None else Place(owned[0], weight.kept)


def _kept_values(weight: Weight, mask: Mask) -> Source:
    def make() -> Tensor:
        values = torch.empty(mask.kept, dtype=weight.dtype, device=weight.device)
        weight.kernels.compress_(weight.param, mask, values)
        return values

    return Source(weight.dtype, (mask.kept,), make)


def _rest_dtypes(weight: Weight) -> set[torch.dtype | None]:
    """Return the types that the rest of a weight has with exact and with lean state."""
    return {rest_dtype(weight.dtype), rest_dtype(weight.dtype, is_lean=True)}


def _start_rest(weight: Weight, rest: Tensor, values: Tensor) -> None:
    """Set the rest to that of a weight that was never trained in more digits than its own."""
    if weight.dtype == torch.bfloat16:
        rest.zero_()
    else:
        rest.copy_(values.reshape(-1))
