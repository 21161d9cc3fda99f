"""Links between GPUs over NCCL. Not yet run on several GPUs: none were to be had.

Headers go over gloo, since reading one from a GPU would hold up its stream. Tensors have a group for each
directed link: NCCL has no tags, and two links in one communicator would wait for each other. torch makes a
communicator for each pair of ranks that sends, but not always: where it connects groups at once, all pairs
of a group share one. Nothing waits for the whole device: streams wait for events.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from samo.pipeline.transport.gloo import GlooTransport, Incoming, Outgoing, Sent
from samo.pipeline.transport.wire import Form, Packet

__all__ = ["NcclTransport"]


class NcclTransport(GlooTransport):
    """The links of this rank; tensors stay on their GPUs.

    Args:
        group: Ranks in the order of the stages.
        device: This rank's own GPU.
        timeout_s: Seconds after which a send or receive is given up.
        backend: "nccl"; tests without GPUs say "gloo".
    """

    is_inline = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout_s: float,
        backend: str = "nccl",
    ) -> None:
        if backend == "nccl" and device.type != "cuda":
            raise ValueError(
                f"NCCL sends between GPUs, got device '{device}'; build the mesh on 'cuda', or with the "
                "gloo backend for a CPU"
            )
        self._links: dict[tuple[int, int], dist.ProcessGroup] = {}
        super().__init__(group, device, timeout_s=timeout_s)
        self.group = self.new_group(backend)
        for stage in range(self.num_stages - 1):  # all stages make all of them, in one order
            for link in ((stage, stage + 1), (stage + 1, stage)):
                self._links[link] = self.new_group(backend)

    def start_sending(self, link: Outgoing, packet: Packet, ready: object) -> list[Sent]:
        """Send the header over gloo, and put the tensors into the GPU's queue."""
        sent = super().start_sending(link, packet, ready)
        group, rank = self._links[self.stage, link.stage], self.ranks[link.stage]
        tensors = [tensor.contiguous() for tensor in packet.tensors if tensor.numel()]
        if not isinstance(ready, torch.cuda.Event):
            return sent + [(dist.isend(tensor, rank, group), tensor) for tensor in tensors]
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            for tensor in tensors:
                tensor.record_stream(stream)
                dist.send(tensor, rank, group)
        return sent

    def _tensors(self, link: Incoming, packet: Packet, form: Form) -> tuple[Tensor, ...]:
        group, rank = self._links[link.stage, self.stage], self.ranks[link.stage]
        is_cuda = self.device.type == "cuda"
        stream = torch.cuda.Stream(self.device) if is_cuda else None
        received = []
        with torch.cuda.stream(stream) if is_cuda else nullcontext():
            for dtype, _, shape in form:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
                if tensor.numel():
                    dist.recv(tensor, rank, group)
                if stream is not None:
                    tensor._samo_ready = stream.record_event()  # type: ignore[attr-defined]
                received.append(tensor)
        return tuple(received)
