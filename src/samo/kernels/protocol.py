"""The operations that an implementation of the kernels provides, and their arguments.

Shape suffixes: N = entries of the dense tensor, Z = kept entries, G = groups of entries.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from samo.mask.mask import Mask

__all__ = ["AdamWSettings", "AdamWUpdate", "Kernels"]


class AdamWUpdate(NamedTuple):
    """One parameter's part of an AdamW step."""

    param: Tensor
    """The values of a pruned weight, 1-D, or an unpruned parameter of any shape."""
    remainder: Tensor | None
    """What rounding to the parameter's type left over: see `samo.kernels.rounding`."""
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    """How many updates the parameter has had, a float32 scalar; the update counts itself."""
    lr: float | Tensor
    weight_decay: float
    dense: Tensor | None = None
    """A copy in the compute type, in the weight's own shape, which the update refreshes."""
    mask: Mask | None = None
    """Where the values lie in the weight; without one, a copy has all entries."""
    age: Tensor | None = None
    """How many updates each entry has had, int16; the update counts itself. Each entry then gets the
    bias correction of its own age: see `samo.kernels.reference`."""
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None
    """Scales of 8-bit moments, one for each group of entries: see `samo.kernels.lean`."""

    @property
    def is_lean(self) -> bool:
        """Whether the moments are 8-bit codes."""
        return self.exp_avg_scale is not None

    @property
    def mask_of_copy(self) -> Mask | None:
        """Where values lie in the dense copy; None without a copy, or if it has all entries."""
        return None if self.dense is None else self.mask


class AdamWSettings(NamedTuple):
    """What all parameters share in an AdamW step."""

    beta1: float
    beta2: float
    eps: float


class Kernels(Protocol):
    """The operations of one implementation."""

    def compress_(self, dense: Tensor, mask: Mask | None, out: Tensor) -> None:
        """Write the kept entries of ``dense`` to ``out``, in its type."""

    def expand_(self, values: Tensor, mask: Mask | None, dense: Tensor) -> None:
        """Write ``values`` to the kept entries of ``dense``, in its type, and 0 to all others."""

    def adamw_(
        self, updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None
    ) -> None:
        """Update parameters, their state and dense copies in place; do nothing where ``skip`` is true."""

    def find_nonfinite(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return whether any entry is NaN or infinite, as a boolean scalar on the tensors' device."""
