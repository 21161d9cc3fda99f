"""What an implementation of the kernels provides."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from samo.mask.mask import Mask


class AdamWUpdate(NamedTuple):
    """One parameter's part of an AdamW step."""

    param: Tensor
    """The values of a pruned weight, 1-D, or an unpruned parameter of any shape."""
    remainder: Tensor | None
    """The rounding error of the parameter: see `samo.kernels.rounding`."""
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    """How many updates the parameter has had, a float32 scalar; incremented by the update."""
    lr: float | Tensor
    weight_decay: float
    dense: Tensor | None = None
    """A copy in the compute type and the weight's own shape, refreshed by the update."""
    mask: Mask | None = None
    """Where the values lie in the weight; without one, the copy has all entries."""
    age: Tensor | None = None
    """How many updates each entry has had, int16, for its own bias correction; incremented by the
    update: see `samo.kernels.reference`."""
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None
    """Scales of 8-bit moments, one for each group of entries: see `samo.kernels.lean`."""

    @property
    def is_lean(self) -> bool:
        """Whether the moments are 8-bit codes."""
        return self.exp_avg_scale is not None


class AdamWSettings(NamedTuple):
    """What all parameters share in an AdamW step."""

    beta1: float
    beta2: float
    eps: float


class Kernels(Protocol):
    """The operations of one implementation."""

    def compress_(self, dense: Tensor, mask: Mask | None, out: Tensor) -> None:
        """Write the kept entries of ``dense`` to ``out``, in its type.

        Example: dense [5, 6, 7, 8] with kept bits 1, 0, 0, 1 gives [5, 8].
        """

    def expand_(self, values: Tensor, mask: Mask | None, dense: Tensor) -> None:
        """Write ``values`` to the kept entries of ``dense``, in its type, and 0 elsewhere.

        Example: values [5, 8] with kept bits 1, 0, 0, 1 give [5, 0, 0, 8].
        """

    def adamw_(
        self, updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None
    ) -> None:
        """Update parameters, state and dense copies in place, unless ``skip`` is true."""

    def find_nonfinite(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return whether any entry is NaN or infinite, a boolean scalar on the tensors' device."""
