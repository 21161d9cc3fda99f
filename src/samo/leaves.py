"""The 1-D leaves of a compressed model: what an optimizer, a clipping function or a scheduler is given."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from samo.candidates import matching
from samo.errors import CompressionError
from samo.owners import put_back, weights_in
from samo.weights import Weight, weight_of

__all__ = ["named_parameters", "param_groups", "parameters"]


def parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Return one 1-D leaf for each parameter; its ``.grad`` is the compressed gradient.

    Any torch optimizer, ``clip_grad_norm_`` and any scheduler work on the leaves as on a model's
    parameters, and the model follows every ``step()``. Between steps a leaf holds no values (it
    reads NaN): look at ``model.state_dict()`` or at the model's own parameters. Where state is sharded
    (`samo.replicate`), a leaf is this rank's part of a parameter, and may be empty.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> model = samo.compress_(model, samo.prune(model, sparsity=0.9))
        >>> [leaf.shape for leaf in samo.parameters(model)]
        [torch.Size([10]), torch.Size([10])]
        >>> opt = torch.optim.SGD(samo.parameters(model), lr=0.1, momentum=0.9)

    Raises:
        CompressionError: The model is not compressed, or has parameters that were added later.
    """
    return (leaf for _, leaf in named_parameters(model))


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the leaves of `parameters` with the names of their parameters.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10))
        >>> model = samo.compress_(model, samo.prune(model, sparsity=0.9))
        >>> [name for name, leaf in samo.named_parameters(model)]
        ['0.weight', '0.bias']

    Raises:
        CompressionError: The model is not compressed, or has parameters that were added later.
    """
    leaves = []
    for name, weight in _weights(model).items():
        leaf = weight.part.leaf
        leaf.requires_grad_(weight.param.requires_grad)
        leaves.append((name, leaf))
    return iter(leaves)


def param_groups(
    model: nn.Module, weight_decay: float, *, no_decay: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices with weight decay, norms and biases without.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.LayerNorm(10))
        >>> model = samo.compress_(model, samo.prune(model, sparsity=0.9))
        >>> groups = samo.param_groups(model, weight_decay=0.1)
        >>> [(group["weight_decay"], len(group["params"])) for group in groups]
        [(0.1, 1), (0.0, 3)]
        >>> opt = samo.AdamW(groups, lr=3e-4)

    Args:
        model: A compressed model.
        weight_decay: Decay of the parameters with two dimensions or more.
        no_decay: Shell-style patterns of further names to leave undecayed, such as ``"wte.*"``.

    Raises:
        CompressionError: The model is not compressed, or has parameters that were added later.
        ValueError: A pattern matches no parameter.
    """
    leaves = dict(named_parameters(model))
    weights = _weights(model)
    exempt = matching(no_decay, leaves, "no_decay")
    decayed = [n for n in leaves if len(weights[n].shape) >= 2 and n not in exempt]
    return [
        {"params": [leaves[name] for name in decayed], "weight_decay": weight_decay},
        {"params": [leaf for n, leaf in leaves.items() if n not in decayed], "weight_decay": 0.0},
    ]


def _weights(model: nn.Module) -> dict[str, Weight]:
    modules = list(model.named_modules())  # once: a walk costs more than all that is looked at
    weights = weights_in(modules)
    if not weights:
        raise CompressionError(
            "the model is not compressed; call samo.compress_(model, masks) first"
        )
    for path, module in modules:
        put_back(module)
        for name, param in module._parameters.items():
            if param is not None and param.requires_grad and weight_of(param) is None:
                raise CompressionError(
                    f"parameter '{f'{path}.{name}' if path else name}' was added to the model after "
                    "compress_ and has no compressed state; add it before, or freeze it with "
                    "requires_grad_(False) here and give it to an optimizer of its own"
                )
    return weights
