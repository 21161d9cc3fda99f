"""Weights that two stages use, such as an embedding that is also the head: one gradient for both."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samo.core.weight import weight_of
from samo.pipeline.layers import Layers

__all__ = ["Tie", "ties_of"]


@dataclass(frozen=True)
class Tie:
    """One weight on several ranks.

    Attributes:
        names: Its names.
        ranks: Ranks that hold it, counted along the axis `pipe`.
        group: These ranks.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    @torch.no_grad()
    def copy_weight(self, module: nn.Module) -> None:
        """Give every rank the values of the first."""
        param = self._param(module)
        values = param.detach().contiguous()
        dist.broadcast(values, group=self.group, group_src=0)
        param.copy_(values)

    def set_aside(self, module: nn.Module) -> Tensor | None:
        """Take away the gradient of earlier batches, which is a sum already."""
        param = self._param(module)
        grad, param.grad = param.grad, None
        return grad

    def leave(self, module: nn.Module, aside: Tensor | None) -> int:
        """Note the gradient of a batch that others follow, so that it is seen if somebody clears it.

        Where the batch brought none, what was set aside is put back for that time.
        """
        param = self._param(module)
        if param.grad is None:
            param.grad = aside
        return -1 if param.grad is None else param.grad._version

    def resume(self, module: nn.Module, aside: Tensor | None, version: int) -> Tensor | None:
        """Return what stays set aside for the next batch: nothing, if gradients were cleared since."""
        param = self._param(module)
        held = param.grad
        if held is None or (held._version != version and not bool(held.any())):
            return None
        if held is aside:
            param.grad = None
        return aside

    @torch.no_grad()
    def add_up(self, module: nn.Module, aside: Tensor | None) -> None:
        """Make the gradient the sum over the ranks, and add what was set aside."""
        param = self._param(module)
        if param.grad is None:
            param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
        total = param.grad.contiguous()
        dist.all_reduce(total, group=self.group)
        param.grad = total if aside is None else aside.add_(total)

    def mask_print(self, module: nn.Module) -> float | None:
        """Return 40 bits of the mask's fingerprint, 0 for a dense weight; None on other ranks."""
        here = dict(module.named_parameters(remove_duplicate=False))
        if not any(name in here for name in self.names):
            return None
        weight = weight_of(self._param(module))
        mask = None if weight is None else weight.mask
        return 0.0 if mask is None else float(int(mask.fingerprint()[:10], 16))

    def _param(self, module: nn.Module) -> nn.Parameter:
        here = dict(module.named_parameters(remove_duplicate=False))
        return next(here[name] for name in self.names if name in here)


def ties_of(layers: Layers, cuts: Sequence[tuple[int, int]], num_ranks: int) -> list[Tie]:
    """Return the weights that lie on more than one rank."""
    rank_of: dict[str, int] = {}
    for piece, (start, stop) in enumerate(cuts):
        for unit in layers.units[start:stop]:
            rank_of |= {name: piece % num_ranks for name, _ in unit.named_parameters()}
    found = [Tie(group, tuple(sorted({rank_of[name] for name in group}))) for group in layers.tied]
    return [tie for tie in found if len(tie.ranks) > 1]
