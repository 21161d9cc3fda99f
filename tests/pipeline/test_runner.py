"""Runners in threads, over a network in memory that delays: gradients, tuples, and whom to blame."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
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


def run_threads(
    stages: list[nn.Module], batches: list[Batch], *, seed: int = 0, timeout_s: float = 20.0
) -> list[Any]:
    """Run two batches on each stage, in threads; return losses or the error of each."""
    network = MemoryNetwork(len(stages), seed=seed, max_delay=0.003)

    def work(stage: int) -> Any:
        runner = Runner(stages[stage], network.transport(stage), in_flight=2, timeout_s=timeout_s)
        try:
            return [runner.run(lambda: batches[stage]) for _ in range(2)]
        except Exception as error:
            with pytest.raises(samo.PeerError, match="the pipeline failed earlier"):
                runner.run(lambda: batches[stage])
            return error

    with ThreadPoolExecutor(len(stages)) as pool:
        return list(pool.map(work, range(len(stages))))


def one_row(number: int, output: torch.Tensor) -> torch.Tensor:
    return output.sum()


def run_last(network: MemoryNetwork, timeout_s: float = 5, num_micro_batches: int = 1) -> Any:
    """Run a batch on the last of two stages; packets of the other one come from the test."""
    runner = Runner(nn.Identity(), network.transport(1), in_flight=1, timeout_s=timeout_s)
    return runner.run(lambda: Batch(num_micro_batches, loss=one_row))


@pytest.mark.parametrize("seed", range(3))
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


class Fails(nn.Module):
    """Fails in its first forward pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
    batches[3] = Batch(4, loss=one_row, is_training=False)
    errors = run_threads(stages, batches, timeout_s=0.4)
    for stage in (0, 1, 3):
        assert (errors[stage].rank, errors[stage].stage) == (2, 2)
        assert str(errors[stage]).startswith(f"rank 2 (stage 2 of 4) {text}")
    assert any(errors[stage].is_timeout for stage in (1, 3)) == (how == "hangs")


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
    with pytest.raises(samo.PeerError, match=text) as caught:
        run_last(network, num_micro_batches=2)
    assert caught.value.rank == 0


class Disordered(MemoryTransport):
    """Links on which the end of a connection is seen before what was sent on it."""

    arrivals: list[Arrival]

    def receive(self, timeout_s: float) -> Arrival | None:
        return self.arrivals.pop(0) if self.arrivals else None


@pytest.mark.parametrize("is_early", [False, True])
def test_an_abort_counts_more_than_a_closed_connection(is_early: bool) -> None:
    gone = Arrival(0, error=ConnectionError("Connection closed by peer"))
    abort = Arrival(0, Packet("abort", 0, origin=2, reason="OSError: disk"))
    transport = Disordered(MemoryNetwork(3), 1, 3)
    transport.arrivals = [Arrival(0, Packet("end", 0)), gone, abort] if is_early else [gone, abort]
    runner = Runner(nn.Identity(), transport, in_flight=1, timeout_s=5)
    with pytest.raises(samo.PeerError, match=r"rank 2 \(stage 2 of 3\) OSError: disk") as caught:
        runner.run(lambda: Batch(1))
    assert caught.value.rank == 2


@pytest.mark.parametrize(
    ("error", "text", "is_timeout"),
    [
        (ConnectionError("Connection closed"), r"is gone \(Connection closed\)", False),
        (TimeoutError("Timed out"), r"did not answer \(Timed out\)", True),
        (samo.PeerError("stage 0 sent an invalid header"), r"of 3\) sent an invalid header", False),
    ],
)
def test_a_broken_link_names_the_stage_at_its_end(error, text: str, is_timeout: bool) -> None:
    transport = Disordered(MemoryNetwork(3), 1, 3)
    transport.arrivals = [Arrival(0, error=error)]
    runner = Runner(nn.Identity(), transport, in_flight=1, timeout_s=5)
    with pytest.raises(samo.PeerError, match=text) as caught:
        runner.run(lambda: Batch(1))
    assert (caught.value.rank, caught.value.is_timeout) == (0, is_timeout)


ONE = Packet("activation", 0, 0, (torch.ones(1),), (False,))


def test_a_batch_ends_when_each_neighbour_has_ended_it() -> None:
    """A rank that exits earlier takes down a neighbour that still waits for messages."""
    network = MemoryNetwork(2)
    other = network.transport(0)
    other.send(1, ONE)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run_last, network)
        kinds = []
        while "end" not in kinds:
            arrival = other.receive(1.0)
            assert arrival is not None
            assert arrival.packet is not None
            kinds.append(arrival.packet.kind)
        with pytest.raises(TimeoutError):
            done.result(timeout=0.1)
        other.send(1, Packet("end", 0))
        assert done.result(timeout=2) == 1


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ((), r"rank 0 .stage 0 of 2. has not ended its batch for 0\.[34]"),
        ((ONE,), "sent more than belongs to the"),
        ((Packet("abort", 0, origin=0, reason="OSError: disk"),), "OSError: disk"),
    ],
)  # fmt: skip
def test_a_neighbour_that_does_not_end_its_batch_is_named(
    more: tuple[Packet, ...], text: str
) -> None:
    network = MemoryNetwork(2)
    for packet in (ONE, *more):
        network.transport(0).send(1, packet)
    with pytest.raises(samo.PeerError, match=text):
        run_last(network, timeout_s=0.1)


def test_gradients_that_do_not_fit_name_their_sender() -> None:
    network = MemoryNetwork(2)
    network.transport(1).send(0, Packet("gradient", 0, 0))
    runner = Runner(nn.Linear(1, 1), network.transport(0), in_flight=1, timeout_s=5)
    with pytest.raises(samo.PeerError, match="sent 0 gradients for 1 outputs of 0"):
        runner.run(lambda: Batch(1, [(torch.ones(1, 1),)]))


def test_a_neighbour_that_is_alive_and_sends_no_data_is_given_up_in_the_end() -> None:
    network = MemoryNetwork(2)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run_last, network, timeout_s=0.1)
        other = network.transport(0)
        while not done.done():
            if other.receive(0.02) is not None:
                other.send(1, Packet("alive", 0))
        with pytest.raises(samo.PeerError, match=r"is alive, but has sent no data for 0\.3") as e:
            done.result()
    assert e.value.is_timeout
