"""The engine over a simulated network: nothing lost, nothing twice, no deadlock, limits kept."""

import json
import random
from collections import defaultdict

import pytest
from hypothesis import given, settings, strategies as st

from samo.pipeline.engine import Action, Engine, Progress, in_flight_limits
from samo.pipeline.timeline import Event, Timeline
from samo.planner.simulator import simulate


def check_possible(timeline: Timeline, num_ranks: int) -> None:
    """Each pass once, after its input, and one at a time on each rank; gradients in one order."""
    ends: dict[tuple[int, str, int], float] = {}
    last = [0.0] * num_ranks
    for event in sorted(timeline.events, key=lambda event: event.end):
        before = (event.stage - 1, "forward", event.micro_batch)
        if event.what == "backward":
            is_last = event.stage == timeline.num_stages - 1
            kind, stage = ("forward", event.stage) if is_last else ("backward", event.stage + 1)
            before = (stage, kind, event.micro_batch)
        assert before[0] < 0 or event.start >= ends[before]
        rank = event.stage % num_ranks
        assert event.start >= last[rank]
        last[rank] = event.end
        key = (event.stage, event.what, event.micro_batch)
        assert key not in ends
        ends[key] = event.end
    for stage in range(timeline.num_stages):
        for what in ("forward", "backward"):
            order = [e.micro_batch for e in timeline.of_stage(stage) if e.what == what]
            assert order == list(range(timeline.num_micro_batches))


@settings(max_examples=200)
@given(
    num_ranks=st.integers(1, 6),
    per_rank=st.integers(1, 3),
    num_micro_batches=st.integers(1, 12),
    limits=st.integers(1, 8) | st.none() | st.lists(st.integers(1, 8), min_size=18, max_size=18),
    seed=st.integers(0, 10**9),
    delay=st.sampled_from([0.0, 0.5, 5.0]),
    jitter=st.sampled_from([0.0, 0.9]),
)
def test_every_micro_batch_goes_once_forward_and_once_backward_within_the_limit(
    num_ranks, per_rank, num_micro_batches, limits, seed, delay, jitter
):
    num_stages = num_ranks * per_rank
    limits = limits[:num_stages] if isinstance(limits, list) else limits
    given = in_flight_limits(limits, num_stages)

    def watch(engine: Engine) -> None:
        for stage, one in engine.stages.items():
            assert one.forwards - one.backwards <= given[stage]
            if stage:  # what waits and what is in flight is in flight one stage earlier
                assert one.activations - one.backwards <= given[stage - 1]

    draw = random.Random(seed)
    slow: dict[tuple[int, int], float] = defaultdict(lambda: draw.uniform(0.0, delay))  # links
    timeline = simulate(  # a deadlock raises
        num_stages,
        num_micro_batches,
        in_flight=limits,
        stages_per_rank=per_rank,
        duration=lambda stage, what, number: draw.uniform(1 - jitter, 1 + jitter),
        delay=lambda *link: slow[link] + draw.uniform(0.0, delay),
        watch=watch,
    )
    check_possible(timeline, num_ranks)
    assert all(timeline.peak_in_flight(s) <= limit for s, limit in enumerate(given))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_even_stages_without_delays_take_the_time_that_theory_says(num_stages: int) -> None:
    timeline = simulate(num_stages, 8)
    check_possible(timeline, num_stages)
    assert timeline.span == pytest.approx((8 + num_stages - 1) * 3)


def test_two_stages_on_each_rank_halve_the_time_of_filling_the_pipeline() -> None:
    half = {"forward": 0.5, "backward": 1.0}
    timeline = simulate(8, 8, stages_per_rank=2, duration=lambda stage, what, _: half[what])
    assert timeline.span == pytest.approx(8 * 3 + 3 * 3 / 2)


def test_a_backward_pass_comes_before_a_forward_pass_but_not_twice_in_a_row() -> None:
    first = Engine([Progress(0, 2, 4, in_flight=3)])
    kinds = [first.next().kind for _ in range(4)]
    assert kinds == ["forward", "forward", "forward", "receive"]
    assert first.senders() == {1}
    first.stages[0].receive("gradient", 0)
    first.stages[0].receive("gradient", 1)
    assert [first.next() for _ in range(3)] == [
        Action("backward", 0, 0),
        Action("forward", 3, 0),
        Action("backward", 1, 0),
    ]


@pytest.mark.parametrize(
    ("stage", "messages", "text"),
    [
        (1, [("activation", 1)], "sent activation 1 of 2 .* activation 0 was due"),
        (1, [("activation", 0)] * 2, "sent activation 0 .* activation 1 was due"),
        (0, [("activation", 0)], "where no activation was due"),
        (1, [("gradient", 0)], "sent gradient 0 .* no gradient was due"),
        (2, [("gradient", 0)], "no gradient was due"),
        (1, [("activation", i) for i in range(3)], "sent activation 2 of 2"),
    ],
)
def test_a_message_out_of_turn_is_refused(stage, messages, text) -> None:
    one = Progress(stage, 3, 2, in_flight=2)
    *good, bad = messages
    for message in good:
        one.receive(*message)
    with pytest.raises(ValueError, match=text):
        one.receive(*bad)


@pytest.mark.parametrize("in_flight", [0, [1, 2], [1, 2, 0]])
def test_limits_must_be_one_for_each_stage(in_flight) -> None:
    with pytest.raises(ValueError, match="in_flight must be 1 or more, one number or one for each"):
        in_flight_limits(in_flight, 3)


def test_the_simulator_sees_a_deadlock(monkeypatch) -> None:
    monkeypatch.setattr(Progress, "can_go_backward", property(lambda self: False))
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] wait for messages that nobody will"):
        simulate(2, 3)


def test_a_trace_has_every_pass_in_microseconds() -> None:
    line = Timeline(2, 1, [Event(i, i + 1, i % 2, "forward", 0) for i in (5, 6)])
    rows = json.loads(line.chrome_trace())["traceEvents"]
    passes = [row for row in rows if row["ph"] == "X"]
    assert [(row["ts"], row["dur"], row["tid"]) for row in passes] == [(0, 1e6, 1), (1e6, 1e6, 0)]
    assert {row["args"]["name"] for row in rows if row["ph"] == "M"} == {"stage 0", "stage 1"}
