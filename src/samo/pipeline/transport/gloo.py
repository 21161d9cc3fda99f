"""Links over torch.distributed with gloo, for CPUs and, through pinned host memory, for GPUs.

A gloo receive cannot be polled: it says that it is done only to whoever waits for it. So a thread for
each neighbour waits, and puts what came into one queue, from which the stage takes whatever is first.
An unfinished gloo send is cancelled when its tensor is dropped, so the last ones are kept. Where tensors lie
on a GPU, a thread for each neighbour sends them, once they have been copied to pinned memory.
"""

import dataclasses
import datetime
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from samo.pipeline.transport.base import Arrival
from samo.pipeline.transport.wire import (
    DATA_KINDS,
    Decoder,
    Encoder,
    Form,
    Packet,
    body_of,
    pack,
    places,
    unpack,
)

__all__ = ["GlooTransport"]

_FIRST_ROOM: Final = 4096
"""Bytes a receiver makes room for before it knows better: more than any control packet has."""

_KEPT: Final = 8
"""Packets to a neighbour that are kept before the oldest is waited for."""

Sent = tuple[Any, Tensor]


@dataclasses.dataclass
class Incoming:
    """The receiving end of a link."""

    stage: int
    decoder: Decoder
    room: int = _FIRST_ROOM


@dataclasses.dataclass
class Outgoing:
    """The sending end of a link."""

    stage: int
    encoder: Encoder
    room: int = _FIRST_ROOM


