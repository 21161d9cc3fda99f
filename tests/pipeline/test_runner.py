"""Runners in threads, over a network in memory that delays: gradients, tuples, and whom to blame."""

import copy
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import samo
from samo.pipeline.runner import Batch, Runner, as_tuple
from samo.pipeline.transport.base import Arrival
from samo.pipeline.transport.wire import Packet
from tests.pipeline.memory_network import MemoryNetwork, MemoryTransport


def test_an_output_that_is_no_tensor_is_refused() -> None:
    assert len(as_tuple([torch.ones(1), torch.ones(1)])) == 2
    with pytest.raises(TypeError, match=r"must return a tensor or a tuple of tensors, got dict"):
        as_tuple({"a": 1})


class TwoWays(nn.Module):
    """Takes and gives a tuple: values that need a gradient, and whole numbers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) + index.unsqueeze(1), index + 1


def run_threads(stages: list[nn.Module], batches: list[Batch], *, seed: int, timeout: float = 20.0):
    network = MemoryNetwork(len(stages), seed=seed, max_delay=0.003)
    results: list[Any] = [None] * len(stages)

    def work(stage: int) -> None:
        runner = Runner(stages[stage], network.transport(stage), in_flight=2, timeout_s=timeout)
        try:
            results[stage] = [runner.run(lambda: batches[stage]) for _ in range(2)]
        except Exception as error:
            results[stage] = error

    threads = [threading.Thread(target=work, args=(s,)) for s in range(len(stages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("seed", range(5))
def test_tuples_and_layers_that_work_in_place_give_the_gradients_of_one_process(seed: int) -> None:
    stages: list[nn.Module] = [TwoWays(), TwoWays(), TwoWays()]
    # The received tensor is changed in place, as a convolution's ReLU often does.
    stages[1].register_forward_pre_hook(lambda module, args: (args[0].relu_(), args[1]))
    whole = copy.deepcopy(stages)
    pieces = [(torch.randn(n, 4), torch.arange(n)) for n in (3, 3, 2)]

    def loss(number: int, output: Any) -> torch.Tensor:
        return (output[0] * output[1].unsqueeze(1)).square().sum()

    batches = [Batch(3, pieces), Batch(3), Batch(3, loss=loss)]
    results = run_threads(stages, batches, seed=seed)
    for _ in range(2):
        total = torch.zeros(())
        for number, piece in enumerate(pieces):
            output: Any = piece
            for stage in whole:
                output = stage(*output)
            value = loss(number, output)
            value.backward()
            total = value.detach() if number == 0 else total + value.detach()
    for losses in results:
        assert torch.equal(losses[1], total)
    for mine, theirs in zip(stages, whole):
        for param, wanted in zip(mine.parameters(), theirs.parameters()):
            assert torch.equal(param.grad, wanted.grad)


def test_without_training_nothing_gets_a_gradient() -> None:
    stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
    x = [(torch.ones(1, 4),)] * 3
    batches = [
        Batch(3, x, is_training=False),
        Batch(3, loss=lambda number, y: y.sum(), is_training=False),
    ]
    results = run_threads(stages, batches, seed=1)
    expected = 3 * stages[1](stages[0](x[0][0])).sum()
    assert all(torch.allclose(loss, expected) for losses in results for loss in losses)
    assert all(param.grad is None for stage in stages for param in stage.parameters())


def test_a_stage_that_falls_silent_is_named_by_all_others() -> None:
    network = MemoryNetwork(4, seed=0)
    errors: list[Any] = [None] * 4
    hangs = threading.Event()

    class Hangs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hangs.wait(5)
            return x

    def work(stage: int) -> None:
        module = Hangs() if stage == 2 else nn.Identity()
        runner = Runner(module, network.transport(stage), in_flight=2, timeout_s=0.4)
        inputs = [(torch.ones(1, requires_grad=False),)] * 4 if stage == 0 else None
        loss = (lambda number, y: y.sum()) if stage == 3 else None
        try:
            runner.run(lambda: Batch(4, inputs, loss, is_training=False))
        except samo.PeerError as error:
            errors[stage] = error
        if stage == 1:
            with pytest.raises(samo.PeerError, match="the pipeline failed earlier"):
                runner.run(lambda: Batch(4))

    threads = [threading.Thread(target=work, args=(s,), daemon=True) for s in range(4)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for stage in (0, 1, 3):
        threads[stage].join()
    assert time.monotonic() - begin < 3
    hangs.set()
    threads[2].join()
    for stage in (0, 1, 3):
        assert errors[stage].rank == 2
        assert str(errors[stage]).startswith("rank 2 (stage 2 of 4) has been silent for")


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        (Packet("activation", 3, 0, (torch.ones(1),), (False,)), "sent activation of batch 3 in batch 0"),
        (Packet("activation", 0, 0, (torch.ones(1),), (False,), is_training=False), r"rank 0 \(stage 0 of 2\) called eval\(\) where this stage called step\(\)"),
        (Packet("gradient", 0, 0), "sent gradient in the wrong direction"),
        (Packet("activation", 0, 1, (torch.ones(1),), (False,)), "sent activation 1 .* activation 0 was"),
        (Packet("abort", 0, origin=0, reason="OSError: disk"), r"rank 0 \(stage 0 of 2\) OSError: disk"),
    ],
)  # fmt: skip
def test_a_packet_out_of_place_names_its_sender(packet: Packet, text: str) -> None:
    network = MemoryNetwork(2)
    network.transport(0).send(1, packet)
    runner = Runner(nn.Identity(), network.transport(1), in_flight=1, timeout_s=5)
    with pytest.raises(samo.PeerError, match=text) as caught:
        runner.run(lambda: Batch(2, loss=lambda number, y: y.sum()))
    assert caught.value.rank == 0


class Disordered(MemoryTransport):
    """Links on which the end of a connection is seen before what was sent on it."""

    arrivals: list[Arrival]

    def receive(self, timeout_s: float) -> Arrival | None:
        return self.arrivals.pop(0) if self.arrivals else None


@pytest.mark.parametrize("is_early", [False, True])
def test_last_words_count_more_than_a_closed_connection(is_early: bool) -> None:
    gone = Arrival(0, None, RuntimeError("Connection closed by peer"))
    abort = Arrival(0, Packet("abort", 0, origin=2, reason="OSError: disk"))
    transport = Disordered(MemoryNetwork(3), 1, 3)
    end = Arrival(0, Packet("end", 0))
    transport.arrivals = [end, abort, gone] if is_early else [gone, abort]
    runner = Runner(nn.Identity(), transport, in_flight=1, timeout_s=5)
    with pytest.raises(samo.PeerError, match=r"rank 2 \(stage 2 of 3\) OSError: disk") as caught:
        runner.run(lambda: Batch(1))
    assert caught.value.rank == 2


def test_a_batch_ends_when_each_neighbour_has_ended_it() -> None:
    """A rank that leaves earlier takes along a neighbour that still waits for messages."""
    network = MemoryNetwork(2)
    other = network.transport(0)
    other.send(1, Packet("activation", 0, 0, (torch.ones(1),), (False,)))
    runner = Runner(nn.Identity(), network.transport(1), in_flight=1, timeout_s=5)
    done = threading.Event()

    def work() -> None:
        runner.run(lambda: Batch(1, loss=lambda number, y: y.sum()))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    said = []
    while "end" not in said:
        arrival = other.receive(1.0)
        assert arrival is not None
        assert arrival.packet is not None
        said.append(arrival.packet.kind)
    assert not done.wait(0.1)
    other.send(1, Packet("end", 0))
    assert done.wait(2)
    thread.join()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ((), r"rank 0 .stage 0 of 2. has not ended its batch for 0\.[34]"),
        ((Packet("activation", 0, 1, (torch.ones(1),), (False,)),), "sent more than belongs to the"),
        ((Packet("abort", 0, origin=0, reason="OSError: disk"),), "OSError: disk"),
    ],
)  # fmt: skip
def test_a_neighbour_that_does_not_end_its_batch_is_named(
    more: tuple[Packet, ...], text: str
) -> None:
    network = MemoryNetwork(2)
    other = network.transport(0)
    for packet in (Packet("activation", 0, 0, (torch.ones(1),), (False,)), *more):
        other.send(1, packet)
    runner = Runner(nn.Identity(), network.transport(1), in_flight=1, timeout_s=0.1)
    with pytest.raises(samo.PeerError, match=text):
        runner.run(lambda: Batch(1, loss=lambda number, y: y.sum()))


def test_gradients_that_do_not_fit_name_their_sender() -> None:
    network = MemoryNetwork(2)
    network.transport(1).send(0, Packet("gradient", 0, 0))
    runner = Runner(nn.Linear(1, 1), network.transport(0), in_flight=1, timeout_s=5)
    with pytest.raises(samo.PeerError, match="sent 0 gradients for 1 outputs of 0"):
        runner.run(lambda: Batch(1, [(torch.ones(1, 1),)]))


def test_a_neighbour_that_is_there_and_sends_nothing_is_given_up_in_the_end() -> None:
    network = MemoryNetwork(2)
    runner = Runner(nn.Identity(), network.transport(1), in_flight=1, timeout_s=0.1)
    is_done = threading.Event()

    def answer() -> None:
        other = network.transport(0)
        while not is_done.is_set():
            if other.receive(0.02) is not None:
                other.send(1, Packet("alive", 0))

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(samo.PeerError, match=r"is alive, but has sent no data for 0\.3"):
        runner.run(lambda: Batch(1, loss=lambda number, y: y.sum()))
    is_done.set()
    thread.join()
