"""A stage: some layers of a model in a row, under the names they have in the whole model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = ["Stage", "Unit"]

Find = Callable[[str], nn.Module]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Unit:
    """What is never cut: the modules of a layer, by their paths in the model, and how to call them.

    Attributes:
        modules: Modules with weights; on the meta device where `build` makes them anew.
        call: Called with a function that finds a module by path, a dict that lives for one forward
            pass of the stage, and the inputs.
        build: Makes the modules on the stage that computes with them.
        local: Modules without weights that each stage makes for itself, such as rotary tables.
    """

    modules: Mapping[str, nn.Module]
    call: Call
    build: Callable[[], Mapping[str, nn.Module]] | None = None
    local: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter with its name in the whole model, also those met before."""
        for path, module in self.modules.items():
            yield from module.named_parameters(prefix=path, remove_duplicate=False)

    def tensor_names(self) -> Iterator[str]:
        """Yield the name of each parameter and persistent buffer in the whole model, in its order."""
        for path, module in self.modules.items():
            for inner, part in module.named_modules(prefix=path, remove_duplicate=False):
                for name in (*part._parameters, *part._buffers):
                    if name not in part._non_persistent_buffers_set:
                        yield f"{inner}.{name}"


class _Names(nn.Module):
    """A place in the tree of names, such as ``blocks``, that holds no layer itself."""


class Stage(nn.Module):
    """The layers of one stage. Its ``state_dict()`` is a part of the whole model's.

    Args:
        units: What to compute, in order.
        modules: The modules of the units, by path.
    """

    def __init__(self, units: Sequence[Unit], modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._units = tuple(units)
        for path, module in modules.items():
            *parents, name = path.split(".")
            place: nn.Module = self
            for parent in parents:
                if parent not in place._modules:
                    place.add_module(parent, _Names())
                place = place._modules[parent]  # type: ignore[assignment]
            place.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        """Compute all layers."""
        return self.run(0, len(self._units), *inputs)

    def run(self, start: int, stop: int, *inputs: Any) -> Any:
        """Compute some of the layers."""
        cache: dict[str, Any] = {}
        output: Any = inputs
        for unit in self._units[start:stop]:
            inputs = output if isinstance(output, tuple) else (output,)
            output = unit.call(self.get_submodule, cache, *inputs)
        if start == stop and len(inputs) == 1:
            return inputs[0]
        return output


class Chunk(nn.Module):
    """Some layers of a stage, for a rank that holds several pieces of the model.

    Args:
        stage: All layers of the rank, which do not become this module's own.
        start: First layer.
        stop: The layer after the last one.
    """

    def __init__(self, stage: Stage, start: int, stop: int) -> None:
        super().__init__()
        self._run: Call = lambda *inputs: stage.run(start, stop, *inputs)

    def forward(self, *inputs: Any) -> Any:
        """Compute the layers."""
        return self._run(*inputs)
