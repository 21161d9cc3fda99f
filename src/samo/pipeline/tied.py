"""Weights that two stages use, such as an embedding that is also the head: one gradient for both."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from samo.errors import MaskError
from samo.mask import Mask
from samo.pipeline.layers import Layers
from samo.pipeline.transport import Transport
from samo.weights import Weight, weight_of

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
    _prints: list[tuple[Mask, float]] = field(default_factory=list, compare=False, repr=False)

    def copy_weight(self, module: nn.Module, transport: Transport) -> None:
        """Give every rank the values of the first."""
        transport.copy_first([self._param(module).data], self.ranks)

    def set_aside(self, module: nn.Module) -> Tensor | None:
        """Take away the gradient of earlier batches, which is a sum already."""
        leaf = self._leaf(module)
        grad, leaf.grad = leaf.grad, None
        weight = self._weight(module)
        if grad is not None and weight is not None and weight.replica is not None:
            return grad.clone()  # its place in a bucket is written anew
        return grad

    def leave(self, module: nn.Module, aside: Tensor | None) -> int:
        """Note the gradient of a batch that others follow, so that it is seen if somebody clears it.

        Where the batch brought none, what was set aside is put back for that time.
        """
        if self._held(module) is None:
            self._leaf(module).grad = aside
        held = self._held(module)
        return -1 if held is None else held._version

    def resume(self, module: nn.Module, aside: Tensor | None, version: int) -> Tensor | None:
        """Return what stays set aside for the next batch: nothing, if gradients were cleared since."""
        held, leaf = self._held(module), self._leaf(module)
        if held is None or (held._version != version and not bool(held.any())):
            return None
        if leaf.grad is aside:
            leaf.grad = None
        return aside

    def add_up(self, module: nn.Module, transport: Transport, aside: Tensor | None) -> None:
        """Make the gradient the sum over the ranks, and add what was set aside.

        Replicas have theirs reduced by now; where each holds a part of it, the parts differ from stage to
        stage, and all of it is put together for the sum.
        """
        weight, leaf = self._weight(module), self._leaf(module)
        if weight is not None and weight.replica is not None:
            total = weight.replica.show_gradient()
            transport.add_up([total], self.ranks)
            weight.replica.set_gradient(total, aside)
            return
        if leaf.grad is None:
            leaf.grad = torch.zeros(leaf.shape, dtype=leaf.grad_dtype, device=leaf.device)
        transport.add_up([leaf.grad.detach()], self.ranks)
        if aside is not None:
            leaf.grad = aside.add_(leaf.grad)

    def check(self, module: nn.Module, transport: Transport) -> None:
        """Compare the masks of the ranks; before each sum, since any of them may have another one.

        Raises:
            MaskError: They differ.
        """
        weight = self._weight(module)
        print_ = self._print_of(None if weight is None else weight.mask)
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

    def _print_of(self, mask: Mask | None) -> float:
        """Return 40 bits of a mask's fingerprint, made once for each mask."""
        if mask is None:
            return 0.0
        if not self._prints or self._prints[0][0] is not mask:
            self._prints[:] = [(mask, float(int(mask.fingerprint()[:10], 16)))]
        return self._prints[0][1]

    def _weight(self, module: nn.Module) -> Weight | None:
        return weight_of(self._param(module))

    def _held(self, module: nn.Module) -> Tensor | None:
        """Return the gradient, or that of this rank alone where replicas did not reduce it yet."""
        weight = self._weight(module)
        own = None if weight is None else weight.leaf.grad
        return self._leaf(module).grad if own is None else own

    def _leaf(self, module: nn.Module) -> Tensor:
        weight = self._weight(module)
        return self._param(module) if weight is None else weight.part.leaf


def ties_of(layers: Layers, cuts: Sequence[tuple[int, int]], num_ranks: int) -> list[Tie]:
    """Return the weights that lie on more than one rank."""
    rank_of: dict[str, int] = {}
    for piece, (start, stop) in enumerate(cuts):
        for unit in layers.units[start:stop]:
            rank_of |= {name: piece % num_ranks for name, _ in unit.named_parameters()}
    found = [Tie(group, tuple(sorted({rank_of[name] for name in group}))) for group in layers.tied]
    return [tie for tie in found if len(tie.ranks) > 1]
