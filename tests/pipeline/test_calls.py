"""What a micro-batch costs beside computing, counted: Python calls and calls of the socket."""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from samo.pipeline.peers import Peers
from samo.pipeline.runner import Batch, Runner
from samo.pipeline.transport.tcp import Transport
from samo.pipeline.transport.wire import Packet
from tests.pipeline.local import Network


class Counted(nn.Linear):
    """The layer of the last stage; each forward pass lets the next micro-batch come."""

    def __init__(self, first: Transport, num_micro_batches: int) -> None:
        super().__init__(4, 4)
        self.first, self.waiting = first, iter(range(num_micro_batches))
        self.counts: Counter[str] = Counter()

    def count(self, frame: FrameType, event: str, what: Any) -> None:
        if event in ("call", "c_call"):
            self.counts["all"] += 1
        if event == "c_call":
            self.counts[what.__name__] += 1

    def send(self) -> None:
        sys.setprofile(None)
        for number in self.waiting:
            packet = Packet("activation", 0, number, 1, (torch.ones(2, 4),), (True,), seed=3)
            self.first.send(1, packet)
            break
        sys.setprofile(self.count)

    def forward(self, x: Tensor, seed: int | None = None) -> Tensor:
        self.send()
        return super().forward(x)


def calls_of(pair: list[Transport], num_micro_batches: int) -> Counter[str]:
    """Return what the last stage of two calls in one batch."""
    layer = Counted(pair[0], num_micro_batches)
    own = Runner([layer], Peers(pair[1], timeout_s=20), [2])
    batch = Batch(num_micro_batches, loss=lambda number, output: output.sum())
    before = sys.getprofile()
    layer.send()
    try:
        own.run(lambda: batch)
    finally:
        sys.setprofile(before)
    return layer.counts


def test_a_micro_batch_takes_few_calls_and_a_message_one_of_the_socket(network: Network) -> None:
    few, many = calls_of(network(2), 8), calls_of(network(2), 24)
    each = {name: (many[name] - few[name]) / 16 for name in many}
    assert each["sendmsg"] == 1  # a header with its tensors
    assert each["recvmsg_into"] == 1
    assert each["poll"] == 2  # one before each pass
    assert each["all"] <= 260  # 237 with torch 2.13, whose own are among them
