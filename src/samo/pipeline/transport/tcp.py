"""Links over TCP, for tensors on a CPU and for the headers of all others.

A gloo receive can neither be polled nor cancelled: it needs a thread for each neighbour, which
wakes up at the wrong moment when the process exits. Sockets need none, and one call waits for all
neighbours. What a socket does not take at once is pushed by a thread that lives until it is sent.
"""

import ctypes
import os
import select
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from samo.pipeline.transport.base import Arrival, Transport
from samo.pipeline.transport.wire import (
    HEADER_BYTES,
    Decoder,
    Encoder,
    Layout,
    Packet,
    pack,
    with_tensors,
)

__all__ = ["Link", "TcpTransport"]

Received = tuple[Packet, Layout, Tensor | None]

_BUFFER_BYTES: Final = 2**14
"""Room for what comes behind the bytes that are due: a small body, or the next packets."""

_open: Final[weakref.WeakSet["Link"]] = weakref.WeakSet()


class Link:
    """A connection to one neighbour, whose bodies may travel another way."""

    def __init__(
        self, connection: socket.socket, *, has_bodies: bool = True, is_pinned: bool = False
    ) -> None:
        self.connection: Final = connection
        self.encoder: Final = Encoder()
        self._has_bodies, self._is_pinned = has_bodies, is_pinned
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
        parts = [memoryview(self.encoder.encode(packet))]
        if body is not None and body.numel():
            parts.append(_memory(body))
        with self._lock, suppress(OSError):
            if not self._outbox:
                parts = _rest(parts, self._send(parts))
            if not parts:
                return
            # The caller may write to its tensors again.
            self._outbox.extend(memoryview(bytes(part)) for part in parts)
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
        poller = select.poll()  # select.select() takes no descriptor over 1,023
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
        decoder, header = Decoder(), bytearray(HEADER_BYTES)
        while True:
            yield from self._fill(memoryview(header))
            text = bytearray(decoder.text_bytes(header))
            if text:
                yield from self._fill(memoryview(text))
            packet, layout = decoder.decode(header, text)
            body: Tensor | None = None
            if layout.specs and self._has_bodies:
                body = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=self._is_pinned)
                yield from self._fill(_memory(body))
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


class TcpTransport(Transport):
    """The links of this rank, for tensors on the host."""

    def __init__(
        self,
        stage: int,
        ranks: Sequence[int],
        links: Mapping[int, Link],
        *,
        is_ring: bool = False,
    ) -> None:
        super().__init__(stage, ranks, is_ring=is_ring)
        self._links: Final = dict(links)
        self._selector: Final = selectors.DefaultSelector()
        for place, link in self._links.items():
            self._selector.register(link.connection, selectors.EVENT_READ, place)
        self._broken: Final[set[int]] = set()

    def send(self, stage: int, packet: Packet) -> None:
        """Send to a neighbour without waiting for it."""
        self._links[stage].send(packet, pack(packet.tensors) if packet.tensors else None)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Read what has come."""
        for key, _ in self._selector.select(timeout_s):
            try:
                while (received := self._links[key.data].receive()) is not None:
                    self._take(key.data, *received)
            except Exception as error:
                self._selector.unregister(key.fileobj)
                self._break(key.data, error)

    def is_sent(self, stage: int) -> bool:
        """Return whether everything is sent to a neighbour, or never will be."""
        return stage in self._broken or self._links[stage].is_idle

    def close(self) -> None:
        """Close the links."""
        self._selector.close()
        for link in self._links.values():
            link.close()

    def _break(self, stage: int, error: Exception) -> None:
        self._broken.add(stage)
        self.inbox.append(Arrival(stage, error=error))

    def _take(self, stage: int, packet: Packet, layout: Layout, body: Tensor | None) -> None:
        """Take a packet that has come."""
        whole = packet if body is None else with_tensors(packet, body, layout)
        self.inbox.append(Arrival(stage, whole))


def _close_in_child() -> None:
    """Leave the links to the parent: a child must neither end them nor keep them open."""
    for link in _open:
        link.connection.close()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_in_child)


def _memory(body: Tensor) -> memoryview:
    """Return the memory of a body, which must be kept alive."""
    if not body.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * body.numel()).from_address(body.data_ptr())).cast("B")


def _rest(parts: Sequence[memoryview], sent: int) -> list[memoryview]:
    """Return what is left of some parts after their first bytes."""
    left = []
    for part in parts:
        if sent < len(part):
            left.append(part[sent:])
        sent = max(sent - len(part), 0)
    return left
