"""Weights that two stages use, such as an embedding that is also the head: one gradient for both."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from samo.errors import CompressionError, MaskError
from samo.pipeline.layers import Layers
from samo.pipeline.transport import Transport
from samo.weights import weight_of

__all__ = ["Tie", "ties_of"]


@dataclass(frozen=True)
class Tie:
    """One weight on several ranks.

    Attributes:
        names: Its names.
        ranks: Ranks that hold it, counted along the axis `pipe`.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]

    def copy_weight(self, module: nn.Module, transport: Transport) -> None:
        """Give every rank the values of the first."""
        transport.copy_first([self._param(module).data], self.ranks)

    def set_aside(self, module: nn.Module) -> Tensor | None:
        """Take away the gradient of earlier batches, which is a sum already."""
        leaf = self._leaf(module)
        grad, leaf.grad = leaf.grad, None
        return grad

    def add_up(self, module: nn.Module, transport: Transport, aside: Tensor | None) -> None:
        """Make the gradient the sum over the ranks, and add what was set aside."""
        leaf = self._leaf(module)
        if leaf.grad is None:
            leaf.grad = torch.zeros(leaf.shape, dtype=leaf.grad_dtype, device=leaf.device)
        transport.add_up([leaf.grad.detach()], self.ranks)
        if aside is not None:
            leaf.grad = aside.add_(leaf.grad)

    def check(self, module: nn.Module, transport: Transport) -> None:
        """Compare the masks of the ranks.

        Raises:
            MaskError: They differ.
        """
        weight = weight_of(self._param(module))
        mask = None if weight is None else weight.mask
        raw = b"" if mask is None else mask.words.cpu().numpy().tobytes()
        print_ = float(int.from_bytes(hashlib.sha256(raw).digest()[:5], "little"))
        total = torch.tensor([print_], dtype=torch.float64)
        transport.add_up([total], self.ranks)
        if float(total) != print_ * len(self.ranks):  # sums of 40-bit numbers are exact
            raise MaskError(
                f"tied weight '{self.names[0]}' has different masks on stages {self.ranks}; give all "
                f"its names {self.names} the same mask, or none"
            )

    def _param(self, module: nn.Module) -> nn.Parameter:
        here = dict(module.named_parameters(remove_duplicate=False))
        return next(here[name] for name in self.names if name in here)

    def _leaf(self, module: nn.Module) -> Tensor:
        param = self._param(module)
        weight = weight_of(param)
        if weight is not None and weight.part is not weight:
            raise CompressionError(
                f"tied weight '{self.names[0]}' lies on stages {self.ranks}, and its state is sharded "
                "over replicas, which hold other parts of it on each stage; replicate with shard=None"
            )
        return param if weight is None else weight.leaf


def ties_of(layers: Layers, cuts: Sequence[tuple[int, int]], num_ranks: int) -> list[Tie]:
    """Return the weights that lie on more than one rank."""
    rank_of: dict[str, int] = {}
    for piece, (start, stop) in enumerate(cuts):
        for unit in layers.units[start:stop]:
            rank_of |= {name: piece % num_ranks for name, _ in unit.named_parameters()}
    found = [Tie(group, tuple(sorted({rank_of[name] for name in group}))) for group in layers.tied]
    return [tie for tie in found if len(tie.ranks) > 1]
