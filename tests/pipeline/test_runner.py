"""Runners in threads over a network in memory: gradients, tuples, and whom to blame."""

import copy
import queue
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samo
from samo.pipeline.runner import Batch, Runner, as_tuple
from samo.pipeline.transport.base import Arrival, Transport
from samo.pipeline.transport.wire import Packet

ONE = Packet("activation", 0, 0, 1, (torch.ones(1),), (False,))
ABORT = Packet("abort", 0, stage=0, reason="OSError: disk")


class MemoryTransport(Transport):
    """Links between threads: a queue for each direction."""

    def __init__(self, links: dict[Any, Any], stage: int, num_stages: int, is_ring: bool) -> None:
        super().__init__(stage, range(num_stages), is_ring=is_ring)
        self.links = links
        self.open: set[int] = set()

    def begin(self) -> None:
        self.open = set(self.neighbours)

    def send(self, stage: int, packet: Packet) -> None:
        tensors = tuple(tensor.detach().clone() for tensor in packet.tensors)
        self.links[self.stage, stage].put(replace(packet, tensors=tensors))

    def receive(self, timeout_s: float) -> Arrival | None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for stage in self.open:
                link = self.links[stage, self.stage]
                if not link.empty():
                    packet = link.get()
                    if packet.kind == "end":  # what follows belongs to the next batch
                        self.open.discard(stage)
                    return Arrival(stage, packet)
            time.sleep(1e-4)
        return None


def network(num_stages: int, is_ring: bool = False) -> list[MemoryTransport]:
    places = range(num_stages)
    links: dict[Any, Any] = {(a, b): queue.SimpleQueue() for a in places for b in places}
    return [MemoryTransport(links, stage, num_stages, is_ring) for stage in places]


def run_threads(stages: list[nn.Module], batches: list[Batch], timeout_s: float = 20.0) -> Any:
    """Run two batches on each rank, in threads; return losses or the error of each."""
    ranks = range(len(batches))
    transports = network(len(ranks), is_ring=len(stages) > len(ranks))

    def work(rank: int) -> Any:
        own = stages[rank :: len(ranks)]
        runner = Runner(own, transports[rank], in_flight=[2] * len(own), timeout_s=timeout_s)
        try:
            return [runner.run(lambda: batches[rank]) for _ in range(2)]
        except Exception as error:
            with pytest.raises(samo.PeerError, match="the pipeline failed earlier"):
                runner.run(lambda: batches[rank])
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


def total(number: int, output: Tensor) -> Tensor:
    return output.sum()


def run_last(transport: Transport, timeout_s: float = 5, num_micro_batches: int = 1) -> Any:
    """Run a batch on the last of two stages; packets of the other one come from the test."""
    runner = Runner([nn.Identity()], transport, in_flight=[1], timeout_s=timeout_s)
    return runner.run(lambda: Batch(num_micro_batches, loss=total))


def test_an_output_that_is_no_tensor_is_refused() -> None:
    assert len(as_tuple([torch.ones(1), torch.ones(1)])) == 2
    with pytest.raises(TypeError, match=r"must return a tensor or a tuple of tensors, got dict"):
        as_tuple({"a": 1})


class TwoWays(nn.Module):
    """Takes and gives a tuple: values that need a gradient, and whole numbers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) + index.unsqueeze(1), index + 1


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(3, 3), (2, 4), (2, 6), (3, 6)])
def test_tuples_and_layers_that_work_in_place_give_the_gradients_of_one_process(
    num_ranks: int, num_stages: int
) -> None:
    stages: list[nn.Module] = [TwoWays() for _ in range(num_stages)]
    # The received tensor is changed in place, as a convolution's ReLU often does.
    stages[1].register_forward_pre_hook(lambda module, args: (args[0].relu_(), args[1]))
    whole = copy.deepcopy(stages)
    for stage in stages:
        stage.register_forward_hook(lambda *_: time.sleep(random.random() / 100))
    pieces = [(torch.randn(n, 4), torch.arange(n)) for n in (3, 3, 2)]

    def loss(number: int, output: Any) -> Tensor:
        return (output[0] * output[1].unsqueeze(1)).square().sum()

    middle = [Batch(3) for _ in range(num_ranks - 2)]
    results = run_threads(stages, [Batch(3, pieces), *middle, Batch(3, loss=loss)])
    for _ in range(2):
        losses = []
        for number, piece in enumerate(pieces):
            output: Any = piece
            for stage in whole:
                output = stage(*output)
            losses.append(loss(number, output))
            losses[-1].backward()
    assert all(torch.equal(found[1], sum(losses[1:], losses[0])) for found in results)
    for mine, theirs in zip(stages, whole):
        for param, wanted in zip(mine.parameters(), theirs.parameters()):
            assert torch.equal(param.grad, wanted.grad)


class Fails(nn.Module):
    """Fails in its first forward pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "hangs":
            time.sleep(1.2)
        if self.how == "raises":
            raise KeyError("no such layer")
        return x


