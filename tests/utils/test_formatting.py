"""Numbers and text as people read them."""

import math

import pytest

from samo.utils import formatting


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        ("count", 868352, "868,352"),
        ("loss", 2.27449, "2.274"),
        ("percent", 0.9, "90 %"),
        ("percent", 0.60519, "60.5 %"),
        ("percent", 1 - 30 / 294_912, "99.99 %"),
        ("percent", 1 - 1e-9, "99.99 %"),
        ("percent", 1e-9, "0.01 %"),
        ("percent", 1.0, "100 %"),
        ("three_digits", 9.7183, "9.72"),
        ("three_digits", 0.0051234, "0.00512"),
        ("three_digits", 99.96, "100"),
        ("three_digits", 9.9996, "10.0"),
        ("three_digits", 16834.2, "16,834"),
        ("perplexity", 2.5, "12.2"),
        ("perplexity", 56.0, "over 1e6"),
        ("perplexity", math.nan, "-"),
        ("duration", 0, "0.0 s"),
        ("duration", 59.96, "1 min 0 s"),
        ("duration", 3599.7, "1 h 0 min"),
        ("duration", 86399.9, "1 d 0 h"),
        ("duration", 200_000, "2 d 7 h"),
        ("size", 0, "0 B"),
        ("size", 999_600, "1.00 MB"),
        ("size", 13_893_632, "13.9 MB"),
        ("size", 2.5e12, "2.50 TB"),
    ],
)
def test_numbers_are_rounded_and_carry_over(write: str, value: float, text: str) -> None:
    assert getattr(formatting, write)(value) == text


@pytest.mark.parametrize("write", ["count", "size", "three_digits", "loss", "percent", "duration"])
def test_what_is_not_known_is_a_dash(write: str) -> None:
    assert {getattr(formatting, write)(value) for value in (None, math.nan, math.inf)} == {"-"}


def test_plain_text_has_nothing_that_breaks_a_file() -> None:
    assert formatting.plain("a\x00\x1b[1m\ud800b\r\n\tc\u00e9") == "a??[1m?b\n\tc\u00e9"
    assert formatting.plain("a\u202eb\u2066c\u2069") == "a?b?c?"  # would turn what follows
    assert formatting.plain(family := "\U0001f468\u200d\U0001f469") == family


def test_shortened_text_keeps_both_ends_and_its_length() -> None:
    assert formatting.shortened("a\n  b", 10) == "a b"
    assert [len(formatting.shortened("x" * 50, n)) for n in (10, 11)] == [10, 11]
