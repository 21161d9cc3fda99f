"""Shapes of well-known public models, from their config.json: what `samo plan` knows by name.

Parameters are checked against the model cards in tests. No weights, and nothing is downloaded.
"""

from typing import Any, Final

from samo.errors import ConfigError, nearest

__all__ = ["PUBLIC"]


def _model(family: str, layers: int, width: int, heads: int, inner: int, vocab: int,
           context: int, **more: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": width,
        "num_attention_heads": heads, "intermediate_size": inner, "vocab_size": vocab,
        "max_position_embeddings": context, **more,
    }  # fmt: skip


def _llama(layers: int, width: int, heads: int, kv: int, inner: int, **more: Any) -> dict[str, Any]:
    """Return a Llama 3."""
    kind = {"num_key_value_heads": kv, **more}
    return _model("llama", layers, width, heads, inner, 128_256, 131_072, **kind)


def _qwen2(layers: int, width: int, heads: int, kv: int, inner: int, vocab: int = 152_064,
           **more: Any) -> dict[str, Any]:  # fmt: skip
    return _model(
        "qwen2", layers, width, heads, inner, vocab, 32_768, num_key_value_heads=kv, **more
    )


def _qwen3(layers: int, width: int, heads: int, inner: int, **more: Any) -> dict[str, Any]:
    kind = {"num_key_value_heads": 8, "head_dim": 128, **more}
    return _model("qwen3", layers, width, heads, inner, 151_936, 40_960, **kind)


def _gemma2(layers: int, width: int, heads: int, kv: int, inner: int, size: int) -> dict[str, Any]:
    kind = {"num_key_value_heads": kv, "head_dim": size, "sliding_window": 4096}
    return _model("gemma2", layers, width, heads, inner, 256_000, 8_192, **kind)


_TIED: Final = {"tie_word_embeddings": True}
_SMALL_VOCAB: Final = {"vocab": 151_936, **_TIED}

PUBLIC: Final[dict[str, dict[str, Any]]] = {
    "llama-2-7b": _model("llama", 32, 4096, 32, 11008, 32_000, 4096),
    "llama-2-13b": _model("llama", 40, 5120, 40, 13824, 32_000, 4096),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, head_dim=64, **_TIED),
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, head_dim=128, **_TIED),
    "mistral-7b": _model("mistral", 32, 4096, 32, 14336, 32_768, 32_768, num_key_value_heads=8),
    "mixtral-8x7b": _model(
        "mixtral", 32, 4096, 32, 14336, 32_000, 32_768,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
    ),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, **_SMALL_VOCAB),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, **_SMALL_VOCAB),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11008, **_SMALL_VOCAB),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13824),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, **_TIED),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "gemma-2-2b": _gemma2(26, 2304, 8, 4, 9216, 256),
    "gemma-2-9b": _gemma2(42, 3584, 16, 8, 14336, 256),
    "gemma-2-27b": _gemma2(46, 4608, 32, 16, 36864, 128),
}  # fmt: skip
"""Configs by name."""


def no_hub(name: str) -> ConfigError:
    """Return the error for a name of the hub, which is not read."""
    guess = nearest(name.rpartition("/")[2].lower(), PUBLIC)
    return ConfigError(
        f"no folder '{name}' here, and samo plan reads no hub; download the model and name its "
        f"folder or config.json, or plan for a shape{guess}: {', '.join(PUBLIC)}"
    )
