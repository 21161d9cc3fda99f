"""A weight's place among the replicas: what it is told, and what it tells.

Each use of a weight in a forward pass has a leaf of its own, the tap, so a gradient may come several times
in one backward pass. A weight is complete once every use that still can bring a gradient has brought it.
How many there are is known without a guess: a use counts from the forward pass on until its gradient comes
or its graph is freed, as that of a recomputation is. Only two kinds of gradients come unannounced: those
that autograd sums over all uses of a plain parameter, and those of a backward pass inside another (reentrant
checkpointing). A weight that once had one of these is waited for.
"""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from samo.errors import CompressionError
from samo.parallel.buckets import Bucket
from samo.partners import Replica
from samo.weights import Weight

if TYPE_CHECKING:
    from samo.parallel.team import ReplicaTeam

__all__ = []


class Member:
    """The replica of a weight; without a bucket, that of a frozen one."""

    def __init__(
        self, team: "ReplicaTeam", weight: Weight, bucket: Bucket | None, index: int = 0
    ) -> None:
        self.team: Final = team
        self.is_released = False  # nothing is reduced until the buckets are laid out anew
        self.bucket: Final = bucket
        self.home: Final = None if bucket is None else bucket.home_of(index)
        self.part: Weight | None = None
        self.num_awaited = 0  # uses whose gradient may still come
        self.has_arrived = False
        self.is_reduced = True  # all gradients that came have been
        self._was_used = False
        self._comes_summed = self._comes_nested = False
        self._last_arrived = False
        self._index: Final = index
        self._name: Final = weight.name
        self._weight: Final = weakref.ref(weight)
        self._mask: Final = weight.mask
        if bucket is not None and bucket.is_sharded:
            self.part = bucket.part_of(index)
            self.part.replica = Part(team, weight, bucket, index)
            weight.rest = None

    @property
    def whole(self) -> Weight | None:
        """Nothing: the weight is whole."""
        return None

    @property
    def owned(self) -> tuple[int, int] | None:
        """Where this rank's part begins and ends among the kept entries; None for a whole weight."""
        if self.part is None or self.bucket is None:
            return None
        return self.bucket.owned(self._index)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where the part of each rank begins, and where the last one ends; nowhere for a frozen weight."""
        return () if self.bucket is None else self.bucket.bounds(self._index)

    def cut(self, values: Tensor) -> Tensor:
        """Return all of it."""
        return values

    def show_gradient(self) -> Tensor:
        """Return the reduced gradient of all kept entries, 0 where there is none; every rank calls it.

        Raises:
            CompressionError: There is one that was not reduced.
        """
        weight = self._weight()
        assert weight is not None, "whoever asks holds the weight"
        if not self.is_reduced and weight.leaf.grad is not None:
            raise CompressionError(
                f"the gradient of '{self._name}' is not reduced over ranks yet, so that of its other "
                "uses on other stages cannot be added; leave the last micro-batch of a batch out of "
                "samo.no_sync, or pass is_last=False to Pipeline.step if other batches follow"
            )
        whole = torch.zeros(weight.kept, dtype=weight.grad_dtype, device=weight.device)
        if self.part is None or self.bucket is None:
            return whole if weight.leaf.grad is None else whole.copy_(weight.leaf.grad)
        start, stop = self.bucket.owned(self._index)
        if self.part.leaf.grad is not None:
            whole[start:stop] = self.part.leaf.grad
        # All but one of the terms of each sum are 0.
        self.team.group.all_reduce(
            whole, kind="gradients", what=f"the gradient of '{self._name}'"
        ).wait()
        return whole

    def set_gradient(self, values: Tensor, own: Tensor | None) -> None:
        """Take other gradients of all kept entries, the same on all ranks, and add ``own`` to its part."""
        weight = self._weight()
        assert weight is not None, "whoever asks holds the weight"
        assert self.bucket is not None, "frozen weights have no gradients"
        if self.part is None:
            held = weight.leaf.grad = self.bucket.home_of(self._index).copy_(values)
        else:
            home = self.bucket.owned_home_of(self._index)
            held = self.part.leaf.grad = home.copy_(self.bucket.cut(self._index, values))
        if own is not None:
            held.add_(own)
        self.bucket.accept()

    @property
    def is_complete(self) -> bool:
        """Whether no gradient of this pass is still to come."""
        if self.num_awaited or (self._comes_summed and not self._last_arrived):
            return False
        return self.has_arrived or not (self._was_used or self._comes_nested)

    def watch(self, take: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Return the hook of one use in a forward pass."""
        if self.bucket is None:
            return take
        self.team.on_use()
        self.num_awaited += 1
        return _Use(self, take)

    def expect(self) -> None:
        """Learn that a gradient comes.

        Raises:
            CompressionError: The weight was released, or frozen at first, its mask has changed, or its
                reduction is under way.
        """
        weight = self._weight()
        if self.is_released:
            raise CompressionError(
                f"'{self._name}' was released, so its gradient would not be reduced and ranks would drift "
                "apart; call rebuild() of what samo.replicate returned, or release(is_final=True) to train "
                "on without the others"
            )
        if self.bucket is None:
            raise CompressionError(
                f"'{self._name}' was frozen when samo.replicate was called, so its gradient would not be "
                "reduced; unfreeze it on all ranks, then call rebuild() of what samo.replicate returned"
            )
        if weight is not None and self.home is not None and weight.kept != self.home.numel():
            raise CompressionError(
                f"'{self._name}' keeps {weight.kept:,} weights, but {self.home.numel():,} when its place "
                "in a bucket was made; call rebuild() of what samo.replicate returned after masks change"
            )
        if weight is not None and weight.mask is not self._mask:
            raise CompressionError(
                f"'{self._name}' has another mask than when its place in a bucket was made, and nobody has "
                "compared it with those of other ranks; call rebuild() of what samo.replicate returned "
                "after masks change"
            )
        if self.bucket.is_launched:
            raise CompressionError(
                f"another gradient of '{self._name}' came after its reduction over ranks had begun; the "
                "weight is used both by its module and as a plain tensor, or an older graph is run "
                "again: pass overlap=False to samo.replicate"
            )
        self.team.on_gradient()
        self.bucket.begin()

    def arrived(self, *, is_last: bool) -> None:
        """Learn that a gradient was written."""
        self._comes_nested |= self.team.is_nested
        self.has_arrived = True
        self.is_reduced = False
        if is_last:
            self._comes_summed = self._last_arrived = True
        self.team.launch_complete()

    def adopted(self) -> None:
        """Take over what somebody else wrote to the parameter into this rank's part of it."""
        weight = self._weight()
        if weight is None or self.part is None or self.bucket is None:
            return
        with torch.no_grad():
            self.part.param.copy_(self.bucket.cut(self._index, weight.values()))
        self.part.check()  # sees that it was written to, and starts its rest anew

    def clear(self) -> None:
        """Forget gradients that were not reduced yet."""
        self.is_reduced = True
        if self.bucket is not None and not self.bucket.is_launched:
            self.bucket.forget()

    def end_pass(self, *, is_reduced: bool) -> None:
        """Be ready for another backward pass."""
        self._was_used = self.has_arrived
        self.has_arrived = self._last_arrived = False
        self.is_reduced |= is_reduced


