"""What an implementation of the kernels provides, and which one runs on which device."""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from samo.mask.mask import Mask

__all__ = ["PATHS", "AdamWSettings", "AdamWUpdate", "Kernels", "Path", "choose"]


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


Path = Literal["auto", "reference", "triton"]

PATHS: Final = ("auto", "reference", "triton")
"""The fastest for the device, plain torch, or Triton on any device (its interpreter on a CPU)."""


def choose(device: torch.device, path: Path = "auto") -> Kernels:
    """Return the fastest implementation for ``device``, or the one that ``path`` names."""
    from samo.kernels import reference

    if path == "reference":
        return reference
    if path == "triton":
        from samo.kernels import triton_launch

        return triton_launch
    if device.type == "cpu":
        try:
            from samo.kernels import cpu
        except ImportError:  # no numba, or NUMBA_DISABLE_JIT is set
            return reference
        return cpu
    if device.type != "cuda" or torch.version.hip is not None:
        name = "rocm" if device.type == "cuda" else device.type
        _warn_once(f"samo has no kernels for {name}")
        return reference
    try:
        from samo.kernels import triton_launch
    except ImportError as error:
        _warn_once(f"samo's kernels for cuda need triton ({error})")
        return reference
    if triton_launch.IS_INTERPRETED and torch.cuda.is_available():  # numpy cannot read a GPU
        _warn_once("samo's kernels for cuda cannot run under TRITON_INTERPRET=1")
        return reference
    return triton_launch


@cache
def _warn_once(what: str) -> None:
    warnings.warn(
        f"{what}; using plain torch operations, which are many times slower. To silence this "
        "warning, pass kernels='reference' to samo.compress_",
        stacklevel=3,
    )
