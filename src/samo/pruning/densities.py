"""How many weights each tensor keeps, whatever their values. Imports no torch.

    n:m    of every m neighbours n are kept, so the sparsity is 1 - n/m
    ERK    small tensors keep more: density proportional to (sum of sizes) / (product of sizes)

ERK is the Erdos-Renyi-Kernel rule of RigL (Evci et al. 2020), clipped to 1; the excess is spread.
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

__all__ = []


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


def erk_counts(matrices: Sequence[tuple[int, Sequence[int]]], kept: int) -> list[int]:
    """Share ``kept`` weights among tensors by the Erdos-Renyi-Kernel rule.

    Shares are rounded down, and the rest goes to the largest fractions, earlier tensors first.
    ``matrices`` has the number of matrices stacked in each tensor, usually 1, and their sizes:
    1,100 kept of (1, (10, 10)) and (1, (100, 100)) are 100 and 1,000.
    """
    numels = [count * math.prod(sizes) for count, sizes in matrices]
    # A count is density times numel, so counts are proportional to the sums of sizes.
    parts = [count * sum(sizes) for count, sizes in matrices]
    open_ = set(range(len(matrices)))
    while True:
        left = kept - sum(numel for i, numel in enumerate(numels) if i not in open_)
        total = sum(parts[i] for i in open_)
        shares = {i: Fraction(left * parts[i], total) for i in sorted(open_)}
        # The excess of one tensor only raises the shares of the others: those over stay over.
        over = {i for i in open_ if shares[i] > numels[i]}
        if not over:
            break
        open_ -= over
    counts = [math.floor(shares[i]) if i in open_ else numel for i, numel in enumerate(numels)]
    by_fraction = sorted(shares, key=lambda i: (counts[i] - shares[i], i))
    for i in by_fraction[: kept - sum(counts)]:
        counts[i] += 1
    return counts
