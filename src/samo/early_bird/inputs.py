"""How many dimensions the inputs of a BatchNorm have, which no trace of a model can tell.

A BatchNorm normalises dimension 1. For (N, C) that is the last one, over which the outputs of a linear
layer run; for (N, C, L) it is not, and a channel is no output of the layer.
"""

import weakref
from typing import Any, Final

from torch import Tensor, nn

from samo.early_bird.channels import Channels

__all__ = []


class LinearInputs:
    """Looks at the inputs of the BatchNorm layers that follow a linear layer, until it is gone."""

    def __init__(self, model: nn.Module, channels: list[Channels]) -> None:
        self._seen: Final = {
            entry.norm: _Seen()
            for entry in channels
            if isinstance(model.get_submodule(entry.producer), nn.Linear)
        }
        for name, seen in self._seen.items():
            handle = model.get_submodule(name).register_forward_pre_hook(seen)
            weakref.finalize(self, handle.remove)

    def check(self) -> None:
        """Refuse channels that are not the outputs of their layer, or may not be.

        Raises:
            ValueError: An input had another number of dimensions than 2, or there was none yet.
        """
        for name, seen in self._seen.items():
            way_out = f"leave it out with skip=['{name}.weight']"
            if not seen.dims:
                raise ValueError(
                    f"BatchNorm '{name}' follows a linear layer, whose outputs are its channels only if "
                    "its input is (N, C), and it has seen none since this EarlyBird was made; run the "
                    f"model once before masks are drawn, or {way_out}"
                )
            if seen.dims != {2}:
                raise ValueError(
                    f"BatchNorm '{name}' normalises dimension 1 of inputs of {max(seen.dims)} dimensions, "
                    f"and the linear layer before it has its outputs in the last; {way_out}"
                )


class _Seen:
    """A hook that notes dimensions, and refers to nothing: a copy of the model may have it too."""

    def __init__(self) -> None:
        self.dims: Final[set[int]] = set()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            self.dims.add(args[0].dim())
