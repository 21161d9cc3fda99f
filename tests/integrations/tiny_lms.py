"""Tiny causal language models of transformers, one for each way that families differ."""

from typing import Any, Final

import torch
import transformers
from torch import nn

VOCAB: Final = 131

_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2: Final[dict[str, Any]] = {
    **{"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB, "n_positions": 64},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "gpt2": _GPT2,
    "llama": _SIZES,
    "mistral": _SIZES,
    "qwen2": {**_SIZES, "tie_word_embeddings": True},
    "gemma": {**_SIZES, "head_dim": 16},
    "gemma2": {**_SIZES, "head_dim": 16},  # softcapped logits
    "granite": {**_SIZES, "logits_scaling": 3.0},
    "cohere": _SIZES,  # scaled logits
    # Eager experts: the grouped product has no float64.
    "mixtral": {**_SIZES, "num_local_experts": 4, "experts_implementation": "eager"},
}


def tiny_lm(family: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """Return a model of random weights, large enough for its logits to differ."""
    settings = {**FAMILIES.get(family, _SIZES), **changes}
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **settings)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(5)
    return model
