"""Give a stage its weights: those it has, new ones, or its own part of a checkpoint. Never another stage's.

Layers on the meta device, and functions that make a layer, take no memory until a rank fills those of
its own stage. New weights are drawn from a seed for each layer, so that they do not depend on the number
of stages.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from samo.pipeline.layers import Layers
from samo.pipeline.stage import Stage

__all__ = ["build_stage"]

Source = Mapping[str, Tensor] | str | Path


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
        >>> from samo.pipeline.filling import build_stage
        >>> from samo.pipeline.layers import take_apart
        >>> layers = take_apart([lambda: torch.nn.Linear(2, 2)] * 3)
        >>> stage = build_stage(layers, [(1, 2)], device=torch.device("cpu"))
        >>> list(stage.state_dict())
        ['1.weight', '1.bias']

    Args:
        layers: The whole model.
        pieces: First layer and the one after the last, of each piece.
        device: Where to.
        seed: For layers that have no values yet.
        weights: Values by name, or safetensors: a file, or a folder of files.

    Raises:
        ValueError: A layer on the meta device has values from nowhere, or weights lack a name.
    """
    places = [place for start, stop in pieces for place in range(start, stop)]
    units = [layers.units[place] for place in places]
    modules: dict[str, nn.Module] = {}
    for place, unit in zip(places, units):
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.device(device):
            torch.manual_seed(seed * 1_000_003 + place)
            made = unit.modules if unit.build is None else unit.build()
            modules |= {path: _filled(module, device, layers.init) for path, module in made.items()}
            modules |= {path: make() for path, make in unit.local.items() if path not in modules}
    stage = Stage(units, modules)
    tie(stage, layers.tied)
    if weights is not None:
        _load(stage, weights, layers.tied)
    _check(stage)
    return stage


def tie(stage: nn.Module, tied: Iterable[tuple[str, ...]]) -> None:
    """Make one parameter of those that are tied and on this stage."""
    here = dict(stage.named_parameters(remove_duplicate=False))
    for group in tied:
        names = [name for name in group if name in here]
        for name in names[1:]:
            path, _, last = name.rpartition(".")
            stage.get_submodule(path)._parameters[last] = here[names[0]]


def _filled(
    module: nn.Module, device: torch.device, init: Callable[[nn.Module], object] | None
) -> nn.Module:
    """Return a module on the device; one without values gets new ones."""
    tensors = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return module.to(device)
    module.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)  # so that what nobody fills is found
        # Before a model's own way too, which may not look after norms.
        for part in module.modules():
            reset: Any = getattr(part, "reset_parameters", None)
            if callable(reset):
                reset()
        if init is not None:
            init(module)
    return module


def _load(stage: nn.Module, weights: Source, tied: Iterable[tuple[str, ...]]) -> None:
    wanted = dict(stage.named_parameters(remove_duplicate=False)) | {
        name: tensor for name, tensor in stage.named_buffers() if name in stage.state_dict()
    }
    # A tied weight stands in a file under one of its names, which may be another stage's.
    places = dict(wanted)
    for group in tied:
        for name in group:
            places |= {other: wanted[name] for other in group if name in wanted}
    reached: set[int] = set()
    for name, values in _values(weights, set(places)):
        _copy(name, places[name], values)
        reached.add(id(places[name]))
        del values  # before the next one is read
    missing = sorted(name for name, tensor in wanted.items() if id(tensor) not in reached)
    if missing:
        raise ValueError(
            f"weights lack {len(missing)} of this stage's {len(wanted)} tensors: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}; give those of the same model"
        )


def _values(weights: Source, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield what is wanted of some weights, one tensor at a time."""
    if not isinstance(weights, str | Path):
        yield from ((name, weights[name]) for name in names & set(weights))
        return
    for file in _files(Path(weights)):
        with safe_open(file, framework="pt") as reader:
            for name in names & set(reader.keys()):
                yield name, reader.get_tensor(name)


@torch.no_grad()
def _copy(name: str, target: Tensor, values: Tensor) -> None:
    if target.shape != values.shape:
        raise ValueError(
            f"weights hold '{name}' as {tuple(values.shape)}, the model as {tuple(target.shape)}; give "
            "those of the same model"
        )
    target.copy_(values)


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"'{path}' is no safetensors file and no folder of them")
    return files


def _check(stage: nn.Module) -> None:
    for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
        if tensor.is_floating_point() and tensor.numel() and bool(tensor.isnan().all()):
            raise ValueError(
                f"'{name}' was on the meta device and got no values: its module has no "
                "reset_parameters; pass weights=, or give the layer as a function that makes it"
            )
