"""Single values of a run's files: what is not of the kind it should be is NaN, None or empty."""

import math

__all__ = []


def number(value: object) -> float:
    """Return a JSON number as a float; NaN for null, for infinity and for anything else.

    Example:
        >>> from samo.report.fields import number
        >>> number(3), number(None), number("3")
        (3.0, nan, nan)
    """
    if type(value) is float:
        return value if math.isfinite(value) else math.nan
    if type(value) is int and abs(value) < 2**1000:
        return float(value)
    return math.nan


def count(value: object) -> int | None:
    """Return a JSON number of 0 or more as a whole one.

    Example:
        >>> from samo.report.fields import count
        >>> count(3), count(-3), count("3")
        (3, None, None)
    """
    found = number(value)
    return int(found) if found >= 0 else None


def text(value: object) -> str:
    """Return a JSON string.

    Example:
        >>> from samo.report.fields import text
        >>> text("a"), text(3)
        ('a', '')
    """
    return value if isinstance(value, str) else ""


def numbers(value: object) -> tuple[float, ...]:
    """Return a JSON list of numbers; empty if it has anything else.

    Example:
        >>> from samo.report.fields import numbers
        >>> numbers([0.5, 1]), numbers([0.5, None]), numbers(3)
        ((0.5, 1.0), (), ())
    """
    found = tuple(map(number, value)) if isinstance(value, list) else ()
    return () if any(map(math.isnan, found)) else found
