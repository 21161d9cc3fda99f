"""A module in hand as a `Network`: samo's GPT and Hugging Face's causal language models."""

from typing import Any

from samo.errors import ConfigError
from samo.mask.masks import Masks
from samo.models.gpt import GPT
from samo.planner.configs import from_config
from samo.planner.folders import pruned_as_counted
from samo.planner.network import Network, gpt

__all__ = ["from_module", "pruned_by_masks"]


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


def pruned_by_masks(network: Network, masks: Masks) -> Network:
    """Return the network with what masks prune of each kind of matrix."""
    pruned = {(name, len(mask.shape)): mask.numel - mask.kept for name, mask in masks.items()}
    return pruned_as_counted(network, pruned)
