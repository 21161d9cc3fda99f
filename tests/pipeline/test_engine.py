"""The engine over a simulated network: nothing lost, nothing twice, no deadlock, promises kept."""

import json
import random

import pytest
from benchmarks.pipeline.simulator import FixedOrder, Schedule, simulate, uniform_delays
from hypothesis import given, settings, strategies as st

import samo
from samo.pipeline.engine import Action, Engine, Message, in_flight_limits
from samo.pipeline.timeline import Event, Pass, Timeline


def durations(seed: int, jitter: float):
    """Return times of passes that depend on the place alone, not on the order of asking."""

    def duration(stage: int, what: Pass, micro_batch: int) -> float:
        draw = random.Random(f"{seed} {stage} {what} {micro_batch}")
        return (1.0 if what == "forward" else 2.0) * draw.uniform(1 - jitter, 1 + jitter)

    return duration


@settings(max_examples=500)
@given(
    num_stages=st.integers(1, 8),
    num_micro_batches=st.integers(1, 16),
    in_flight=st.integers(1, 8) | st.none() | st.lists(st.integers(1, 8), min_size=8, max_size=8),
    prefer=st.sampled_from(["alternate", "backward"]),
    seed=st.integers(0, 10**9),
    delay=st.sampled_from([0.0, 0.5, 5.0]),
    jitter=st.sampled_from([0.0, 0.9]),
)
def test_every_micro_batch_goes_once_forward_and_once_backward_within_the_limit(
    num_stages, num_micro_batches, in_flight, prefer, seed, delay, jitter
):
    if isinstance(in_flight, list):  # one for each stage
        in_flight = in_flight[:num_stages]
    limits = in_flight_limits(in_flight, num_stages)

    def watch(engine: Engine) -> None:
        assert engine.forwards - engine.backwards <= limits[engine.stage]
        if not engine.is_first:  # what waits and what is in flight is in flight one stage earlier
            assert engine.num_held <= limits[engine.stage - 1]

    draw = random.Random(seed)
    times = {
        (stage, what): draw.uniform(1 - jitter, 1 + jitter)
        for stage in range(num_stages)
        for what in ("forward", "backward")
    }
    timeline = simulate(  # a Timeline checks itself; a deadlock raises
        num_stages,
        num_micro_batches,
        in_flight=in_flight,
        prefer=prefer,
        duration=lambda stage, what, _: times[stage, what] * draw.uniform(1 - jitter, 1 + jitter),
        delay=uniform_delays(seed, 0.0, delay, per_link=delay),
        watch=watch,
    )
    for stage in range(num_stages):
        assert timeline.peak_in_flight(stage) <= limits[stage]
        for what in ("forward", "backward"):
            order = [e.micro_batch for e in timeline.of_stage(stage) if e.what == what]
            assert order == list(range(num_micro_batches))  # gradients add up in one order


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "message-driven"])
def test_even_stages_without_delays_take_the_time_that_theory_says(
    schedule: Schedule, num_stages: int
) -> None:
    timeline = simulate(num_stages, 8, schedule=schedule)
    assert timeline.span == pytest.approx((8 + num_stages - 1) * 3)


def test_limits_of_1f1b_are_kept_by_the_message_driven_engine_stage_by_stage() -> None:
    timeline = simulate(4, 16, in_flight=[4, 3, 2, 1], duration=durations(3, 0.8))
    fixed = simulate(4, 16, schedule="1f1b", duration=durations(3, 0.8))
    for stage in range(4):
        assert timeline.peak_in_flight(stage) <= fixed.peak_in_flight(stage) == 4 - stage


def test_a_slow_link_makes_a_fixed_order_wait_and_not_the_message_driven_one() -> None:
    def delay(source: int, target: int) -> float:
        return 2.5 if (source, target) == (1, 2) else 0.0

    waiting = simulate(4, 24, schedule="1f1b", delay=delay).span
    assert simulate(4, 24, in_flight=6, delay=delay).span < 0.9 * waiting


def test_alternating_beats_backward_first_when_passes_jitter() -> None:
    spans: dict[str, float] = {"alternate": 0.0, "backward": 0.0}
    for seed in range(20):
        for prefer in ("alternate", "backward"):
            spans[prefer] += simulate(4, 16, prefer=prefer, duration=durations(seed, 0.5)).span
    assert spans["alternate"] < 0.97 * spans["backward"]


# One engine