class GlooTransport:
    """The links of this rank within a group of ranks, one for each stage.

    Connections are its own: a batch that fails takes them along, and the group that the caller gave
    stays in order.

    Args:
        group: Ranks in the order of the stages.
        device: Where received tensors are wanted.
        timeout_s: Seconds after which a send or receive is given up.
    """

    is_inline = True
    """Whether tensors travel in the same message as their header."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout_s: float,
    ) -> None:
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self.stage = dist.get_rank(group)
        self.num_stages = len(self.ranks)
        self.device: Final = device
        self.timeout_s: Final = timeout_s
        # The stage gives up first and says whom it waited for; gloo's own limit is for threads.
        self._limit: Final = datetime.timedelta(seconds=2 * timeout_s + 5)
        self.host_group: Final = self.new_group("gloo")  # all stages, for tensors on the host
        self.group = self.host_group  # the same, for tensors on the device
        self._inbox: Final[queue.SimpleQueue[Arrival]] = queue.SimpleQueue()
        self._receivers: Final[dict[int, _Receiver]] = {}
        self._senders: Final[dict[int, _Sender | _ThreadedSender]] = {}
        sender = _Sender if device.type != "cuda" else _ThreadedSender
        for stage in (self.stage - 1, self.stage + 1):
            if 0 <= stage < self.num_stages:
                self._receivers[stage] = _Receiver(self, Incoming(stage, Decoder(stage)))
                self._senders[stage] = sender(self, Outgoing(stage, Encoder(self.stage)))

    def begin(self) -> None:
        """Start to receive."""
        for receiver in self._receivers.values():
            receiver.expect(True)

    def send(self, stage: int, packet: Packet) -> None:
        """Send to a neighbour, without waiting for it."""
        self._senders[stage].send(packet)

    def receive(self, timeout_s: float) -> Arrival | None:
        """Return whatever came first."""
        try:
            arrival = self._inbox.get(timeout_s > 0, max(timeout_s, 0.0))
        except queue.Empty:
            return None
        if arrival.packet is not None and self.device.type == "cuda":
            for tensor in arrival.packet.tensors:
                take_over(tensor)
        return arrival

    def flush(self, timeout_s: float, stages: Iterable[int]) -> int | None:
        """Wait until all is sent to some stages."""
        deadline = time.monotonic() + timeout_s
        for stage in stages:
            if not self._senders[stage].wait_idle(deadline - time.monotonic()):
                return stage
        return None

    def close(self) -> None:
        """End the threads; one in the middle of a transfer ends with it, and is not waited for."""
        for receiver in self._receivers.values():
            receiver.expect(False)
        for sender in self._senders.values():
            sender.end()
        for receiver in self._receivers.values():
            receiver.join(timeout=0.2)

    def new_group(self, backend: str) -> dist.ProcessGroup:
        """Return new connections between all stages.

        Always all of them: torch names a group by how many its ranks have made, so that ranks which
        have made different numbers never meet.
        """
        group = dist.new_group(
            list(self.ranks), timeout=self._limit, backend=backend, use_local_synchronization=True
        )
        assert isinstance(group, dist.ProcessGroup), "this rank is one of the ranks"
        return group

    # What threads call ---------------------------------------------------------------------------

    def arrived(self, arrival: Arrival) -> None:
        """Put something into the queue."""
        self._inbox.put(arrival)

    def start_sending(self, link: Outgoing, packet: Packet, ready: object) -> list[Sent]:
        """Begin to send; return what must be kept until it is gone."""
        sent: list[Sent] = []
        form = packet.form if self.is_inline else ()
        needed = places(form, len(body_of(packet)))[1]
        if needed > link.room:
            sent.append(self._send(link, Packet("grow", packet.step, needed), None))
            link.room = needed
        sent.append(self._send(link, packet, ready))
        return sent

    def _send(self, link: Outgoing, packet: Packet, ready: object) -> Sent:
        words, body = link.encoder.encode(packet)
        tensors = packet.tensors if self.is_inline else ()
        form = packet.form if self.is_inline else ()
        is_cuda = any(tensor.is_cuda for tensor in tensors)
        buffer = torch.empty(places(form, len(body))[1], dtype=torch.uint8, pin_memory=is_cuda)
        if is_cuda:
            _pack_from_gpu(words, body, tensors, buffer, ready)
        else:
            pack(words, body, tensors, buffer)
        # The tag is the sender: a link is told from its way back by it.
        return dist.isend(buffer, self.ranks[link.stage], self.host_group, self.stage), buffer

    def fetch(self, link: Incoming) -> Packet:
        """Wait for the next packet of a link."""
        while True:
            is_pinned = self.device.type == "cuda" and self.is_inline
            buffer = torch.empty(link.room, dtype=torch.uint8, pin_memory=is_pinned)
            dist.recv(buffer, self.ranks[link.stage], self.host_group, link.stage)
            packet, form = unpack(link.decoder, buffer, has_tensors=self.is_inline)
            if packet.kind != "grow":
                break
            link.room = packet.micro_batch
        if packet.kind not in DATA_KINDS:
            return packet
        tensors = self._tensors(link, packet, form)
        return dataclasses.replace(packet, tensors=tensors)

    def _tensors(self, link: Incoming, packet: Packet, form: Form) -> tuple[Tensor, ...]:
        """Return the tensors of a packet where they are wanted."""
        if self.device.type != "cuda":
            return packet.tensors
        return tuple(_to_device(tensor, self.device) for tensor in packet.tensors)


class _Receiver(threading.Thread):
    """Waits for packets of one neighbour, from the beginning of a batch to its end."""

    def __init__(self, transport: GlooTransport, link: Incoming) -> None:
        super().__init__(name=f"samo-receive-{link.stage}", daemon=True)
        self._expected: Final[queue.SimpleQueue[bool]] = queue.SimpleQueue()
        self._transport = transport
        self._link = link
        self.start()

    def expect(self, is_batch: bool) -> None:
        """Expect another batch, or no more."""
        self._expected.put(is_batch)

    def run(self) -> None:
        while self._expected.get():
            is_open = True
            while is_open:
                try:
                    packet = self._transport.fetch(self._link)
                except Exception as error:
                    self._transport.arrived(Arrival(self._link.stage, error=error))
                    return
                is_open = packet.kind != "end"
                self._transport.arrived(Arrival(self._link.stage, packet))


class _Sender:
    """Sends to one neighbour from the stage's own thread, and keeps what is on its way.

    The neighbour's thread takes packets as they come. So one that was sent some packets ago is gone,
    or something is wrong.
    """

    def __init__(self, transport: GlooTransport, link: Outgoing) -> None:
        self._transport = transport
        self.link = link
        self._kept: deque[Sent] = deque()
        self._is_broken = False

    def send(self, packet: Packet) -> None:
        """Send without waiting."""
        if self._is_broken:
            return
        try:
            self._kept.extend(self._transport.start_sending(self.link, packet, None))
        except RuntimeError as error:
            self._give_up(error)
        while len(self._kept) > _KEPT and self._finish(self._transport.timeout_s):
            pass

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is left to send; return whether that is so."""
        deadline = time.monotonic() + timeout_s
        while self._kept:
            if not self._finish(max(deadline - time.monotonic(), 0.01)):
                return False
        return True

    def end(self) -> None:
        """Nothing to do."""

    def _finish(self, timeout_s: float) -> bool:
        """Wait for the oldest packet."""
        try:
            self._kept[0][0].wait(datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self._give_up(error)
            return False
        self._kept.popleft()
        return True

    def _give_up(self, error: Exception) -> None:
        self._is_broken = True
        self._kept.clear()
        self._transport.arrived(Arrival(self.link.stage, error=error))


class _ThreadedSender(threading.Thread):
    """Sends to one neighbour what comes from a GPU. One way for all packets keeps their order."""

    def __init__(self, transport: GlooTransport, link: Outgoing) -> None:
        super().__init__(name=f"samo-send-{link.stage}", daemon=True)
        self._queue: Final[queue.SimpleQueue[tuple[Packet, object] | None]] = queue.SimpleQueue()
        self._transport = transport
        self.link = link
        self._pending = 0
        self._changed = threading.Condition()
        self.start()

    def send(self, packet: Packet) -> None:
        """Send without waiting."""
        self._set_pending(lambda pending: pending + 1)
        self._queue.put((packet, _ready_event(packet.tensors)))

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is left to send; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout_s)

    def end(self) -> None:
        """Let the thread end."""
        self._queue.put(None)

    def run(self) -> None:
        while (entry := self._queue.get()) is not None:
            try:
                for work, _ in self._transport.start_sending(self.link, *entry):
                    work.wait()
            except Exception as error:
                self._transport.arrived(Arrival(self.link.stage, error=error))
                self._set_pending(lambda pending: 0)  # nothing will be taken any more
                return
            self._set_pending(lambda pending: pending - 1)

    def _set_pending(self, change: Callable[[int], int]) -> None:
        with self._changed:
            self._pending = change(self._pending)
            self._changed.notify_all()


def _ready_event(tensors: Sequence[Tensor]) -> object:
    """Mark the point after which the tensors are computed."""
    for tensor in tensors:
        if tensor.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(tensor.device))
            return event
    return None


def _pack_from_gpu(
    words: list[int], body: list[int], tensors: Sequence[Tensor], buffer: Tensor, ready: object
) -> None:
    """Copy to pinned memory on a stream of its own; waits for the copy, not for the device."""
    assert isinstance(ready, torch.cuda.Event), "packets with CUDA tensors have an event"
    stream = torch.cuda.Stream(tensors[0].device)
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        pack(words, body, tensors, buffer)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)
        stream.synchronize()


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy from pinned memory on a stream of its own; `take_over` lets the reader wait for it."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        tensor = host.to(device, non_blocking=True)
        tensor._samo_ready = stream.record_event()  # type: ignore[attr-defined]
    return tensor


def take_over(tensor: Tensor) -> None:
    """Let the current stream wait until a received tensor is there."""
    ready = getattr(tensor, "_samo_ready", None)
    if ready is not None:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(ready)
        tensor.record_stream(stream)
        del tensor._samo_ready  # type: ignore[attr-defined]
