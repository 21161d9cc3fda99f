"""Writes to expansions of a streamed weight reach its values."""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from samo.errors import CompressionError

if TYPE_CHECKING:
    from samo.core.weight import Weight

__all__ = []

LOCK: Final = threading.RLock()
"""Held while values or a dense copy change. Reentrant, because the garbage collector may finalize a
written expansion anywhere."""


class Handed:
    """An expansion returned to a caller.

    Writes to it reach the values at the weight's next use, or when the expansion is freed.
    """

    def __init__(self, weight: Weight, index: tuple[int, ...], base: Tensor) -> None:
        self.base: Final = weakref.ref(base)
        self._dense: Final = base.detach()  # outlives `base`, for the final check
        self._weight: Final = weakref.ref(weight)
        self.index: Final = index
        self._mask: Final = weight.mask
        self._version: int = base._version
        self._values_version: int = weight.values._version
        weight.handed.append(self)
        weakref.finalize(base, self._let_go).atexit = False

    def is_current(self, weight: Weight) -> bool:
        """Return whether mask and values are still the same."""
        return weight.mask is self._mask and weight.values._version == self._values_version

    def follow(self) -> None:
        """Apply writes to the values; raise CompressionError if the values changed too."""
        with LOCK:
            weight = self._weight()
            if weight is None or self._dense._version == self._version:
                return
            self._version = self._dense._version
            if not self.is_current(weight):
                raise CompressionError(
                    f"'{weight.name}' was written in two ways since it was last used: through "
                    "module.weight and model.parameters(); read module.weight in between"
                )
            self._take(weight)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take(self, weight: Weight) -> None:
        dense = self._dense.detach()
        if self.index:
            dense = weight.layout.expand(weight.values, weight.dtype)
            dense[self.index] = self._dense
        weight.take_dense(dense)
        self._dense.copy_(weight.layout.expand(weight.values, weight.dtype)[self.index])
        self._version, self._values_version = self._dense._version, weight.values._version

    def _let_go(self) -> None:
        weight = self._weight()
        try:
            self.follow()
        except CompressionError as error:
            warnings.warn(f"{error}; the write to the tensor is lost", stacklevel=2)
        if weight is not None and self in weight.handed:
            weight.handed.remove(self)