def test_a_backward_pass_comes_before_a_forward_pass_but_not_twice_in_a_row() -> None:
    first = Engine(0, 2, 4, in_flight=3)
    done = [first.next() for _ in range(7)]
    assert [a.kind for a in done[::2]] == ["forward", "forward", "forward", "receive"]
    first.receive(Message("gradient", 0))
    first.receive(Message("gradient", 1))
    assert [first.next() for _ in range(4)] == [
        Action("backward", 0),
        Action("forward", 3),
        Action("send_activation", 3),
        Action("backward", 1),
    ]
    eager = Engine(0, 2, 4, in_flight=3, prefer="backward")
    for _ in range(6):
        eager.next()
    eager.receive(Message("gradient", 0))
    assert eager.senders() == [1]
    eager.receive(Message("gradient", 1))
    assert [eager.next().kind for _ in range(3)] == ["backward", "backward", "forward"]


@pytest.mark.parametrize(
    ("stage", "messages", "text"),
    [
        (1, [Message("activation", 1)], "stage 0 sent activation 1 of 2 .* activation 0 was due"),
        (1, [Message("activation", 0)] * 2, "sent activation 0 .* activation 1 was due"),
        (0, [Message("activation", 0)], "where no activation was due"),
        (1, [Message("gradient", 0)], "stage 2 sent gradient 0 .* no gradient was due"),
        (2, [Message("gradient", 0)], "no gradient was due"),
        (1, [Message("loss", 1)], "stage 2 sent loss 1 .* no loss was due"),
        (1, [Message("activation", i) for i in range(3)], "sent activation 2 of 2"),
    ],
)
def test_a_message_out_of_turn_names_its_sender(stage, messages, text) -> None:
    engine = Engine(stage, 3, 2, in_flight=2)
    *good, bad = messages
    for message in good:
        engine.receive(message)
    with pytest.raises(samo.PeerError, match=text):
        engine.receive(bad)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3, 3, 1, 1), r"stage must be in 0\.\.2, got 3"),
        ((0, 1, 0, 1), "micro-batches must be 1 or more, got 0"),
        ((0, 1, 1, 0), "in_flight must be 1 or more, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, text) -> None:
    with pytest.raises(ValueError, match=text):
        Engine(*arguments)


@pytest.mark.parametrize("in_flight", [0, [1, 2], [1, 2, 0]])
def test_limits_must_be_one_for_each_stage(in_flight) -> None:
    with pytest.raises(ValueError, match="in_flight must be 1 or more, for all stages or for each"):
        in_flight_limits(in_flight, 3)


def test_an_unknown_fixed_order_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule must be '1f1b' or 'gpipe', got 'zbv'"):
        FixedOrder("zbv", 0, 1, 1)


def test_a_deadlock_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "can_go_backward", property(lambda self: False))
    with pytest.raises(
        RuntimeError, match=r"stages \[0, 1\] wait for messages that nobody will send"
    ):
        simulate(2, 3)


# Timelines

F0, B0 = Event(0, 1, 0, "forward", 0), Event(1, 3, 0, "backward", 0)


@pytest.mark.parametrize(
    ("num_stages", "events", "text"),
    [
        (1, [F0], "backward 0 of stage 0 is missing"),
        (1, [F0, F0, B0], "forward 0 of stage 0 comes twice"),
        (1, [F0, Event(3, 2, 0, "backward", 0)], "ends at 2, before it starts"),
        (1, [F0, B0, Event(3, 4, 0, "forward", 1)], "there are 3 passes"),
        (1, [F0, Event(0.5, 3, 0, "backward", 0)], "starts while forward 0 of stage 0"),
        (1, [Event(4, 5, 0, "forward", 0), B0], "backward 0 of stage 0 starts before forward 0"),
        (
            2,
            [F0, Event(0.5, 2, 1, "forward", 0), Event(2, 3, 1, "backward", 0), Event(3, 4, 0, "backward", 0)],
            "forward 0 of stage 1 starts before forward 0 of stage 0 has ended",
        ),
        (
            2,
            [F0, Event(1, 2, 1, "forward", 0), Event(2, 4, 1, "backward", 0), Event(3, 4, 0, "backward", 0)],
            "backward 0 of stage 0 starts before backward 0 of stage 1 has ended",
        ),
    ],
)  # fmt: skip
def test_a_timeline_that_cannot_be_is_refused(num_stages, events, text) -> None:
    with pytest.raises(ValueError, match=text):
        Timeline(num_stages, 1, events)


def test_a_trace_has_every_pass_in_microseconds() -> None:
    timeline = simulate(2, 3)
    rows = json.loads(timeline.chrome_trace())["traceEvents"]
    passes = [row for row in rows if row["ph"] == "X"]
    assert len(passes) == 12
    assert sum(row["dur"] for row in passes) == 18e6
    assert {row["args"]["name"] for row in rows if row["ph"] == "M"} == {"stage 0", "stage 1"}


def test_the_bubble_is_what_is_not_computed() -> None:
    assert simulate(4, 8).bubble == pytest.approx(3 / 11)