@pytest.mark.parametrize(
    ("how", "text"), [("hangs", "has been silent for"), ("raises", "KeyError: 'no such layer'")]
)
def test_a_stage_that_fails_is_named_by_all_others(how: str, text: str) -> None:
    stages = [Fails(how if stage == 2 else "") for stage in range(4)]
    batches = [Batch(4, is_training=False) for _ in range(4)]
    batches[0] = Batch(4, [(torch.ones(1),)] * 4, is_training=False)
    batches[3] = Batch(4, loss=total, is_training=False)
    errors = run_threads(stages, batches, timeout_s=0.4)
    for stage in (0, 1, 3):
        assert (errors[stage].rank, errors[stage].stage) == (2, 2)
        assert str(errors[stage]).startswith(f"rank 2 (stage 2 of 4) {text}")
    assert any(errors[stage].is_timeout for stage in (1, 3)) == (how == "hangs")


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        (replace(ONE, step=3), "sent activation of batch 3 in batch 0"),
        (replace(ONE, is_training=False), r"rank 0 .* called eval\(\) where this rank"),
        (replace(ONE, stage=0), "sent activation for stage 0, which is not on this rank"),
        (replace(ONE, kind="gradient"), "sent gradient 0 of 2 .* no gradient was due"),
        (replace(ONE, micro_batch=1), "sent activation 1 .* activation 0 was due"),
        (ABORT, r"rank 0 \(stage 0 of 2\) OSError: disk"),
    ],
)
def test_a_packet_out_of_place_names_its_sender(packet: Packet, text: str) -> None:
    other, transport = network(2)
    other.send(1, packet)
    with pytest.raises(samo.PeerError, match=text) as caught:
        run_last(transport, num_micro_batches=2)
    assert caught.value.rank == 0


@pytest.mark.parametrize(
    ("arrivals", "rank", "text", "is_timeout"),
    [
        ([ConnectionError("Closed")], 0, r"is gone \(Closed\)", False),
        ([TimeoutError("Timed out")], 0, r"did not answer \(Timed out\)", True),
        ([ValueError("sent an invalid header")], 0, r"of 3\) sent an invalid header", False),
        # An "abort" counts more than the closed connection, which may be seen before it.
        ([ConnectionError(), replace(ABORT, stage=2)], 2, r"of 3\) OSError: disk", False),
        ([Packet("end", 0), ConnectionError(), replace(ABORT, stage=2)], 2, "OSError: disk", False),
    ],
)
def test_a_broken_link_names_the_stage_at_fault(
    arrivals: list[Any], rank: int, text: str, is_timeout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, left = network(3)[1], list(arrivals)

    def receive(timeout_s: float) -> Arrival | None:
        found = left.pop(0) if left else None
        if isinstance(found, Exception):
            return Arrival(0, error=found)
        return found and Arrival(0, found)

    monkeypatch.setattr(transport, "receive", receive)
    runner = Runner([nn.Identity()], transport, in_flight=[1], timeout_s=5)
    with pytest.raises(samo.PeerError, match=text) as caught:
        runner.run(lambda: Batch(1))
    assert (caught.value.rank, caught.value.is_timeout) == (rank, is_timeout)


def test_a_batch_ends_when_each_neighbour_has_ended_it() -> None:
    """A rank that exits earlier takes down a neighbour that still waits for messages."""
    other, transport = network(2)
    other.begin()
    other.send(1, ONE)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run_last, transport)
        while True:
            arrival = other.receive(1.0)
            assert arrival is not None
            if arrival.packet.kind == "end":
                break
        with pytest.raises(TimeoutError):
            done.result(timeout=0.1)
        other.send(1, Packet("end", 0))
        assert done.result(timeout=2) == 1


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ((), r"rank 0 .stage 0 of 2. has not ended its batch for 0\.[34]"),
        ((ONE,), "sent more than belongs to the"),
        ((ABORT,), "OSError: disk"),
    ],
)
def test_a_neighbour_that_does_not_end_its_batch_is_named(more: Any, text: str) -> None:
    other, transport = network(2)
    for packet in (ONE, *more):
        other.send(1, packet)
    with pytest.raises(samo.PeerError, match=text):
        run_last(transport, timeout_s=0.1)


def test_gradients_that_do_not_fit_name_their_sender() -> None:
    transport, other = network(2)
    other.send(0, Packet("gradient", 0, 0, 0))
    runner = Runner([nn.Linear(1, 1)], transport, in_flight=[1], timeout_s=5)
    with pytest.raises(samo.PeerError, match="sent 0 gradients for 1 outputs of 0"):
        runner.run(lambda: Batch(1, [(torch.ones(1, 1),)]))


def test_a_neighbour_that_is_alive_and_sends_no_data_is_given_up_in_the_end() -> None:
    other, transport = network(2)
    other.begin()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run_last, transport, timeout_s=0.1)
        while not done.done():
            if other.receive(0.02) is not None:
                other.send(1, Packet("alive", 0))
        with pytest.raises(samo.PeerError, match=r"is alive, but has sent no data for 0\.3") as e:
            done.result()
    assert e.value.is_timeout
