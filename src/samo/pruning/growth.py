"""The entries of one weight that a gradient asks for, found while the dense gradient is there.

A dense gradient lives for a moment: it is compressed and freed before the next weight's. So candidates
for growth are chosen right then, and only they are held on to, as a mask and their scores:

    weight           a  .  b  .  c  .       kept a, b, c; the smallest, b, is to be dropped
    dense gradient   .  4  1  .  .  9       the largest where nothing is kept after that: the last
    held             mask 0 1 0 0 0 1, scores 4 9, of which the largest grow in the end

Gradients of one step may come in parts: micro-batches, recomputed blocks. Scores are sums, as gradients
are. What is a candidate gets the exact sum from its first part on; what a later part brings in starts
there. So several times as many are held as are to grow. With one part, which is the rule, or with all
entries as candidates, the choice is exact.
"""

import weakref
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samo.core.ranks import group_of
from samo.core.transfer import move, narrow
from samo.core.weight import Weight
from samo.errors import CompressionError
from samo.kernels.rounding import master_dtype
from samo.mask.mask import Mask
from samo.pruning.choices import grow_largest, largest

__all__ = []


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
    """Watches a weight's dense gradients as long as it lives, and decides what to drop and to grow.

    Args:
        weight: A weight with a mask.
        fraction: How much of what is kept is replaced.
        seed: Chooses between equals.
        candidates: How many times as many entries as are to grow are held; None for all.
        group: Ranks over which gradients are summed; by default those of DistributedDataParallel.
    """

    def __init__(
        self,
        weight: Weight,
        fraction: float,
        seed: int,
        candidates: int | None = 4,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.weight: Final = weight
        self.fraction: Final = fraction
        self.seed: Final = seed
        self.candidates: Final = candidates
        self.group: Final = group
        self._found: _Found | None = None
        self._pass = -1
        reference = weakref.ref(self)

        def watch(grad: Tensor) -> None:
            growth = reference()
            if growth is not None:
                growth.add(grad)

        weakref.finalize(self, weight.watch(watch)).atexit = False

    @property
    def has_seen(self) -> bool:
        """Whether there was a gradient."""
        return self._found is not None

    @property
    def is_finite(self) -> bool:
        """Whether no score is NaN or infinite."""
        return self._found is None or bool(self._found.scores.isfinite().all())

    @property
    def nbytes(self) -> int:
        """Bytes held until `decide`."""
        found = self._found
        if found is None:
            return 0
        return found.kept_words.nbytes + found.candidates.nbytes + found.scores.nbytes

    @torch.no_grad()
    def add(self, grad: Tensor) -> None:
        """Take in a dense gradient: the first of a sum, or a further part of it."""
        mask, sum_so_far = self.weight.mask, self.weight.values.grad
        assert mask is not None  # only weights with a mask are watched
        grad = self._of_all_ranks(grad)
        # Gradients that were thrown away leave nothing behind, set to None or to 0. Of a streamed weight
        # each use in a pass comes alone, and the sum is there at the end.
        backward, self._pass = self._pass, torch._C._current_graph_task_id()
        is_empty = sum_so_far is None or not bool(sum_so_far.any())
        is_first = is_empty and (self._pass == -1 or self._pass != backward)
        if is_first or self._found is None or self._found.mask is not mask:
            self._found = self._first(mask, grad)
        else:
            self._found = self._sum(grad, self._found)

    def decide(self) -> Mask | None:
        """Return the new mask; None without a gradient of the mask that the weight has."""
        found = self._found
        if found is None or found.mask is not self.weight.mask:
            return None
        if found.num_grown == 0:
            return found.mask
        words = largest(self.weight.name, found.scores, found.num_grown, self.seed)
        return found.survivors | narrow(found.candidates, words)

    def _of_all_ranks(self, grad: Tensor) -> Tensor:
        """Return the sum of a gradient over ranks, each of which has seen a part of the batch."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return grad
        group = self.group or group_of(self.weight.values)
        if group is None:
            raise CompressionError(
                f"'{self.weight.name}' is to grow by gradients, of which each of "
                f"{dist.get_world_size()} ranks may have a part, and no DistributedDataParallel tells "
                "which; pass group=torch.distributed.group.WORLD to DynamicSparse, or the group of the "
                "ranks that have replicas of this model"
            )
        # A copy: the gradient itself goes on to be compressed, and reduced by others.
        dtype = master_dtype(grad.dtype)
        total = grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    def _first(self, mask: Mask, grad: Tensor) -> _Found:
        weight, count = self.weight, round(self.fraction * mask.kept)
        values = weight.values.detach()
        kept_words = largest(weight.name, values, mask.kept - count, self.seed)
        survivors = narrow(mask, kept_words)
        num_held = survivors.numel - survivors.kept
        if self.candidates is not None:
            num_held = min(num_held, self.candidates * count)
        candidates = grow_largest(weight.name, grad, survivors, num_held, self.seed)
        return _Found(mask, kept_words, count, candidates, self._at(grad, candidates))

    def _sum(self, grad: Tensor, found: _Found) -> _Found:
        name, candidates = self.weight.name, found.candidates
        scores = found.scores + self._at(grad, candidates)
        taken = found.survivors | candidates
        count = min(candidates.kept, taken.numel - taken.kept)
        if count == 0:
            return found._replace(scores=scores)
        more = grow_largest(name, grad, taken, count, self.seed)
        union = candidates | more
        added = {"scores": self._at(grad, more)}
        moved, _ = move({"scores": scores}, candidates, union, added)
        best = narrow(union, largest(name, moved["scores"], candidates.kept, self.seed))
        best_scores = move(moved, union, best, {})[0]["scores"]
        return found._replace(candidates=best, scores=best_scores)

    def _at(self, grad: Tensor, mask: Mask) -> Tensor:
        return self.weight.layout._replace(mask=mask).compress(grad, torch.float32)
