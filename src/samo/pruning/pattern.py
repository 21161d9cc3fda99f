"""n:m patterns: of every m neighbours n are kept, so the sparsity is 1 - n/m. Imports no torch."""

import math
import re
from typing import NamedTuple


class Pattern(NamedTuple):
    """An n:m pattern: keep ``kept`` of every ``group`` neighbours along a weight's inputs."""

    kept: int
    group: int

    @property
    def sparsity(self) -> float:
        """Fraction of the weights that the pattern prunes."""
        return (self.group - self.kept) / self.group


def parse_pattern(text: str) -> Pattern:
    """Parse a pattern such as ``"2:4"``, which must keep some entries and prune some."""
    match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", text)
    if match is None or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(f"pattern must be 'n:m' with 0 < n < m, such as '2:4', got {text!r}")
    return Pattern(int(match[1]), int(match[2]))


def pattern_sparsity(pattern: Pattern, sparsity: float | None) -> float:
    """Return the sparsity of a pattern, which ``sparsity`` must not contradict."""
    if sparsity is not None and not math.isclose(sparsity, pattern.sparsity, abs_tol=1e-6):
        raise ValueError(
            f"pattern '{pattern.kept}:{pattern.group}' prunes {pattern.sparsity:.6g} of the "
            f"weights, which contradicts sparsity {sparsity}; give one of the two"
        )
    return pattern.sparsity
