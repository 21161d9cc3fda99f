"""What the dimensions of a weight stand for: which one runs over its inputs.

nn.Linear, attention          (out, in)
nn.Conv                       (out, in / groups, ...)
nn.ConvTranspose              (in, out / groups, ...)
Hugging Face's Conv1D         (in, out)
stacked experts               (experts, in, out) if the module's ``is_transposed`` says so, or
                              (experts, out, in) if it denies it; else nobody knows
"""

from typing import Final, NamedTuple

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


def layouts(model: nn.Module) -> dict[int, Layout]:
    """Return the layout of every parameter of two dimensions or more, by the parameter's id.

    A weight that several modules share has the layout that the first matrix layer gives it.
    """
    found: dict[int, Layout] = {}
    sure: set[int] = set()
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() < 2 or id(parameter) in sure:
                continue
            is_matrix = isinstance(module, _MATRICES) or _is_conv1d(module)
            if is_matrix or id(parameter) not in found:
                found[id(parameter)] = layout_of(path, module, parameter)
            if is_matrix:
                sure.add(id(parameter))
    return found


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
