"""Ranks as threads of one process; the transport for NCCL, over copies in place of NCCL."""

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from samo.errors import PeerError
from samo.pipeline.peers import Peers
from samo.pipeline.runner import Batch, Runner, as_tuple
from samo.pipeline.transport.nccl import NcclTransport
from samo.pipeline.transport.tcp import Link, Transport

Network = Callable[..., list[Transport]]


class Work:
    event: Any = None

    def is_completed(self) -> bool:
        return self.event is not None and self.event.query()

    def wait(self) -> None:
        assert self.is_completed()


class LocalComm:
    """A directed link: a copy on a stream of its own, once both sides have posted.

    ``cuda`` is torch.cuda; on a CPU a mock, all of whose events have happened.
    """

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


def ends(**settings: Any) -> list[Link]:
    """Return both ends of a link over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sockets = [socket.create_connection(server.getsockname()), server.accept()[0]]
    for one in sockets:
        one.setblocking(False)
    return [Link(one, **settings) for one in sockets]


def transports(device: torch.device, cuda: Any) -> list[LocalTransport]:
    """Return both ends of a link for NCCL."""
    comms = LocalComm(cuda, device), LocalComm(cuda, device)
    found = []
    for place, link in enumerate(ends(has_bodies=False)):
        both = {1 - place: comms if place == 0 else comms[::-1]}
        found.append(LocalTransport(place, (0, 1), {1 - place: link}, device, both, cuda))
    return found


def run_threads(
    transports: Sequence[Transport],
    stages: list[nn.Module],
    batches: list[Batch],
    *,
    steps: int,
    timeout_s: float = 30.0,
    cuda: Any = None,
) -> list[Any]:
    """Run the batch of each rank in a thread, some times; return the losses or errors of each."""
    cuda = cuda or MagicMock()
    ready = cuda.current_stream().record_event()

    def work(rank: int) -> Any:
        own = stages[rank :: len(batches)]
        runner = Runner(own, Peers(transports[rank], timeout_s), [2] * len(own))
        stream = cuda.Stream()
        stream.wait_event(ready)
        with cuda.stream(stream):
            try:
                losses = [runner.run(lambda: batches[rank]) for _ in range(steps)]
                stream.synchronize()
                return losses
            except Exception as error:
                with pytest.raises(PeerError, match="the pipeline failed earlier"):
                    runner.run(lambda: batches[rank])
                return error

    with ThreadPoolExecutor(len(batches)) as pool:
        results = list(pool.map(work, range(len(batches))))
    for transport in transports:
        transport.close()
    return results


def check_trained(
    stages: list[nn.Module],
    whole: list[nn.Module],
    results: list[list[Tensor]],
    inputs: list[tuple[Tensor, ...]],
    loss: Callable[[int, Any], Tensor],
    **tolerance: float,
) -> None:
    """Compare the last losses and all gradients with those of one process."""
    for _ in results[0]:
        losses = []
        for number, piece in enumerate(inputs):
            output: Any = piece
            for stage in whole:
                output = stage(*as_tuple(output))
            losses.append(loss(number, output))
            losses[-1].backward()
    wanted = sum(losses[1:], losses[0]).detach()
    for found in results:
        torch.testing.assert_close(found[-1], wanted, **tolerance)
    for mine, theirs in zip(stages, whole):
        for param, expected in zip(mine.parameters(), theirs.parameters()):
            torch.testing.assert_close(param.grad, expected.grad, **tolerance)
