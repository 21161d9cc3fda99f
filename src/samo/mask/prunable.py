"""Which parameters are worth pruning, and what their dimensions mean, by module type and name.

Pruned by default are the large matrices: weights of linear and convolution layers, of Hugging
Face's ``Conv1D`` and of stacked experts. Embeddings, output heads, norms, biases, routers and
position tables stay dense: they are small, and pruning them hurts. So do recurrent layers.
"""

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from samo.errors import nearest

_CONVS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED: Final = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDINGS: Final = (nn.Embedding, nn.EmbeddingBag)
_ATTENTION_WEIGHTS: Final = {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
_HEADS: Final = {"lm_head", "head", "heads", "classifier", "score", "embed_out", "output"}
_ROUTERS: Final = {"gate", "router"}


class Layout(NamedTuple):
    """The meaning of a matrix's dimensions."""

    input_dim: int | None  # None if unknown
    is_stack: bool = False  # whether the first dimension stacks independent matrices


def prunable(model: nn.Module) -> list[str]:
    """Return the names of the parameters that `samo.prune` prunes by default.

    These are the weights of linear, convolution and attention layers and of stacked experts. Heads
    and routers are recognized by name: ``head``, ``heads``, ``lm_head``, ``classifier``, ``score``,
    ``embed_out`` and ``output`` outside of numbered blocks, ``fc`` at the root; ``gate``,
    ``router``, ``*_gate`` and ``*_router`` anywhere. `samo.prune` prunes them too if a pattern of
    its ``rules`` names them.

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
    # Hugging Face models know their head, whatever its name.
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return _matrices(model, lambda path, module: module is head or _is_head_or_router(path))


def matrices(model: nn.Module) -> list[str]:
    """Return the names of `prunable` and of the matrices of heads and routers."""
    return _matrices(model, lambda path, module: False)


def layout_of(model: nn.Module, name: str, dim: int) -> Layout:
    """Return what the ``dim`` dimensions of a matrix mean.

    nn.Linear, attention     (out, in)
    nn.Conv                  (out, in / groups, ...)
    nn.ConvTranspose         (in, out / groups, ...)
    Hugging Face's Conv1D    (in, out)
    stacked experts          (experts, in, out) if the module's ``is_transposed`` is True,
                             (experts, out, in) if it is False, unknown if it has none
    """
    path = name.rpartition(".")[0]
    module = model.get_submodule(path)
    if isinstance(module, _CONVS):
        return Layout(input_dim=1)
    if isinstance(module, _TRANSPOSED) or _is_conv1d(module):
        return Layout(input_dim=0)
    if dim == 3 and _is_experts(path, module):
        is_transposed = getattr(module, "is_transposed", None)
        input_dim = None if is_transposed is None else 1 if is_transposed else 2
        return Layout(input_dim, is_stack=True)
    return Layout(input_dim=dim - 1)


@torch.no_grad()
def dense_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters by name, compressed ones as their dense weights.

    A tied parameter appears under each of its names, as one object.
    """
    found: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in seen:
                seen[id(parameter)] = getattr(module, name)
            found[f"{path}.{name}" if path else name] = seen[id(parameter)]
    return found


def matching(patterns: Iterable[str], names: Mapping[str, object], argument: str) -> set[str]:
    """Return the names that match shell-style patterns; raise a ValueError if one matches none."""
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not hits:
            raise ValueError(
                f"{argument} pattern '{pattern}' matches no parameter{nearest(pattern, names)}; "
                f"patterns are shell-style, for example '{_example(names)}'"
            )
        found.update(hits)
    return found


def _example(names: Mapping[str, object]) -> str:
    """Return a pattern that matches a few of the names: of the first block, if there are any."""
    first = next((name for name in names if ".0." in name), None)
    return "layers.0.*" if first is None else first.partition(".0.")[0] + ".0.*"


def is_empty(parameter: Tensor) -> bool:
    """Return whether a parameter has no entries to prune."""
    return not nn.parameter.is_lazy(parameter) and parameter.numel() == 0


def _matrices(model: nn.Module, is_exempt: Callable[[str, nn.Module], bool]) -> list[str]:
    # By identity: what is tied to an exempt parameter is exempt, and a shared matrix is named once.
    seen = {
        id(parameter)
        for path, module in model.named_modules()
        if isinstance(module, _EMBEDDINGS) or is_exempt(path, module)
        for parameter in module.parameters(recurse=False)
    }
    names = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or is_empty(parameter) or not _is_matrix(path, module, name):
                continue
            seen.add(id(parameter))
            names.append(f"{path}.{name}" if path else name)
    return names


@torch.no_grad()
def _is_matrix(path: str, module: nn.Module, name: str) -> bool:
    if isinstance(module, (nn.Linear, *_CONVS, *_TRANSPOSED)) or _is_conv1d(module):
        return name == "weight"
    if isinstance(module, nn.MultiheadAttention):
        return name in _ATTENTION_WEIGHTS
    if not _is_experts(path, module) or "bias" in name:
        return False
    return bool(getattr(module, name).dim() == 3)  # a compressed parameter itself is 1-D


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _is_experts(path: str, module: nn.Module) -> bool:
    return "expert" in type(module).__name__.lower() or "expert" in path.lower()


def _is_head_or_router(path: str) -> bool:
    parts = path.split(".")
    first, last = parts[0], parts[-1]
    # A head may be a whole module (`classifier.dense`), but `layers.0.attention.output` is none.
    # torchvision's classifiers keep theirs in a root attribute `fc`.
    is_in_block = any(part.isdigit() for part in parts[1:-1])
    is_head = first in _HEADS or (last in _HEADS and not is_in_block) or path == "fc"
    return is_head or last in _ROUTERS or last.endswith(("_router", "_gate"))
