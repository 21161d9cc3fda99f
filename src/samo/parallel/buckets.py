"""Flat buffers of compressed gradients, and their reduction over ranks.

The gradients of a bucket's weights are views of its one buffer: there is no second copy, and no dense
bucket anywhere. With sharded state a rank owns one of equal ranges of the buffer. It then holds the
optimizer's state for these entries alone, and a vector of their values, so that each weight's part of it
is an unpruned weight of its own.

    flat      gradients of all weights, padded to a multiple of the ranks
    own       the range of them that is reduced on this rank: all of it, or this rank's
    values    the weights of that range, if sharded
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from samo.parallel.collectives import Group, Pending
from samo.parallel.layout import BucketPlan
from samo.weights import Weight

__all__ = []


class Bucket:
    """The gradients of some weights of equal types."""

    def __init__(
        self,
        plan: BucketPlan,
        weights: Sequence[Weight],
        group: Group,
        *,
        wire_dtype: torch.dtype | None,
        is_averaged: bool,
        what: str,
    ) -> None:
        first = weights[0]
        self.plan: Final = plan
        self.is_begun = False  # has a gradient come since the last reduction?
        self._group: Final = group
        self._is_averaged: Final = is_averaged
        self._divisor: Final = group.size if is_averaged else 1
        self._what: Final = what
        self._weights: Final = [weakref.ref(weight) for weight in weights]
        self.flat: Final = torch.zeros(plan.size, dtype=first.grad_dtype, device=first.device)
        self._wire_dtype: Final = wire_dtype or first.grad_dtype
        self._pruned: Final = sum(weight.kept for weight in weights if weight.mask is not None)
        begin = group.rank * plan.chunk if self.is_sharded else 0
        self.own: Final = self.flat[begin : begin + plan.chunk]
        self.values: Final = (
            torch.zeros(plan.chunk, dtype=first.dtype, device=first.device)
            if self.is_sharded
            else None
        )
        self._wire: Tensor | None = None
        self._pending: Pending | None = None
        self._carried: Tensor | None = None
        self._carrying: set[int] = set()
        self._version = -1

    @property
    def is_sharded(self) -> bool:
        """Whether each rank owns a range of the bucket."""
        return self.plan.num_ranks > 1

    @property
    def is_launched(self) -> bool:
        """Whether its reduction is under way."""
        return self._pending is not None

    @property
    def weights(self) -> list[Weight]:
        """Its weights, in their order."""
        return list(self.each_weight())

    def each_weight(self) -> Iterator[Weight]:
        """Yield its weights, in their order."""
        for reference in self._weights:
            weight = reference()
            if weight is not None:
                yield weight

    def home_of(self, index: int) -> Tensor:
        """Return where the gradient of a weight lies."""
        start, stop = self.plan.range_of(index)
        return self.flat[start:stop]

    def part_of(self, index: int) -> Weight:
        """Return this rank's part of a weight, made now from the weight's values and rest."""
        weight = self.weights[index]
        assert self.values is not None
        values = self.values[self._owned_place(index)]
        values.copy_(self.cut(index, weight.values()))
        rest = weight.ensure_rest()
        # Not the view itself: all views would share one count of changes.
        part = Weight(
            weight.name,
            nn.Parameter(values.data),
            None,
            dtype=weight.dtype,
            grad_dtype=weight.grad_dtype,
            path=weight.path,
        )
        part.rest = None if rest is None else self.cut(index, rest)
        return part

    def cut(self, index: int, values: Tensor) -> Tensor:
        """Return this rank's part of a vector of all kept entries of a weight; a new tensor."""
        start, stop = self.owned(index)
        return values[start:stop].clone()

    def owned(self, index: int) -> tuple[int, int]:
        """Return where this rank's part of a weight begins and ends in it."""
        return self.plan.owned(index, self._group.rank)

    def bounds(self, index: int) -> tuple[int, ...]:
        """Return where the part of each rank begins in a weight, and where the last one ends."""
        owned = [self.plan.owned(index, rank) for rank in range(self.plan.num_ranks)]
        return (*(start for start, _ in owned), owned[-1][1])

    def owned_home_of(self, index: int) -> Tensor:
        """Return where the gradient of this rank's part of a weight lies."""
        return self.own[self._owned_place(index)]

    def begin(self) -> None:
        """Make room for the first gradient since the last reduction; what was reduced counts on."""
        if self.is_begun:
            return
        self.is_begun = True
        if self.is_sharded:
            self._carry()
        elif not self._is_averaged and any(w.leaf.grad is not None for w in self.weights):
            self.flat.div_(self._group.size)  # every rank has the sum, and will add it once more

    def carries(self, index: int) -> bool:
        """Return whether a weight has reduced gradients that this pass adds to."""
        return index in self._carrying

    def launch(self) -> None:
        """Start the reduction; gradients that did not come are 0."""
        self.begin()
        for index, weight in enumerate(self.weights):
            home = self.home_of(index)
            if weight.leaf.grad is None:
                home.zero_()
            elif weight.leaf.grad.data_ptr() != home.data_ptr():
                home.copy_(weight.leaf.grad)  # somebody set it
        self._wire = self.flat.to(self._wire_dtype)  # the buffer itself where types agree
        pruned = self._pruned * self._wire.element_size()
        if self.is_sharded:
            chunk = self._wire.view(self._group.size, -1)[self._group.rank]
            self._pending = self._group.reduce_scatter(
                chunk,
                self._wire,
                kind="gradients",
                what=self._what,
                divisor=self._divisor,
                pruned=pruned,
            )
        else:
            self._pending = self._group.all_reduce(
                self._wire, kind="gradients", what=self._what, pruned=pruned
            )

    def wait(self) -> None:
        """Wait for the reduction and put its result in place."""
        assert self._pending is not None
        assert self._wire is not None
        self._pending.wait()
        reduced, divisor = self._wire, self._divisor
        if self.is_sharded:  # divided already, before the sum was rounded
            reduced, divisor = self._wire.view(self._group.size, -1)[self._group.rank], 1
        if reduced.element_size() < self.own.element_size():
            reduced = self.own.copy_(reduced)  # a mean is rounded in the wider of both types
        if divisor > 1:
            reduced.div_(divisor)
        if reduced.data_ptr() != self.own.data_ptr():
            self.own.copy_(reduced)
        if self._carried is not None:
            self.own.add_(self._carried)

    def finish(self, used: Sequence[bool]) -> None:
        """Hand the gradients of the weights that were used on any rank to their leaves."""
        for index, (weight, is_used) in enumerate(zip(self.weights, used)):
            if self.is_sharded:
                weight.leaf.grad = None
                if is_used:
                    weight.part.leaf.grad = self.owned_home_of(index)
            elif is_used:
                weight.leaf.grad = self.home_of(index)
        self.forget()
        self.accept()

    def forget(self) -> None:
        """Be ready for the gradients of another pass."""
        self._wire = self._pending = self._carried = None
        self._carrying = set()
        self.is_begun = False

    def accept(self) -> None:
        """Take the gradients as they are now."""
        self._version = self.own._version

    @property
    def is_edited(self) -> bool:
        """Whether somebody wrote to the gradients since they were reduced."""
        return self.own._version != self._version

    def publish(self) -> "Publication":
        """Start to gather the new values of all ranks."""
        assert self.values is not None
        gathered = torch.empty(self.plan.size, dtype=self.values.dtype, device=self.values.device)
        pending = self._group.all_gather(
            gathered,
            self.values,
            kind="values",
            what=self._what.replace("gradients", "new values"),
            pruned=self._pruned * gathered.element_size(),
        )
        return Publication(self, gathered, pending)

    def gather_rests(self) -> None:
        """Give every weight its whole rest again, from the parts of all ranks."""
        weights = self.weights
        if not weights or (first := weights[0].part.rest) is None:
            return
        own = torch.zeros(self.plan.chunk, dtype=first.dtype, device=first.device)
        for index, weight in enumerate(weights):
            rest = weight.part.rest
            assert rest is not None
            own[self._owned_place(index)] = rest
        gathered = torch.empty(self.plan.size, dtype=own.dtype, device=own.device)
        self._group.all_gather(
            gathered.view(torch.uint8), own.view(torch.uint8), kind="values", what="the remainders"
        ).wait()
        for index, weight in enumerate(weights):
            start, stop = self.plan.range_of(index)
            weight.rest = gathered[start:stop].clone()

    def _owned_place(self, index: int) -> slice:
        """Return where this rank's part of a weight lies in its own range."""
        start, stop = self.plan.owned(index, self._group.rank)
        base = self.plan.range_of(index)[0] - self._group.rank * self.plan.chunk
        return slice(base + start, base + stop) if stop > start else slice(0, 0)

    def _carry(self) -> None:
        """Set aside what was reduced: this rank's gradients will be written over it."""
        parts = [weight.part for weight in self.weights]
        if all(part.leaf.grad is None for part in parts):
            return
        self._carried = self.own.clone()
        for index, part in enumerate(parts):
            if part.leaf.grad is None:
                self._carried[self._owned_place(index)] = 0
            else:
                self._carrying.add(index)
            part.leaf.grad = None


class Publication:
    """The new values of a bucket on their way to all ranks."""

    def __init__(self, bucket: Bucket, gathered: Tensor, pending: Pending) -> None:
        self._bucket, self._gathered, self._pending = bucket, gathered, pending

    def wait(self) -> None:
        """Wait until they are here."""
        self._pending.wait()

    def finish(self) -> None:
        """Wait for them and let the model compute with them."""
        self.wait()
        for index, weight in enumerate(self._bucket.weights):
            start, stop = self._bucket.plan.range_of(index)
            weight.kernels.expand_(self._gathered[start:stop], weight.mask, weight.param)
            weight.changed()
