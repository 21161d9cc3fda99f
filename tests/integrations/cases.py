"""Tiny language models of several families, and what their folders hold."""

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import samo

IDS: Final = torch.arange(16).view(2, 8) * 3

_SMALL: Final = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}

FAMILIES: Final = ("GPT2", "Llama", "Qwen2", "Mistral", "Gemma", "Mixtral")


def causal_lm(family: str, **changes: Any) -> Any:
    """A language model of two layers, in evaluation mode."""
    transformers = pytest.importorskip("transformers")
    sizes = _SMALL | {"Mixtral": {"num_local_experts": 4}}.get(family, {})
    # Gemma's embeddings are tied, and so are GPT-2's.
    if family == "Gemma":
        sizes |= {"head_dim": 8}
    config = getattr(transformers, f"{family}Config")(**sizes | changes)
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, name)(config).eval()


def pruned(family: str, sparsity: float = 0.9, **changes: Any) -> tuple[Any, samo.Masks]:
    """A model with zeros, of which one is kept, and its masks."""
    model = causal_lm(family, **changes)
    masks = samo.prune(model, sparsity)
    masks.apply_(model)
    name, mask = next(iter(masks.items()))
    weight = model.get_parameter(name).detach()
    weight.view(-1)[mask.to_bool().view(-1).nonzero()[0]] = 0.0  # kept, and exactly 0
    return model, masks


def trained(family: str, **changes: Any) -> Any:
    """A pruned model, compressed in bfloat16 and trained for a step."""
    model, masks = pruned(family, **changes)
    samo.compress_(model, masks, dtype=torch.bfloat16)
    opt = samo.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=IDS, labels=IDS).loss.backward()
    opt.step()
    return model


def load(folder: Path, **options: Any) -> Any:
    """Load a folder as a user of transformers does."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}
