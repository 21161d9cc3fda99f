"""Hugging Face's config.json as a `Network`: Llama, Mistral, Qwen, Gemma, GPT-2, and mixtures.

Parameters are counted exactly. Activations are those of the eager code of transformers: its norms
of Llama's kind work in fp32. The loss is that of `samo.chunk_loss_`; a pipeline has all logits of a
micro-batch at once.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from samo.errors import ConfigError, nearest
from samo.models.shapes import GPTConfig
from samo.planner.network import Layer, Matrix, Network, gpt
from samo.utils import untrusted

_MAX_BYTES: Final = 2**24

_MOST: Final = 2**24
_MOST_LAYERS: Final = 2**12
_SIZES: Final = (
    *("n_embd", "n_layer", "n_head", "n_inner", "n_positions"),
    *("hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
    *("sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok"),
    "decoder_sparse_step",
)

FAMILIES: Final = {
    "gpt2": "", "llama": "", "mistral": "", "qwen2": "qkv bias", "qwen3": "qk norms",
    "gemma": "", "gemma2": "four norms", "gemma3_text": "four norms, qk norms",
    "mixtral": "experts", "qwen2_moe": "qkv bias, experts", "qwen3_moe": "qk norms, experts",
}  # fmt: skip
"""What `model_type` may be, and how the family differs from Llama."""


def read_config(path: Path) -> Network:
    """Return the network of a Hugging Face folder, or of its config.json.

    Raises:
        ConfigError: There is no such file, or the family is not known.
    """
    name = path.name if path.is_dir() else path.resolve().parent.name
    return from_config(read_json(path), name)


def read_json(path: Path) -> dict[str, Any]:
    """Return the config of a folder, or of its config.json."""
    file = path / "config.json" if path.is_dir() else path
    try:
        # A link may be named, as in the hub's cache, but neither a pipe nor a device.
        found = untrusted.parse_json(untrusted.read_file(os.path.realpath(file), _MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"'{file}': {error.strerror}; name a folder with config.json") from None
    except ValueError as error:
        raise ConfigError(f"'{file}' cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"'{file}' is not the config of a model")
    return found


def from_module(model: Any) -> Network:
    """Return the network of samo's GPT or of a model of Hugging Face, on the meta device too."""
    config: Any = getattr(model, "config", None)
    if isinstance(config, GPTConfig):
        return gpt(config)
    if hasattr(config, "to_dict") and hasattr(model, "get_output_embeddings"):
        return from_config(config.to_dict(), type(model).__name__)
    raise ConfigError(
        f"samo.plan takes samo's GPT or a causal language model of Hugging Face, got "
        f"{type(model).__name__}; print(samo.ledger(model, opt)) shows the state of any model"
    )


def from_config(config: Mapping[str, Any], name: str = "") -> Network:
    """Return the network of a config, as `transformers` writes it.

    Example:
        >>> from samo.planner.configs import from_config
        >>> llama = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        ...          "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}
        >>> from_config(llama).num_params
        6738415616
    """
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        guess = nearest(family, FAMILIES)
        raise ConfigError(
            f"the config's model_type is '{family}'{guess}; samo plan knows {', '.join(FAMILIES)}. "
            "For another transformer pass --num-layers, --width and --vocab-size"
        )
    sizes = {key: config[key] for key in _SIZES if config.get(key)}  # others are as if not there
    for key, value in sizes.items():
        most = _MOST_LAYERS if key in ("num_hidden_layers", "n_layer") else _MOST
        if type(value) is not int or not 0 < value <= most:
            raise ConfigError(
                f"the config of '{name or family}' is damaged: {key} must be a whole number, 1 to "
                f"{most:,}, got {str(value)[:40]}"
            )
    others = {key: value for key, value in config.items() if key not in _SIZES}
    try:
        if family == "gpt2":
            return _gpt2(others | sizes, name)
        return _llama(others | sizes, name, family)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the config of '{name or family}' lacks {error}") from None
    except ValueError as error:
        raise ConfigError(f"the config of '{name or family}' is damaged: {error}") from None


