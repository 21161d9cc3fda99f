"""A network between threads of one process, with seeded delays."""

import queue
import random
import threading
import time
from dataclasses import replace
from typing import Final

from samo.pipeline.transport.base import Arrival, Transport
from samo.pipeline.transport.wire import Packet, decode, encode


class MemoryNetwork:
    """The links between all stages; give each thread the transport of its stage.

    Every packet goes through the header of a real network. It is delivered after a delay drawn for
    it, but never before one that was sent earlier over the same link.
    """

    def __init__(self, num_stages: int, *, seed: int = 0, max_delay: float = 0.0) -> None:
        self._draw: Final = random.Random(seed)
        self._delay = {
            (a, b): self._draw.random() * max_delay
            for a in range(num_stages)
            for b in (a - 1, a + 1)
        }
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


class MemoryTransport(Transport):
    """The links of one stage of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, stage: int, num_stages: int) -> None:
        super().__init__(stage, range(num_stages))
        self.network: Final = network
        self.inbox: Final[queue.PriorityQueue[tuple[float, int, Arrival]]] = queue.PriorityQueue()
        self._last: dict[int, float] = {}
        self._sequence = dict.fromkeys(self.neighbours, 0)
        self._is_open = dict.fromkeys(self.neighbours, True)
        self._held_back: list[tuple[float, int, Arrival]] = []

    def begin(self) -> None:
        """Receive from all neighbours, also those that have sent "end"."""
        self._is_open = dict.fromkeys(self.neighbours, True)
        for entry in self._held_back:
            self.inbox.put(entry)
        self._held_back.clear()

    def send(self, stage: int, packet: Packet) -> None:
        """Send to a neighbour."""
        sequence = self._sequence[stage]
        self._sequence[stage] += 1
        arrived, _ = decode(encode(packet, sequence), stage=self.stage, sequence=sequence)
        arrived = replace(arrived, tensors=tuple(t.detach().clone() for t in packet.tensors))
        due = self.network.due((self.stage, stage), self._last.get(stage, 0.0))
        self._last[stage] = due
        order = sequence * self.num_stages + self.stage  # no two packets of an inbox are alike
        self.network.transport(stage).inbox.put((due, order, Arrival(self.stage, arrived)))

    def receive(self, timeout_s: float) -> Arrival | None:
        """Return the first arrival."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                entry = self.inbox.get(timeout=left)
            except queue.Empty:
                return None
            wait, arrival = entry[0] - time.monotonic(), entry[2]
            if not self._is_open[arrival.stage]:
                self._held_back.append(entry)
            elif wait > 0:
                self.inbox.put(entry)  # one that comes earlier may still be sent
                time.sleep(min(wait, left, 1e-3))
            else:
                is_end = arrival.packet is not None and arrival.packet.kind == "end"
                self._is_open[arrival.stage] = not is_end
                return arrival
        return None
