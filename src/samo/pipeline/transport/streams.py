"""Links for tensors on a GPU, driven by polling: `PinnedTransport` copies them through host memory.

Two rules keep a GPU free of deadlocks, whatever the number of its hardware queues:

- A packet is handed over when its data is there, not when it is announced. So no stream ever waits
  for a transfer, and nothing in a hardware queue stands behind one.
- A link has at most one transfer under way in each direction. The next one is queued when the host
  has seen the end of the last.

What remains in the queues depends on computation alone, which always comes to an end.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from samo.errors import first_words
from samo.pipeline.transport.base import Arrival
from samo.pipeline.transport.tcp import Link, TcpTransport
from samo.pipeline.transport.wire import Layout, Packet, pack, with_tensors

__all__ = ["Channel", "PinnedTransport", "StreamTransport", "Transfer"]

_POLL_S: Final = 20e-6
"""Seconds between two looks at transfers under way."""

_GRACE_S: Final = 2.0
"""Seconds for which transfers from a neighbour that has left may still end."""

_DATA: Final = ("activation", "gradient", "loss")


@dataclass
class Transfer:
    """A transfer under way; its tensors are kept until it is complete."""

    packet: Packet
    body: Tensor
    is_complete: Callable[[], bool]
    layout: Layout = field(default_factory=Layout)
    finish: Callable[[], object] = lambda: None  # raises if it has failed


@dataclass
class Channel:
    """Both directions of a link: what waits for its turn, and what is under way."""

    send_stream: Any
    recv_stream: Any
    comms: tuple[Any, ...] = ()  # of NCCL, to send and to receive with
    to_send: deque[tuple[Packet, Any]] = field(default_factory=deque)  # with the event of its data
    sending: Transfer | None = None
    to_receive: deque[tuple[Packet, Layout, Tensor | None]] = field(default_factory=deque)
    receiving: Transfer | None = None
    error: Exception | None = None  # what broke the link, reported behind what came before
    given_up_at: float = 0.0


class StreamTransport(TcpTransport):
    """Moves tensors on streams of their own, and headers over TCP. ``cuda`` is ``torch.cuda``."""

    def __init__(
        self,
        stage: int,
        ranks: Sequence[int],
        links: Mapping[int, Link],
        device: torch.device,
        *,
        comms: Mapping[int, tuple[Any, Any]] | None = None,
        is_ring: bool = False,
        cuda: Any = torch.cuda,
    ) -> None:
        super().__init__(stage, ranks, links, is_ring=is_ring)
        self.device: Final = device
        self.cuda: Final = cuda
        self._channels: Final = {
            place: Channel(cuda.Stream(device), cuda.Stream(device), comms[place] if comms else ())
            for place in self._links
        }

    def send(self, stage: int, packet: Packet) -> None:
        """Send to a neighbour without waiting for it. Reports of failures overtake data."""
        if packet.kind not in _DATA:
            self._links[stage].send(packet)
            return
        ready = self.cuda.current_stream(self.device).record_event()
        self._channels[stage].to_send.append((packet, ready))
        self._advance(stage)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Read headers, and advance transfers."""
        is_busy = any(c.sending or c.receiving for c in self._channels.values())
        self._wait(timeout_s, is_busy)
        for place in self._channels.keys() - self._broken:
            self._advance(place)

    def is_sent(self, stage: int) -> bool:
        """Return whether everything is sent to a neighbour, or never will be."""
        channel = self._channels[stage]
        is_idle = channel.sending is None and not channel.to_send
        return stage in self._broken or (is_idle and super().is_sent(stage))

    def start_send(self, link: Link, channel: Channel, packet: Packet, ready: Any) -> Transfer:
        """Queue the tensors of a packet behind the event that ends their computation."""
        raise NotImplementedError

    def start_receive(
        self, channel: Channel, packet: Packet, layout: Layout, body: Tensor | None
    ) -> Transfer:
        """Queue the tensors of an announced packet."""
        raise NotImplementedError

    def end_send(self, link: Link, transfer: Transfer) -> None:
        """Called when a transfer is complete."""

    def _wait(self, timeout_s: float, is_busy: bool) -> None:
        super().poll(0.0 if is_busy else timeout_s)
        if is_busy and timeout_s > 0 and not self.inbox:
            time.sleep(min(_POLL_S, timeout_s))

    def _take(self, stage: int, packet: Packet, layout: Layout, body: Tensor | None) -> None:
        if packet.kind in _DATA:
            self._channels[stage].to_receive.append((packet, layout, body))
        else:
            self.inbox.append(Arrival(stage, packet))

    def _advance(self, stage: int) -> None:
        """End what is complete, and start what is next."""
        try:
            self._advance_sends(self._links[stage], self._channels[stage])
            self._advance_receives(stage, self._channels[stage])
        except RuntimeError as error:
            super()._break(stage, ConnectionError(first_words(error)))
            return
        channel = self._channels[stage]
        is_received = channel.receiving is None and not channel.to_receive
        if channel.error is not None and (is_received or time.monotonic() > channel.given_up_at):
            super()._break(stage, channel.error)

    def _break(self, stage: int, error: Exception) -> None:
        """Hand over first what has come; from a neighbour that died, it may never be complete."""
        channel = self._channels[stage]
        channel.error, channel.given_up_at = error, time.monotonic() + _GRACE_S

    def _advance_sends(self, link: Link, channel: Channel) -> None:
        while True:
            if channel.sending is not None:
                if not channel.sending.is_complete():
                    return
                channel.sending.finish()
                self.end_send(link, channel.sending)
                channel.sending = None
            if not channel.to_send:
                return
            packet, ready = channel.to_send.popleft()
            if any(tensor.numel() for tensor in packet.tensors):
                channel.sending = self.start_send(link, channel, packet, ready)
            else:
                link.send(packet)

    def _advance_receives(self, stage: int, channel: Channel) -> None:
        while True:
            if channel.receiving is not None:
                done = channel.receiving
                if not done.is_complete():
                    return
                done.finish()
                self._hand_over(done.body)
                self.inbox.append(Arrival(stage, with_tensors(done.packet, done.body, done.layout)))
                channel.receiving = None
            if not channel.to_receive:
                return
            packet, layout, body = channel.to_receive.popleft()
            if layout.nbytes:
                channel.receiving = self.start_receive(channel, packet, layout, body)
            else:
                empty = torch.empty(0, dtype=torch.uint8, device=self.device)
                self.inbox.append(Arrival(stage, with_tensors(packet, empty, layout)))

    def _hand_over(self, body: Tensor) -> None:
        """Let the current stream use memory that was allocated on another one."""
        body.record_stream(self.cuda.current_stream(self.device))


class PinnedTransport(StreamTransport):
    """Links between GPUs through pinned host memory and TCP; the links are pinned."""

    def start_send(self, link: Link, channel: Channel, packet: Packet, ready: Any) -> Transfer:
        """Copy the tensors to the host."""
        stream = channel.send_stream
        with self.cuda.stream(stream):
            stream.wait_event(ready)
            body = pack(packet.tensors)
            host = torch.empty(body.numel(), dtype=torch.uint8, pin_memory=True)
            host.copy_(body, non_blocking=True)
            return Transfer(packet, host, stream.record_event().query)

    def end_send(self, link: Link, transfer: Transfer) -> None:
        """Send what was copied."""
        link.send(transfer.packet, transfer.body)

    def start_receive(
        self, channel: Channel, packet: Packet, layout: Layout, body: Tensor | None
    ) -> Transfer:
        """Copy the tensors to the GPU."""
        assert body is not None, "bodies of pinned links travel with their headers"
        stream = channel.recv_stream
        with self.cuda.stream(stream):
            found = body.to(self.device, non_blocking=True)
            return Transfer(packet, found, stream.record_event().query, layout)
