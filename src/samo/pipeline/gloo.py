"""Links over torch.distributed with gloo, for CPUs and, through pinned host memory, for GPUs.

A gloo receive cannot be polled: it says that it is done only to whoever waits for it. So a thread for
each neighbour waits, and puts what came into one queue, from which the stage takes whatever is first.
Sends have a thread for each neighbour too: an unfinished send is cancelled when its tensor is dropped,
and one that waits for a GPU would hold up the stage.
"""

import datetime
import queue
import threading
import time
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from samo.pipeline.transport import Arrival
from samo.pipeline.wire import DATA_KINDS, HEADER_WORDS, Decoder, Encoder, Form, Packet

__all__ = ["GlooTransport"]


class GlooTransport:
    """The links of this rank within a group of ranks, one for each stage.

    The group is its own: a batch that fails takes the connections with it, and the group that the
    caller gave stays in order.

    Args:
        group: Ranks in the order of the stages.
        device: Where received tensors are wanted.
        timeout: Seconds after which a send or receive is given up.
        tied: Sets of stages that add up gradients.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout: float,
        tied: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self.stage = dist.get_rank(group)
        self.num_stages = len(self.ranks)
        self.device: Final = device
        # The stage gives up first and says whom it waited for; gloo's own limit is for threads.
        self._limit: Final = datetime.timedelta(seconds=2 * timeout + 5)
        self._group: Final = self._new_group(self.ranks, "gloo")
        self._tied: Final = {
            stages: self._new_group([self.ranks[s] for s in stages], "gloo")
            for stages in tied
            if self.stage in stages
        }
        self._inbox: Final[queue.Queue[Arrival]] = queue.Queue()
        neighbours = [s for s in (self.stage - 1, self.stage + 1) if 0 <= s < self.num_stages]
        self._receivers: Final = {s: _Receiver(self, s) for s in neighbours}
        self._senders: Final = {s: _Sender(self, s) for s in neighbours}

    def begin(self, expected: dict[int, int]) -> None:
        """Start to receive."""
        for stage, count in expected.items():
            if count:
                self._receivers[stage].wanted.put(count)

    def send(self, stage: int, packet: Packet) -> None:
        """Send to a neighbour, without waiting for it."""
        self._senders[stage].put(packet)

    def receive(self, timeout: float) -> Arrival | None:
        """Return whatever came first."""
        try:
            arrival = self._inbox.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            return None
        if arrival.packet is not None and self.device.type == "cuda":
            for tensor in arrival.packet.tensors:
                _take_over(tensor)
        return arrival

    def flush(self, timeout: float) -> int | None:
        """Wait until everything is sent."""
        deadline = time.monotonic() + timeout
        for stage, sender in self._senders.items():
            if not sender.join(deadline - time.monotonic()):
                return stage
        return None

    def add_up(self, tensors: list[Tensor], stages: tuple[int, ...]) -> None:
        """Replace each tensor by its sum over some stages."""
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._tied[stages])

    def copy_first(self, tensors: list[Tensor], stages: tuple[int, ...]) -> None:
        """Replace each tensor by that of the first of some stages."""
        for tensor in tensors:
            dist.broadcast(tensor, self.ranks[stages[0]], group=self._tied[stages])

    def close(self) -> None:
        """Stop the threads that wait for nothing; one in the middle of a transfer ends with it."""
        for receiver in self._receivers.values():
            receiver.wanted.put(None)
        for sender in self._senders.values():
            sender.put(None)

    # What threads call ---------------------------------------------------------------------------

    def arrived(self, arrival: Arrival) -> None:
        """Put something into the queue."""
        self._inbox.put(arrival)

    def transmit(self, stage: int, encoder: Encoder, packet: Packet, ready: object) -> None:
        """Send header, body and tensors, and wait until they are gone."""
        words, body = encoder.encode(packet)
        self._send_words(words, stage)
        if body:
            self._send_words(body, stage)
        for tensor in packet.tensors:
            if tensor.numel():
                self._send_tensor(tensor, stage, ready)

    def fetch(self, stage: int, decoder: Decoder) -> Packet:
        """Wait for the next packet of a link."""
        header = decoder.header(self._receive_words(HEADER_WORDS, stage))
        body = self._receive_words(header.body_words, stage) if header.body_words else []
        form: Form = decoder.form(header, body) if header.kind in DATA_KINDS else ()
        tensors = tuple(self._receive_tensor(dtype, shape, stage) for dtype, _, shape in form)
        return decoder.packet(header, body, tensors, form)

    def _send_words(self, words: list[int], stage: int) -> None:
        dist.send(torch.tensor(words), self.ranks[stage], self._group, tag=self.stage)

    def _receive_words(self, count: int, stage: int) -> list[int]:
        words = torch.empty(count, dtype=torch.int64)
        dist.recv(words, self.ranks[stage], self._group, tag=stage)
        return words.tolist()

    def _send_tensor(self, tensor: Tensor, stage: int, ready: object) -> None:
        if tensor.is_cuda:
            tensor = _to_host(tensor, ready)
        dist.send(tensor.contiguous(), self.ranks[stage], self._group, tag=self.stage)

    def _receive_tensor(self, dtype: torch.dtype, shape: tuple[int, ...], stage: int) -> Tensor:
        is_cuda = self.device.type == "cuda"
        host = torch.empty(shape, dtype=dtype, pin_memory=is_cuda)
        if host.numel():
            dist.recv(host, self.ranks[stage], self._group, tag=stage)
        return _to_device(host, self.device) if is_cuda else host

    def _new_group(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
        group = dist.new_group(
            list(ranks), timeout=self._limit, backend=backend, use_local_synchronization=True
        )
        assert isinstance(group, dist.ProcessGroup), "this rank is one of the ranks"
        return group


class _Receiver(threading.Thread):
    """Waits for packets of one neighbour, as many as are wanted."""

    def __init__(self, transport: GlooTransport, stage: int) -> None:
        super().__init__(name=f"samo-receive-{stage}", daemon=True)
        self.wanted: Final[queue.Queue[int | None]] = queue.Queue()
        self._transport = transport
        self._stage = stage
        self._decoder = Decoder(stage)
        self.start()

    def run(self) -> None:
        while (count := self.wanted.get()) is not None:
            while count:
                try:
                    packet = self._transport.fetch(self._stage, self._decoder)
                except Exception as error:
                    self._transport.arrived(Arrival(self._stage, error=error))
                    return
                count -= packet.kind in DATA_KINDS
                self._transport.arrived(Arrival(self._stage, packet))


class _Sender(threading.Thread):
    """Sends packets to one neighbour, one after the other."""

    def __init__(self, transport: GlooTransport, stage: int) -> None:
        super().__init__(name=f"samo-send-{stage}", daemon=True)
        self._queue: Final[queue.Queue[tuple[Packet, object] | None]] = queue.Queue()
        self._transport = transport
        self._stage = stage
        self._encoder = Encoder(transport.stage)
        self._pending = 0
        self._changed = threading.Condition()
        self.start()

    def put(self, packet: Packet | None) -> None:
        if packet is None:
            self._queue.put(None)
            return
        with self._changed:
            self._pending += 1
        self._queue.put((packet, _ready_event(packet.tensors)))

    def join(self, timeout: float | None = None) -> bool:  # type: ignore[override]
        """Wait until nothing is left to send; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout)

    def run(self) -> None:
        while (entry := self._queue.get()) is not None:
            packet, ready = entry
            try:
                self._transport.transmit(self._stage, self._encoder, packet, ready)
            except Exception as error:
                self._transport.arrived(Arrival(self._stage, error=error))
                return
            del entry, packet
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()


def _ready_event(tensors: Sequence[Tensor]) -> object:
    """Mark the point after which the tensors are computed."""
    for tensor in tensors:
        if tensor.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(tensor.device))
            return event
    return None


def _to_host(tensor: Tensor, ready: object) -> Tensor:
    """Copy to pinned memory on a stream of its own; waits for that copy, not for the device."""
    assert isinstance(ready, torch.cuda.Event), "packets with CUDA tensors have an event"
    stream = torch.cuda.Stream(tensor.device)
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        stream.synchronize()
    return host


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy from pinned memory on a stream of its own; `_take_over` lets the reader wait for it."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        tensor = host.to(device, non_blocking=True)
        tensor._samo_ready = stream.record_event()  # type: ignore[attr-defined]
    return tensor


def _take_over(tensor: Tensor) -> None:
    """Let the current stream wait until a tensor is there."""
    ready = getattr(tensor, "_samo_ready", None)
    if ready is not None:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(ready)
        tensor.record_stream(stream)
        del tensor._samo_ready  # type: ignore[attr-defined]


