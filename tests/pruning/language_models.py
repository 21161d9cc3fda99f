"""Tiny models of several families with random weights, plain stacks of layers, and tokens."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from samo.models.gpt import GPT, GPTConfig

VOCABULARY = 97

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Mistral": {},
    "Gemma": {"pad_token_id": 0},
    "Gemma3": {
        "pad_token_id": 0,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Mixtral": {"num_local_experts": 3},
    "Qwen2Moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 36,
    },
}
FAMILIES = ["GPT2", *_CHANGES]


def language_model(family: str, **changes: Any) -> nn.Module:
    """Return a model whose weights are large enough for its blocks to matter."""
    torch.manual_seed(0)
    if family == "samo":
        return GPT(GPTConfig(num_layers=2, width=32, num_heads=2, context=64))
    if family == "GPT2":
        ids = {"bos_token_id": 1, "eos_token_id": 2}
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
        config = transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **ids, **changes)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        text = "Text" if family == "Gemma3" else ""
        shape = _SHAPE | _CHANGES[family] | changes
        config = getattr(transformers, f"{family}{text}Config")(**shape)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(8)
    return model


def batches(count: int = 3, size: int = 4, length: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (size, length), generator=generator) for _ in range(count)]


class Stack(nn.Module):
    """Blocks of one linear layer."""

    def __init__(self, count: int, width: int, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layers, x)


def in_order(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x
