"""Which implementation of the kernels runs on which device."""

import warnings
from functools import cache
from typing import Final, Literal

import torch

from samo.kernels.protocol import Kernels

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
    if device.type in ("cpu", "meta"):
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
