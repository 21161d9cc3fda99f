"""Links between GPUs over NCCL; headers go over TCP. Not yet run on several GPUs.

Two rules keep a GPU free of deadlocks, whatever the number of its hardware queues:

- A packet is handed over when its data is there, not when it is announced. So no stream ever waits
  for a transfer, and nothing in a hardware queue stands behind one.
- A link has at most one transfer under way in each direction. The next one is queued when the host
  has seen the end of the last.

What remains in the queues depends on computation alone, which always comes to an end.

Each directed link has a communicator of its own two ranks: NCCL has no tags, and two directions in
one communicator would wait for each other. They are created in one order on all ranks, when the
pipeline is built: creating one later may wait for kernels that wait for a neighbour.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from samo.errors import first_words
from samo.pipeline.transport.connect import Meeting, neighbours_of
from samo.pipeline.transport.tcp import Link, Transport
from samo.pipeline.transport.wire import Layout, Packet, pack, unpack

_SENDER, _RECEIVER = 0, 1
"""The ranks in a communicator."""

_POLL_S: Final = 20e-6
"""Seconds between two looks at transfers under way."""

_GRACE_S: Final = 2.0
"""Seconds for which transfers from a neighbour that has left may still end."""

_DATA: Final = ("activation", "gradient")


@dataclass
class Transfer:
    """A transfer under way; its tensors are kept until it is complete."""

    packet: Packet
    layout: Layout
    body: Tensor
    work: Any


@dataclass
class Channel:
    """Both directions of a link: what waits for its turn, and what is under way."""

    send_stream: Any
    recv_stream: Any
    comms: tuple[Any, Any]  # to send and to receive with
    to_send: deque[tuple[Packet, Any]] = field(default_factory=deque)  # with the event of its data
    sending: Transfer | None = None
    to_receive: deque[tuple[Packet, Layout]] = field(default_factory=deque)
    receiving: Transfer | None = None
    error: Exception | None = None  # what broke the link, reported behind what came before
    given_up_at: float = 0.0


class NcclTransport(Transport):
    """Tensors stay on their GPUs. A packet is one NCCL kernel, whatever the number of tensors.

    ``comms`` has a communicator to send with and one to receive with for each neighbour; ``cuda``
    is ``torch.cuda``.
    """

    def __init__(
        self,
        place: int,
        ranks: Sequence[int],
        links: Mapping[int, Link],
        device: torch.device,
        comms: Mapping[int, tuple[Any, Any]],
        cuda: Any = torch.cuda,
    ) -> None:
        super().__init__(place, ranks, links, device)
        self.cuda: Final = cuda
        self._channels: Final = {
            place: Channel(cuda.Stream(device), cuda.Stream(device), both)
            for place, both in comms.items()
        }

    def send(self, place: int, packet: Packet) -> None:
        """Send to a neighbour without waiting for it. Reports of failures overtake data."""
        if packet.kind not in _DATA:
            self.links[place].send(packet)
            return
        ready = self.cuda.current_stream(self.device).record_event()
        self._channels[place].to_send.append((packet, ready))
        self._advance(place)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Read headers, and advance transfers."""
        is_busy = any(c.sending or c.receiving for c in self._channels.values())
        self._wait(timeout_s, is_busy)
        for place in self._channels.keys() - self.broken.keys():
            self._advance(place)

    def is_sent(self, place: int) -> bool:
        """Return whether everything is sent to a neighbour, or never will be."""
        channel = self._channels[place]
        is_idle = channel.sending is None and not channel.to_send
        return place in self.broken or (is_idle and super().is_sent(place))

    def close(self) -> None:
        """Close the links, and end kernels that wait for a neighbour."""
        for channel in self._channels.values():
            for comm in channel.comms:
                comm.abort()
        super().close()

    def start_send(self, link: Link, channel: Channel, packet: Packet, ready: Any) -> Transfer:
        """Queue the send, then announce it: the receiver's kernel waits for one that is there."""
        stream = channel.send_stream
        with self.cuda.stream(stream):
            stream.wait_event(ready)
            body = pack(packet.tensors)  # on this stream: elsewhere, it might be sent unfinished
            work = channel.comms[0].send([body], _RECEIVER, 0)
        link.send(packet)
        return Transfer(packet, Layout(), body, work)

    def start_receive(self, channel: Channel, packet: Packet, layout: Layout) -> Transfer:
        """Queue the receive of an announced packet."""
        with self.cuda.stream(channel.recv_stream):
            body = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.device)
            work = channel.comms[1].recv([body], _SENDER, 0)
        return Transfer(packet, layout, body, work)

    def _wait(self, timeout_s: float, is_busy: bool) -> None:
        super().poll(0.0 if is_busy else timeout_s)
        if is_busy and timeout_s > 0 and not self.inbox:
            time.sleep(min(_POLL_S, timeout_s))

    def _take(self, place: int, packet: Packet, layout: Layout, body: Tensor | None) -> None:
        if packet.kind in _DATA:
            self._channels[place].to_receive.append((packet, layout))
        else:
            self.inbox.append((place, packet))

    def _break(self, place: int, error: Exception) -> None:
        """Hand over first what has come; from a neighbour that died, it may never be complete."""
        channel = self._channels[place]
        channel.error, channel.given_up_at = error, time.monotonic() + _GRACE_S

    def _advance(self, place: int) -> None:
        """End what is complete, and start what is next."""
        channel = self._channels[place]
        try:
            self._advance_sends(self.links[place], channel)
            self._advance_receives(place, channel)
        except RuntimeError as error:
            self.broken[place] = ConnectionError(first_words(error))
            return
        is_received = channel.receiving is None and not channel.to_receive
        if channel.error is not None and (is_received or time.monotonic() > channel.given_up_at):
            self.broken[place] = channel.error

    def _advance_sends(self, link: Link, channel: Channel) -> None:
        while True:
            if channel.sending is not None:
                if not channel.sending.work.is_completed():
                    return
                channel.sending.work.wait()  # raises if it has failed
                channel.sending = None
            if not channel.to_send:
                return
            packet, ready = channel.to_send.popleft()
            if any(tensor.numel() for tensor in packet.tensors):
                channel.sending = self.start_send(link, channel, packet, ready)
            else:
                link.send(packet)

    def _advance_receives(self, place: int, channel: Channel) -> None:
        while True:
            if channel.receiving is not None:
                done = channel.receiving
                if not done.work.is_completed():
                    return
                done.work.wait()
                self._hand_over(done.body)
                tensors = unpack(done.body, done.layout)
                self.inbox.append((place, done.packet._replace(tensors=tensors)))
                channel.receiving = None
            if not channel.to_receive:
                return
            packet, layout = channel.to_receive.popleft()
            if layout.nbytes:
                channel.receiving = self.start_receive(channel, packet, layout)
            else:
                empty = torch.empty(0, dtype=torch.uint8, device=self.device)
                self.inbox.append((place, packet._replace(tensors=unpack(empty, layout))))

    def _hand_over(self, body: Tensor) -> None:
        """Let the current stream use memory that was allocated on another one."""
        body.record_stream(self.cuda.current_stream(self.device))


