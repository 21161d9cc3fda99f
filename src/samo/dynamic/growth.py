"""The entries of one weight that a gradient asks for, found while the dense gradient is there.

A dense gradient lives for a moment: it is compressed and freed before the next weight's. So candidates
for growth are chosen right then, and only they are held on to, as a mask and their scores:

    weight           a  .  b  .  c  .       kept a, b, c; the smallest, b, is to be dropped
    dense gradient   .  4  1  .  .  9       the largest where nothing is kept after that: the last
    held             mask 0 1 0 0 0 1, scores 4 9, of which the largest grow in the end

Gradients of one step may come in parts: micro-batches, the uses of a tied weight, recomputed blocks.
Scores are sums, as gradients are. What is a candidate gets the exact sum from its first part on; what a
later part brings in starts there. So several times as many are held as are to grow. With one part,
which is the rule, or with all entries as candidates, the choice is exact.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from samo.dynamic.choices import grow_largest, largest
from samo.kernels.rounding import master_dtype
from samo.mask import Mask
from samo.transfer import move, narrow
from samo.weights import Weight

__all__ = []


AddUp = Callable[[Tensor], Tensor | None]
"""Returns the sum of a tensor over ranks, or writes it to the tensor."""


class _Found(NamedTuple):
    mask: Mask
    """The weight's, on which all of this stands."""
    kept_words: Tensor
    """Packed bits: which of its kept entries stay."""
    num_grown: int
    """How many are to grow."""
    candidates: Mask
    scores: Tensor
    """The gradients of the candidates, summed up."""

    @property
    def survivors(self) -> Mask:
        return narrow(self.mask, self.kept_words)


class Growth:
    """Watches a weight's dense gradients, and decides what to drop and what to grow.

    Args:
        fraction: How much of what is kept is replaced.
        seed: Chooses between equals.
        candidates: How many times as many entries as are to grow are held; None for all.
        add_up: Sums a dense gradient over the ranks of a run, in place of the weight's replicas.
    """

    def __init__(
        self,
        fraction: float,
        seed: int,
        candidates: int | None = 4,
        add_up: AddUp | None = None,
    ) -> None:
        self.add_up: Final = add_up
        self.fraction: Final = fraction
        self.seed: Final = seed
        self.candidates: Final = candidates
        self._found: _Found | None = None

    @property
    def has_seen(self) -> bool:
        """Whether there was a gradient."""
        return self._found is not None

    @property
    def nbytes(self) -> int:
        """Bytes held until `decide`."""
        found = self._found
        if found is None:
            return 0
        return found.kept_words.nbytes + found.candidates.nbytes + found.scores.nbytes

    @torch.no_grad()
    def __call__(self, weight: Weight, grad: Tensor, is_first: bool) -> None:
        """Take in a dense gradient, the first of a sum or a further part of it."""
        assert weight.mask is not None  # only weights with a mask are watched
        grad = self._of_all_ranks(weight, grad)
        if is_first or self._found is None or self._found.mask is not weight.mask:
            self._found = self._first(weight, weight.mask, grad)
        else:
            self._found = self._sum(weight, grad, self._found)

    def decide(self, weight: Weight) -> Mask | None:
        """Return the new mask; None without a gradient, or if it or the mask cannot be trusted."""
        found = self._found
        if found is None or found.mask is not weight.mask:
            return None
        if found.num_grown == 0:
            return found.mask
        if not bool(found.scores.isfinite().all()):
            return None
        words = largest(weight.name, found.scores, found.num_grown, self.seed)
        return found.survivors | narrow(found.candidates, words)

    def _of_all_ranks(self, weight: Weight, grad: Tensor) -> Tensor:
        """Return the sum of a gradient over ranks, each of which has seen a part of the batch."""
        if self.add_up is None:
            if weight.replica is None:
                return grad
            what = f"the gradient of '{weight.name}', by which entries grow"
            return weight.replica.team.add_up(grad, what)
        # A copy: the gradient itself goes on to be compressed, and reduced by others.
        own = grad.to(master_dtype(grad.dtype), copy=True, memory_format=torch.contiguous_format)
        total = self.add_up(own)
        if total is None:
            return own
        if not isinstance(total, Tensor) or total.shape != grad.shape:
            found = f"a {type(total).__name__}"
            if isinstance(total, Tensor):
                found = f"shape {tuple(total.shape)}"
            raise TypeError(
                f"add_up returned {found} for the gradient of '{weight.name}', of shape "
                f"{tuple(grad.shape)}; it returns the sum of its argument over ranks, or writes it to the "
                "argument and returns None, as torch.distributed.all_reduce does"
            )
        return total

    def _first(self, weight: Weight, mask: Mask, grad: Tensor) -> _Found:
        count = round(self.fraction * mask.kept)
        kept_words = largest(weight.name, weight.masters(), mask.kept - count, self.seed)
        survivors = narrow(mask, kept_words)
        num_held = survivors.numel - survivors.kept
        if self.candidates is not None:
            num_held = min(num_held, self.candidates * count)
        candidates = grow_largest(weight.name, grad, survivors, num_held, self.seed)
        return _Found(mask, kept_words, count, candidates, _at(weight, grad, candidates))

    def _sum(self, weight: Weight, grad: Tensor, found: _Found) -> _Found:
        candidates, scores = found.candidates, found.scores
        weight.kernels.compress_(grad, candidates, scores, add=True)
        taken = found.survivors | candidates
        count = min(candidates.kept, taken.numel - taken.kept)
        if count == 0:
            return found
        more = grow_largest(weight.name, grad, taken, count, self.seed)
        union = candidates | more
        added = {"scores": _at(weight, grad, more)}
        moved, _ = move({"scores": scores}, candidates, union, added)
        words = largest(weight.name, moved["scores"], candidates.kept, self.seed)
        best = narrow(union, words)
        best_scores = move(moved, union, best, {})[0]["scores"]
        return found._replace(candidates=best, scores=best_scores)


def _at(weight: Weight, grad: Tensor, mask: Mask) -> Tensor:
    scores = torch.empty(mask.kept, dtype=torch.float32, device=grad.device)
    weight.kernels.compress_(grad, mask, scores)
    return scores
