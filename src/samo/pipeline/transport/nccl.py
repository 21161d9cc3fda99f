"""Links between GPUs over NCCL. Not yet run on several GPUs.

Headers go over gloo, since reading one from a GPU would stall its stream. Tensors have a group for
each directed link: NCCL has no tags, and two links in one communicator would wait for each other.
torch creates a communicator for each pair of ranks that sends, but not always: where it connects
groups eagerly, all pairs of a group share one. Nothing waits for the whole device: streams wait for
events.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from samo.pipeline.transport.gloo import GlooTransport, Ready, Send, new_group
from samo.pipeline.transport.wire import TensorSpec

__all__ = ["NcclTransport"]


class NcclTransport(GlooTransport):
    """The links of this rank; tensors stay on their GPUs. Tests without GPUs use gloo for both."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout_s: float,
        is_ring: bool = False,
        backend: str = "nccl",
    ) -> None:
        super().__init__(group, device, timeout_s=timeout_s, is_ring=is_ring)
        self.group = new_group(self.ranks, backend, timeout_s)
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        for stage in range(self.num_stages):  # all stages create all of them, in one order
            after = (stage + 1) % self.num_stages
            if after > stage or is_ring:
                for link in ((stage, after), (after, stage)):
                    self._groups[link] = new_group(self.ranks, backend, timeout_s)

    def isend_tensors(self, tensors: Sequence[Tensor], stage: int, ready: Ready) -> list[Send]:
        """Put the tensors into the GPU's queue."""
        group, rank = self._groups[self.stage, stage], self.ranks[stage]
        tensors = [tensor for tensor in tensors if tensor.numel()]
        if ready is None:
            tensors = [tensor.contiguous() for tensor in tensors]
            return [(dist.isend(tensor, rank, group), tensor) for tensor in tensors]
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            for tensor in tensors:
                tensor.record_stream(stream)
                # Copied on this stream: on another one, it might be sent before it is copied.
                dist.send(tensor.contiguous(), rank, group)
        return []

    def recv_tensors(self, specs: list[TensorSpec], stage: int) -> tuple[list[Tensor], Ready]:
        """Receive the tensors on a stream of their own."""
        group, rank = self._groups[stage, self.stage], self.ranks[stage]
        is_cuda = self.device.type == "cuda"
        stream = torch.cuda.Stream(self.device) if is_cuda else None
        with torch.cuda.stream(stream) if is_cuda else nullcontext():
            tensors = [
                torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape in specs
            ]
            for tensor in tensors:
                if tensor.numel():
                    dist.recv(tensor, rank, group)
            return tensors, None if stream is None else stream.record_event()
