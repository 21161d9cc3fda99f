"""The NCCL transport of version 0.1, kept to show what the model of NCCL finds.

As it was (nccl.py and gloo.py at 7afd8c5), with the model's streams, threads and queues in place of
torch's. A thread for each neighbour sends: the header first, then tensors on a stream of their own.
Another one receives, and hands a packet over when its header has come: the stream that computes
then waits for the data.
"""

from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.pipeline.nccl_model import Agent, Device, Event, agent
from samo.pipeline.transport.tcp import Transport
from samo.pipeline.transport.wire import Layout, Packet


class NcclTransport01(Transport):
    """The links of one rank."""

    def __init__(
        self, place: int, num_ranks: int, links: Any, comms: dict[int, Any], device: Device
    ) -> None:
        super().__init__(place, range(num_ranks), {})
        self.links.update(links)
        self.comms, self.gpu = comms, device
        self.outboxes: dict[int, deque[tuple[Packet, Event]]] = {s: deque() for s in links}
        self.pending = dict.fromkeys(links, 0)
        self.received: deque[tuple[int, Packet, list[Event]]] = deque()
        for stage in links:
            Agent(device.world, device, partial(self._send_all, stage))
            Agent(device.world, device, partial(self._receive_all, stage))

    def send(self, stage: int, packet: Packet) -> None:
        """Leave a packet to the sending thread."""
        self.pending[stage] += 1
        self.outboxes[stage].append((packet, self.gpu.current_stream().record_event()))
        self.gpu.wake()

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take what the receiving threads have."""
        agent().pause(0.02)
        while not self.received and not self.inbox and timeout_s > 0:
            agent().sleep()
        while self.received:
            place, packet, events = self.received.popleft()
            for ready in events:
                self.gpu.current_stream().wait_event(ready)
            self.inbox.append((place, packet))

    def flush(self, timeout_s: float, stages: Any) -> int | None:
        """Wait for the sending threads."""
        while any(self.pending[stage] for stage in stages):
            agent().sleep()
        return None

    def _send_all(self, stage: int) -> None:
        while True:
            while not self.outboxes[stage]:
                agent().sleep()
            packet, ready = self.outboxes[stage].popleft()
            self.links[stage].send(packet)  # the header, before anything is queued
            tensors = [self._contiguous(tensor) for tensor in packet.tensors if tensor.numel()]
            stream = self.gpu.Stream()
            with self.gpu.stream(stream):
                stream.wait_event(ready)
                for tensor in tensors:
                    self.comms[stage][0].send([tensor], 1, 0).wait()
            self.pending[stage] -= 1
            self.gpu.wake()

    def _contiguous(self, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return tensor
        copy = tensor.contiguous()
        self.gpu.kernel([tensor], [copy], 0.2)  # on this thread's current stream
        return copy

    def _receive_all(self, stage: int) -> None:
        wire = self.links[stage].back
        while True:
            while not wire.arrived:
                agent().sleep()
            packet, layout = wire.arrived.popleft()
            tensors, events = self._tensors(stage, layout)
            self.received.append((stage, packet._replace(tensors=tuple(tensors)), events))
            self.gpu.wake()

    def _tensors(self, stage: int, layout: Layout) -> tuple[list[Tensor], list[Event]]:
        stream, received, events = self.gpu.Stream(), [], []
        with self.gpu.stream(stream):
            for dtype, shape, *_ in layout.specs:
                tensor = torch.empty(shape, dtype=dtype)
                if tensor.numel():
                    self.comms[stage][1].recv([tensor], 0, 0).wait()
                events.append(stream.record_event())
                received.append(tensor)
        return received, events
