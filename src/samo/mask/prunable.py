"""Which parameters of a model are worth pruning, told by where they stand.

Pruned by default are the big matrices that dense kernels multiply with: the weights of linear and
convolution layers, of Hugging Face's ``Conv1D`` and of stacked experts. Not pruned are embeddings,
output heads, norms, biases, routers and position tables: they are few, and they hurt.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from samo.errors import nearest
from samo.mask.layouts import is_experts

__all__ = ["prunable"]

_LINEAR_LIKE: Final = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_ATTENTION_WEIGHTS: Final = {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
_HEADS: Final = {"lm_head", "head", "heads", "classifier", "score", "embed_out", "output"}
_ROUTERS: Final = {"gate", "router"}


def prunable(model: nn.Module) -> list[str]:
    """Return the names of the parameters that `samo.prune` prunes by default.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.ModuleDict({
        ...     "embed": torch.nn.Embedding(100, 8),
        ...     "mlp": torch.nn.Linear(8, 8),
        ...     "lm_head": torch.nn.Linear(8, 100),
        ... })
        >>> samo.prunable(model)
        ['mlp.weight']
    """
    return _matrices(model, _exempt(model))


def matrices(model: nn.Module) -> list[str]:
    """Return `prunable` and the matrices of heads and routers, which somebody else may have pruned."""
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    return _matrices(model, tables)


def _matrices(model: nn.Module, exempt: set[int]) -> list[str]:
    names = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in exempt or id(parameter) in seen:
                continue
            if not is_empty(parameter) and _is_matrix(path, module, name):
                seen.add(id(parameter))
                names.append(f"{path}.{name}" if path else name)
    return names


def matching(patterns: Iterable[str], names: Mapping[str, object], argument: str) -> set[str]:
    """Return the names that match a shell-style pattern; a pattern that matches none is an error.

    Raises:
        ValueError: A pattern matches no name; ``argument`` says where it was given.
    """
    if isinstance(patterns, str):
        patterns = [patterns]
    found: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not hits:
            raise ValueError(
                f"{argument} pattern '{pattern}' matches no parameter of the model"
                f"{nearest(pattern, names)}; patterns are shell-style, for example 'layers.0.*'"
            )
        found.update(hits)
    return found


def is_empty(parameter: Tensor) -> bool:
    """Return whether a parameter has no entries: there is nothing to prune."""
    return not nn.parameter.is_lazy(parameter) and parameter.numel() == 0


@torch.no_grad()
def _is_matrix(path: str, module: nn.Module, name: str) -> bool:
    if isinstance(module, _LINEAR_LIKE) or type(module).__name__ == "Conv1D":
        return name == "weight"
    if isinstance(module, nn.MultiheadAttention):
        return name in _ATTENTION_WEIGHTS
    # Experts stacked in one tensor: (experts, rows, columns).
    if not is_experts(path, module) or "bias" in name:
        return False
    dense: Tensor = getattr(module, name)  # a compressed parameter has one dimension
    return dense.dim() == 3


def _exempt(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of embeddings, heads and routers, and what is tied to them."""
    head = _output_embeddings(model)
    return {
        id(parameter)
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        or module is head
        or _is_head_or_router(path)
        for parameter in module.parameters(recurse=False)
    }


def _is_head_or_router(path: str) -> bool:
    first, last = path.partition(".")[0], path.rpartition(".")[2]
    # A head may be a whole module (`classifier.dense`), but attention has heads of its own inside
    # of blocks. torchvision's classifiers keep theirs in a root attribute `fc`.
    is_head = first in _HEADS or last in _HEADS or path == "fc"
    return is_head or last in _ROUTERS or last.endswith(("_router", "_gate"))


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    """Return the head of a Hugging Face model, which knows it whatever its name."""
    get = getattr(model, "get_output_embeddings", None)
    if get is None:
        return None
    head: nn.Module | None = get()
    return head
