"""Split a model into layers, and the layers into stages.

It takes `nn.Sequential`, a list of layers or of functions that build one, samo's GPT, and Hugging
Face's GPT-2 and Llama. Attention masks and rotary tables are computed on each stage and never sent.
"""

import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Layers", "LayersLike", "Unit", "parameter_costs", "partition", "take_apart"]

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

    def tensor_names(self) -> Iterator[str]:
        """Yield the name of each parameter and persistent buffer in the whole model, in order."""
        for path, module in self.modules.items():
            for inner, part in module.named_modules(prefix=path, remove_duplicate=False):
                for name in (*part._parameters, *part._buffers):
                    if name not in part._non_persistent_buffers_set:
                        yield f"{inner}.{name}"


@dataclass(frozen=True)
class Layers:
    """A model as a sequence of units, in the order of the forward pass."""

    units: tuple[Unit, ...]
    tied: tuple[tuple[str, ...], ...] = ()  # groups of parameter names that are one weight
    init: Callable[[nn.Module], object] | None = None  # the model's own way to initialize a module


def take_apart(model: LayersLike) -> Layers:
    """Return a model as a sequence of units; nothing is copied."""
    found = _layers_of(model)
    names: dict[int, list[str]] = defaultdict(list)
    for unit in found.units:
        for name, param in unit.named_parameters():
            names[id(param)].append(name)
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


def partition(costs: Sequence[float], num_stages: int) -> list[tuple[int, int]]:
    """Cut a sequence of layers into stages of one layer or more; exact, by dynamic programming.

    Of all cuts, one whose slowest stage is fastest; among those, one with the smallest sum of
    squared costs, so that the other stages are even.

    Example:
        >>> from samo.pipeline.split import partition
        >>> partition([1, 1, 1, 5], 2)  # first layer and the one after the last, of each stage
        [(0, 3), (3, 4)]
    """
    count = len(costs)
    if not 1 <= num_stages <= count:
        raise ValueError(
            f"{count} layers cannot be cut into {num_stages} stages; each needs one layer or more"
        )
    total = [0.0, *accumulate(costs)]

    def best(
        cost: Callable[[float], float], join: Callable[[float, float], float]
    ) -> tuple[float, list[int]]:
        # found[stop]: cost and starts of the stages that hold the first `stop` layers.
        found: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
        for stage in range(num_stages):
            found = {
                stop: min(
                    (join(before, cost(total[stop] - total[start])), [*starts, start])
                    for start, (before, starts) in found.items()
                    if start < stop
                )
                for stop in range(stage + 1, count - (num_stages - stage - 1) + 1)
            }
        return found[count]

    # Two passes: the most even start of a cut may have a slower stage than the fastest start.
    slowest, _ = best(lambda own: own, max)
    _, starts = best(lambda own: own * own if own <= slowest else inf, operator.add)
    return list(zip(starts, [*starts[1:], count]))


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
            split = _FAMILIES.get(f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}")
            if split is not None and type(model).forward is vars(cls).get("forward"):
                return split(model)
    raise TypeError(
        "a pipeline takes nn.Sequential, a list of layers or of functions that build one, or one "
        f"of {', '.join(_FAMILIES)}; got {type(model).__name__}. Pass its layers as a list"
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
        with torch.device("meta"):
            shape = layer()
    if not isinstance(shape, nn.Module):
        raise TypeError(
            f"layer {path} is or returns {type(shape).__name__}; pass a module, or a function "
            "without arguments that builds one"
        )
    return Unit({path: shape}, _chain(path), build=lambda: {path: layer()})


# Language models: an embedding, blocks, and a norm with the head


def _decoder(
    model: Any,
    embed: Call,
    block: Callable[[str], Call],
    init: Callable[[nn.Module], object],
    *,
    first: Sequence[str],
    blocks: str,
    last: tuple[str, str],
    local: Mapping[str, Callable[[], nn.Module]] | None = None,
) -> Layers:
    """Return the units of a language model, whose modules are given by their paths."""

    def modules(*paths: str) -> dict[str, nn.Module]:
        return {path: model.get_submodule(path) for path in paths}

    paths = [f"{blocks}.{i}" for i in range(len(model.get_submodule(blocks)))]
    middle = [Unit(modules(path), block(path), local=local or {}) for path in paths]
    head = Unit(modules(*last), _chain(*last))
    return Layers((Unit(modules(*first), embed), *middle, head), init=init)


def _gpt(model: Any) -> Layers:
    from samo.models.gpt import init_weights  # here, since not every pipeline holds a GPT

    config = model.config

    def embed(find: Find, cache: Cache, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return find("embed")(tokens_BT) + find("position")(positions_T)

    def block(path: str) -> Call:
        def call(find: Find, cache: Cache, x_BTD: Tensor) -> Tensor:
            if config.is_checkpointed and torch.is_grad_enabled():
                return checkpoint(find(path), x_BTD, use_reentrant=False)
            return find(path)(x_BTD)

        return call

    return _decoder(
        model,
        embed,
        block,
        lambda module: init_weights(module, config),
        first=("embed", "position"),
        blocks="blocks",
        last=("norm", "head"),
    )


def _gpt2(model: Any) -> Layers:
    def embed(find: Find, cache: Cache, tokens_BT: Tensor) -> Tensor:
        x_BTD = find("transformer.wte")(tokens_BT)
        positions_1T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).unsqueeze(0)
        return find("transformer.drop")(x_BTD + find("transformer.wpe")(positions_1T))

    return _decoder(
        model,
        embed,
        lambda path: _hf_block(model, model.transformer, path),
        lambda module: module.apply(model._init_weights),
        first=("transformer.wte", "transformer.wpe", "transformer.drop"),
        blocks="transformer.h",
        last=("transformer.ln_f", "lm_head"),
    )


def _llama(model: Any) -> Layers:
    rotary = type(model.model.rotary_emb)
    return _decoder(
        model,
        _chain("model.embed_tokens"),
        lambda path: _hf_block(model, model.model, path, rotary="model.rotary_emb"),
        lambda module: module.apply(model._init_weights),
        first=("model.embed_tokens",),
        blocks="model.layers",
        last=("model.norm", "lm_head"),
        local={"model.rotary_emb": lambda: rotary(config=model.config)},
    )


def _hf_block(model: Any, body: Any, path: str, *, rotary: str | None = None) -> Call:
    """Return how to call a Hugging Face block; a stage computes mask and tables once a pass."""
    config, make_mask = model.config, sys.modules[type(body).__module__].create_causal_mask

    def call(find: Find, cache: Cache, x_BTD: Tensor) -> Tensor:
        if not cache:
            positions_1T = torch.arange(x_BTD.shape[1], device=x_BTD.device).unsqueeze(0)
            mask = make_mask(
                config=config,
                inputs_embeds=x_BTD,
                attention_mask=None,
                past_key_values=None,
                position_ids=positions_1T,
            )
            cache |= {"attention_mask": mask, "position_ids": positions_1T, "use_cache": False}
            if rotary is not None:
                cache["position_embeddings"] = find(rotary)(x_BTD, position_ids=positions_1T)
        out = find(path)(x_BTD, **cache)
        return out[0] if isinstance(out, tuple) else out

    return call


_FAMILIES: dict[str, Callable[[Any], Layers]] = {
    "samo.GPT": _gpt,
    "transformers.GPT2LMHeadModel": _gpt2,
    "transformers.LlamaForCausalLM": _llama,
}
"""By package and class: other packages may have classes of the same name."""
