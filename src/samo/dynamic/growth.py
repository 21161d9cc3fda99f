"""The entries of one weight that a gradient asks for, found while the dense gradient is there.

A dense gradient lives for a moment: it is compressed and freed before the next weight's. So the
entries to grow are chosen right then, and only they are held on to, as a mask and their scores:

    weight           a  .  b  .  c  .       kept a, b, c; the smallest, b, is to be dropped
    dense gradient   .  4  1  .  .  9       the largest where nothing is kept after that: the last
    held             mask 0 0 0 0 0 1, scores 9

Gradients of one step may come in parts: micro-batches, the uses of a tied weight, recomputed blocks.
Scores are sums, as gradients are. What is a candidate gets the exact sum from its first part on; what a
later part brings in starts there. With one part, which is the rule, that is the exact choice.
"""

from typing import Final

import torch
from torch import Tensor

from samo.dynamic.choices import grow_largest, largest
from samo.masks import Mask
from samo.transfer import move, narrow
from samo.weights import Weight

__all__ = []


class Growth:
    """Watches a weight's dense gradients, and decides what to drop and what to grow."""

    def __init__(self, count: int, seed: int) -> None:
        self.count: Final = count
        self.seed: Final = seed
        self._kept_words: Tensor | None = None
        self._candidates: Mask | None = None
        self._scores: Tensor | None = None

    @torch.no_grad()
    def __call__(self, weight: Weight, grad: Tensor, is_first: bool) -> None:
        """Take in a dense gradient, the first of a sum or a further part of it."""
        assert weight.mask is not None
        if is_first or self._candidates is None or self._kept_words is None:
            staying = weight.kept - self.count
            self._kept_words = largest(weight.name, weight.masters(), staying, self.seed)
            self._candidates = self._best(weight, grad)
            self._scores = _at(weight, grad, self._candidates)
        else:
            self._add(weight, grad, self._candidates)

    def decide(self, weight: Weight) -> Mask | None:
        """Return the new mask; None if there was no gradient, or one that is not finite."""
        if self._candidates is None or self._kept_words is None or self._scores is None:
            return None
        if not bool(self._scores.isfinite().all()):
            return None
        assert weight.mask is not None
        return narrow(weight.mask, self._kept_words) | self._candidates

    @property
    def has_seen(self) -> bool:
        """Whether there was a gradient."""
        return self._candidates is not None

    def _best(self, weight: Weight, grad: Tensor) -> Mask:
        assert weight.mask is not None and self._kept_words is not None
        survivors = narrow(weight.mask, self._kept_words)
        return grow_largest(weight.name, grad, survivors, self.count, self.seed)

    def _add(self, weight: Weight, grad: Tensor, candidates: Mask) -> None:
        assert self._scores is not None
        weight.kernels.compress_(grad, candidates, self._scores, add=True)
        union = candidates | self._best(weight, grad)
        added = {"scores": _at(weight, grad, union ^ candidates)}
        moved, _ = move({"scores": self._scores}, candidates, union, added)
        words = largest(weight.name, moved["scores"], self.count, self.seed)
        self._candidates = narrow(union, words)
        best, _ = move(moved, union, self._candidates, {})
        self._scores = best["scores"]


def _at(weight: Weight, grad: Tensor, mask: Mask) -> Tensor:
    scores = torch.empty(mask.kept, dtype=torch.float32, device=grad.device)
    weight.kernels.compress_(grad, mask, scores)
    return scores
