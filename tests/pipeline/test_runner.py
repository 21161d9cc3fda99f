"""Runners in threads over a network in memory: gradients, tuples, and whom to blame."""

import copy
import queue
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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

    def send(self, stage: int, packet: Packet) -> None:
        tensors = tuple(tensor.detach().clone() for tensor in packet.tensors)
        self.links[self.stage, stage].put(packet._replace(tensors=tensors))

    def poll(self, timeout_s: float = 0.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            for stage in self.neighbours:
                while not self.links[stage, self.stage].empty():
                    self.inbox.append(Arrival(stage, self.links[stage, self.stage].get()))
            if self.inbox or time.monotonic() >= deadline:
                return
            time.sleep(1e-4)


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
        (ONE._replace(step=3), "sent activation of batch 3 in batch 0"),
        (ONE._replace(is_training=False), r"rank 0 .* called eval\(\) where this rank"),
        (ONE._replace(stage=0), "sent activation for stage 0, which is not on this rank"),
        (ONE._replace(kind="gradient"), "sent gradient 0 of 2 .* no gradient was due"),
        (ONE._replace(micro_batch=1), "sent activation 1 .* activation 0 was due"),
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
    ("arrivals", "rank", "text"),
    [
        ([ConnectionError("Closed")], 0, r"is gone \(Closed\)"),
        ([ValueError("sent an invalid header")], 0, r"of 3\) sent an invalid header"),
        # What was sent before a link broke is read before.
        ([ABORT._replace(stage=2), ConnectionError("Closed")], 2, r"of 3\) OSError: disk"),
        ([ONE._replace(step=1)], 0, "sent activation of batch 1 in batch 0"),
    ],
)
def test_a_broken_link_names_the_stage_at_fault(arrivals: list[Any], rank: int, text: str) -> None:
    transport = network(3)[1]
    for found in arrivals:
        is_error = isinstance(found, Exception)
        transport.inbox.append(Arrival(0, error=found) if is_error else Arrival(0, found))
    runner = Runner([nn.Identity()], transport, in_flight=[1], timeout_s=5)
    with pytest.raises(samo.PeerError, match=text) as caught:
        runner.run(lambda: Batch(1))
    assert (caught.value.rank, caught.value.is_timeout) == (rank, False)


def test_a_neighbour_that_has_sent_everything_may_leave_and_is_missed_in_the_next_batch() -> None:
    transport = network(2)[1]
    transport.inbox.extend([Arrival(0, ONE), Arrival(0, error=ConnectionError("Closed"))])
    runner = Runner([nn.Identity()], transport, in_flight=[1], timeout_s=5)
    assert runner.run(lambda: Batch(1, loss=total)) == 1
    with pytest.raises(samo.PeerError, match=r"rank 0 .* is gone \(Closed\)"):
        runner.run(lambda: Batch(1, loss=total))


def test_data_of_the_next_batch_waits_for_it() -> None:
    """The first stage may begin a batch before its neighbour has left the last one."""
    transport = network(2)[1]
    later = ONE._replace(step=1, tensors=(torch.zeros(1),))
    transport.inbox.extend([Arrival(0, ONE), Arrival(0, later)])
    runner = Runner([nn.Identity()], transport, in_flight=[1], timeout_s=5)
    assert [float(runner.run(lambda: Batch(1, loss=total))) for _ in range(2)] == [1, 0]


class Late:
    """A collective that another rank does not join, or not in the first few waits."""

    def __init__(self, waits: int, error: str = "") -> None:
        self.waits, self.error = waits, error

    def is_completed(self) -> bool:
        return self.waits <= 0

    def wait(self, timeout: Any = None) -> None:
        self.waits -= 1
        if self.error and self.waits < 0:
            raise RuntimeError(self.error)
        if self.waits >= 0:  # it is done just after the time was over
            time.sleep(0.01)
            raise RuntimeError("Operation timed out!")


def test_a_collective_that_ends_when_the_time_of_a_wait_is_over_has_ended() -> None:
    runner = Runner([nn.Identity()], network(2)[1], in_flight=[1], timeout_s=5)
    for waits in range(4):
        runner.run_collective(partial(runner.wait, Late(waits)))
    with pytest.raises(samo.PeerError, match=r"did not join a collective \(Closed\)"):
        runner.run_collective(lambda: runner.wait(Late(2, "Closed")))


@pytest.mark.parametrize(
    ("arrivals", "text"),
    [
        ([], r"another rank did not join a collective \(Operation timed out!\)"),
        ([ABORT], r"rank 0 \(stage 0 of 2\) OSError: disk"),
        ([ConnectionError("Closed")], r"rank 0 \(stage 0 of 2\) is gone \(Closed\)"),
    ],
)
def test_a_rank_that_waits_for_a_collective_hears_of_failures(arrivals: Any, text: str) -> None:
    transport = network(2)[1]
    for found in arrivals:
        is_error = isinstance(found, Exception)
        transport.inbox.append(Arrival(0, error=found) if is_error else Arrival(0, found))
    transport.inbox.append(Arrival(0, ONE))  # of the next batch
    runner = Runner([nn.Identity()], transport, in_flight=[1], timeout_s=0.1)
    with pytest.raises(samo.PeerError, match=text):
        runner.run_collective(lambda: runner.wait(Late(999)))
    assert [arrival.packet for arrival in transport.inbox] in ([ONE], [])


def test_gradients_that_do_not_fit_name_their_sender() -> None:
    transport, other = network(2)
    layer = nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_: other.send(0, Packet("gradient", 0, 0, 0)))
    runner = Runner([layer], transport, in_flight=[1], timeout_s=5)
    with pytest.raises(samo.PeerError, match="sent 0 gradients for 1 outputs of 0"):
        runner.run(lambda: Batch(1, [(torch.ones(1, 1),)]))


def test_a_neighbour_that_is_alive_and_sends_no_data_is_given_up_in_the_end() -> None:
    other, transport = network(2)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run_last, transport, timeout_s=0.1)
        while not done.done():
            if other.receive(0.02) is not None:
                other.send(1, Packet("alive", 0))
        with pytest.raises(samo.PeerError, match=r"is alive, but has sent no data for 0\.3") as e:
            done.result()
    assert e.value.is_timeout
