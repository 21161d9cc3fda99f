"""Links between GPUs over NCCL; headers go over TCP. Not yet run on several GPUs.

Each directed link has a communicator of its own two ranks: NCCL has no tags, and two directions in
one communicator would wait for each other. They are created in one order on all ranks, when the
pipeline is built: creating one later may wait for kernels that wait for a neighbour.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samo.pipeline.transport.base import neighbours_of
from samo.pipeline.transport.connect import Meeting
from samo.pipeline.transport.streams import Channel, PinnedTransport, StreamTransport, Transfer
from samo.pipeline.transport.tcp import Link, TcpTransport
from samo.pipeline.transport.wire import Layout, Packet, pack

__all__ = ["NcclTransport", "communicators", "link_order", "open_links"]

_SENDER, _RECEIVER = 0, 1
"""The ranks in a communicator."""


class NcclTransport(StreamTransport):
    """Tensors stay on their GPUs. A packet is one NCCL kernel, whatever the number of tensors."""

    def start_send(self, link: Link, channel: Channel, packet: Packet, ready: Any) -> Transfer:
        """Queue the send, then announce it: the receiver's kernel waits for one that is there."""
        stream = channel.send_stream
        with self.cuda.stream(stream):
            stream.wait_event(ready)
            body = pack(packet.tensors)  # on this stream: elsewhere, it might be sent unfinished
            work = channel.comms[0].send([body], _RECEIVER, 0)
        link.send(packet)
        return Transfer(packet, body, work.is_completed, finish=work.wait)

    def start_receive(
        self, channel: Channel, packet: Packet, layout: Layout, body: Tensor | None
    ) -> Transfer:
        """Queue the receive."""
        with self.cuda.stream(channel.recv_stream):
            found = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.device)
            work = channel.comms[1].recv([found], _SENDER, 0)
        return Transfer(packet, found, work.is_completed, layout, finish=work.wait)

    def close(self) -> None:
        """Close the links, and end kernels that wait for a neighbour."""
        for channel in self._channels.values():
            for comm in channel.comms:
                comm.abort()
        super().close()


def open_links(
    meeting: Meeting, device: torch.device, backend: str, *, is_ring: bool
) -> TcpTransport:
    """Connect this rank to its neighbours, which all call this."""
    is_nccl, is_cuda = backend == "nccl", device.type == "cuda"
    links = {
        place: Link(connection, has_bodies=not is_nccl, is_pinned=is_cuda and not is_nccl)
        for place, connection in meeting.links(is_ring=is_ring).items()
    }
    place, ranks = meeting.place, meeting.ranks
    if is_nccl:
        comms = communicators(meeting, device, is_ring=is_ring)
        return NcclTransport(place, ranks, links, device, comms=comms, is_ring=is_ring)
    if is_cuda:
        return PinnedTransport(place, ranks, links, device, is_ring=is_ring)
    return TcpTransport(place, ranks, links, is_ring=is_ring)


def link_order(num_places: int, is_ring: bool) -> list[tuple[int, int]]:
    """Return directed links in the order in which all ranks create their communicators.

    Links that share no rank come together, so this takes as long for 1,000 ranks as for 3.

    Example:
        >>> link_order(4, is_ring=False)
        [(0, 1), (1, 0), (2, 3), (3, 2), (1, 2), (2, 1)]
    """
    pairs = {
        (min(pair), max(pair))
        for place in range(num_places)
        for pair in [(place, other) for other in neighbours_of(place, num_places, is_ring)]
    }

    def color(pair: tuple[int, int]) -> tuple[int, int]:
        is_closing = pair == (0, num_places - 1) and num_places > 2
        return (2 if is_closing and num_places % 2 else is_closing or pair[0] % 2), pair[0]

    return [link for a, b in sorted(pairs, key=color) for link in ((a, b), (b, a))]


def communicators(
    meeting: Meeting, device: torch.device, *, is_ring: bool
) -> dict[int, tuple[Any, Any]]:
    """Return a communicator to send with and one to receive with for each neighbour."""
    found: dict[tuple[int, int], Any] = {}
    for link in link_order(len(meeting.ranks), is_ring):
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
