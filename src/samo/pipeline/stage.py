"""The layers of one rank, under their names in the whole model, and where their values come from.

Layers on the meta device, and functions that build a layer, take no memory until a rank builds
those of its own stage. New weights are drawn from a seed for each layer, so they do not depend on
the number of stages.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from samo.pipeline.units import Cache, Layers, Unit

Source = Mapping[str, Tensor] | str | Path


class Stage(nn.Module):
    """The layers of one rank, a piece for each of its stages, under their paths in the model."""

    def __init__(
        self,
        pieces: Sequence[Mapping[int, Unit]],
        modules: Mapping[str, nn.Module],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._device = device
        self._pieces = tuple(map(dict, pieces))  # units by their numbers in the model
        for path, module in modules.items():
            *parents, name = path.split(".")
            place: nn.Module = self
            for parent in parents:
                if parent not in place._modules:
                    place.add_module(parent, nn.Module())
                place = place.get_submodule(parent)
            place.add_module(name, module)

    def forward(self, *inputs: Any, piece: int = 0, seed: int | None = None) -> Any:
        """Compute one stage of this rank; with a seed, draw the same numbers in every layout.

        A seed leaves torch's generators changed: the caller restores them after the batch.
        """
        cache: Cache = {}
        output: Any = inputs
        generators = [] if seed is None else _generators(self._device)
        for number, unit in self._pieces[piece].items():
            for generator in generators:
                generator.manual_seed(_mixed(seed or 0, number))
            output = unit.call(self.get_submodule, cache, *inputs)
            inputs = output if isinstance(output, tuple) else (output,)
        return output


def _mixed(seed: int, number: int) -> int:
    """Return a seed of 64 bits for a layer; a CPU's generator takes the lower 32 alone."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that dropout draws from."""
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]


def build_stage(
    layers: Layers,
    cuts: Sequence[tuple[int, int]],
    *,
    device: torch.device,
    seed: int = 0,
    weights: Source | None = None,
) -> Stage:
    """Return the layers of one rank, with values, on a device; arguments as in `samo.Pipeline`."""
    modules: dict[str, nn.Module] = {}
    for number in (number for start, stop in cuts for number in range(start, stop)):
        unit = layers.units[number]
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.device(device):
            torch.manual_seed(seed * 1_000_003 + number)
            made = unit.modules if unit.build is None else unit.build()
            for path, module in made.items():
                modules[path] = _initialized(module, device, layers.init)
            modules |= {path: make() for path, make in unit.local.items() if path not in modules}
    pieces = [{n: layers.units[n] for n in range(start, stop)} for start, stop in cuts]
    stage = Stage(pieces, modules, device)
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
    wanted = stage.state_dict(keep_vars=True)
    # A file holds a tied weight under one of its names, which may be another stage's.
    names = {name: group for group in tied for name in group}
    targets = {other: wanted[name] for name in wanted for other in names.get(name, [name])}
    loaded: set[int] = set()
    for name, values in _read(weights, set(targets)):
        target = targets[name]
        if target.shape != values.shape:
            raise ValueError(
                f"weights have '{name}' as {tuple(values.shape)}, the model as "
                f"{tuple(target.shape)}; pass those of the same model"
            )
        with torch.no_grad():
            target.copy_(values)
        loaded.add(id(target))
        del values  # before the next one is read
    missing = sorted(name for name, tensor in wanted.items() if id(tensor) not in loaded)
    if missing:
        raise ValueError(
            f"weights lack {len(missing)} of this rank's {len(wanted)} tensors: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}; pass those of the "
            "same model"
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
