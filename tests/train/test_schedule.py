"""The learning rate: up, along and down."""

import itertools
import math

import pytest
from hypothesis import given, strategies as st

from samo.train.config import OptimConfig
from samo.train.schedule import learning_rate


def rates(schedule: str, steps: int, *, warmup: int, final: float) -> list[float]:
    optim = OptimConfig(lr=2.0, warmup_steps=warmup, schedule=schedule, final_lr=final)
    return [learning_rate(step, steps, optim) for step in range(1, steps + 1)]


SCHEDULES = st.sampled_from(["cosine", "linear", "constant", "wsd"])


@given(SCHEDULES, st.integers(1, 200), st.integers(0, 250), st.floats(0, 1))
def test_it_rises_in_the_warm_up_and_never_after(
    schedule: str, steps: int, warmup: int, final: float
) -> None:
    values = rates(schedule, steps, warmup=warmup, final=final)
    rising, after = values[:warmup], values[warmup:]
    assert all(a < b for a, b in itertools.pairwise(rising))
    assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(after))
    assert all(0 <= value <= 2.0 for value in values)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_it_ends_at_its_final_fraction(schedule: str) -> None:
    assert rates(schedule, 100, warmup=10, final=0.1)[-1] == pytest.approx(0.2)


def test_constant_stays_at_the_top() -> None:
    assert set(rates("constant", 50, warmup=5, final=0.1)[4:]) == {2.0}


def test_wsd_stays_at_the_top_until_the_last_fifth() -> None:
    values = rates("wsd", 100, warmup=0, final=0.0)
    assert values[78] == 2.0
    assert values[80] < 2.0
    assert values[89] == pytest.approx(1.0)


def test_cosine_passes_half_way_at_half_height() -> None:
    assert rates("cosine", 100, warmup=0, final=0.0)[49] == pytest.approx(1.0)


def test_steps_past_the_plan_stay_at_the_end() -> None:
    optim = OptimConfig(lr=2.0, warmup_steps=0, final_lr=0.5)
    assert math.isclose(learning_rate(500, 100, optim), 1.0)
