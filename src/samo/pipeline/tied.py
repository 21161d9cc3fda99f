"""Weights on several ranks, such as an embedding that is also the head: one gradient for all."""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samo.core.weight import weight_of
from samo.errors import MaskError
from samo.pipeline.transport.gloo import new_group
from samo.pipeline.units import Layers
from samo.utils.collectives import all_gather_json, backend_of

__all__ = ["TiedWeight", "check_tied_masks", "find_tied"]


class TiedWeight:
    """One weight on several ranks, whose gradients are added up after every batch.

    A gradient from before the batch is a sum over the ranks already. It is set aside meanwhile, so
    that it is not counted once for each rank. ``ranks`` counts along the axis `pipe`.
    """

    def __init__(
        self, names: tuple[str, ...], ranks: tuple[int, ...], group: dist.ProcessGroup
    ) -> None:
        self.names: Final = names
        self.ranks: Final = ranks
        self._group: Final = group
        self._earlier: Tensor | None = None

    @torch.no_grad()
    def broadcast(self, module: nn.Module) -> None:
        """Give every rank the values of the first."""
        param = self._param(module)
        values = param.detach().contiguous()
        dist.broadcast(values, group=self._group, group_src=0)
        param.copy_(values)

    def before_batch(self, module: nn.Module) -> None:
        """Set aside the gradient of earlier batches."""
        param = self._param(module)
        self._earlier, param.grad = param.grad, None

    @torch.no_grad()
    def all_reduce(self, module: nn.Module) -> None:
        """Sum the gradient of the batch over the ranks, and add it to what was set aside."""
        param, earlier = self._param(module), self._earlier
        if param.grad is None:
            param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
        total = param.grad.contiguous()
        dist.all_reduce(total, group=self._group)
        param.grad = total if earlier is None else earlier.add_(total)
        self._earlier = None

    def fingerprint(self, module: nn.Module) -> str | None:
        """Return the fingerprint of the mask, "" for a dense weight, None on other stages."""
        if not {*self.names} & dict(module.named_parameters(remove_duplicate=False)).keys():
            return None
        weight = weight_of(self._param(module))
        return "" if weight is None or weight.mask is None else weight.mask.fingerprint()

    def _param(self, module: nn.Module) -> nn.Parameter:
        here = dict(module.named_parameters(remove_duplicate=False))
        return next(here[name] for name in self.names if name in here)


def find_tied(
    layers: Layers,
    cuts: Sequence[tuple[int, int]],
    pipe: dist.ProcessGroup | None,
    device: str,
    timeout_s: float,
) -> list[TiedWeight]:
    """Return the weights that are on several ranks, with groups of these; all ranks call it."""
    if pipe is None:
        return []
    rank_of: dict[str, int] = {}
    for piece, (start, stop) in enumerate(cuts):
        for unit in layers.units[start:stop]:
            rank_of |= {name: piece % pipe.size() for name, _ in unit.named_parameters()}
    global_ranks, own = dist.get_process_group_ranks(pipe), dist.get_rank()
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    found = []
    for names in layers.tied:
        stages = tuple(sorted({rank_of[name] for name in names}))
        if len(stages) == 1:
            continue
        if stages not in groups:
            ranks = [global_ranks[stage] for stage in stages]
            # A stage without the weight creates a group of itself alone, see new_group.
            ranks = ranks if own in ranks else [own]
            groups[stages] = new_group(ranks, backend_of(pipe, device), timeout_s)
        found.append(TiedWeight(names, stages, groups[stages]))
    return found


def check_tied_masks(
    tied: Iterable[TiedWeight], module: nn.Module, group: dist.ProcessGroup
) -> None:
    """Raise a MaskError on all ranks of ``group`` if masks of a tied weight differ."""
    gathered = all_gather_json([tie.fingerprint(module) for tie in tied], group)
    for tie, found in zip(tied, zip(*gathered)):
        if len({*found} - {None}) > 1:
            raise MaskError(
                f"tied weight '{tie.names[0]}' has different masks on stages {tie.ranks}; "
                f"give {tie.names} the same mask, or none"
            )
