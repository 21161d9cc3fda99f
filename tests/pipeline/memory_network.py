"""A network between threads of one process, with seeded delays."""

import queue
import random
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final

from samo.pipeline.transport.base import Arrival
from samo.pipeline.transport.wire import DATA_KINDS, Decoder, Encoder, Packet


class MemoryNetwork:
    """The links between all stages; give each thread the transport of its stage.

    Every packet goes through the encoding of a real network. It is handed over after a delay drawn
    for it, but never before one that was sent earlier over the same link.
    """

    def __init__(self, num_stages: int, *, seed: int = 0, max_delay: float = 0.0) -> None:
        draw = random.Random(seed)
        self._delay = {
            (a, b): draw.random() * max_delay for a in range(num_stages) for b in (a - 1, a + 1)
        }
        self._draw = draw
        self._lock: Final = threading.Lock()
        self._transports: Final = [MemoryTransport(self, s, num_stages) for s in range(num_stages)]

    def transport(self, stage: int) -> "MemoryTransport":
        """Return the links of one stage."""
        return self._transports[stage]

    def due(self, link: tuple[int, int], not_before: float) -> float:
        """Draw when a packet arrives."""
        with self._lock:
            jitter = self._draw.random()
        return max(time.monotonic() + self._delay[link] * (0.5 + jitter), not_before)


class MemoryTransport:
    """The links of one stage of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, stage: int, num_stages: int) -> None:
        self.stage = stage
        self.num_stages = num_stages
        self.ranks: Sequence[int] = range(num_stages)
        self.network: Final = network
        self._inbox: Final[queue.PriorityQueue[tuple[float, int, int, Packet | None]]] = (
            queue.PriorityQueue()
        )
        self._last: dict[int, float] = {}
        self._encoders = {s: Encoder(stage) for s in (stage - 1, stage + 1)}
        self._decoders = {s: Decoder(s) for s in (stage - 1, stage + 1)}
        self._count = 0

    def begin(self) -> None:
        """Nothing to do: packets are taken as they come."""

    def send(self, stage: int, packet: Packet) -> None:
        """Send to a neighbour."""
        target = self.network.transport(stage)
        words, body = self._encoders[stage].encode(packet)
        decoder = target._decoders[self.stage]
        header = decoder.header(words)
        form = decoder.form(body) if packet.kind in DATA_KINDS else ()
        tensors = tuple(tensor.detach().clone() for tensor in packet.tensors)
        arrived = decoder.packet(header, body, tensors, form)
        due = self.network.due((self.stage, stage), self._last.get(stage, 0.0))
        self._last[stage] = due
        self._count += 1
        target._inbox.put((due, self.stage * 10**9 + self._count, self.stage, arrived))

    def receive(self, timeout_s: float) -> Arrival | None:
        """Return whatever came first."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                entry = self._inbox.get(timeout=left)
            except queue.Empty:
                return None
            wait = entry[0] - time.monotonic()
            if wait <= 0:
                return Arrival(entry[2], entry[3])
            self._inbox.put(entry)  # one that comes earlier may still be sent
            time.sleep(min(wait, left, 1e-3))
        return None

    def flush(self, timeout_s: float, stages: Iterable[int]) -> int | None:
        """Nothing to do: a packet is sent when `send` returns."""
        return None

    def close(self) -> None:
        """Nothing to do."""
