"""The transport for NCCL on a model of it, whose deadlocks and races that of 0.1 runs into."""

from collections import Counter
from typing import Any

import pytest
import torch
from benchmarks.pipeline.nccl_0_1 import NcclTransport01
from benchmarks.pipeline.nccl_model import Case, NcclOnTheModel, try_timing

from samo.pipeline.transport import nccl
from samo.pipeline.transport.base import neighbours_of
from samo.pipeline.transport.streams import Channel
from samo.pipeline.transport.wire import Packet


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_timing_makes_a_deadlock_a_race_or_another_loss(first: int) -> None:
    for seed in range(first, first + 50):
        case = Case.draw(seed)
        outcome, losses = try_timing(NcclOnTheModel, seed, case)
        assert outcome == "", (seed, case)
        assert all(torch.equal(loss, case.loss(seed)) for each in losses for loss in each), seed


@pytest.mark.parametrize(
    ("is_turned", "is_eager", "found"),
    [(True, True, "race"), (False, True, "deadlock"), (False, False, "deadlock")],
)
def test_the_model_finds_what_was_wrong_in_0_1(is_turned: bool, is_eager: bool, found: str) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(100):
        case = Case(4, 6, num_queues=1, is_turned=is_turned)
        outcomes[try_timing(NcclTransport01, seed, case, is_eager=is_eager)[0]] += 1
        if outcomes[found]:
            return
    pytest.fail(f"{dict(outcomes)}")


class SentTooEarly(NcclOnTheModel):  # type: ignore[misc, valid-type]
    """Sends before the stream that made the data is done."""

    def start_send(self, link: Any, channel: Channel, packet: Packet, ready: Any) -> Any:
        return super().start_send(link, channel, packet, self.cuda.Stream().record_event())


def test_the_model_finds_a_send_that_does_not_wait_for_its_data() -> None:
    case = Case(2, 6, num_queues=8, is_turned=False)
    assert any(try_timing(SentTooEarly, seed, case)[0] == "race" for seed in range(50))


@pytest.mark.parametrize("is_ring", [False, True])
@pytest.mark.parametrize("num_places", [2, 3, 4, 5, 8, 64])
def test_communicators_are_created_in_three_rounds_at_most(num_places: int, is_ring: bool) -> None:
    links = nccl.link_order(num_places, is_ring)
    wanted = {(a, b) for a in range(num_places) for b in neighbours_of(a, num_places, is_ring)}
    assert set(links) == wanted
    assert len(links) == len(wanted)
    time = dict.fromkeys(range(num_places), 0)  # each takes one unit of time of both ranks
    for a, b in links:
        time[a] = time[b] = max(time[a], time[b]) + 1
    assert max(time.values()) <= (6 if is_ring and num_places > 2 else 4)
