"""Links over torch.distributed with gloo, for CPUs and, through pinned host memory, for GPUs.

A gloo receive cannot be polled: only a thread that waits for it learns that it is complete. So one
thread for each neighbour receives, and puts packets into one queue; another one sends. An
unfinished gloo send is cancelled when its tensor is freed, so the sending thread keeps it.
"""

import datetime
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from samo.errors import first_words
from samo.pipeline.transport.base import Arrival, Transport
from samo.pipeline.transport.wire import HEADER_BYTES, Packet, TensorSpec, decode, encode

__all__ = ["GlooTransport"]

Ready = torch.cuda.Event | None
"""When tensors on a GPU are complete; None for those on the host."""

Send = tuple[Any, Tensor]
"""An unfinished send, and the tensor that it reads."""


class GlooTransport(Transport):
    """The links of this rank; received tensors arrive on ``device``.

    It has connections of its own: a batch that fails breaks them, and ``group`` stays intact.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout_s: float,
        is_ring: bool = False,
    ) -> None:
        ranks = dist.get_process_group_ranks(group)
        super().__init__(dist.get_rank(group), ranks, is_ring=is_ring)
        self.device: Final = device
        self.timeout_s: Final = timeout_s
        self.host_group: Final = new_group(self.ranks, "gloo", timeout_s)  # for tensors on the host
        self.group = self.host_group  # for tensors on the device
        self.inbox: Final[queue.SimpleQueue[tuple[Arrival, Ready]]] = queue.SimpleQueue()
        self._links: Final = {stage: _Link(self, stage) for stage in self.neighbours}

    def begin(self) -> None:
        """Start to receive from each neighbour."""
        for link in self._links.values():
            link.is_wanted.put(True)

    def send(self, stage: int, packet: Packet) -> None:
        """Send to a neighbour without waiting for it."""
        self._links[stage].send(packet)

    def receive(self, timeout_s: float) -> Arrival | None:
        """Return the first arrival from any neighbour, or None."""
        try:
            arrival, ready = self.inbox.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None
        if ready is not None and arrival.packet is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(ready)
            for tensor in arrival.packet.tensors:
                tensor.record_stream(stream)
        return arrival

    def flush(self, timeout_s: float, stages: Iterable[int]) -> int | None:
        """Wait until everything is sent; return a stage that did not take it in time."""
        deadline = time.monotonic() + timeout_s
        for stage in stages:
            if not self._links[stage].wait_idle(deadline - time.monotonic()):
                return stage
        return None

    def close(self) -> None:
        """End the threads; one in the middle of a transfer ends with it, and is not waited for."""
        for link in self._links.values():
            link.is_wanted.put(False)
            link.outbox.put(None)
        for link in self._links.values():
            for thread in link.threads:
                thread.join(timeout=0.2)

    # Called by the threads; NCCL overrides the tensors' way. The tag of a message is its sender.

    def isend(self, tensor: Tensor, stage: int) -> Send:
        """Start to send a tensor on the host."""
        return dist.isend(tensor, self.ranks[stage], self.host_group, self.stage), tensor

    def recv(self, tensor: Tensor, stage: int) -> None:
        """Receive a tensor on the host."""
        dist.recv(tensor, self.ranks[stage], self.host_group, stage)

    def isend_tensors(self, tensors: Sequence[Tensor], stage: int, ready: Ready) -> list[Send]:
        """Start to send the tensors of a packet."""
        if ready is not None:
            tensors = _to_host(tensors, ready, self.device)
        return [self.isend(as_bytes(tensor), stage) for tensor in tensors if tensor.numel()]

    def recv_tensors(self, specs: list[TensorSpec], stage: int) -> tuple[list[Tensor], Ready]:
        """Receive the tensors of a packet."""
        is_cuda = self.device.type == "cuda"
        tensors = [torch.empty(shape, dtype=dtype, pin_memory=is_cuda) for dtype, shape in specs]
        for tensor in tensors:
            if tensor.numel():
                self.recv(as_bytes(tensor), stage)
        if not is_cuda:
            return tensors, None
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            tensors = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
            return tensors, stream.record_event()


class _Link:
    """The two threads that exchange packets with one neighbour."""

    def __init__(self, transport: GlooTransport, stage: int) -> None:
        self.is_wanted: Final[queue.SimpleQueue[bool]] = queue.SimpleQueue()
        self.outbox: Final[queue.Queue[Any]] = queue.Queue()
        self.sequence = 0
        self._transport, self._stage = transport, stage
        self._is_broken = False
        self.threads: Final = [
            threading.Thread(target=loop, name=f"samo-stage-{stage}", daemon=True)
            for loop in (self._receive_all, self._send_all)
        ]
        for thread in self.threads:
            thread.start()

    def send(self, packet: Packet) -> None:
        """Send without waiting."""
        header = encode(packet, self.sequence)
        self.sequence += 1
        # The module may write to its output again, before it is sent.
        layout = torch.contiguous_format
        tensors = [t if t.is_cuda else t.clone(memory_format=layout) for t in packet.tensors]
        ready = None
        if any(tensor.is_cuda for tensor in tensors):
            ready = torch.cuda.current_stream(self._transport.device).record_event()
        self.outbox.put((header, tensors, ready))

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until everything is sent; return whether it is. A broken link is idle."""
        with self.outbox.all_tasks_done:
            return self.outbox.all_tasks_done.wait_for(
                lambda: self._is_broken or not self.outbox.unfinished_tasks, timeout_s
            )

    def _receive_all(self) -> None:
        """Receive packets, from the beginning of each batch to its end."""
        sequence = 0
        while self.is_wanted.get():
            kind = ""
            while kind != "end":
                begin = time.monotonic()
                try:
                    packet, ready = self._receive(sequence)
                except Exception as error:
                    self._report(error, begin)
                    return
                sequence += 1
                self._transport.inbox.put((Arrival(self._stage, packet), ready))
                kind = packet.kind

    def _receive(self, sequence: int) -> tuple[Packet, Ready]:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._transport.recv(header, self._stage)
        packet, specs = decode(header, sequence=sequence)
        if not specs:
            return packet, None
        tensors, ready = self._transport.recv_tensors(specs, self._stage)
        return replace(packet, tensors=tuple(tensors)), ready

    def _send_all(self) -> None:
        """Send packets in order."""
        while (entry := self.outbox.get()) is not None:
            begin = time.monotonic()
            try:
                self._send(*entry)
            except Exception as error:
                self._report(error, begin)
                with self.outbox.all_tasks_done:
                    self._is_broken = True
                    self.outbox.all_tasks_done.notify_all()
                return
            del entry  # its tensors, before the next one is waited for
            self.outbox.task_done()

    def _send(self, header: Tensor, tensors: list[Tensor], ready: Ready) -> None:
        sends = [self._transport.isend(header, self._stage)]
        sends += self._transport.isend_tensors(tensors, self._stage, ready)
        for work, _ in sends:
            work.wait()

    def _report(self, error: Exception, begin: float) -> None:
        """Put a typed error into the inbox; gloo's own are all RuntimeErrors."""
        if not isinstance(error, ValueError):  # which decode raises
            is_late = time.monotonic() - begin >= limit_of(self._transport.timeout_s)
            error = (TimeoutError if is_late else ConnectionError)(first_words(error))
        self._transport.inbox.put((Arrival(self._stage, error=error), None))


def limit_of(timeout_s: float) -> float:
    """Return the backend's own timeout: the runner gives up earlier, and names the neighbour."""
    return 2 * timeout_s + 5


def new_group(ranks: Sequence[int], backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Create connections between some ranks, all of which call this.

    torch names a group by how many its ranks have created, so ranks that have created different
    numbers of groups never meet: all stages create the same number.
    """
    group = dist.new_group(
        list(ranks),
        timeout=datetime.timedelta(seconds=limit_of(timeout_s)),
        backend=backend,
        use_local_synchronization=True,
    )
    assert isinstance(group, dist.ProcessGroup), "this rank is one of the ranks"
    return group


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory, whatever its type."""
    return tensor.view(-1).view(torch.uint8)


def _to_host(
    tensors: Sequence[Tensor], ready: torch.cuda.Event, device: torch.device
) -> list[Tensor]:
    """Copy to pinned memory on a stream of its own; waits for the copies, not for the device."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        hosts = []
        for tensor in tensors:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            hosts.append(host.copy_(tensor, non_blocking=True))
            if tensor.is_cuda:
                tensor.record_stream(stream)
        stream.synchronize()
    return hosts