def _gpt2(config: Mapping[str, Any], name: str) -> Network:
    d, context = config["n_embd"], config.get("n_positions", 1024)
    inner = config.get("n_inner", 4 * d)
    shape = GPTConfig(
        num_layers=config["n_layer"],
        width=d,
        num_heads=config["n_head"],
        context=context,
        vocab_size=config["vocab_size"],
        is_tied=config.get("tie_word_embeddings", True),
    )
    network = gpt(shape, name or "gpt2")
    block = replace(
        network.blocks[0],
        matrices=(
            *network.blocks[0].matrices[:2],
            Matrix("mlp", d, inner),
            Matrix("mlp", inner, d),
        ),
        vectors=(d, d, 3 * d, d, d, d, inner, d),
        # transformers' GELU is eight operators on fp32-free tensors, of which five are saved;
        # three dropouts keep a mask each.
        saved=17 * d + 12 * inner,
        traffic=40 * d + 24 * inner,
        flow=2 * d + 4 * inner,
        operators=45,
    )
    layers = (network.layers[0], *[block] * shape.num_layers, network.layers[-1])
    return replace(network, layers=layers, has_chunks=False)


def _llama(config: Mapping[str, Any], name: str, family: str) -> Network:
    traits = FAMILIES[family]
    d, vocab, count = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    default = 128 if family == "qwen3" else 256 if family.startswith("gemma") else d // heads
    size = config.get("head_dim", default)
    q, kv = heads * size, config.get("num_key_value_heads", heads) * size
    f = config["intermediate_size"]
    norms = 4 if "four norms" in traits else 2
    norm_bytes = 10 if family.startswith("gemma") else 8  # saved: fp32 input, two results
    vectors = [d] * norms
    if "qk norms" in traits:
        vectors += [size, size]
    if "qkv bias" in traits or config.get("attention_bias"):
        has_all = config.get("attention_bias") and "qkv bias" not in traits
        vectors += [q, kv, kv] + ([d] if has_all else [])
    if config.get("mlp_bias"):
        vectors += [f, f, d]
    attention = (
        Matrix("attention", d, q),
        Matrix("attention", d, kv, count=2),
        Matrix("attention", q, d),
    )
    extra = 6 * (q + kv) if "qk norms" in traits else 0
    saved = norms * norm_bytes * d + 4 * q + 4 * kv + extra
    traffic = norms * 36 * d + 12 * d + 20 * (q + kv) + 4 * extra

    def block(mlp: tuple[Matrix, ...], wide: float, more: int, operators: int) -> Layer:
        """Return a block; ``wide`` is the width of the products between gate, up and down."""
        return Layer(
            matrices=attention + mlp,
            vectors=tuple(vectors),
            attention_width=q,
            saved=saved + 8 * wide + more,
            traffic=traffic + 10 * wide + 2 * more,
            flow=2 * d + 6 * wide,
            operators=operators,
        )

    def gated(width: int) -> tuple[Matrix, ...]:
        return (
            Matrix("mlp", d, width, count=2),
            Matrix("mlp", width, d),
        )

    blocks = [block(gated(f), f, 0, 45)] * count
    if "experts" in traits:
        experts = config.get("num_local_experts") or config["num_experts"]
        top, inner = config["num_experts_per_tok"], config.get("moe_intermediate_size", f)
        share = {"stack": experts, "share": top / experts}
        mlp: tuple[Matrix, ...] = (
            Matrix("experts", d, 2 * inner, **share),
            Matrix("experts", inner, d, **share),
            Matrix("router", d, experts),
        )
        wide = top * inner
        if shared := config.get("shared_expert_intermediate_size", 0):
            mlp += (*gated(shared), Matrix("router", d, 1))
            wide += shared
        mixed = block(mlp, wide, 6 * top * d + 4 * experts, 60 + 8 * experts)
        every, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        blocks = [blocks[i] if i in plain or (i + 1) % every else mixed for i in range(count)]
    has_window = not family.startswith("qwen") or config.get("use_sliding_window")
    if has_window and (window := config.get("sliding_window")):
        local = {layer: replace(layer, window=window) for layer in {*blocks}}
        period = {"gemma2": 2, "gemma3_text": 6}.get(family, 0)
        blocks = [
            layer if period and (i + 1) % period == 0 else local[layer]
            for i, layer in enumerate(blocks)
        ]
    is_tied = bool(config.get("tie_word_embeddings", family.startswith("gemma")))
    embedding = Matrix("embedding", d, vocab, is_lookup=True)
    head = Matrix("head", d, vocab, is_tied=is_tied)
    return Network(
        name=name or family,
        layers=(
            Layer(matrices=(embedding,), traffic=4 * d, operators=5),
            *blocks,
            Layer(
                matrices=(head,), vectors=(d,), saved=norm_bytes * d, traffic=36 * d, operators=15
            ),
        ),
        width=d,
        vocab_size=vocab,
        context=config.get("max_position_embeddings", 2048),
        has_chunks=False,
    )
