"""Links over TCP: what a pipeline needs of a network.

A gloo receive can neither be polled nor cancelled: it needs a thread for each neighbour, which
wakes up at the wrong moment when the process exits. Sockets need none, and one call waits for all
neighbours. What a socket does not take at once is pushed by a thread that lives until it is sent.
"""

import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from samo.pipeline.transport.wire import (
    HEADER_BYTES,
    Layout,
    Packet,
    decode,
    encode,
    pack,
    text_bytes,
    unpack,
)

Received = tuple[Packet, Layout, Tensor | None]

_BUFFER_BYTES: Final = 2**14
"""Room for what comes behind the bytes that are due: a small body, or the next packets."""

_open: Final[weakref.WeakSet["Link"]] = weakref.WeakSet()


class Link:
    """A connection to one neighbour, whose bodies may travel another way."""

    def __init__(self, connection: socket.socket, *, has_bodies: bool = True) -> None:
        self.connection: Final = connection
        self._has_bodies: Final = has_bodies
        self._buffer: Final = memoryview(bytearray(_BUFFER_BYTES))
        self._unread = self._buffer[:0]
        self._is_empty = False
        self._packets: Final = self._read()
        self._outbox: Final[deque[memoryview]] = deque()
        self._lock: Final = threading.Lock()
        self._pusher: threading.Thread | None = None
        _open.add(self)

    @property
    def is_idle(self) -> bool:
        """Whether everything is sent."""
        return not self._outbox

    def send(self, packet: Packet, body: Tensor | None = None) -> None:
        """Send without waiting. A broken link takes anything: its reader finds the cause."""
        parts = [memoryview(encode(packet))]
        if body is not None:
            parts.append(body.numpy().data)
        with self._lock, suppress(OSError):
            sent = 0 if self._outbox else self._send(parts)
            if sent == sum(map(len, parts)):
                return
            # A copy: the caller may write to its tensors again.
            self._outbox.append(memoryview(b"".join(parts))[sent:])
            if self._pusher is None:
                self._pusher = threading.Thread(target=self._push, name="samo-push", daemon=True)
                self._pusher.start()

    def receive(self) -> Received | None:
        """Return the next packet, or None if it has not come; raise what broke the link."""
        return next(self._packets)

    def close(self) -> None:
        """Close. What is not sent by now is dropped."""
        with suppress(OSError):
            while self.connection.recv(2**16):  # unread bytes would reset the connection, and the
                pass  # neighbour could lose what was sent to it last
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # ends the pusher
        pusher = self._pusher
        if pusher is not None:
            pusher.join()
        self.connection.close()

    def _send(self, parts: Sequence[memoryview]) -> int:
        try:
            return self.connection.sendmsg(parts)
        except BlockingIOError:
            return 0

    def _push(self) -> None:
        """Send what the socket did not take at once."""
        poller = select.poll()
        poller.register(self.connection, select.POLLOUT)
        while True:
            with self._lock:
                try:
                    rest = self._outbox[0][self._send([self._outbox[0]]) :]
                except OSError:
                    self._outbox.clear()
                else:
                    if rest:  # in place: `is_idle` looks without the lock
                        self._outbox[0] = rest
                    else:
                        self._outbox.popleft()
                if not self._outbox:
                    self._pusher = None
                    return
            poller.poll(1000.0)

    def _read(self) -> Iterator[Received | None]:
        header = bytearray(HEADER_BYTES)
        while True:
            yield from self._fill(memoryview(header))
            text = bytearray(text_bytes(header))
            yield from self._fill(memoryview(text))
            packet, layout = decode(header, text)
            body: Tensor | None = None
            if layout.specs and self._has_bodies:
                body = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
                yield from self._fill(body.numpy().data)
            yield packet, layout, body

    def _fill(self, memory: memoryview) -> Iterator[None]:
        """Fill memory, first with what came with the last bytes; yield where more must come."""
        size = min(len(memory), len(self._unread))
        memory[:size] = self._unread[:size]
        memory, self._unread = memory[size:], self._unread[size:]
        while memory:
            if self._is_empty:  # as the last call has told
                self._is_empty = False
                yield
            try:
                size, *_ = self.connection.recvmsg_into([memory, self._buffer])
            except BlockingIOError:
                self._is_empty = True
                continue
            except OSError as error:
                raise ConnectionError(error.strerror or str(error)) from error
            if not size:
                raise ConnectionError("Connection closed by peer")
            self._is_empty = size < len(memory) + _BUFFER_BYTES
            self._unread = self._buffer[: max(size - len(memory), 0)]
            memory = memory[size:]


class Transport:
    """The links of one rank to its neighbours; none by default: one rank.

    ``place`` is a rank's in the pipeline, and the number of its first stage; ``ranks`` are the
    global ranks. Packets of a directed link arrive in the order of sending, then what broke it, if
    anything did. Nothing runs in the background that the caller could wait for: it polls, at every
    action and while it waits. Tensors of a GPU are copied through the host, which waits for them.
    """

    def __init__(
        self,
        place: int = 0,
        ranks: Sequence[int] = (0,),
        links: Mapping[int, Link] | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self.place: Final = place
        self.ranks: Final = tuple(ranks)
        self.links: Final = dict(links or {})
        self.device: Final = device
        self.inbox: Final[deque[tuple[int, Packet]]] = deque()
        # A ConnectionError for each link that has ended, a ValueError after an invalid packet.
        self.broken: Final[dict[int, Exception]] = {}
        self._poller: Final = select.poll()  # select.select() takes no descriptor over 1,023
        self._places: Final = {link.connection.fileno(): at for at, link in self.links.items()}
        for number in self._places:
            self._poller.register(number, select.POLLIN)

    def send(self, place: int, packet: Packet) -> None:
        """Send to a neighbour without waiting for it."""
        self.links[place].send(packet, pack(packet.tensors).cpu() if packet.tensors else None)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Advance all transfers; wait up to ``timeout_s`` for something to happen."""
        for number, _ in self._poller.poll(timeout_s * 1e3):
            place = self._places[number]
            try:
                while (received := self.links[place].receive()) is not None:
                    self._take(place, *received)
            except Exception as error:
                self._poller.unregister(number)
                self._break(place, error)

    def is_sent(self, place: int) -> bool:
        """Return whether everything is sent to a neighbour, or never will be."""
        return place in self.broken or self.links[place].is_idle

    def flush(self, timeout_s: float, places: Iterable[int]) -> int | None:
        """Wait until everything is sent to ``places``; return one that did not take it in time."""
        deadline = time.monotonic() + timeout_s
        while late := [place for place in places if not self.is_sent(place)]:
            left = deadline - time.monotonic()
            if left <= 0:
                return late[0]
            self.poll(min(left, 1e-3))
        return None

    def close(self) -> None:
        """Close the links; the transport is not used again."""
        for link in self.links.values():
            link.close()

    def _take(self, place: int, packet: Packet, layout: Layout, body: Tensor | None) -> None:
        """Take a packet that has come."""
        if body is not None:
            packet = packet._replace(tensors=unpack(body.to(self.device), layout))
        self.inbox.append((place, packet))

    def _break(self, place: int, error: Exception) -> None:
        self.broken[place] = error


def _close_in_child() -> None:
    """Leave the links to the parent: a child must neither end them nor keep them open."""
    for link in _open:
        link.connection.close()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_in_child)
