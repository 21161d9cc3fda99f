"""The tensors of a model as a checkpoint has them: by name, each once, compressed or dense."""

from contextlib import ExitStack
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from samo import kernels
from samo.checkpoint.layout import Layout
from samo.checkpoint.reader import Checkpoint
from samo.checkpoint.tensors import check_plain, rows_of
from samo.core.modules import CompressedModule, weights_in
from samo.core.shards import local_of
from samo.core.weight import Weight
from samo.errors import CheckpointError, nearest
from samo.mask.mask import Mask


class Entry(NamedTuple):
    """A parameter or a persistent buffer; of the values of a compressed weight, also the weight."""

    tensor: Tensor
    weight: Weight | None


class ModelState:
    """What of a model, or of a rank's stage of one, is saved and loaded."""

    def __init__(self, layout: Layout) -> None:
        modules = dict(layout.module.named_modules(remove_duplicate=False))
        self.layout: Final = layout
        self.is_compressed: Final = any(isinstance(m, CompressedModule) for m in modules.values())
        self.entries: Final[dict[str, Entry]] = {}
        self.tied: Final[dict[str, str]] = {}
        self._names: Final[set[str]] = set()
        first: dict[int, str] = {}
        for path, module in modules.items():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or name in module._non_persistent_buffers_set:
                    continue
                full = f"{path}.{name}" if path else name
                self._names.add(full)
                known = first.setdefault(id(tensor), layout.aliases.get(full, full))
                if known != full:
                    self.tied[full] = known
                if known not in self.entries:
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
        """The tensors that this stage saves: a tied weight only on its first stage."""
        return {name: e.tensor for name, e in self.entries.items() if name in self._names}

    @property
    def params(self) -> dict[str, tuple[str, int, int]]:
        """Compute dtype, entries and kept entries of each parameter of `tensors`."""
        found = {}
        for name, tensor in self.tensors.items():
            if isinstance(tensor, nn.Parameter):
                dense = self.entries[name].weight or tensor
                dtype = str(dense.dtype).removeprefix("torch.")
                found[name] = (dtype, dense.shape.numel(), tensor.numel())
        return found

    def check_fits(self, saved: Checkpoint) -> None:
        """Refuse a checkpoint of another model, before anything is changed."""
        if self.is_compressed and not saved.manifest.is_compressed:
            raise CheckpointError(
                f"'{saved.path}' was saved from a dense model, and this one is compressed; load it "
                "first, then call samo.compress_(model, masks)"
            )
        specs = saved.weights.specs
        for side, one, other in (
            ("model", self.entries, specs),
            ("checkpoint", specs, self.entries),
        ):
            names = sorted(one.keys() - other.keys())
            if names and not (side == "checkpoint" and self.layout.is_part):
                raise saved.misfit(
                    f"tensors that only the {side} has: {len(names)}, such as "
                    f"'{names[0]}'{nearest(names[0], other)}"
                )
        theirs = saved.manifest.tied
        if self.layout.is_part:
            theirs = {alias: name for alias, name in theirs.items() if alias in self._names}
        if self.tied != theirs:
            alias = min(self.tied.items() ^ theirs.items())[0]
            found, own = (tied.get(alias, "nothing") for tied in (theirs, self.tied))
            raise saved.misfit(
                f"'{alias}' is tied to '{found}' in the checkpoint, to '{own}' in the model"
            )
        masks = self.masks
        for name in self.entries:
            if self.is_compressed and masks.get(name) != saved.masks.get(name):
                raise saved.misfit(
                    f"its mask of '{name}' is not the model's; compress the model with "
                    f"samo.load_masks('{saved.path}'), or call samo.remap_ with them"
                )
            self._check_tensor(saved, name)

    def _check_tensor(self, saved: Checkpoint, name: str) -> None:
        tensor, weight = self.entries[name]
        spec, mask = saved.weights.specs[name], saved.masks.get(name)
        if mask is not None and not (
            isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        ):
            raise saved.misfit(f"its mask of '{name}' is not of a floating-point parameter")
        shape = tuple((weight or tensor).shape)
        found = spec.shape if mask is None else mask.shape
        if found != shape:
            raise saved.misfit(
                f"'{name}' has shape {found} in the checkpoint, {shape} in the model"
            )
        if mask is not None and spec.shape != (mask.kept,):
            raise saved.misfit(
                f"'{name}' has values of shape {spec.shape}, and its mask keeps {mask.kept:,}"
            )
        is_expanding = saved.manifest.is_compressed and not self.is_compressed
        can_cast = is_expanding and spec.dtype.is_floating_point and tensor.is_floating_point()
        if spec.dtype != tensor.dtype and not can_cast:
            raise saved.misfit(
                f"'{name}' is {spec.dtype} in the checkpoint, {tensor.dtype} in the model"
            )

    def fill(self, saved: Checkpoint, undo: ExitStack) -> None:
        """Write the values of a checkpoint that fits into the model; ``undo`` restores the old."""
        for name, (tensor, weight) in self.entries.items():
            mask = saved.masks.get(name)
            undo.callback(_restore, self.entries[name], local_of(tensor).to("cpu", copy=True))
            if mask is not None and weight is None:
                _expand(tensor, mask, saved.weights.read(name))
            else:
                local_of(tensor).copy_(saved.weights.read(name, rows_of(tensor)))
                if weight is not None and weight.dense is not None:
                    weight.refresh()
            self.layout.ranks.note_progress()


@torch.no_grad()  # a failure may have left a context of torch half way
def _restore(entry: Entry, values: Tensor) -> None:
    local_of(entry.tensor).copy_(values)
    if entry.weight is not None:
        entry.weight.refresh()


def _expand(tensor: Tensor, mask: Mask, values: Tensor) -> None:
    """Fill a dense parameter with kept values, and zeros between them."""
    rows, device = rows_of(tensor), tensor.device
    dense = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    kernels.choose(device).expand_(values.to(device), mask.to(device), dense)
    local_of(tensor).copy_(dense if rows is None else dense[rows.start : rows.stop])
