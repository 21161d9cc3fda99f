"""The layers of one stage, under the names they have in the whole model, and where their values come from.

Layers on the meta device, and functions that build a layer, take no memory until a rank builds
those of its own stage. New weights are drawn from a seed for each layer, so they do not depend on
the number of stages.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from samo.pipeline.split import Cache, Call, Layers, Unit

__all__ = ["Stage", "build_stage"]

Source = Mapping[str, Tensor] | str | Path


class Stage(nn.Module):
    """The layers of one stage. Its ``state_dict()`` is a part of the whole model's.

    Args:
        units: The layers, in order.
        modules: The modules of the layers, by path.
    """

    def __init__(self, units: Sequence[Unit], modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._units = tuple(units)
        for path, module in modules.items():
            parents, _, name = path.rpartition(".")
            place: nn.Module = self
            for parent in parents.split(".") if parents else ():
                if parent not in place._modules:
                    place.add_module(parent, nn.Module())
                place = place.get_submodule(parent)
            place.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        """Compute all layers."""
        return self.run(0, len(self._units), *inputs)

    def run(self, start: int, stop: int, *inputs: Any) -> Any:
        """Compute some of the layers."""
        cache: Cache = {}
        output: Any = inputs
        for unit in self._units[start:stop]:
            output = unit.call(self.get_submodule, cache, *inputs)
            inputs = output if isinstance(output, tuple) else (output,)
        return output


class Chunk(nn.Module):
    """Some layers of a stage, for a rank that holds several pieces of the model.

    Args:
        stage: All layers of the rank, which do not become submodules.
        start: First layer.
        stop: The layer after the last one.
    """

    def __init__(self, stage: Stage, start: int, stop: int) -> None:
        super().__init__()
        self._run: Call = lambda *inputs: stage.run(start, stop, *inputs)

    def forward(self, *inputs: Any) -> Any:
        """Compute the layers."""
        return self._run(*inputs)


def build_stage(
    layers: Layers,
    pieces: Iterable[tuple[int, int]],
    *,
    device: torch.device,
    seed: int = 0,
    weights: Source | None = None,
) -> Stage:
    """Return some of a model's layers, with values, on a device.

    Example:
        >>> import torch
        >>> from samo.pipeline.split import take_apart
        >>> from samo.pipeline.stage import build_stage
        >>> layers = take_apart([lambda: torch.nn.Linear(2, 2)] * 3)
        >>> stage = build_stage(layers, [(1, 2)], device=torch.device("cpu"))
        >>> list(stage.state_dict())
        ['1.weight', '1.bias']

    Args:
        layers: The whole model.
        pieces: First layer and the one after the last, of each piece.
        device: Where the stage computes.
        seed: Seed of layers that have no values yet.
        weights: Values by name, or safetensors: a file, or a folder of files.

    Raises:
        ValueError: A layer on the meta device gets no values, or a name is missing in ``weights``.
    """
    numbers = [number for start, stop in pieces for number in range(start, stop)]
    units = [layers.units[number] for number in numbers]
    modules: dict[str, nn.Module] = {}
    for number, unit in zip(numbers, units):
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.device(device):
            torch.manual_seed(seed * 1_000_003 + number)
            made = unit.modules if unit.build is None else unit.build()
            for path, module in made.items():
                modules[path] = _initialized(module, device, layers.init)
            modules |= {path: make() for path, make in unit.local.items() if path not in modules}
    stage = Stage(units, modules)
    _tie(stage, layers.tied)
    if weights is not None:
        _load(stage, weights, layers.tied)
    for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
        if tensor.is_floating_point() and tensor.numel() and bool(tensor.isnan().all()):
            raise ValueError(
                f"'{name}' was on the meta device and got no values: its module has no "
                "reset_parameters; pass weights=, or pass the layer as a function that builds it"
            )
    return stage


def _initialized(
    module: nn.Module, device: torch.device, init: Callable[[nn.Module], object] | None
) -> nn.Module:
    """Return a module on the device; initialize one that is on the meta device."""
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return module.to(device)
    module.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)  # so that what stays uninitialized is found
        # Before a model's own way too, which may not initialize norms.
        for part in module.modules():
            if callable(reset := getattr(part, "reset_parameters", None)):
                reset()
        if init is not None:
            init(module)
    return module


def _tie(stage: nn.Module, tied: Iterable[tuple[str, ...]]) -> None:
    """Make one parameter of those that are tied and on this stage."""
    here = dict(stage.named_parameters(remove_duplicate=False))
    for group in tied:
        names = [name for name in group if name in here]
        for name in names[1:]:
            path, _, last = name.rpartition(".")
            stage.get_submodule(path)._parameters[last] = here[names[0]]


def _load(stage: nn.Module, weights: Source, tied: Iterable[tuple[str, ...]]) -> None:
    wanted = dict(stage.named_parameters(remove_duplicate=False)) | {
        name: tensor for name, tensor in stage.named_buffers() if name in stage.state_dict()
    }
    # A file holds a tied weight under one of its names, which may be another stage's.
    targets = dict(wanted)
    for group in tied:
        for name in group:
            targets |= {other: wanted[name] for other in group if name in wanted}
    loaded: set[int] = set()
    for name, values in _read(weights, set(targets)):
        target = targets[name]
        if target.shape != values.shape:
            raise ValueError(
                f"weights hold '{name}' as {tuple(values.shape)}, the model as "
                f"{tuple(target.shape)}; pass those of the same model"
            )
        with torch.no_grad():
            target.copy_(values)
        loaded.add(id(target))
        del values  # before the next one is read
    missing = sorted(name for name, tensor in wanted.items() if id(tensor) not in loaded)
    if missing:
        raise ValueError(
            f"weights lack {len(missing)} of this stage's {len(wanted)} tensors: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}; pass those of the same model"
        )


def _read(weights: Source, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of some names, one at a time."""
    if not isinstance(weights, str | Path):
        yield from ((name, weights[name]) for name in names & set(weights))
        return
    path = Path(weights)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"'{path}' is neither a safetensors file nor a folder of them")
    for file in files:
        with safe_open(file, framework="pt") as reader:
            for name in names & set(reader.keys()):
                yield name, reader.get_tensor(name)
