"""`Masks`: a `Mask` for each pruned parameter of a model."""

import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from samo.errors import MaskError, nearest
from samo.mask import bitmap, mask_files
from samo.mask.mask import Mask, distance, hamming
from samo.mask.prunable import dense_parameters, matching, matrices, prunable

__all__ = ["Masks"]


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

    Raises:
        TypeError: A value is not a `Mask`.
    """

    def __init__(self, masks: Mapping[str, Mask]) -> None:
        self._masks: Final = dict(masks)
        for name, mask in self._masks.items():
            if not isinstance(mask, Mask):
                raise TypeError(
                    f"the mask of {name!r} is a {type(mask).__name__}; build a samo.Mask from a tensor "
                    "that is True where a weight is kept: samo.Mask.from_bool(tensor)"
                )

    def __getitem__(self, name: str) -> Mask:
        try:
            return self._masks[name]
        except KeyError:
            raise KeyError(f"no mask for '{name}'{nearest(name, self._masks)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __contains__(self, name: object) -> bool:
        return name in self._masks  # Mapping's calls __getitem__, which searches near names

    def __len__(self) -> int:
        return len(self._masks)

    def __repr__(self) -> str:
        return (
            f"Masks({len(self)} tensors, {self.kept:,} of {self.numel:,} weights kept, "
            f"sparsity {self.sparsity:.3f})"
        )

    @classmethod
    def whole(cls, model: nn.Module, *, skip: Iterable[str] = ()) -> "Masks":
        """Build masks that keep everything, for the weights that `samo.prune` would prune.

        A model compressed with them trains like a dense one; `samo.GradualPruning` starts from it.

        Example:
            >>> import torch, samo
            >>> samo.Masks.whole(torch.nn.Sequential(torch.nn.Linear(64, 64)))
            Masks(1 tensors, 4,096 of 4,096 weights kept, sparsity 0.000)

        Args:
            model: Any module.
            skip: Shell-style patterns of weights to leave without a mask.

        Raises:
            ValueError: A pattern matches no parameter.
        """
        dense = dense_parameters(model)
        skipped = matching(skip, dense, "skip")
        names = [name for name in prunable(model) if name not in skipped]
        return cls({name: Mask.whole(dense[name].shape, dense[name].device) for name in names})

    @classmethod
    def from_zeros(
        cls, model: nn.Module, *, skip: Iterable[str] = (), min_sparsity: float = 0.05
    ) -> "Masks":
        """Read the masks of an already pruned model: weights that are exactly 0 are pruned.

        Looks at the weights that `samo.prune` would prune, and at heads and routers. A tensor with
        fewer zeros than ``min_sparsity`` counts as dense.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
            >>> with torch.no_grad():
            ...     _ = model[0].weight.copy_(torch.eye(4))
            >>> samo.Masks.from_zeros(model)
            Masks(1 tensors, 4 of 16 weights kept, sparsity 0.750)

        Raises:
            MaskError: No tensor has enough zeros, or one is all zeros.
            ValueError: A pattern of ``skip`` matches no parameter.
        """
        parameters = dense_parameters(model)
        skipped = matching(skip, parameters, "skip")
        usual = set(prunable(model))
        found: dict[str, Mask] = {}
        for name in matrices(model):
            if name in skipped:
                continue
            mask = _nonzero(parameters[name])
            if mask.kept:
                found[name] = mask
            elif name in usual:  # a head may be initialized to 0
                raise MaskError(
                    f"all {mask.numel:,} weights of '{name}' are 0, so it could never be trained; "
                    f"leave it out with skip=['{name}']"
                )
        if not found:
            raise MaskError(
                "no weight was checked for zeros: the model has none that is pruned by default, or "
                "skip= matches them all; samo.prunable(model) lists them"
            )
        masks = {name: mask for name, mask in found.items() if mask.sparsity >= min_sparsity}
        if not masks:
            most = max(found, key=lambda name: found[name].sparsity)
            raise MaskError(
                f"the model is not pruned: its sparsest weight '{most}' has "
                f"{found[most].sparsity:.1%} zeros, under min_sparsity={min_sparsity}; prune it with "
                "samo.prune(model, sparsity)"
            )
        return cls(masks)

    @classmethod
    def from_torch_prune(cls, model: nn.Module) -> "Masks":
        """Read the masks of a model pruned with ``torch.nn.utils.prune``.

        They carry the names that the weights have after ``torch.nn.utils.prune.remove``, which must
        be called before `samo.compress_`.

        Example:
            >>> import torch, samo
            >>> from torch.nn.utils import prune
            >>> layer = prune.l1_unstructured(torch.nn.Linear(8, 8), "weight", amount=0.5)
            >>> masks = samo.Masks.from_torch_prune(layer)
            >>> masks["weight"].sparsity
            0.5
            >>> _ = samo.compress_(prune.remove(layer, "weight"), masks)

        Raises:
            MaskError: No parameter was pruned that way.
        """
        parameters = dict(model.named_parameters())
        masks = {
            name.removesuffix("_mask"): Mask.from_bool(buffer != 0)
            for name, buffer in model.named_buffers()
            if name.endswith("_mask") and f"{name.removesuffix('_mask')}_orig" in parameters
        }
        if not masks:
            raise MaskError(
                "no parameter was pruned with torch.nn.utils.prune (no 'weight_orig' beside a "
                "'weight_mask'); use samo.prune(model, sparsity) or Masks.from_zeros(model)"
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
        """Return these masks on another device.

        Example:
            >>> import torch, samo
            >>> masks = samo.Masks({"w": samo.Mask.from_bool(torch.tensor([True, False]))})
            >>> masks.to("cpu") == masks
            True
        """
        return Masks({name: mask.to(device) for name, mask in self.items()})

    def apply_(self, model: nn.Module) -> None:
        """Set the pruned weights of a model to exactly 0, once and in place.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Linear(10, 10)
            >>> samo.prune(model, sparsity=0.9).apply_(model)
            >>> int((model.weight != 0).sum())
            10

        Raises:
            MaskError: The masks belong to another model.
        """
        parameters = self.parameters_of(model)
        for name, mask in self.items():
            mask.to(parameters[name].device).zero_(parameters[name].detach())

    def parameters_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights of ``model`` that these masks belong to, in dense form.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> list(samo.prune(model, sparsity=0.5).parameters_of(model))
            ['0.weight']

        Raises:
            MaskError: A name is unknown or a shape differs.
        """
        parameters = dense_parameters(model)
        for name, mask in self.items():
            if name not in parameters:
                unknown = [other for other in self if other not in parameters]
                raise MaskError(
                    f"{len(unknown)} of {len(self)} masks name no parameter of this model, the first "
                    f"is '{name}'{nearest(name, parameters)}; build the masks from the model you "
                    "train (samo.prune)"
                )
            if tuple(parameters[name].shape) != mask.shape:
                raise MaskError(
                    f"mask for '{name}' has shape {mask.shape} but the parameter has "
                    f"{tuple(parameters[name].shape)}; build the masks from the model you train "
                    "(samo.prune)"
                )
        return {name: parameters[name] for name in self}

    def hamming(self, other: "Masks") -> float:
        """Return the fraction of all entries on which two sets of masks differ.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(100, 100))
            >>> a, b = (samo.prune(model, 0.9, method="random", seed=s) for s in (0, 1))
            >>> 0.16 < a.hamming(b) < 0.20
            True
        """
        return hamming(self._common(other), self.kept + other.kept, self.numel)

    def distance(self, other: "Masks") -> float:
        """Return the fraction of the kept entries that two sets of masks do not share.

        See `Mask.distance`: 0 for equal masks, 1 for disjoint ones.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(100, 100))
            >>> a, b = (samo.prune(model, 0.9, method="random", seed=s) for s in (0, 1))
            >>> 0.86 < a.distance(b) < 0.94
            True
        """
        return distance(self._common(other), max(self.kept, other.kept))

    def fingerprint(self) -> str:
        """Return the SHA-256 of all names, shapes and bits, independent of their order.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> a, b = samo.prune(model, 0.5), samo.prune(model, 0.5)
            >>> a.fingerprint() == b.fingerprint()
            True
        """
        digest = hashlib.sha256()
        for name in sorted(self):
            digest.update(f"{name}\0{self[name].fingerprint()}\0".encode())
        return digest.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the masks to a safetensors file: complete, or not at all.

        Example:
            >>> import tempfile, torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> masks = samo.prune(model, 0.5)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     masks.save(f"{folder}/masks.safetensors")
            ...     samo.Masks.load(f"{folder}/masks.safetensors") == masks
            True

        Raises:
            FileNotFoundError: The folder does not exist.
        """
        mask_files.write(path, self, self.fingerprint())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Masks":
        """Read masks written by `save` onto the CPU, and check every bit.

        `samo.load_masks` reads those of a checkpoint as well.

        Example:
            >>> import samo
            >>> samo.Masks.load("README.md")
            Traceback (most recent call last):
            samo.errors.MaskError: 'README.md' is not a mask file: ...

        Raises:
            MaskError: The file is missing, damaged, of another kind or of another version.
        """
        words, shapes, fingerprint = mask_files.read(path)
        try:
            masks = cls({name: Mask(shapes[name], words[name]) for name in words})
        except (KeyError, TypeError, ValueError):
            masks = cls({})
        if set(masks) != set(shapes) or masks.fingerprint() != fingerprint:
            raise MaskError(
                f"mask file '{path}' is damaged: its contents do not match its fingerprint; "
                "take another copy of it"
            )
        return masks

    def __and__(self, other: "Masks") -> "Masks":
        return self._combine(operator.and_, other)

    def __or__(self, other: "Masks") -> "Masks":
        return self._combine(operator.or_, other)

    def __xor__(self, other: "Masks") -> "Masks":
        return self._combine(operator.xor, other)

    def __sub__(self, other: "Masks") -> "Masks":
        return self ^ (self & other)

    def _combine(self, function: Callable[[Mask, Mask], Mask], other: "Masks") -> "Masks":
        self._check_same(other)
        return Masks({name: function(mask, other[name]) for name, mask in self.items()})

    def _common(self, other: "Masks") -> int:
        self._check_same(other)
        return sum(mask.common(other[name]) for name, mask in self.items())

    def _check_same(self, other: "Masks") -> None:
        if set(self) != set(other):
            name = sorted(set(self) ^ set(other))[0]
            raise MaskError(
                f"the masks belong to different tensors: '{name}' is in only one of them; "
                "compare masks of one model"
            )


def _nonzero(dense: Tensor) -> Mask:
    """Return the mask of the entries that are not exactly 0."""
    words = torch.empty(bitmap.num_words(dense.numel()), dtype=torch.int32, device=dense.device)
    flat = dense.detach().reshape(-1)
    for start, stop in bitmap.chunks(flat.numel()):
        bitmap.pack(flat[start:stop] != 0, words, start)
    return Mask(dense.shape, words)
