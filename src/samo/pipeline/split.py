"""Split a model into layers, and the layers into stages.

It takes `nn.Sequential`, a list of layers or of functions that build one, samo's GPT, and Hugging
Face's causal language models.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samo.pipeline import hugging_face
from samo.pipeline.partition import partition
from samo.pipeline.units import Cache, Call, Find, Layers, LayersLike, Unit


def take_apart(model: LayersLike) -> Layers:
    """Return a model as a sequence of units; nothing is copied."""
    found = _layers_of(model)
    names: dict[int, list[str]] = defaultdict(list)
    for unit in found.units:
        for name, param in unit.named_parameters():
            names[id(param)].append(name)
        for path, module in unit.modules.items():
            if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
                raise TypeError(
                    f"layer '{path}' is wrapped in DistributedDataParallel; pass it bare: a mesh "
                    "with an axis 'data' gives stages replicas"
                )
    tied = tuple(tuple(group) for group in names.values() if len(group) > 1)
    return replace(found, tied=tied)


def parameter_costs(layers: Layers) -> list[float]:
    """Estimate each layer's time: the weights that are multiplied with, and 1 % of the others."""

    def cost(module: nn.Module) -> float:
        is_lookup = isinstance(module, nn.Embedding)
        return sum(
            param.numel() * (1.0 if param.dim() >= 2 and not is_lookup else 0.01)
            for param in module.parameters(recurse=False)
        )

    return [
        float(sum(cost(part) for module in unit.modules.values() for part in module.modules()))
        for unit in layers.units
    ]


def check_cuts(
    cuts: Sequence[tuple[int, int]] | None, layers: Layers, num_stages: int
) -> list[tuple[int, int]]:
    """Return the cuts, by default even in the number of weights."""
    if cuts is None:
        return partition(parameter_costs(layers), num_stages)
    count, found = len(layers.units), [(start, stop) for start, stop in cuts]
    is_consecutive = [0, *(b for _, b in found)] == [*(a for a, _ in found), count]
    if len(found) != num_stages or not is_consecutive or any(a >= b for a, b in found):
        raise ValueError(
            f"cuts must be {num_stages} consecutive ranges from layer 0 to {count}, got {found}"
        )
    return found


def _layers_of(model: LayersLike) -> Layers:
    if isinstance(model, nn.Sequential):
        if type(model).forward is not nn.Sequential.forward:
            raise TypeError(
                f"{type(model).__name__} is an nn.Sequential with its own forward(); pass a list "
                "of layers that in sequence compute the same"
            )
        # Not named_children(), which leaves out the second use of a module.
        layers = model._modules.items()
        return Layers(tuple(_unit(name, layer) for name, layer in layers))
    if isinstance(model, Sequence | nn.ModuleList):
        return Layers(tuple(_unit(str(i), layer) for i, layer in enumerate(model)))
    if isinstance(model, nn.Module):
        for cls in type(model).__mro__:
            if type(model).forward is vars(cls).get("forward"):
                package, name = cls.__module__.partition(".")[0], cls.__qualname__
                if (package, name) == ("samo", "GPT"):
                    return _gpt(model)
                if package == "transformers" and name in hugging_face.FAMILIES:
                    return hugging_face.take_apart_causal_lm(model)
    raise TypeError(
        "a pipeline takes nn.Sequential, a list of layers or of functions that build one, samo's "
        f"GPT, or one of {', '.join(hugging_face.FAMILIES)}; got {type(model).__name__}. Pass its "
        "layers as a list"
    )


def _chain(*paths: str) -> Call:
    """Return how to call modules one after another."""

    def call(find: Find, cache: Cache, *inputs: Any) -> Any:
        output = find(paths[0])(*inputs)
        for path in paths[1:]:
            output = find(path)(output)
        return output

    return call


def _unit(path: str, layer: nn.Module | Callable[[], nn.Module]) -> Unit:
    if isinstance(layer, nn.Module):
        return Unit({path: layer}, _chain(path))
    shape: object = layer
    if callable(layer):
        try:
            with torch.device("meta"):
                shape = layer()
        except TypeError as error:  # F.relu, say, takes a tensor
            raise TypeError(
                f"layer {path} cannot be built ({error}); pass a module, such as nn.ReLU(), or a "
                "function without arguments that builds one"
            ) from error
    if not isinstance(shape, nn.Module):
        raise TypeError(
            f"layer {path} is or returns {type(shape).__name__}; pass a module, or a function "
            "without arguments that builds one"
        )
    return Unit({path: shape}, _chain(path), build=lambda: {path: layer()})


def _gpt(model: Any) -> Layers:
    from samo.models.gpt import init_weights  # here, since not every pipeline holds a GPT

    config = model.config

    def embed(find: Find, cache: Cache, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return find("embed")(tokens_BT) + find("position")(positions_T)

    def block(path: str) -> Call:
        def call(find: Find, cache: Cache, x_BTD: Tensor) -> Tensor:
            return find(path)(x_BTD, config.is_checkpointed)

        return call

    first = {"embed": model.embed, "position": model.position}
    last = {"norm": model.norm, "head": model.head}
    middle = [Unit({f"blocks.{i}": b}, block(f"blocks.{i}")) for i, b in enumerate(model.blocks)]
    units = (Unit(first, embed), *middle, Unit(last, _chain(*last)))
    return Layers(units, init=lambda module: init_weights(module, config))