def open_links(meeting: Meeting, device: torch.device, backend: str) -> Transport:
    """Connect this rank to its neighbours, which all call this."""
    is_nccl = backend == "nccl"
    links = {at: Link(end, has_bodies=not is_nccl) for at, end in meeting.links().items()}
    if not is_nccl:
        return Transport(meeting.place, meeting.ranks, links, device)
    return NcclTransport(
        meeting.place, meeting.ranks, links, device, communicators(meeting, device)
    )


def link_order(num_places: int, is_ring: bool) -> list[tuple[int, int]]:
    """Return directed links in the order in which all ranks create their communicators.

    Every second pair comes first, so this takes as long for 1,000 ranks as for 5.

    Example:
        >>> link_order(4, is_ring=False)
        [(0, 1), (1, 0), (2, 3), (3, 2), (1, 2), (2, 1)]
    """
    places = range(num_places)
    pairs = [(a, b) for a in places for b in neighbours_of(a, num_places, is_ring) if a < b]
    in_turns = sorted(pairs, key=lambda pair: (pair[0] % 2, pair))
    return [link for a, b in in_turns for link in ((a, b), (b, a))]


def communicators(meeting: Meeting, device: torch.device) -> dict[int, tuple[Any, Any]]:
    """Return a communicator to send with and one to receive with for each neighbour."""
    found: dict[tuple[int, int], Any] = {}
    for link in link_order(len(meeting.ranks), meeting.is_ring):
        if meeting.place in link:
            found[link] = comm = meeting.group(f"nccl {link}", link, "nccl")
            _exchange(comm, link.index(meeting.place), device)
    return {b: (comm, found[b, a]) for (a, b), comm in found.items() if a == meeting.place}


def _exchange(comm: Any, rank: int, device: torch.device) -> None:
    """Send one byte: torch creates a communicator at its first use."""
    byte: Sequence[Tensor] = [torch.zeros(1, dtype=torch.uint8, device=device)]
    work = comm.send(byte, _RECEIVER, 0) if rank == _SENDER else comm.recv(byte, _SENDER, 0)
    work.wait()
    torch.cuda.synchronize(device)
