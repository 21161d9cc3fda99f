"""Tiny models of several families with random weights, plain stacks of layers, and tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from samo.models.gpt import GPT, GPTConfig
from tests.integrations.tiny_lms import VOCAB, tiny_lm

_CHANGES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2_moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 36,
    },
}
FAMILIES = ["gpt2", "llama", "qwen2", "mistral", "gemma", "mixtral", *_CHANGES]


def language_model(family: str, **changes: Any) -> Any:
    if family == "samo":
        torch.manual_seed(0)
        return GPT(GPTConfig(num_layers=2, width=32, num_heads=2, context=64))
    return tiny_lm(family, **_CHANGES.get(family, {}), **changes)


def batches(count: int = 3, size: int = 4, length: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (size, length), generator=generator) for _ in range(count)]


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
