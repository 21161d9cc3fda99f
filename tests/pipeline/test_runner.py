"""Runners in threads over a network in memory: gradients, tuples, and whom to blame."""

import copy
import queue
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samo
from samo.pipeline.peers import Peers
from samo.pipeline.runner import Batch, Runner, as_tuple
from samo.pipeline.transport.connect import neighbours_of
from samo.pipeline.transport.tcp import Transport
from samo.pipeline.transport.wire import Packet

ONE = Packet("activation", 0, 0, 1, (torch.ones(1),), (False,))
ABORT = Packet("abort", 0, stage=0, reason="OSError: disk")


class MemoryTransport(Transport):
    """Links between threads: a queue for each direction."""

    def __init__(self, queues: dict[Any, Any], place: int, num_ranks: int, is_ring: bool) -> None:
        super().__init__(place, range(num_ranks))
        self.links.update(dict.fromkeys(neighbours_of(place, num_ranks, is_ring)))
        self.queues = queues

    def send(self, place: int, packet: Packet) -> None:
        tensors = tuple(tensor.detach().clone() for tensor in packet.tensors)
        self.queues[self.place, place].put(packet._replace(tensors=tensors))

    def poll(self, timeout_s: float = 0.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            for place in self.links:
                while not self.queues[place, self.place].empty():
                    self.inbox.append((place, self.queues[place, self.place].get()))
            if self.inbox or time.monotonic() >= deadline:
                return
            time.sleep(1e-4)

    def is_sent(self, place: int) -> bool:
        return True


def network(num_ranks: int, is_ring: bool = False) -> list[MemoryTransport]:
    places = range(num_ranks)
    queues: dict[Any, Any] = {(a, b): queue.SimpleQueue() for a in places for b in places}
    return [MemoryTransport(queues, place, num_ranks, is_ring) for place in places]


def runner_of(transport: Transport, layer: nn.Module, timeout_s: float = 5.0) -> Runner:
    return Runner([layer], Peers(transport, timeout_s), [1])


def run_threads(stages: list[nn.Module], batches: list[Batch], timeout_s: float = 20.0) -> Any:
    """Run two batches on each rank, in threads; return losses or the error of each."""
    ranks = range(len(batches))
    transports = network(len(ranks), is_ring=len(stages) > len(ranks))

    def work(rank: int) -> Any:
        own = stages[rank :: len(ranks)]
        runner = Runner(own, Peers(transports[rank], timeout_s), [2] * len(own))
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
    runner = runner_of(transport, nn.Identity(), timeout_s)
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
    ("packets", "error", "rank", "text"),
    [
        ([], ConnectionError("Closed"), 0, r"is gone \(Closed\)"),
        ([], ValueError("sent an invalid header"), 0, r"of 3\) sent an invalid header"),
        # What was sent before a link broke is read before.
        ([ABORT._replace(stage=2)], ConnectionError("Closed"), 2, r"of 3\) OSError: disk"),
        ([ONE._replace(step=1)], None, 0, "sent activation of batch 1 in batch 0"),
    ],
)
def test_a_broken_link_names_the_stage_at_fault(
    packets: list[Packet], error: Exception | None, rank: int, text: str
) -> None:
    transport = network(3)[1]
    transport.inbox.extend((0, packet) for packet in packets)
    transport.broken.update({} if error is None else {0: error})
    with pytest.raises(samo.PeerError, match=text) as caught:
        runner_of(transport, nn.Identity()).run(lambda: Batch(1))
    assert (caught.value.rank, caught.value.is_timeout) == (rank, False)


def test_a_neighbour_that_has_sent_everything_may_leave_and_is_missed_in_the_next_batch() -> None:
    transport = network(2)[1]
    transport.inbox.append((0, ONE))
    transport.broken[0] = ConnectionError("Closed")
    runner = runner_of(transport, nn.Identity())
    assert runner.run(lambda: Batch(1, loss=total)) == 1
    with pytest.raises(samo.PeerError, match=r"rank 0 .* is gone \(Closed\)"):
        runner.run(lambda: Batch(1, loss=total))


def test_data_of_the_next_batch_waits_for_it() -> None:
    """The first stage may begin a batch before its neighbour has left the last one."""
    transport = network(2)[1]
    later = ONE._replace(step=1, tensors=(torch.zeros(1),))
    transport.inbox.extend([(0, ONE), (0, later)])
    runner = runner_of(transport, nn.Identity())
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


def wait_for(peers: Peers, work: Any) -> None:
    with peers.collective():
        peers.wait(work)


def test_a_collective_that_ends_when_the_time_of_a_wait_is_over_has_ended() -> None:
    peers = Peers(network(2)[1], timeout_s=5)
    for waits in range(4):
        wait_for(peers, Late(waits))
    with pytest.raises(samo.PeerError, match=r"did not join a collective \(Closed\)"):
        wait_for(peers, Late(2, "Closed"))


@pytest.mark.parametrize(
    ("packets", "broken", "text"),
    [
        ([], {}, r"another rank did not join a collective \(Operation timed out!\)"),
        ([ABORT], {}, r"rank 0 \(stage 0 of 2\) OSError: disk"),
        ([], {0: ConnectionError("Closed")}, r"rank 0 \(stage 0 of 2\) is gone \(Closed\)"),
    ],
)
def test_a_rank_that_waits_for_a_collective_hears_of_failures(
    packets: list[Packet], broken: dict[int, Exception], text: str
) -> None:
    transport = network(2)[1]
    transport.inbox.extend((0, packet) for packet in [*packets, ONE])  # that of the next batch
    transport.broken.update(broken)
    with pytest.raises(samo.PeerError, match=text):
        wait_for(Peers(transport, timeout_s=0.1), Late(999))
    assert bool(packets) or list(transport.inbox) == [(0, ONE)]


def test_gradients_that_do_not_fit_name_their_sender() -> None:
    transport, other = network(2)
    layer = nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_: other.send(0, Packet("gradient", 0, 0, 0)))
    with pytest.raises(samo.PeerError, match="sent 0 tensors with gradient 0, where 2 were due"):
        runner_of(transport, layer).run(lambda: Batch(1, [(torch.ones(1, 1),)]))


def test_a_neighbour_that_is_alive_and_sends_no_data_is_given_up_in_the_end() -> None:
    other, transport = network(2)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run_last, transport, timeout_s=0.1)
        while not done.done():
            other.poll(0.02)
            if other.inbox:
                other.inbox.clear()
                other.send(1, Packet("alive"))
        with pytest.raises(samo.PeerError, match=r"is alive, but has sent no data for 0\.3") as e:
            done.result()
    assert e.value.is_timeout
