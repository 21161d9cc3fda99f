"""Curves and numbers of the report: smoothing, thinning, labels, units."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from samo.report.curves import smooth, spread, thin
from samo.utils import formatting


def test_smoothing_averages_and_keeps_the_length() -> None:
    noisy = 2 + np.random.default_rng(0).normal(0, 1, 5000)
    calm = smooth(noisy, [(0, 5000)])
    assert calm.shape == noisy.shape
    assert np.abs(calm[100:-100] - 2).max() < 0.5 < np.abs(noisy - 2).max()


def test_smoothing_stops_where_a_phase_ends() -> None:
    jump = np.repeat([1.0, 5.0], 500)
    assert np.array_equal(smooth(jump, [(0, 500), (500, 1000)]), jump)
    assert not np.array_equal(smooth(jump, [(0, 1000)]), jump)


def test_a_smoothed_straight_line_stays_where_it_is() -> None:
    line = np.arange(1000.0)
    # Only the last 2 points at each end have a window that is not centred on them.
    assert np.allclose(smooth(line, [(0, 1000)])[2:-2], line[2:-2], rtol=1e-12)


def test_smoothing_passes_over_nan_and_leaves_gaps_where_nothing_is_known() -> None:
    y = np.full(1000, 3.0)
    y[10:20] = np.nan
    y[400:600] = np.nan
    calm = smooth(y, [(0, 1000)])
    assert np.array_equal(calm[:300], np.full(300, 3.0))
    assert np.isnan(calm[450:550]).all()


def test_an_empty_curve_is_smoothed_and_thinned() -> None:
    nothing = np.empty(0)
    assert len(smooth(nothing, [])) == len(thin(nothing, nothing, 10)[0]) == 0


def test_thinning_keeps_lowest_and_highest_and_the_order() -> None:
    y = np.random.default_rng(0).normal(0, 1, 123_457)
    y[5], y[99_999], y[1000:9000] = 50.0, -50.0, np.nan
    few_x, few_y = thin(np.arange(len(y), dtype=float), y, 2000)
    assert 1800 < len(few_y) <= 2000
    assert (np.nanmin(few_y), np.nanmax(few_y)) == (-50.0, 50.0)
    assert (np.diff(few_x) > 0).all()
    assert np.isnan(few_y).any()  # the gap stays a gap


@given(values=st.lists(st.floats(-5, 15), min_size=1, max_size=12), gap=st.floats(0.01, 3))
def test_labels_that_are_spread_do_not_touch(values: list[float], gap: float) -> None:
    places = spread(values, gap, 0.0, 10.0)
    room = min(gap, 10.0 / len(values))
    ordered = sorted(places)
    assert all(b - a > room - 1e-9 for a, b in itertools.pairwise(ordered))
    assert ordered[0] > -1e-9
    assert ordered[-1] < 10 + 1e-9
    assert all(
        places[i] < places[j]
        for i in range(len(values))
        for j in range(len(values))
        if values[i] < values[j]
    )


def test_labels_far_apart_stay_where_they_are() -> None:
    assert spread([1.0, 9.0, 5.0], 1.0, 0.0, 10.0) == [1.0, 9.0, 5.0]
    assert spread([], 1.0, 0.0, 10.0) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_400, "999 kB"),
        (999_600, "1.00 MB"),
        (13_893_632, "13.9 MB"),
        (350e9, "350 GB"),
        (2.5e12, "2.50 TB"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_sizes_have_three_digits_and_a_unit(value: float | None, text: str) -> None:
    assert formatting.size(value) == text


def test_what_is_not_known_is_a_dash() -> None:
    writers = (
        formatting.count,
        formatting.three_digits,
        formatting.loss,
        formatting.percent,
        formatting.duration,
    )
    assert {write(value) for write in writers for value in (None, math.nan, math.inf)} == {"-"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (59.96, "1 min 0 s"), (3599.7, "1 h 0 min"), (86399.9, "1 d 0 h")],
)
def test_durations_carry_over(seconds: float, text: str) -> None:
    assert formatting.duration(seconds) == text


def test_plain_text_has_nothing_that_breaks_a_file() -> None:
    assert formatting.plain("a\x00\x1b[1m\ud800b\r\n\tc\u00e9") == "a??[1m?b\n\tc\u00e9"


def test_shortened_text_keeps_both_ends_and_its_length() -> None:
    assert formatting.shortened("a\n  b", 10) == "a b"
    assert [len(formatting.shortened("x" * 50, n)) for n in (10, 11)] == [10, 11]
