"""Hugging Face's causal language models as units of a pipeline.

A family's own forward() knows what its layers get: masks, rotary tables, positions, scaled
embeddings. So each stage calls it once per pass, on a skeleton of the model in which the layers are
replaced by recorders, and calls its own layers with what was recorded. None of that is sent.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from samo.pipeline.units import Cache, Call, Find, Layers, Unit

FAMILIES: Final = (
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
)
"""Classes of transformers that are known to work: compared with the whole model in the tests."""


def take_apart_causal_lm(model: Any) -> Layers:
    """Return embeddings, layers, and final norm with head, as units."""
    prefix, body, config = model.base_model_prefix, model.base_model, model.config
    (blocks,) = [name for name, part in body.named_children() if isinstance(part, nn.ModuleList)]
    head_module = model.get_output_embeddings()
    (head_path,) = [name for name, part in model.named_children() if part is head_module]
    names = [*body._modules]
    paths = [f"{prefix}.{blocks}.{i}" for i in range(len(body._modules[blocks]))]
    # Without the weights, which only the stages hold.
    bare_model, bare_body = _without_modules(model), _without_modules(body)
    recorders = [_Recorder(layer) for layer in body._modules[blocks]]
    tables: dict[str, Callable[[], nn.Module]] = {}
    first: dict[str, nn.Module] = {}
    last: dict[str, nn.Module] = {}
    for name in names:
        path, part = f"{prefix}.{name}", body._modules[name]
        if "Rotary" in type(part).__name__:
            tables[path] = partial(type(part), config=config)  # type: ignore[misc]
        elif name != blocks:
            (first if names.index(name) < names.index(blocks) else last)[path] = part

    def call_body(find: Find, own: Mapping[str, object], x: Tensor | None = None) -> Any:
        """Return a body to call, with the modules that this stage has and recorders as layers."""
        called = copy.copy(bare_body)
        called._modules = {
            name: find(path) if path in own or path in tables else _Through()
            for name, path in zip(names, (f"{prefix}.{name}" for name in names))
        }
        called._modules[blocks] = nn.ModuleList(recorders)
        recorders[0].replacement = x
        return called

    def record(find: Find, cache: Cache, own: Mapping[str, object], **inputs: Tensor) -> Tensor:
        call_body(find, own)(**inputs, use_cache=False)
        hidden: Tensor = recorders[0].hidden
        for path, recorder in zip(paths, recorders):
            cache[path] = recorder.arguments
            recorder.clear()
        return hidden

    def embed(find: Find, cache: Cache, tokens_BT: Tensor) -> Tensor:
        return record(find, cache, first, input_ids=tokens_BT)

    def layer(path: str) -> Call:
        def call(find: Find, cache: Cache, x_BTD: Tensor) -> Tensor:
            if path not in cache:
                with torch.no_grad():
                    record(find, cache, {}, inputs_embeds=x_BTD)
            args, kwargs = cache[path]
            output = find(path)(x_BTD, *args, **kwargs)
            return output[0] if isinstance(output, tuple) else output

        return call

    def head(find: Find, cache: Cache, x_BTD: Tensor) -> Tensor:
        called = copy.copy(bare_model)
        called._modules = {prefix: call_body(find, last, x_BTD), head_path: find(head_path)}
        logits: Tensor = called(inputs_embeds=x_BTD, use_cache=False).logits
        for recorder in recorders:
            recorder.clear()
        return logits

    middle = [
        Unit({path: part}, layer(path), local=tables)
        for path, part in zip(paths, body._modules[blocks])
    ]
    ends = Unit({**last, head_path: head_module}, head, local=tables)
    units = (Unit(first, embed, local=tables), *middle, ends)
    return Layers(units, init=lambda module: module.apply(bare_model._init_weights))


def _without_modules(module: nn.Module) -> Any:
    bare = copy.copy(module)
    bare._modules = {}
    return bare


class _Recorder(nn.Module):
    """Stands for a layer: keeps what it is called with, and returns its input or a replacement."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # A forward() may ask a layer for its kind of attention.
        plain = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        vars(self).update(plain)
        self.clear()

    def clear(self) -> None:
        """Forget the tensors of a pass."""
        self.hidden: Any = None
        self.arguments: Any = None
        self.replacement: Any = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.hidden, self.arguments = hidden, (args, kwargs)
        return hidden if self.replacement is None else self.replacement


class _Through(nn.Module):
    """Stands for a module of another stage; embeddings of positions become 0."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x if x.is_floating_point() else torch.zeros((), device=x.device)
