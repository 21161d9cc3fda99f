"""Links over torch.distributed with gloo, for CPUs and, through pinned host memory, for GPUs.

A gloo receive cannot be polled: only a thread that waits for it learns that it is complete. So one
thread for each neighbour receives, and puts packets into one queue; another one sends. An
unfinished gloo send is cancelled when its tensor is freed, so the sending thread keeps tensors
until they are sent.
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

from samo.errors import PeerError, first_words
from samo.pipeline.transport.base import Arrival, Transport
from samo.pipeline.transport.wire import HEADER_BYTES, Packet, TensorSpec, decode, encode

__all__ = ["GlooTransport"]

Ready = torch.cuda.Event | None
"""When tensors on a GPU are complete; None for those on the host."""

Send = tuple[Any, Tensor]
"""An unfinished send, and the tensor that it reads."""


class GlooTransport(Transport):
    """The links of this rank within a group of ranks, one for each stage.

    It has connections of its own: a batch that fails breaks them, and ``group`` stays intact.

    Args:
        group: Ranks in the order of the stages.
        device: Where received tensors are wanted.
        timeout_s: Seconds of silence after which the runner gives up a neighbour.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, timeout_s: float) -> None:
        super().__init__(dist.get_rank(group), dist.get_process_group_ranks(group))
        self.device: Final = device
        self.timeout_s: Final = timeout_s
        self.host_group: Final = new_group(self.ranks, "gloo", timeout_s)  # for tensors on the host
        self.group = self.host_group  # for tensors on the device
        self.inbox: Final[queue.SimpleQueue[tuple[Arrival, Ready]]] = queue.SimpleQueue()
        self._receivers: Final = {stage: _Receiver(self, stage) for stage in self.neighbours}
        self._senders: Final = {stage: _Sender(self, stage) for stage in self.neighbours}

    def begin(self) -> None:
        """Start to receive from each neighbour."""
        for receiver in self._receivers.values():
            receiver.is_wanted.put(True)

    def send(self, stage: int, packet: Packet) -> None:
        """Send to a neighbour without waiting for it."""
        self._senders[stage].send(packet)

    def receive(self, timeout_s: float) -> Arrival | None:
        """Return the first arrival from any neighbour, or None after ``timeout_s`` seconds."""
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
        """Wait until everything is sent to ``stages``; return one that did not take it in time."""
        deadline = time.monotonic() + timeout_s
        for stage in stages:
            if not self._senders[stage].wait_idle(deadline - time.monotonic()):
                return stage
        return None

    def close(self) -> None:
        """End the threads; one in the middle of a transfer ends with it, and is not waited for."""
        for receiver in self._receivers.values():
            receiver.is_wanted.put(False)
        for sender in self._senders.values():
            sender.queue.put(None)
        for thread in (*self._receivers.values(), *self._senders.values()):
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


class _Receiver(threading.Thread):
    """Receives packets of one neighbour, from the beginning of a batch to its end."""

    def __init__(self, transport: GlooTransport, stage: int) -> None:
        super().__init__(name=f"samo-receive-{stage}", daemon=True)
        self.is_wanted: Final[queue.SimpleQueue[bool]] = queue.SimpleQueue()
        self._transport, self._stage = transport, stage
        self._sequence = 0
        self.start()

    def run(self) -> None:
        while self.is_wanted.get():
            is_open = True
            while is_open:
                begin = time.monotonic()
                try:
                    packet, ready = self._receive()
                except Exception as error:
                    _report(self._transport, self._stage, error, begin)
                    return
                self._transport.inbox.put((Arrival(self._stage, packet), ready))
                is_open = packet.kind != "end"

    def _receive(self) -> tuple[Packet, Ready]:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._transport.recv(header, self._stage)
        packet, specs = decode(header, stage=self._stage, sequence=self._sequence)
        self._sequence += 1
        if not specs:
            return packet, None
        tensors, ready = self._transport.recv_tensors(specs, self._stage)
        return replace(packet, tensors=tuple(tensors)), ready


class _Sender(threading.Thread):
    """Sends packets to one neighbour in order."""

    def __init__(self, transport: GlooTransport, stage: int) -> None:
        super().__init__(name=f"samo-send-{stage}", daemon=True)
        self.queue: Final[queue.SimpleQueue[Any]] = queue.SimpleQueue()
        self.sequence = 0
        self._transport, self._stage = transport, stage
        self._num_pending = 0
        self._is_broken = False
        self._changed: Final = threading.Condition()
        self.start()

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
        with self._changed:
            self._num_pending += 1
        self.queue.put((header, tensors, ready))

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until everything is sent; return whether it is. A broken link is idle."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_broken or self._num_pending == 0, timeout_s
            )

    def run(self) -> None:
        while (entry := self.queue.get()) is not None:
            begin = time.monotonic()
            try:
                self._send(*entry)
            except Exception as error:
                _report(self._transport, self._stage, error, begin)
                with self._changed:
                    self._is_broken = True
                    self._changed.notify_all()
                return
            del entry  # its tensors, before the next one is waited for
            with self._changed:
                self._num_pending -= 1
                self._changed.notify_all()

    def _send(self, header: Tensor, tensors: list[Tensor], ready: Ready) -> None:
        sends = [self._transport.isend(header, self._stage)]
        sends += self._transport.isend_tensors(tensors, self._stage, ready)
        for work, _ in sends:
            work.wait()


def _report(transport: GlooTransport, stage: int, error: Exception, begin: float) -> None:
    """Put a typed error into the inbox; gloo's own are all of one type."""
    said: PeerError | TimeoutError | ConnectionError
    if isinstance(error, PeerError):
        said = error
    elif time.monotonic() - begin >= limit_of(transport.timeout_s):
        said = TimeoutError(first_words(error))
    else:
        said = ConnectionError(first_words(error))
    transport.inbox.put((Arrival(stage, error=said), None))


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
