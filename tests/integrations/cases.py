"""Tiny language models of several families, and what their folders hold."""

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import samo
from tests.integrations.tiny_lms import tiny_lm

IDS: Final = torch.arange(16).view(2, 8) * 3

FAMILIES: Final = ("GPT2", "Llama", "Qwen2", "Mistral", "Gemma", "Mixtral")

_SIZES: Final = {
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 64, "max_position_embeddings": 32},
}


def causal_lm(family: str, **changes: Any) -> Any:
    """A language model of two layers, in evaluation mode."""
    # A folder does not say how to compute experts, so no way is chosen here either.
    experts = {"experts_implementation": None} if family == "Mixtral" else {}
    return tiny_lm(family.lower(), **_SIZES | experts | changes).eval()


def pruned(family: str, sparsity: float = 0.9, **changes: Any) -> tuple[Any, samo.Masks]:
    """A model with zeros, of which one is kept, and its masks."""
    model = causal_lm(family, **changes)
    masks = samo.prune(model, sparsity)
    masks.apply_(model)
    name, mask = next(iter(masks.items()))
    weight = model.get_parameter(name).detach()
    weight.view(-1)[mask.to_bool().view(-1).nonzero()[0]] = 0.0  # kept, and exactly 0
    return model, masks


def exported(tmp_path: Path, format: Any, **changes: Any) -> Path:
    """The folder of a pruned Llama."""
    model, masks = pruned("Llama", **changes)
    return samo.export(model, tmp_path / "llama", format=format, masks=masks)


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
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}
