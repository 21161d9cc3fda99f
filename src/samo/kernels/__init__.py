"""The operations on compressed tensors, and which implementation runs them.

Four operations carry everything else; the first three read the mask's bits block by block:

    compress_       dense tensor -> vector of its kept entries
    expand_         vector of kept entries -> dense tensor with exact zeros
    adamw_          one AdamW update of parameters, and of the dense copies that are made of them
    find_nonfinite  is any entry of some vectors NaN or infinite?

``reference`` does them in plain torch operations on any device and is what "right" means here;
``cpu`` is the fast path for a laptop and ``cuda`` that for an NVIDIA GPU. An implementation for
another device is one more module with these four functions and one more line in `choose`.

A fifth, ``adamw_lean_``, is an AdamW update with 8-bit state, in modules of its own: ``lean`` in plain
torch operations, and ``cuda_lean`` for an NVIDIA GPU. A CPU takes the former. A sixth, ``adamw_aged_``, is
one whose entries have step counts of their own: ``ages`` in plain torch operations, ``cpu_ages`` and
``cuda_ages``.

Shape suffixes below: N = entries of the dense tensor, Z = kept entries, G = groups of entries.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from samo.mask.mask import Mask

__all__ = []

Path = Literal["auto", "reference", "triton"]

PATHS: Final = ("auto", "reference", "triton")
"""The fastest for the device, plain torch, or the GPU's on any device (with Triton's interpreter)."""


class AdamWUpdate(NamedTuple):
    """One parameter's part of an AdamW step."""

    param: Tensor
    """The values of a pruned weight, 1-D, or an unpruned parameter of any shape."""
    rest: Tensor | None
    """What rounding to the parameter's type left over: see `samo.kernels.rounding`."""
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    """How many updates the parameter has had, a float32 scalar; the update counts itself."""
    lr: float | Tensor
    weight_decay: float
    dense: Tensor | None = None
    """A copy in the type of compute, in the weight's own shape, which the update refreshes."""
    mask: Mask | None = None
    """Where the values lie in the weight; with None a copy has all entries."""


class LeanUpdate(NamedTuple):
    """One parameter's part of an AdamW step with 8-bit state: see `samo.kernels.lean`."""

    update: AdamWUpdate
    """Moments as int8 and uint8; the rest of a bfloat16 parameter as int8."""
    exp_avg_scale_G: Tensor
    exp_avg_sq_scale_G: Tensor


class AgedUpdate(NamedTuple):
    """One parameter's part of an AdamW step with an age for each entry: see `samo.kernels.ages`."""

    update: AdamWUpdate
    age_Z: Tensor
    """How many updates each entry has had, int16; the update counts itself."""


class AdamWSettings(NamedTuple):
    """What all parameters share in an AdamW step."""

    beta1: float
    beta2: float
    eps: float


class Kernels(Protocol):
    """What an implementation provides."""

    def compress_(self, dense: Tensor, mask: Mask | None, out: Tensor) -> None:
        """Write the kept entries of ``dense`` to ``out``, in its type."""

    def expand_(self, values: Tensor, mask: Mask | None, dense: Tensor) -> None:
        """Write ``values`` to the kept entries of ``dense``, in its type, and 0 to all others."""

    def adamw_(
        self, updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None
    ) -> None:
        """Update parameters, rests, moments, step counts and copies in place; not where ``skip`` is true."""

    def find_nonfinite(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return whether any entry is NaN or infinite, as a boolean scalar on the tensors' device."""


class LeanKernels(Protocol):
    """What an implementation of AdamW with 8-bit state provides."""

    def adamw_lean_(
        self, updates: Sequence[LeanUpdate], settings: AdamWSettings, skip: Tensor | None
    ) -> None:
        """Update as ``adamw_`` does, and the scales of the moments."""


class AgedKernels(Protocol):
    """What an implementation of AdamW with an age for each entry provides."""

    def adamw_aged_(
        self, updates: Sequence[AgedUpdate], settings: AdamWSettings, skip: Tensor | None
    ) -> None:
        """Update as ``adamw_`` does, and count the ages."""


def choose(device: torch.device, path: Path = "auto") -> Kernels:
    """Return the fastest implementation for ``device``, or the one that ``path`` asks for."""
    from samo.kernels import reference

    if path == "reference":
        return reference
    if path == "triton":
        from samo.kernels import cuda

        return cuda
    if device.type == "cpu":
        try:
            from samo.kernels import cpu
        except ImportError:  # no numba on this machine, or switched off: right, only slower
            return reference
        return cpu
    if device.type != "cuda" or torch.version.hip is not None:
        _warn_once(f"samo has no kernels of its own for this device ({_name(device)})")
        return reference
    try:
        from samo.kernels import cuda
    except ImportError as error:
        _warn_once(f"samo's kernels for {_name(device)} need triton, and {error}")
        return reference
    if cuda.IS_INTERPRETED and torch.cuda.is_available():  # by numpy, which cannot read a GPU
        _warn_once("samo's kernels for cuda cannot run under TRITON_INTERPRET=1")
        return reference
    return cuda


def choose_lean(device: torch.device, path: Path = "auto") -> LeanKernels:
    """Return the implementation of AdamW with 8-bit state that goes with `choose`."""
    from samo.kernels import lean, reference

    if device.type != "cuda" and path != "triton":
        return lean
    if choose(device, path) is reference:
        return lean
    from samo.kernels import cuda_lean

    return cuda_lean


def choose_aged(device: torch.device, path: Path = "auto") -> AgedKernels:
    """Return the implementation of AdamW with ages that goes with `choose`."""
    from samo.kernels import ages, reference

    if choose(device, path) is reference:
        return ages
    if device.type == "cpu" and path == "auto":
        from samo.kernels import cpu_ages

        return cpu_ages
    from samo.kernels import cuda_ages

    return cuda_ages


@cache
def _warn_once(what: str) -> None:
    warnings.warn(
        f"{what}; plain torch operations do the same, many times slower. To be told nothing, pass "
        "kernels='reference' to samo.compress_",
        stacklevel=3,
    )


def _name(device: torch.device) -> str:
    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type