def released(team: "ReplicaTeam", weight: Weight) -> Member:
    """Return the replica of a weight that takes no gradient until buckets are laid out anew."""
    member = Member(team, weight, None)
    member.is_released = True
    return member


class Part:
    """The replica of this rank's part of a weight, which an optimizer updates."""

    part: Weight | None = None

    def __init__(self, team: "ReplicaTeam", whole: Weight, bucket: Bucket, index: int) -> None:
        self.team: Final = team
        self.home: Final = bucket.owned_home_of(index)
        self._whole: Final = weakref.ref(whole)
        self._bucket: Final = bucket
        self._index: Final = index

    @property
    def whole(self) -> Weight | None:
        """The weight that this is a part of."""
        return self._whole()

    @property
    def owned(self) -> tuple[int, int] | None:
        """Where the part begins and ends among the kept entries of the whole weight."""
        return self._bucket.owned(self._index)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where the part of each rank begins, and where the last one ends."""
        return self._bucket.bounds(self._index)

    def cut(self, values: Tensor) -> Tensor:
        """Return this rank's part of a vector of all kept entries."""
        return self._bucket.cut(self._index, values)

    def show_gradient(self) -> Tensor:
        """Return that of the whole weight."""
        return self._member.show_gradient()

    def set_gradient(self, values: Tensor, own: Tensor | None) -> None:
        """Take that of the whole weight."""
        self._member.set_gradient(values, own)

    @property
    def _member(self) -> Replica:
        whole = self._whole()
        assert whole is not None, "whoever asks holds the weight"
        assert whole.replica is not None, "a part is one of a replica's"
        return whole.replica

    def watch(self, take: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Return the hook as it is: a part is used in no forward pass."""
        return take

    def expect(self) -> None:
        """Do nothing: a part's gradient comes from a reduction."""

    def arrived(self, *, is_last: bool) -> None:
        """Do nothing."""

    def adopted(self) -> None:
        """Do nothing: the model is told after the step."""

    def clear(self) -> None:
        """Do nothing."""


class _Use:
    """The hook of one use. Only the use's leaf refers to it, so both end together."""

    def __init__(self, member: Member, take: Callable[[Tensor], None]) -> None:
        self._member, self._take = member, take
        self._is_awaited = True

    def __call__(self, use: Tensor) -> None:
        if not self._is_awaited:
            self._member.team.on_repeated_use()
        self._done()
        self._take(use)

    def __del__(self) -> None:
        self._done()

    def _done(self) -> None:
        self._member.num_awaited -= self._is_awaited
        self._is_awaited = False
