"""A model as a sequence of units, which are never cut."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

LayersLike = nn.Module | Sequence[nn.Module | Callable[[], nn.Module]]
Find = Callable[[str], nn.Module]
Cache = dict[str, Any]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Unit:
    """A layer, which is never cut: its modules by their paths in the model, and how to call them.

    Attributes:
        modules: Modules with weights; on the meta device if there is a `build`.
        call: Called with a function that finds a module by path, a dict that lives for one forward
            pass of the stage, and the inputs.
        build: Builds the modules on the stage that computes with them.
        local: Modules without weights that each stage builds for itself, such as rotary tables.
    """

    modules: Mapping[str, nn.Module]
    call: Call
    build: Callable[[], Mapping[str, nn.Module]] | None = None
    local: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter with its name in the whole model, duplicates included."""
        for path, module in self.modules.items():
            yield from module.named_parameters(prefix=path, remove_duplicate=False)


@dataclass(frozen=True)
class Layers:
    """A model as a sequence of units, in the order of the forward pass."""

    units: tuple[Unit, ...]
    tied: tuple[tuple[str, ...], ...] = ()  # for each tied weight its names, in order
    init: Callable[[nn.Module], object] | None = None  # the model's own way to initialize a module
