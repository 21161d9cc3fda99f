"""`Masks`: a `Mask` for each pruned parameter of a model, and their files, which are safetensors.

tensors    parameter name -> words of its bitmap, int32; sorted: equal masks are equal bytes
metadata   format "samo-masks", version, shapes (JSON), fingerprint of names, shapes and bits
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from samo.errors import MaskError, nearest
from samo.mask.mask import Mask
from samo.mask.prunable import dense_parameters, matching, matrices, prunable
from samo.utils import atomic_io, safetensors_io, untrusted
from samo.utils.formatting import counted, percent

MIN_SPARSITY: Final = 0.05
"""Fraction of zeros from which on they count as pruned."""

_FORMAT: Final = "samo-masks"
_VERSION: Final = "1"


class Masks(Mapping[str, Mask]):
    """The masks of a model: parameter name to `Mask`, for the pruned parameters only.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> masks = samo.prune(model, sparsity=0.75)
        >>> masks
        Masks(2 tensors, 2,048 of 8,192 weights kept, sparsity 0.750)
        >>> masks["0.weight"].kept
        1024
    """

    def __init__(self, masks: Mapping[str, Mask]) -> None:
        self._masks: Final = dict(masks)
        for name, mask in self._masks.items():
            if not isinstance(mask, Mask):
                raise TypeError(
                    f"the mask of '{name}' is a {type(mask).__name__}; make a samo.Mask of a "
                    "boolean tensor with samo.Mask.from_bool(tensor)"
                )

    def __getitem__(self, name: str) -> Mask:
        return self._masks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    def __repr__(self) -> str:
        return (
            f"Masks({counted(len(self), 'tensor')}, {self.kept:,} of {self.numel:,} weights kept, "
            f"sparsity {self.sparsity:.3f})"
        )

    @classmethod
    def ones(cls, model: nn.Module, *, skip: Iterable[str] = ()) -> "Masks":
        """Keep everything, for `samo.GradualPruning` to start from; ``skip`` as in `samo.prune`."""
        dense = dense_parameters(model)
        skipped = matching(skip, dense, "skip")
        names = [name for name in prunable(model) if name not in skipped]
        return cls({name: Mask.ones(dense[name].shape, dense[name].device) for name in names})

    @classmethod
    def from_zeros(
        cls, model: nn.Module, *, skip: Iterable[str] = (), min_sparsity: float = MIN_SPARSITY
    ) -> "Masks":
        """Read the masks of an already pruned model: weights that are exactly 0 are pruned.

        Reads the weights that `samo.prune` would prune, heads and routers. Tensors with fewer zeros
        than ``min_sparsity``, and those that match a pattern of ``skip``, get no mask.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
            >>> with torch.no_grad():
            ...     _ = model[0].weight.copy_(torch.eye(4))
            >>> samo.Masks.from_zeros(model)
            Masks(1 tensor, 4 of 16 weights kept, sparsity 0.750)
        """
        parameters = dense_parameters(model)
        skipped = matching(skip, parameters, "skip")
        usual = set(prunable(model))
        found: dict[str, Mask] = {}
        for name in matrices(model):
            if name in skipped:
                continue
            mask = Mask.from_bool(parameters[name].detach() != 0)
            if mask.kept:
                found[name] = mask
            elif name in usual:  # a head may be initialized to 0
                raise MaskError(
                    f"all {mask.numel:,} weights of '{name}' are 0, so it could never be trained; "
                    f"leave it out with skip=['{name}']"
                )
        masks = {name: mask for name, mask in found.items() if mask.sparsity >= min_sparsity}
        if not masks:
            most = max((mask.sparsity for mask in found.values()), default=0.0)
            raise MaskError(
                f"the model is not pruned: the sparsest of {len(found)} tensors has "
                f"{percent(most)} zeros, less than {percent(min_sparsity)}; prune it with "
                "samo.prune(model, sparsity)"
            )
        return cls(masks)

    @property
    def numel(self) -> int:
        """Number of weights in the masked tensors."""
        return sum(mask.numel for mask in self._masks.values())

    @property
    def kept(self) -> int:
        """Number of weights kept."""
        return sum(mask.kept for mask in self._masks.values())

    @property
    def sparsity(self) -> float:
        """Fraction of the masked tensors' weights that are pruned."""
        return 1.0 - self.kept / self.numel if self.numel else 0.0

    def to(self, device: torch.device | str) -> "Masks":
        """Return these masks on another device."""
        return Masks({name: mask.to(device) for name, mask in self.items()})

    def apply_(self, model: nn.Module) -> None:
        """Set the pruned weights of a model to exactly 0, once and in place."""
        parameters = self.parameters_of(model)
        for name, mask in self.items():
            mask.to(parameters[name].device).zero_(parameters[name].detach())

    def parameters_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the dense weights of these masks, or raise a `MaskError` if one does not fit."""
        parameters = dense_parameters(model)
        for name, mask in self.items():
            if name not in parameters:
                unknown = [other for other in self if other not in parameters]
                raise MaskError(
                    f"{len(unknown)} of {len(self)} masks name no parameter of this model, first "
                    f"'{name}'{nearest(name, parameters)}; build the masks from the model you train"
                )
            if tuple(parameters[name].shape) != mask.shape:
                raise MaskError(
                    f"the mask of '{name}' has shape {mask.shape}, the parameter has "
                    f"{tuple(parameters[name].shape)}; build the masks from the model you train"
                )
        return {name: parameters[name] for name in self}

    def fingerprint(self) -> str:
        """Return the SHA-256 of all names, shapes and bits, independent of their order."""
        digest = hashlib.sha256()
        for name in sorted(self):
            digest.update(f"{name}\0{self[name].fingerprint()}\0".encode())
        return digest.hexdigest()

    def file_metadata(self) -> dict[str, str]:
        """Return the metadata of a file with these masks."""
        shapes = {name: mask.shape for name, mask in self.items()}
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "shapes": json.dumps(shapes, sort_keys=True),
            "fingerprint": self.fingerprint(),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the masks to a safetensors file, atomically."""
        target = Path(os.path.realpath(path))  # through a link, which stays
        if not target.parent.is_dir():
            raise FileNotFoundError(
                f"cannot write '{target}': there is no folder '{target.parent}'"
            )
        words = {name: self[name].words for name in sorted(self)}
        data = b"".join(safetensors_io.encode(words, self.file_metadata()))
        atomic_io.write_bytes(target, data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Masks":
        """Read masks of `save` onto the CPU, or raise a `MaskError` if one bit is damaged."""
        path = Path(path)
        if path.is_dir():
            raise MaskError(f"'{path}' is a folder; read its masks with samo.load_masks('{path}')")
        if not path.is_file():
            raise MaskError(f"mask file '{path}' does not exist; write one with Masks.save(path)")
        try:
            with safe_open(path, framework="pt") as file:
                found = file.metadata() or {}
                words = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except safetensors_io.READ_ERRORS as error:
            raise MaskError(
                f"'{path}' is not a mask file, or it is damaged; write one with Masks.save(path) "
                "or samo prune"
            ) from error
        if found.get("format") != _FORMAT:
            raise MaskError(
                f"'{path}' is not a mask file: its format is {found.get('format')!r}, not "
                f"{_FORMAT!r}; for the weights of a pruned model use Masks.from_zeros(model)"
            )
        if found.get("version") != _VERSION:
            raise MaskError(
                f"mask file '{path}' has version {found.get('version')!r}, this samo reads version "
                f"{_VERSION!r}; update samo"
            )
        try:
            shapes = untrusted.parse_json(found["shapes"].encode())
            masks = cls({name: Mask(shapes[name], words[name]) for name in words})
            if shapes.keys() == masks.keys() and masks.fingerprint() == found["fingerprint"]:
                return masks
        except (AttributeError, KeyError, TypeError, ValueError):  # of shapes that are none
            pass
        raise MaskError(
            f"mask file '{path}' is damaged: its contents do not match its fingerprint; use "
            "another copy"
        )

    def __and__(self, other: "Masks") -> "Masks":
        if set(self) != set(other):
            name = min(set(self) ^ set(other))
            raise MaskError(f"only one of the two has a mask for '{name}'; use masks of one model")
        return Masks({name: mask & other[name] for name, mask in self.items()})
