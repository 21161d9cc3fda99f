"""Numbers and text as people read them."""

import math

import pytest

from samo.utils import formatting


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
    ],
)
def test_sizes_have_three_digits_and_a_unit(value: float, text: str) -> None:
    assert formatting.size(value) == text


@pytest.mark.parametrize("write", ["count", "size", "three_digits", "loss", "percent", "duration"])
def test_what_is_not_known_is_a_dash(write: str) -> None:
    assert {getattr(formatting, write)(value) for value in (None, math.nan, math.inf)} == {"-"}


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
