"""The learning rate: up, along and down."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from samo.train.lr_schedule import learning_rate
from tests.train.helpers import optim


def rates(schedule: str, steps: int, *, warmup: int, final: float) -> list[float]:
    config = optim(lr=2.0, warmup_steps=warmup, schedule=schedule, final_lr=final)
    return [learning_rate(step, steps, config) for step in range(1, steps + 1)]


@settings(max_examples=30)
@given(
    st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    st.integers(1, 200),
    st.integers(0, 250),
    st.floats(0, 1),
)
def test_it_rises_during_warmup_and_never_after(
    schedule: str, steps: int, warmup: int, final: float
) -> None:
    values = rates(schedule, steps, warmup=warmup, final=final)
    assert all(a < b for a, b in itertools.pairwise(values[:warmup]))
    assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(values[warmup:]))
    assert all(0 <= value <= 2.0 for value in values)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", {50: 1.0, 100: 0.0}),
        ("linear", {25: 1.5, 100: 0.0}),
        ("constant", {100: 2.0}),
        ("wsd", {79: 2.0, 90: 1.0, 100: 0.0}),
    ],
)
def test_schedules_have_their_shapes(schedule: str, expected: dict[int, float]) -> None:
    found = rates(schedule, 100, warmup=0, final=0.0)
    for step, rate in expected.items():
        assert found[step - 1] == pytest.approx(rate, abs=1e-12)


def test_it_ends_at_its_final_fraction_and_stays_there() -> None:
    assert rates("cosine", 100, warmup=10, final=0.1)[-1] == pytest.approx(0.2)
    assert learning_rate(500, 100, optim(lr=2.0, final_lr=0.5)) == pytest.approx(1.0)
