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

from typing import Final, NamedTuple

import torch
from torch import Tensor

from samo.dynamic.choices import grow_largest, largest
from samo.masks import Mask
from samo.transfer import move, narrow
from samo.weights import Weight

__all__ = []


class _Found(NamedTuple):
    kept_words: Tensor
    """Packed bits: which of the kept entries stay."""
    candidates: Mask
    scores: Tensor
    """The gradients of the candidates, summed up."""


class Growth:
    """Watches a weight's dense gradients, and decides what to drop and what to grow."""

    def __init__(self, count: int, seed: int) -> None:
        self.count: Final = count
        self.seed: Final = seed
        self._found: _Found | None = None

    @property
    def has_seen(self) -> bool:
        """Whether there was a gradient."""
        return self._found is not None

    @torch.no_grad()
    def __call__(self, weight: Weight, grad: Tensor, is_first: bool) -> None:
        """Take in a dense gradient, the first of a sum or a further part of it."""
        if is_first or self._found is None:
            staying = weight.kept - self.count
            kept_words = largest(weight.name, weight.masters(), staying, self.seed)
            survivors = _survivors(weight, kept_words)
            candidates = grow_largest(weight.name, grad, survivors, self.count, self.seed)
            self._found = _Found(kept_words, candidates, _at(weight, grad, candidates))
        else:
            self._found = self._sum(weight, grad, *self._found)

    def decide(self, weight: Weight) -> Mask | None:
        """Return the new mask; None if there was no gradient, or one that is not finite."""
        if self._found is None or not bool(self._found.scores.isfinite().all()):
            return None
        return _survivors(weight, self._found.kept_words) | self._found.candidates

    def _sum(
        self, weight: Weight, grad: Tensor, kept_words: Tensor, candidates: Mask, scores: Tensor
    ) -> _Found:
        weight.kernels.compress_(grad, candidates, scores, add=True)
        taken = _survivors(weight, kept_words) | candidates
        count = min(self.count, taken.numel - taken.kept)
        more = grow_largest(weight.name, grad, taken, count, self.seed)
        union = candidates | more
        added = {"scores": _at(weight, grad, more)}
        moved, _ = move({"scores": scores}, candidates, union, added)
        words = largest(weight.name, moved["scores"], self.count, self.seed)
        best = narrow(union, words)
        return _Found(kept_words, best, move(moved, union, best, {})[0]["scores"])


def _survivors(weight: Weight, kept_words: Tensor) -> Mask:
    assert weight.mask is not None  # only weights with a mask are watched
    return narrow(weight.mask, kept_words)


def _at(weight: Weight, grad: Tensor, mask: Mask) -> Tensor:
    scores = torch.empty(mask.kept, dtype=torch.float32, device=grad.device)
    weight.kernels.compress_(grad, mask, scores)
    return scores
