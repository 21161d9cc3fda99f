"""The transport for NCCL between two threads of one process, over copies in place of NCCL."""

import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from samo.pipeline.peers import Peers
from samo.pipeline.runner import Batch, Runner
from samo.pipeline.transport.nccl import NcclTransport
from samo.pipeline.transport.tcp import Link


class HostEvent:
    def query(self) -> bool:
        return True


class HostStream:
    def record_event(self) -> HostEvent:
        return HostEvent()

    def wait_event(self, event: HostEvent) -> None: ...


class Host:
    """Stands for ``torch.cuda`` on a CPU, where everything is done at once."""

    def Stream(self, device: object = None) -> HostStream:  # noqa: N802
        return HostStream()

    def current_stream(self, device: object = None) -> HostStream:
        return HostStream()

    def stream(self, stream: HostStream) -> AbstractContextManager[None]:
        return nullcontext()


class Work:
    event: Any = None

    def is_completed(self) -> bool:
        return self.event is not None and self.event.query()

    def wait(self) -> None:
        assert self.is_completed()


class LocalComm:
    """A directed link: a copy on a stream of its own, once both sides have posted."""

    def __init__(self, cuda: Any, device: torch.device) -> None:
        self.cuda, self.stream = cuda, cuda.Stream(device)
        self.posted: list[deque[tuple[Work, Tensor, Any]]] = [deque(), deque()]
        self.lock = threading.Lock()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._post(0, tensors[0])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._post(1, tensors[0])

    def abort(self) -> None: ...

    def _post(self, side: int, tensor: Tensor) -> Work:
        work = Work()
        ready = self.cuda.current_stream(tensor.device).record_event()
        with self.lock:
            self.posted[side].append((work, tensor, ready))
            while all(self.posted):
                (send, source, filled), (recv, target, free) = (p.popleft() for p in self.posted)
                with self.cuda.stream(self.stream):
                    self.stream.wait_event(filled)
                    self.stream.wait_event(free)
                    target.copy_(source, non_blocking=True)
                    send.event = recv.event = self.stream.record_event()
        return work


class LocalTransport(NcclTransport):
    def _hand_over(self, body: Tensor) -> None:
        if body.is_cuda:
            super()._hand_over(body)


def transports(device: torch.device, cuda: Any) -> list[LocalTransport]:
    """Return both ends of a link."""
    ends = socket.socketpair()
    comms = LocalComm(cuda, device), LocalComm(cuda, device)
    found = []
    for place, end in enumerate(ends):
        end.setblocking(False)
        links = {1 - place: Link(end, has_bodies=False)}
        both = {1 - place: comms if place == 0 else comms[::-1]}
        found.append(LocalTransport(place, (0, 1), links, device, both, cuda))
    return found


def train_two_stages(
    stages: list[nn.Module],
    inputs: list[tuple[Tensor, ...]],
    loss: Callable[[int, Any], Tensor],
    cuda: Any,
    batches: int = 3,
) -> list[Any]:
    """Train two stages in two threads, each on a stream of its own; return losses or errors."""
    device, count = inputs[0][0].device, len(inputs)
    ends = transports(device, cuda)

    def work(place: int) -> Any:
        stream = cuda.Stream(device)
        stream.wait_event(ready)
        with cuda.stream(stream):
            runner = Runner([stages[place]], Peers(ends[place], timeout_s=30), [2])
            batch = Batch(count, inputs if place == 0 else None, loss if place == 1 else None)
            found = [runner.run(lambda: batch) for _ in range(batches)]
        stream.synchronize() if device.type == "cuda" else None
        return found

    ready = cuda.current_stream(device).record_event()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))
    for end in ends:
        end.close()
    return results
