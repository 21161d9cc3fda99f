"""Format numbers for people: units, thousands separators, three significant digits."""

import math
import unicodedata
from typing import Final

NOTHING = "-"
"""Placeholder for a missing number."""


def count(value: float | None) -> str:
    """Format a whole number, such as ``868,352``."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:,.0f}"


def counted(value: int, noun: str) -> str:
    """Format a number of things, such as ``1 tensor`` or ``2 tensors``."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def size(value: float | None) -> str:
    """Format bytes, such as ``13.9 MB``; GB is 10**9 bytes."""
    if value is None or not math.isfinite(value):
        return NOTHING
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        # 999,600 is "1.00 MB", not "1,000 kB"
        if abs(value) >= 0.9995 * 10**power:
            return f"{three_digits(value / 10**power)} {unit}"
    return f"{value:,.0f} B"


def three_digits(value: float | None) -> str:
    """Format a number with three digits or all before the point: 0.00512, 9.72, 16,834."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def loss(value: float | None) -> str:
    """Format a loss, such as ``2.274``, or ``5.11e+07`` of a diverged model."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"


def perplexity(loss: float) -> str:
    """Format the exponential of a loss, such as ``9.72``; ``over 1e6`` of a diverged model."""
    return "over 1e6" if loss > math.log(1e6) else three_digits(math.exp(loss))


def percent(fraction: float | None) -> str:
    """Format a fraction, such as ``90 %``, ``60.5 %``, or ``99.99 %`` of what is not quite all."""
    if fraction is None or not math.isfinite(fraction):
        return NOTHING
    text = f"{100 * fraction:.1f}"
    if 0 < fraction < 1 and text in ("0.0", "100.0"):
        text = f"{min(max(100 * fraction, 0.01), 99.99):.2f}"
    return text.removesuffix(".0") + " %"


def duration(seconds: float | None) -> str:
    """Format a time span, such as ``4.2 s``, ``1 min 5 s``, ``3 h 2 min`` or ``2 d 7 h``."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400:,} d {whole % 86400 // 3600} h"


def plain(text: str) -> str:
    """Replace control characters, of directions too, and lone surrogates by question marks."""
    return "".join(
        "?" if char not in "\n\t" and _is_control(char) else char
        for char in text.replace("\r\n", "\n")
    )


def _is_control(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cs") or unicodedata.bidirectional(char) in _TURNS


_TURNS: Final = frozenset(["LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"])


def shortened(text: str, length: int) -> str:
    """Put a text on one line, and cut out its middle: ``transfor...kv.weight``."""
    text = " ".join(plain(text).split())
    if len(text) <= length:
        return text
    head = (length - 3) // 2
    return f"{text[:head]}...{text[len(text) - (length - 3 - head) :]}"
