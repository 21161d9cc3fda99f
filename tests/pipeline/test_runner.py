"""Runners in threads, over TCP: gradients, tuples, and whom to blame."""

import copy
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samo
from samo.pipeline.peers import Peers
from samo.pipeline.runner import Batch, Runner, as_tuple
from samo.pipeline.transport.tcp import Transport
from samo.pipeline.transport.wire import Packet
from tests.pipeline.local import Network, check_trained, run_threads

ONE = Packet("activation", 0, 0, 1, (torch.ones(1),), (False,))
ABORT = Packet("abort", 0, stage=0, reason="OSError: disk")


def runner_of(transport: Transport, layer: nn.Module, timeout_s: float = 5.0) -> Runner:
    return Runner([layer], Peers(transport, timeout_s), [1])


def total(number: int, output: Tensor) -> Tensor:
    return output.sum()


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
    num_ranks: int, num_stages: int, network: Network
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
    batches = [Batch(3, pieces), *middle, Batch(3, loss=loss)]
    transports = network(num_ranks, is_ring=num_stages > num_ranks)
    results = run_threads(transports, stages, batches, steps=2)
    check_trained(stages, whole, results, pieces, loss, rtol=0, atol=0)


class Fails(nn.Module):
    """A layer whose rank fails."""

    def __init__(self, how: str, transport: Transport) -> None:
        super().__init__()
        self.how, self.transport = how, transport

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "hangs":
            time.sleep(1.2)
        if self.how == "sends nonsense":
            self.transport.links[1].connection.send(b"garbage" * 9)
        if self.how == "dies":
            self.transport.close()
        if self.how in ("dies", "raises"):
            raise KeyError("no such layer")
        return x


@pytest.mark.parametrize("per_rank", [1, 2])
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("hangs", "has been silent for"),
        ("raises", "KeyError: 'no such layer'"),
        ("dies", r"is gone \(Connection closed by peer\)"),
        ("sends nonsense", r"sent an invalid header|is gone"),  # it ends too, when it hears of it
    ],
)
def test_a_rank_that_fails_is_named_by_all_others(
    how: str, text: str, per_rank: int, network: Network
) -> None:
    """In a ring, in which several stages are on a rank, there are two ways to report a failure."""
    transports = network(4, is_ring=per_rank > 1)
    stages: list[nn.Module] = [nn.Identity() for _ in range(4 * per_rank)]
    stages[2] = Fails(how, transports[2])
    batches = [Batch(4, is_training=False) for _ in range(4)]
    batches[0] = Batch(4, [(torch.ones(1),)] * 4, is_training=False)
    batches[3] = Batch(4, loss=total, is_training=False)
    errors = run_threads(transports, stages, batches, steps=1, timeout_s=0.4)
    for rank in (0, 1, 3):
        assert (errors[rank].rank, errors[rank].stage) == (2, 2)
        assert re.match(rf"rank 2 \(stage 2 of 4\) ({text})", str(errors[rank]))
    assert any(errors[rank].is_timeout for rank in (1, 3)) == (how == "hangs")


@pytest.mark.parametrize(
    ("packets", "error", "rank", "text"),
    [
        ([(0, ONE._replace(step=1))], None, 0, "sent activation of batch 1 in batch 0"),
        ([(0, ONE._replace(step=3))], None, 0, "sent activation of batch 3 in batch 0"),
        ([(0, ONE._replace(is_training=False))], None, 0, r"called eval\(\) where this rank"),
        ([(0, ONE._replace(stage=0))], None, 0, "sent activation for stage 0, which is not on"),
        ([(2, ONE._replace(kind="gradient"))], None, 2, "sent gradient 0 of 2 .* no gradient was"),
        ([(0, ONE._replace(micro_batch=1))], None, 0, "sent activation 1 .* activation 0 was due"),
        ([(0, ABORT)], None, 0, r"rank 0 \(stage 0 of 3\) OSError: disk"),
        ([], ConnectionError("Closed"), 0, r"is gone \(Closed\)"),
        ([], ValueError("sent an invalid header"), 0, r"of 3\) sent an invalid header"),
        # What was sent before a link broke is read before.
        ([(0, ABORT._replace(stage=2))], ConnectionError("Closed"), 2, r"of 3\) OSError: disk"),
    ],
)
def test_a_packet_out_of_place_or_a_broken_link_names_the_stage_at_fault(
    packets: list[tuple[int, Packet]],
    error: Exception | None,
    rank: int,
    text: str,
    network: Network,
) -> None:
    transport = network(3)[1]
    transport.inbox.extend(packets)
    transport.broken.update({} if error is None else {0: error})
    with pytest.raises(samo.PeerError, match=text) as caught:
        runner_of(transport, nn.Identity()).run(lambda: Batch(2))
    assert (caught.value.rank, caught.value.is_timeout) == (rank, False)


def test_a_neighbour_that_has_sent_everything_may_leave_and_is_missed_in_the_next_batch(
    pair: list[Transport],
) -> None:
    transport = pair[1]
    transport.inbox.append((0, ONE))
    transport.broken[0] = ConnectionError("Closed")
    runner = runner_of(transport, nn.Identity())
    assert runner.run(lambda: Batch(1, loss=total)) == 1
    with pytest.raises(samo.PeerError, match=r"rank 0 .* is gone \(Closed\)"):
        runner.run(lambda: Batch(1, loss=total))


def test_data_of_the_next_batch_waits_for_it(pair: list[Transport]) -> None:
    """The first stage may begin a batch before its neighbour has left the last one."""
    transport = pair[1]
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


def test_a_collective_that_ends_when_the_time_of_a_wait_is_over_has_ended(
    pair: list[Transport],
) -> None:
    peers = Peers(pair[1], timeout_s=5)
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
    packets: list[Packet], broken: dict[int, Exception], text: str, pair: list[Transport]
) -> None:
    transport = pair[1]
    transport.inbox.extend((0, packet) for packet in [*packets, ONE])  # that of the next batch
    transport.broken.update(broken)
    with pytest.raises(samo.PeerError, match=text):
        wait_for(Peers(transport, timeout_s=0.1), Late(999))
    assert bool(packets) or list(transport.inbox) == [(0, ONE)]


def test_gradients_that_do_not_fit_name_their_sender(pair: list[Transport]) -> None:
    transport, other = pair
    layer = nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_: other.send(0, Packet("gradient", 0, 0, 0)))
    with pytest.raises(samo.PeerError, match="sent 0 tensors with gradient 0, where 2 were due"):
        runner_of(transport, layer).run(lambda: Batch(1, [(torch.ones(1, 1),)]))


def test_a_neighbour_that_is_alive_and_sends_no_data_is_given_up_in_the_end(
    pair: list[Transport],
) -> None:
    other, transport = pair
    runner = runner_of(transport, nn.Identity(), timeout_s=0.1)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(runner.run, lambda: Batch(1, loss=total))
        while not done.done():
            other.poll(0.02)
            if other.inbox:
                other.inbox.clear()
                other.send(1, Packet("alive"))
        with pytest.raises(samo.PeerError, match=r"is alive, but has sent no data for 0\.3") as e:
            done.result()
    assert e.value.is_timeout
