"""Shapes of well-known public models, from their config.json: what `samo plan` knows by name.

Parameters are checked against the model cards in tests. No weights, and nothing is downloaded.
"""

from typing import Any, Final


def _model(family: str, layers: int, width: int, heads: int, kv_heads: int, inner: int, vocab: int,
           context: int, **more: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": width,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner,
        "vocab_size": vocab, "max_position_embeddings": context, **more,
    }  # fmt: skip


_TIED: Final = {"tie_word_embeddings": True}
_GEMMA: Final = {"sliding_window": 4096}

PUBLIC: Final[dict[str, dict[str, Any]]] = {
    "llama-2-7b": _model("llama", 32, 4096, 32, 32, 11008, 32_000, 4096),
    "llama-2-13b": _model("llama", 40, 5120, 40, 40, 13824, 32_000, 4096),
    "llama-3-8b": _model("llama", 32, 4096, 32, 8, 14336, 128_256, 8_192),
    "llama-3-70b": _model("llama", 80, 8192, 64, 8, 28672, 128_256, 8_192),
    "llama-3.1-8b": _model("llama", 32, 4096, 32, 8, 14336, 128_256, 131_072),
    "llama-3.1-70b": _model("llama", 80, 8192, 64, 8, 28672, 128_256, 131_072),
    "llama-3.2-1b": _model("llama", 16, 2048, 32, 8, 8192, 128_256, 131_072, **_TIED),
    "llama-3.2-3b": _model("llama", 28, 3072, 24, 8, 8192, 128_256, 131_072, **_TIED),
    "mistral-7b": _model("mistral", 32, 4096, 32, 8, 14336, 32_768, 32_768),
    "mixtral-8x7b": _model(
        "mixtral", 32, 4096, 32, 8, 14336, 32_000, 32_768, num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen2.5-0.5b": _model("qwen2", 24, 896, 14, 2, 4864, 151_936, 32_768, **_TIED),
    "qwen2.5-1.5b": _model("qwen2", 28, 1536, 12, 2, 8960, 151_936, 32_768, **_TIED),
    "qwen2.5-3b": _model("qwen2", 36, 2048, 16, 2, 11008, 151_936, 32_768, **_TIED),
    "qwen2.5-7b": _model("qwen2", 28, 3584, 28, 4, 18944, 152_064, 32_768),
    "qwen2.5-14b": _model("qwen2", 48, 5120, 40, 8, 13824, 152_064, 32_768),
    "qwen2.5-32b": _model("qwen2", 64, 5120, 40, 8, 27648, 152_064, 32_768),
    "qwen2.5-72b": _model("qwen2", 80, 8192, 64, 8, 29568, 152_064, 32_768),
    "qwen3-0.6b": _model("qwen3", 28, 1024, 16, 8, 3072, 151_936, 40_960, **_TIED),
    "qwen3-8b": _model("qwen3", 36, 4096, 32, 8, 12288, 151_936, 40_960),
    "gemma-2-2b": _model("gemma2", 26, 2304, 8, 4, 9216, 256_000, 8_192, **_GEMMA),
    "gemma-2-9b": _model("gemma2", 42, 3584, 16, 8, 14336, 256_000, 8_192, **_GEMMA),
    "gemma-2-27b": _model(
        "gemma2", 46, 4608, 32, 16, 36864, 256_000, 8_192, **_GEMMA, head_dim=128
    ),
}  # fmt: skip
"""Configs by name."""
