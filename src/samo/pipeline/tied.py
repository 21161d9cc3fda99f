"""Weights on several ranks, such as an embedding that is also the head: one gradient for all."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from samo.core.weight import weight_of
from samo.errors import MaskError
from samo.pipeline.gradients import Wait
from samo.pipeline.mask_check import MaskCheck
from samo.pipeline.transport.connect import Meeting
from samo.pipeline.units import Layers


class TiedWeight:
    """One weight on several ranks, whose gradients are added up after every batch.

    A gradient from before the batch is a sum over the ranks already, which the first one keeps and
    the others drop, so that it is counted once. ``ranks`` counts along the axis `pipe`.
    """

    def __init__(self, names: tuple[str, ...], ranks: tuple[int, ...], group: Any) -> None:
        self.names: Final = names
        self.ranks: Final = ranks
        self._group: Final = group  # a backend of torch; None on other ranks

    @torch.no_grad()
    def broadcast(self, module: nn.Module) -> None:
        """Give every rank the values of the first."""
        param = self._param(module)
        values = param.detach().contiguous()
        self._group.broadcast([values]).wait()
        param.copy_(values)

    def before_batch(self, module: nn.Module) -> None:
        """Keep the gradient of earlier batches on the first rank alone."""
        if self._group.rank() > 0:
            self._param(module).grad = None

    @torch.no_grad()
    def all_reduce(self, module: nn.Module, wait: Wait) -> None:
        """Sum the gradient over the ranks."""
        param = self._param(module)
        grad = param.grad
        if grad is None:
            grad = torch.zeros_like(param, dtype=param.grad_dtype)
        grad = grad.to_dense().contiguous()
        wait(self._group.allreduce([grad]))
        if param.requires_grad:  # or weight decay would change a frozen one
            param.grad = grad

    def digest(self, module: nn.Module) -> int | None:
        """Return a number that tells masks apart, 0 for a dense weight, None on other ranks."""
        if self._group is None:
            return None
        weight = weight_of(self._param(module))
        mask = None if weight is None else weight.mask
        return 0 if mask is None else int(mask.fingerprint()[:12], 16)

    def _param(self, module: nn.Module) -> nn.Parameter:
        here = dict(module.named_parameters(remove_duplicate=False))
        return next(here[name] for name in self.names if name in here)


def find_tied(
    layers: Layers, cuts: Sequence[tuple[int, int]], meeting: Meeting | None, backend: str
) -> list[TiedWeight]:
    """Return the weights that are on several ranks, with groups of these; all ranks call it."""
    if meeting is None:
        return []
    rank_of: dict[str, int] = {}
    for piece, (start, stop) in enumerate(cuts):
        for unit in layers.units[start:stop]:
            rank_of |= {name: piece % len(meeting.ranks) for name, _ in unit.named_parameters()}
    groups: dict[tuple[int, ...], Any] = {}
    found = []
    for names in layers.tied:
        ranks = tuple(sorted({rank_of[name] for name in names}))
        if len(ranks) == 1:
            continue
        if ranks not in groups:
            is_here = meeting.place in ranks
            groups[ranks] = meeting.group(f"tied {ranks}", ranks, backend) if is_here else None
        found.append(TiedWeight(names, ranks, groups[ranks]))
    return found


def check_tied_masks(
    ties: Sequence[TiedWeight], module: nn.Module, check: MaskCheck, wait: Wait
) -> None:
    """Raise a MaskError on all ranks if masks of a tied weight differ."""
    for place in check.differing([tie.digest(module) for tie in ties], wait):
        tie = ties[place]
        raise MaskError(
            f"tied weight '{tie.names[0]}' has different masks on stages {tie.ranks}; "
            f"give {tie.names} the same mask, or none"
        )
