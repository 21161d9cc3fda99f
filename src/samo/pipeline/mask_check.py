"""Compare masks between ranks in every step, at the cost of one small all-reduce."""

import hashlib
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from samo.mask.masks import Masks
from samo.pipeline.gradients import Wait
from samo.utils.collectives import backend_of

_NONE: Final = -(2**62)


def digest(masks: Masks) -> int:
    """Return a number that tells masks and their names apart."""
    text = str([(name, masks[name].fingerprint()) for name in sorted(masks)])
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)


class MaskCheck:
    """Compares numbers over the ranks of a group, all of which call it.

    With NCCL the host does not wait for the GPU: from the second call on, a difference is reported
    one call late.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: Final = group
        self._device: Final = "cpu" if backend_of(group, "cpu") else "cuda"
        self._last: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def differing(self, numbers: Sequence[int | None], wait: Wait) -> list[int]:
        """Return the places at which ranks have different numbers; None equals any."""
        pairs = [(_NONE, _NONE) if one is None else (one, -one) for one in numbers]
        found = torch.tensor(pairs, dtype=torch.int64).to(self._device, non_blocking=True)
        wait(dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group, async_op=True))
        if self._device == "cuda":
            host = torch.empty_like(found, device="cpu", pin_memory=True)
            host.copy_(found, non_blocking=True)
            now = host, torch.cuda.current_stream().record_event()
            (found, event), self._last = self._last or now, now
            event.synchronize()  # but for the first call, of the last one
        rows = found.tolist()
        return [place for place, (high, low) in enumerate(rows) if high != -low]
