"""The transport for NCCL on a model of it, which sees deadlocks and races."""

import copy
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from benchmarks.pipeline.nccl_model import Case
from benchmarks.pipeline.timings import outcome_of
from torch import nn

import samo
from samo.pipeline.peers import Peers
from samo.pipeline.runner import Batch, Runner
from samo.pipeline.transport import nccl
from samo.pipeline.transport.connect import neighbours_of
from samo.pipeline.transport.wire import Packet
from tests.pipeline.local import check_trained, run_threads, transports


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_timing_makes_a_deadlock_a_race_or_another_loss(first: int) -> None:
    for seed in range(first, first + 50):
        case = Case.draw(seed)
        assert outcome_of("samo", seed, case) == "right", (seed, case)


@pytest.mark.parametrize(("is_turned", "found"), [(False, "deadlock"), (True, "race")])
def test_the_model_finds_what_was_wrong_in_0_1(is_turned: bool, found: str) -> None:
    case = Case(4, 6, num_queues=8 if is_turned else 1, is_turned=is_turned)
    assert found in {outcome_of("samo 0.1", seed, case) for seed in range(5)}


@pytest.mark.parametrize("is_ring", [False, True])
@pytest.mark.parametrize("num_places", [2, 3, 4, 5, 8, 64])
def test_communicators_of_any_number_of_ranks_are_created_in_a_few_rounds(
    num_places: int, is_ring: bool
) -> None:
    links = nccl.link_order(num_places, is_ring)
    wanted = {(a, b) for a in range(num_places) for b in neighbours_of(a, num_places, is_ring)}
    assert set(links) == wanted
    assert len(links) == len(wanted)
    time = dict.fromkeys(range(num_places), 0)  # each takes one unit of time of both ranks
    for a, b in links:
        time[a] = time[b] = max(time[a], time[b]) + 1
    assert max(time.values()) <= (8 if is_ring else 4)


class Turned(nn.Module):
    """Returns a non-contiguous tensor, whole numbers and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, ...]:
        index = more[0] if more else torch.arange(4, device=x.device)
        return (self.linear(x).tanh().t(), index + 1, x.new_empty(0, 3))


def weighted_sum(number: int, output: Any) -> torch.Tensor:
    found: torch.Tensor = (output[0] * output[1] * (number + 1)).sum()
    return found


def test_tensors_and_headers_on_their_own_ways_give_the_gradients_of_one_process() -> None:
    torch.manual_seed(0)
    stages: list[nn.Module] = [Turned(), Turned()]
    whole = copy.deepcopy(stages)
    inputs = [(torch.randn(4, 4, dtype=torch.float64),) for _ in range(5)]
    batches = [Batch(5, inputs), Batch(5, loss=weighted_sum)]
    both = transports(torch.device("cpu"), MagicMock())
    results = run_threads(both, stages, batches, steps=3)
    check_trained(stages, whole, results, inputs, weighted_sum, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("leaves", "text"), [(True, "is gone"), (False, "has been silent for")])
def test_a_neighbour_whose_data_does_not_follow_its_header_is_named(
    leaves: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samo.pipeline.transport.nccl._GRACE_S", 0.05)
    first, second = transports(torch.device("cpu"), MagicMock())
    first.links[1].send(Packet("activation", 0, 0, 1, (torch.ones(2),), (False,)))
    if leaves:
        first.close()
    runner = Runner([nn.Identity()], Peers(second, timeout_s=0.3), [1])
    with pytest.raises(samo.PeerError, match=rf"rank 0 \(stage 0 of 2\) {text}") as caught:
        runner.run(lambda: Batch(1, loss=lambda number, y: y.sum()))
    assert caught.value.rank == 0
    for end in (first, second):
        end.close()


def test_what_a_neighbour_sent_before_it_left_is_handed_over_before() -> None:
    is_complete, cuda = [False], MagicMock()
    cuda.Stream().record_event().query = lambda: is_complete[0]
    first, second = transports(torch.device("cpu"), cuda)
    first.send(1, Packet("gradient", tensors=(torch.full((3,), 7),)))
    first.close()
    for is_complete[0] in (False, True):
        second.poll(0.1)
        second.poll()
        assert list(second.broken) == ([0] if is_complete[0] else [])
        assert [packet.tensors[0].tolist() for _, packet in second.inbox] == (
            [[7] * 3] if is_complete[0] else []
        )
    second.close()
