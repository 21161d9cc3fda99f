"""Take a model apart into layers that can be put on different ranks.

It takes `nn.Sequential`, a list of layers or of functions that make one, samo's GPT, and Hugging Face's
GPT-2 and Llama as they come. Masks and rotary tables are made on each stage and never sent.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samo.errors import nearest
from samo.pipeline.stage import Find, Unit

__all__ = ["Layers", "LayersLike", "take_apart"]

LayersLike = nn.Module | Sequence[nn.Module | Callable[[], nn.Module]]


@dataclass(frozen=True)
class Layers:
    """A model as a row of units.

    Attributes:
        units: In the order of the forward pass.
        tied: Groups of parameter names that are one weight.
        init: Gives a module its first values, where the model has a way of its own.
    """

    units: tuple[Unit, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    init: Callable[[nn.Module], object] | None = None


def take_apart(model: LayersLike, tied: Sequence[tuple[str, ...]] = ()) -> Layers:
    """Return a model as a row of units; nothing is copied.

    Example:
        >>> import torch
        >>> from samo.pipeline.layers import take_apart
        >>> layers = take_apart(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()))
        >>> [list(unit.modules) for unit in layers.units]
        [['0'], ['1']]

    Raises:
        TypeError: The model is none of those it knows.
        ValueError: A name in ``tied`` does not exist.
    """
    found = _known(model)
    names: dict[int, list[str]] = defaultdict(list)
    known: dict[str, nn.Parameter] = {}
    for unit in found.units:
        for name, param in unit.named_parameters():
            names[id(param)].append(name)
            known[name] = param
    groups = [tuple(group) for group in names.values() if len(group) > 1]
    for group in tied:
        for name in group:
            if name not in known:
                raise ValueError(f"tied weight '{name}' is no parameter{nearest(name, known)}")
        if len({known[name].shape for name in group}) > 1:
            shapes = [tuple(known[name].shape) for name in group]
            raise ValueError(f"tied weights {group} must have one shape, got {shapes}")
        if tuple(group) not in groups:
            groups.append(tuple(group))
    return Layers(found.units, tuple(groups), found.init)


def _known(model: LayersLike) -> Layers:
    if isinstance(model, nn.Sequential):
        if type(model).forward is not nn.Sequential.forward:
            raise TypeError(
                f"{type(model).__name__} is an nn.Sequential with a forward() of its own, which its layers "
                "one after the other do not compute; give its layers as a list, with modules for what "
                "forward() does beside them"
            )
        return Layers(tuple(_plain(name, layer) for name, layer in model.named_children()))
    if isinstance(model, Sequence | nn.ModuleList):
        return Layers(tuple(_listed(str(i), layer) for i, layer in enumerate(model)))
    if isinstance(model, nn.Module):
        for cls in type(model).__mro__:
            how = _FAMILIES.get(f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}")
            if how is not None and type(model).forward is vars(cls).get("forward"):
                return how(model)
    raise TypeError(
        f"a pipeline takes nn.Sequential, a list of layers or of functions that make one, or one of "
        f"{', '.join(_FAMILIES)}; got {type(model).__name__}. Give its layers as a list"
    )


def _plain(path: str, layer: nn.Module) -> Unit:
    return Unit({path: layer}, lambda find, cache, *inputs: find(path)(*inputs))


def _listed(path: str, layer: object) -> Unit:
    if isinstance(layer, nn.Module):
        return _plain(path, layer)
    if not callable(layer):
        raise TypeError(
            f"layer {path} is a {type(layer).__name__}; give a module, or a function that makes one"
        )
    with torch.device("meta"):
        shape = layer()
    if not isinstance(shape, nn.Module):
        raise TypeError(
            f"layer {path} is a function that returned {type(shape).__name__}, not a module; give "
            "functions without arguments that make one"
        )
    make: Callable[[], nn.Module] = layer
    return Unit({path: shape}, _plain(path, shape).call, build=lambda: {path: make()})


# samo's own GPT -----------------------------------------------------------------------------------


def _gpt(model: Any) -> Layers:
    def embed(find: Find, cache: dict[str, Any], tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return find("embed")(tokens_BT) + find("position")(places_T)

    def block(path: str) -> Callable[..., Tensor]:
        def call(find: Find, cache: dict[str, Any], x_BTD: Tensor) -> Tensor:
            if model_config.is_checkpointed and torch.is_grad_enabled():
                return checkpoint(find(path), x_BTD, use_reentrant=False)
            return find(path)(x_BTD)

        return call

    def head(find: Find, cache: dict[str, Any], x_BTD: Tensor) -> Tensor:
        return find("head")(find("norm")(x_BTD))

    model_config = model.config
    paths = [f"blocks.{i}" for i in range(len(model.blocks))]
    return Layers(
        (
            Unit({"embed": model.embed, "position": model.position}, embed),
            *(Unit({path: layer}, block(path)) for path, layer in zip(paths, model.blocks)),
            Unit({"norm": model.norm, "head": model.head}, head),
        ),
        init=_gpt_init(model_config),
    )


def _gpt_init(config: Any) -> Callable[[nn.Module], None]:
    from samo.models.gpt import init_weights  # here, since not every pipeline holds a GPT

    return lambda module: init_weights(module, config)


# Hugging Face -------------------------------------------------------------------------------------


def _gpt2(model: Any) -> Layers:
    body, config = model.transformer, model.config
    mask_of = sys.modules[type(body).__module__].create_causal_mask

    def embed(find: Find, cache: dict[str, Any], tokens_BT: Tensor) -> Tensor:
        x_BTD = find("transformer.wte")(tokens_BT)
        places_1T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).unsqueeze(0)
        return find("transformer.drop")(x_BTD + find("transformer.wpe")(places_1T))

    def block(path: str) -> Callable[..., Tensor]:
        def call(find: Find, cache: dict[str, Any], x_BTD: Tensor) -> Tensor:
            mask, places_1T = _hf_mask(cache, config, mask_of, x_BTD)
            out = find(path)(x_BTD, None, mask, None, use_cache=False, position_ids=places_1T)
            return out[0] if isinstance(out, tuple) else out

        return call

    def head(find: Find, cache: dict[str, Any], x_BTD: Tensor) -> Tensor:
        return find("lm_head")(find("transformer.ln_f")(x_BTD))

    first = {f"transformer.{name}": getattr(body, name) for name in ("wte", "wpe", "drop")}
    paths = [f"transformer.h.{i}" for i in range(len(body.h))]
    last = {"transformer.ln_f": body.ln_f, "lm_head": model.lm_head}
    return Layers(
        (
            Unit(first, embed),
            *(Unit({path: layer}, block(path)) for path, layer in zip(paths, body.h)),
            Unit(last, head),
        ),
        init=lambda module: module.apply(model._init_weights),
    )


def _llama(model: Any) -> Layers:
    body, config = model.model, model.config
    mask_of = sys.modules[type(body).__module__].create_causal_mask
    tables = type(body.rotary_emb)

    def embed(find: Find, cache: dict[str, Any], tokens_BT: Tensor) -> Tensor:
        return find("model.embed_tokens")(tokens_BT)

    def block(path: str) -> Callable[..., Tensor]:
        def call(find: Find, cache: dict[str, Any], x_BTD: Tensor) -> Tensor:
            mask, places_1T = _hf_mask(cache, config, mask_of, x_BTD)
            if "rotary" not in cache:
                cache["rotary"] = find("model.rotary_emb")(x_BTD, position_ids=places_1T)
            out = find(path)(
                x_BTD,
                attention_mask=mask,
                position_ids=places_1T,
                past_key_values=None,
                use_cache=False,
                position_embeddings=cache["rotary"],
            )
            return out[0] if isinstance(out, tuple) else out

        return call

    def head(find: Find, cache: dict[str, Any], x_BTD: Tensor) -> Tensor:
        return find("lm_head")(find("model.norm")(x_BTD))

    rotary: Mapping[str, Callable[[], nn.Module]] = {
        "model.rotary_emb": lambda: tables(config=config)
    }
    paths = [f"model.layers.{i}" for i in range(len(body.layers))]
    last = {"model.norm": body.norm, "lm_head": model.lm_head}
    return Layers(
        (
            Unit({"model.embed_tokens": body.embed_tokens}, embed),
            *(
                Unit({path: layer}, block(path), local=rotary)
                for path, layer in zip(paths, body.layers)
            ),
            Unit(last, head),
        ),
        init=lambda module: module.apply(model._init_weights),
    )


def _hf_mask(
    cache: dict[str, Any], config: Any, mask_of: Callable[..., Any], x_BTD: Tensor
) -> tuple[Any, Tensor]:
    """Return the causal mask and the positions, made once for each forward pass of a stage."""
    if "mask" not in cache:
        places_1T = torch.arange(x_BTD.shape[1], device=x_BTD.device).unsqueeze(0)
        mask = mask_of(
            config=config,
            inputs_embeds=x_BTD,
            attention_mask=None,
            past_key_values=None,
            position_ids=places_1T,
        )
        cache["mask"] = mask, places_1T
    return cache["mask"]


_FAMILIES: dict[str, Callable[[Any], Layers]] = {
    "samo.GPT": _gpt,
    "transformers.GPT2LMHeadModel": _gpt2,
    "transformers.LlamaForCausalLM": _llama,
}
"""By package and class: others may have classes of these names, which compute something else."""
