"""Which entries of a weight to drop and which to grow, at random or by their gradient.

A dense gradient lives for a moment: it is compressed and freed before the next weight's. So
candidates for growth are chosen right then, and only their mask and scores are kept:

    weight           a  .  b  .  c  .       keeps a, b, c; the smallest, b, will be dropped
    dense gradient   .  4  1  .  .  9       the largest where nothing is kept after that: the last
    candidates       mask 0 1 0 0 0 1, scores 4 9, of which the largest grow in the end

The gradient of one step may come in parts: micro-batches, recomputed blocks. Scores are sums, as
gradients are; an entry that a later part brings in starts there. So several times as many are held
as will grow. With one part, which is usual, or with all entries as candidates, the choice is exact.
"""

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samo.core.rank_checks import group_of
from samo.core.remap import move, narrow
from samo.core.weight import Weight
from samo.errors import CompressionError
from samo.kernels.rounding import master_dtype
from samo.mask.mask import Mask
from samo.pruning.topk import largest


def prune_to(name: str, mask: Mask, values: Tensor, kept: int, seed: int) -> Mask:
    """Return a mask that keeps the ``kept`` largest values of what ``mask`` keeps."""
    return narrow(mask, largest(name, values, kept, seed))


def grow_largest(name: str, scores: Tensor, taken: Mask, count: int, seed: int) -> Mask:
    """Return a mask of the ``count`` largest dense scores where ``taken`` keeps nothing."""
    return Mask(taken.shape, largest(name, scores, count, seed, excluded=taken))


class _Found(NamedTuple):
    mask: Mask  # of the weight at that time
    survivors: Tensor  # packed bits: which of its kept entries stay
    num_grown: int
    candidates: Mask
    scores: Tensor  # the summed gradients of the candidates


@dataclass(eq=False)
class Growth:
    """Watches a weight's dense gradients while it lives, and decides what to drop and to grow."""

    weight: Weight
    fraction: float  # of the kept entries that are replaced
    seed: int
    candidates: int | None = 4  # as in `DynamicSparse`, and the group too
    group: dist.ProcessGroup | None = None
    _found: _Found | None = None
    _pass: int = -1
    _is_zero: bool = False  # whether the summed gradients of the kept entries are all 0

    def __post_init__(self) -> None:
        reference = weakref.ref(self)

        def watch(grad: Tensor) -> None:
            growth = reference()
            if growth is not None:
                growth.add(grad)

        weakref.finalize(self, self.weight.watch(watch)).atexit = False

    @property
    def scores(self) -> Tensor | None:
        """The summed gradients of the candidates; None before the first one."""
        return None if self._found is None else self._found.scores

    @torch.no_grad()
    def add(self, grad: Tensor) -> None:
        """Take a dense gradient: the first of a sum, or a further part of it."""
        mask, sum_so_far = self.weight.mask, self.weight.values.grad
        assert mask is not None  # only weights with a mask are watched
        is_zero = not bool(self._at(grad, mask).any())
        grad = self._all_reduce(grad)
        # A discarded gradient, set to None or to 0, starts a new sum. A streamed weight reports
        # each use in a backward pass by itself, and its sum is there only at the end: the id of the
        # pass tells its uses from a new sum.
        last_pass, self._pass = self._pass, torch._C._current_graph_task_id()
        is_empty = sum_so_far is None or not (self._is_zero or bool(sum_so_far.any()))
        is_first = is_empty and (self._pass == -1 or self._pass != last_pass)
        if is_first or self._found is None or self._found.mask is not mask:
            self._found, self._is_zero = self._first(mask, grad), is_zero
        else:
            self._found, self._is_zero = self._sum(grad, self._found), is_zero and self._is_zero

    def decide(self) -> Mask | None:
        """Return the new mask, or None if there was no gradient since the mask last changed."""
        found = self._found
        if found is None or found.mask is not self.weight.mask:
            return None
        if found.num_grown == 0:
            return found.mask
        words = largest(self.weight.name, found.scores, found.num_grown, self.seed)
        return narrow(found.mask, found.survivors) | narrow(found.candidates, words)

    def _all_reduce(self, grad: Tensor) -> Tensor:
        """Return the sum of a gradient over the replicas."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return grad
        group = self.group or group_of(self.weight.values)
        if group is None:
            raise CompressionError(
                f"'{self.weight.name}' grows by gradients of {dist.get_world_size()} ranks, but "
                "the model is not wrapped in DistributedDataParallel; pass "
                "DynamicSparse(group=) the process group of the ranks with replicas of it"
            )
        # A copy: the gradient itself is compressed, and reduced by others.
        dtype = master_dtype(grad.dtype)
        total = grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    def _first(self, mask: Mask, grad: Tensor) -> _Found:
        weight, count = self.weight, round(self.fraction * mask.kept)
        survivors = largest(weight.name, weight.values.detach(), mask.kept - count, self.seed)
        num_held = mask.numel - (mask.kept - count)
        if self.candidates is not None:
            num_held = min(num_held, self.candidates * count)
        taken = narrow(mask, survivors)
        candidates = grow_largest(weight.name, grad, taken, num_held, self.seed)
        return _Found(mask, survivors, count, candidates, self._at(grad, candidates))

    def _sum(self, grad: Tensor, found: _Found) -> _Found:
        name, candidates = self.weight.name, found.candidates
        scores = found.scores + self._at(grad, candidates)
        taken = narrow(found.mask, found.survivors) | candidates
        count = min(candidates.kept, taken.numel - taken.kept)
        if count == 0:
            return found._replace(scores=scores)
        more = grow_largest(name, grad, taken, count, self.seed)
        union = candidates | more
        moved, _ = move({"scores": scores}, candidates, union, {"scores": self._at(grad, more)})
        best = narrow(union, largest(name, moved["scores"], candidates.kept, self.seed))
        best_scores = move(moved, union, best, {})[0]["scores"]
        return found._replace(candidates=best, scores=best_scores)

    def _at(self, grad: Tensor, mask: Mask) -> Tensor:
        return self.weight.layout._replace(mask=mask).compress(grad, master_dtype(grad.dtype))
