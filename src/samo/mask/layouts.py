"""The weights of a model in dense form, compressed or not, and what their dimensions stand for.

Which dimension runs over the inputs:

nn.Linear, attention          (out, in)
nn.Conv                       (out, in / groups, ...)
nn.ConvTranspose              (in, out / groups, ...)
Hugging Face's Conv1D         (in, out)
stacked experts               (experts, in, out) if the module's ``is_transposed`` says so, or
                              (experts, out, in) if it denies it; else nobody knows
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

__all__ = []

_CONVS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED: Final = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_MATRICES: Final = (nn.Linear, *_CONVS, *_TRANSPOSED)


class Layout(NamedTuple):
    """The meaning of a weight's dimensions."""

    input_dim: int | None
    """None if it cannot be told."""
    is_stack: bool = False
    """Whether the first dimension only stacks matrices that have nothing to do with each other."""


@torch.no_grad()
def dense_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters by name, compressed ones as the dense weights that they stand for.

    A tied one is there under each of its names, as one object.

    Example:
        >>> import samo
        >>> model = torch.nn.Linear(8, 4)
        >>> _ = samo.compress_(model, samo.prune(model, 0.5))
        >>> {name: tuple(dense.shape) for name, dense in dense_parameters(model).items()}
        {'weight': (4, 8), 'bias': (4,)}
    """
    found: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in seen:
                seen[id(parameter)] = getattr(module, name)
            found[f"{path}.{name}" if path else name] = seen[id(parameter)]
    return found


def layouts(model: nn.Module) -> dict[str, Layout]:
    """Return the layout of every parameter of two dimensions or more, by each of its names.

    A weight that several modules share has the layout that the first matrix layer gives it.
    """
    found: dict[int, Layout] = {}
    sure: set[int] = set()
    parameters = dense_parameters(model)
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            dense = parameters[f"{path}.{name}" if path else name]
            if dense.dim() < 2 or id(dense) in sure:
                continue
            is_matrix = isinstance(module, _MATRICES) or _is_conv1d(module)
            if is_matrix or id(dense) not in found:
                found[id(dense)] = layout_of(path, module, dense)
            if is_matrix:
                sure.add(id(dense))
    return {name: found[id(dense)] for name, dense in parameters.items() if id(dense) in found}


def layout_of(path: str, module: nn.Module, parameter: Tensor) -> Layout:
    """Return the layout of a parameter of the module at ``path``."""
    if isinstance(module, _CONVS):
        return Layout(input_dim=1)
    if isinstance(module, _TRANSPOSED) or _is_conv1d(module):
        return Layout(input_dim=0)
    if parameter.dim() == 3 and is_experts(path, module):
        is_transposed = getattr(module, "is_transposed", None)
        input_dim = None if is_transposed is None else 1 if is_transposed else 2
        return Layout(input_dim=input_dim, is_stack=True)
    return Layout(input_dim=parameter.dim() - 1)


def is_experts(path: str, module: nn.Module) -> bool:
    """Return whether a module stacks the weights of experts, whatever the model calls them."""
    return "expert" in type(module).__name__.lower() or "expert" in path.lower()


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"
