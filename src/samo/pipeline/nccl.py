"""Links between GPUs over NCCL. Not yet run on several GPUs: none were to be had.

Headers go over gloo, since reading one from a GPU would hold up its stream. Tensors have a communicator
for each directed link: NCCL has no tags, and two directions in one communicator would wait for each
other. Nothing waits for the whole device: streams wait for events.
"""

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from samo.pipeline.gloo import GlooTransport

__all__ = ["NcclTransport"]


class NcclTransport(GlooTransport):
    """The links of this rank; tensors stay on their GPUs.

    Args:
        group: Ranks in the order of the stages.
        device: This rank's own GPU.
        timeout: Seconds after which a send or receive is given up.
        tied: Sets of stages that add up gradients.
        backend: "nccl"; tests without GPUs say "gloo".
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout: float,
        tied: Sequence[tuple[int, ...]] = (),
        backend: str = "nccl",
    ) -> None:
        if backend == "nccl" and device.type != "cuda":
            raise ValueError(
                f"NCCL sends between GPUs, got device '{device}'; build the mesh on 'cuda', or with the "
                "gloo backend for a CPU"
            )
        super().__init__(group, device, timeout=timeout, tied=tied)
        self._links: Final[dict[tuple[int, int], dist.ProcessGroup]] = {}
        # One order for all: stage after stage, forward before backward.
        for left in range(self.num_stages - 1):
            for link in ((left, left + 1), (left + 1, left)):
                if self.stage in link:
                    ranks = sorted(self.ranks[stage] for stage in link)
                    self._links[link] = self._new_group(ranks, backend)

    def _send_tensor(self, tensor: Tensor, stage: int, ready: object) -> None:
        link, rank = self._links[self.stage, stage], self.ranks[stage]
        if not isinstance(ready, torch.cuda.Event):
            dist.send(tensor.contiguous(), rank, link)
            return
        stream = torch.cuda.Stream(tensor.device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            tensor.record_stream(stream)
            dist.send(tensor.contiguous(), rank, link)

    def _receive_tensor(self, dtype: torch.dtype, shape: tuple[int, ...], stage: int) -> Tensor:
        link, rank = self._links[stage, self.stage], self.ranks[stage]
        if self.device.type != "cuda":
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                dist.recv(tensor, rank, link)
            return tensor
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            if tensor.numel():
                dist.recv(tensor, rank, link)
            tensor._samo_ready = stream.record_event()  # type: ignore[attr-defined]
        return tensor
