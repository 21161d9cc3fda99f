"""The settings of how dense weights are held and computed with. Imports no torch.

weights   "resident", "streamed", or the bytes that may stay resident: 4_000_000_000, "4GB"
compile   whether blocks are compiled
"""

import re
from typing import TYPE_CHECKING, Final, Literal

from samo.errors import ConfigError

if TYPE_CHECKING:
    from samo.train.config import TrainConfig

__all__ = []

Held = Literal["resident", "streamed"] | int
"""How `samo.compress_` is told to hold dense weights."""

_WORDS: Final[dict[str, Held]] = {"resident": "resident", "streamed": "streamed"}
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_AMOUNT: Final = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*(?:([kmgt])(i?)b|b)?", re.IGNORECASE)
_MOST: Final = 2**63


def resolve_weights(value: str | int, *, is_sharded: bool = False) -> Held:
    """Return "resident", "streamed", or a number of bytes; what is sharded is never resident.

    Example:
        >>> from samo.train.config_weights import resolve_weights
        >>> [resolve_weights(value) for value in ("streamed", "4GB", "512 MiB", 1000)]
        ['streamed', 4000000000, 536870912, 1000]

    Raises:
        ConfigError: It is none of them.
    """
    if isinstance(value, str) and value in _WORDS:
        return "streamed" if is_sharded else _WORDS[value]
    found = _bytes(value)
    if found is None or not 0 <= found < _MOST:
        raise ConfigError(
            f"weights must be resident, streamed, or an amount of memory that dense weights may take, got "
            f"{str(value)[:40]!r}; write it as 4GB or 500MB, where GB is 10^9 bytes"
        )
    return found


def _bytes(value: str | int) -> int | None:
    if isinstance(value, int):
        return value
    match = _AMOUNT.fullmatch(value.strip())
    if match is None:
        return None
    number, unit, is_binary = match[1].replace("_", ""), (match[2] or "").lower(), match[3]
    size = 1024 ** [*_UNITS].index(unit) if is_binary else _UNITS[unit]
    return round(float(number) * size) if "." in number else int(number) * size


def check_weights(config: "TrainConfig") -> None:
    """Refuse settings that would have no effect.

    Raises:
        ConfigError: There is one.
    """
    run = config.run
    if run.mode == "dense" and run.weights != "resident":
        raise ConfigError(
            f"mode dense keeps its weights dense, and weights {run.weights} would have no effect; leave it "
            "out, or choose mode samo"
        )


def compiles_by_default(config: "TrainConfig") -> bool:
    """Return whether blocks are compiled if nothing is said: where that step is not slower than eager's.

    Device and type are known by now. So far it is nowhere: compiled blocks of a prototype took 336 ms on an
    H200 where eager ones took 298 (2.7B, 8 x 1024 tokens, resident; torch 2.11, 2026-11).
    """
    return False
