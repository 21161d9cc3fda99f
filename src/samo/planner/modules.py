"""A module in hand as a `Network`: samo's GPT and Hugging Face's causal language models."""

from typing import Any

from samo.errors import ConfigError
from samo.mask.masks import Masks
from samo.models.gpt import GPT
from samo.planner.configs import from_config
from samo.planner.folders import kind_sparsities
from samo.planner.network import Kind, Network, gpt

__all__ = ["from_module", "sparsities_of"]


def from_module(model: Any) -> Network:
    """Return the network of a module, which may be on the meta device."""
    if isinstance(model, GPT):
        return gpt(model.config)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict") and hasattr(model, "get_output_embeddings"):
        return from_config(config.to_dict(), type(model).__name__)
    raise ConfigError(
        f"samo.plan takes samo's GPT or a causal language model of Hugging Face, got "
        f"{type(model).__name__}; print(samo.ledger(model, opt)) shows the state of any model"
    )


def sparsities_of(masks: Masks, network: Network) -> dict[Kind, float]:
    """Return the sparsity of each kind of matrix: what the masks prune, of all of that kind."""
    return kind_sparsities(
        {(name, len(mask.shape)): mask.numel - mask.kept for name, mask in masks.items()}, network
    )
