"""What weights are multiplied with: statistics of the inputs of every product of a block.

Hooks on modules would see the inputs of `nn.Linear` but not what reaches one expert of a stack. So
the matrix products themselves are watched, below autograd, where there are few of them: an operand
is a weight, or one matrix of a stack, if it is a view of its memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FEW_TOKENS: Final = 32
"""An expert that fewer tokens reach has no statistics to speak of."""

_PAIRS: Final = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Products by name, and the place of their first matrix; the second follows."""
_GROUPED: Final = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}
"""Products of rows sorted by expert with a stack: (rows, stack, ends of the experts' rows)."""


@dataclass(slots=True)
class Inputs:
    """What is known of the inputs of a weight: of each matrix of a stack, or of the only one.

    ``moments`` are the sums over tokens of x_j squared, (matrices, inputs), or of the products
    x_i x_j, (matrices, inputs, inputs). Inputs are unknown if they are always 0, and those of an
    expert if few tokens reach it: then all count alike.
    """

    name: str
    weight: Tensor
    with_products: bool
    moments: Tensor | None = None
    tokens: list[int] = field(default_factory=list)
    is_transposed: bool = False  # stored as (inputs, outputs)

    @property
    def matrices(self) -> Tensor:
        """The weight as a view (matrices, outputs, inputs)."""
        stack = self.weight.view(-1, *self.weight.shape[-2:])
        return stack.mT if self.is_transposed else stack

    def squares(self) -> Tensor:
        """Return the sum of squares of each input, (matrices, inputs); 1 for unknown inputs."""
        assert self.moments is not None
        found = self.moments
        return found.masked_fill(~self._is_known()[:, None], 1)

    def take_products(self, matrix: int) -> Tensor:
        """Return the sums of x_i x_j of a matrix, to overwrite; the identity for unknown inputs."""
        assert self.moments is not None
        found = self.moments[matrix]
        return found if self._is_known()[matrix] else torch.eye(len(found), out=found)

    @property
    def num_lacking(self) -> int:
        """Experts that too few tokens reach."""
        return sum(tokens < self._least for tokens in self.tokens)

    @property
    def _least(self) -> int:
        return FEW_TOKENS if len(self.tokens) > 1 else 1

    def add(self, operand: Tensor, rows: Sequence[Tensor]) -> None:
        """Add the inputs of one product, whose ``operand`` is (..., inputs, outputs)."""
        first = self._place(operand)
        count = len(self.weight) if self.weight.dim() == 3 else 1
        if self.moments is None:
            inputs = operand.shape[-2]
            shape = (count, inputs, inputs) if self.with_products else (count, inputs)
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            self.moments = torch.zeros(shape, dtype=dtype, device=self.weight.device)
            self.tokens = [0] * count
        # A linear layer multiplies inputs that are not contiguous with a weight expanded over them.
        is_expanded = operand.dim() == 3 and operand.stride(0) == 0
        for number, row in enumerate(rows):
            place = first if is_expanded else first + number
            x = row.to(self.moments.dtype)
            self.tokens[place] += len(x)
            if self.with_products:
                self.moments[place].addmm_(x.mT, x)
            else:
                self.moments[place] += x.square().sum(0)

    def check(self) -> None:
        """Raise a ValueError if the inputs were not seen, or are not finite."""
        if self.moments is None:
            raise ValueError(
                f"the inputs of '{self.name}' were not seen: the model does not use it as a matrix "
                f"in a product. Leave it out with skip=['{self.name}']; for experts of a Hugging "
                "Face model, try model.set_experts_implementation('eager')"
            )
        if not self.moments.isfinite().all():
            raise ValueError(
                f"inputs of '{self.name}' are NaN or infinite for this calibration data; check the "
                "model's dtype (bfloat16 has the range of float32) and its weights"
            )

    def _is_known(self) -> Tensor:
        assert self.moments is not None
        squares = self.moments.diagonal(dim1=1, dim2=2) if self.with_products else self.moments
        tokens = torch.tensor(self.tokens, device=squares.device)
        return (tokens >= self._least) & squares.any(1)

    def _place(self, operand: Tensor) -> int:
        """Return which matrix of the stack ``operand`` begins with, and learn its layout."""
        rows, columns = self.weight.shape[-2:]
        place, rest = divmod(int(operand.storage_offset()), rows * columns)
        layout = (*operand.shape[-2:], *operand.stride()[-2:])
        is_linear = layout == (columns, rows, 1, columns)
        is_transposed = layout == (rows, columns, columns, 1)
        is_whole = operand.dim() == 2 or operand.stride(0) in (0, rows * columns)
        known = self.moments is None or self.is_transposed == is_transposed
        if rest or not is_whole or not (is_linear or is_transposed) or not known:
            raise ValueError(
                f"'{self.name}' of shape {tuple(self.weight.shape)} is multiplied as "
                f"{tuple(operand.shape)}, not as a whole matrix; leave it out with "
                f"skip=['{self.name}']"
            )
        self.is_transposed = is_transposed
        return place


class InputStatistics(TorchDispatchMode):
    """Collects the inputs of some weights while it is entered."""

    def __init__(self, weights: Mapping[str, Tensor], *, with_products: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs: Final = {
            name: Inputs(name, weight, with_products) for name, weight in weights.items()
        }
        self._by_memory: Final = {
            _address(inputs.weight): inputs for inputs in self.inputs.values()
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and look at its operands if it is a product."""
        for operand, rows in _products(func.name().partition(".")[0], args):
            inputs = self._by_memory.get(_address(operand))
            if inputs is not None:
                inputs.add(operand, rows())
        return func(*args, **(kwargs or {}))


def _products(
    name: str, args: Sequence[Any]
) -> Iterator[tuple[Tensor, Callable[[], Sequence[Tensor]]]]:
    """Yield the operands of a product as (..., inputs, outputs), with the rows they multiply."""
    if name in _PAIRS:
        left, right = args[_PAIRS[name] : _PAIRS[name] + 2]
        yield right, lambda: left if left.dim() == 3 else [left]
        yield left.mT, lambda: right.mT if right.dim() == 3 else [right.mT]
    elif name in _GROUPED and len(args) > 2 and args[1].dim() == 3:
        rows, stack, ends = args[:3]
        yield stack, lambda: rows[: int(ends[-1])].tensor_split(ends[:-1].long().cpu())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
