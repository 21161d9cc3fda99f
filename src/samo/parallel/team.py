"""When buckets are reduced, and what an optimizer's step does around it.

One backward pass:

    gradient of a weight    written to its place in a bucket; is the next bucket complete? launch it
    ...                     buckets start one after the other in one order, the same on all ranks
    end of backward         launch what is left; wait for all; leaves have their gradients

A bucket starts only after all before it. So the order on the wire does not depend on the order in which
gradients come. A parameter that was not used in the last pass, and was handed to no module since, is not
waited for; on ranks that do not use it, it counts as 0.
"""

import functools
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from samo.errors import CompressionError
from samo.kernels.rounding import master_dtype
from samo.parallel.buckets import Bucket, Publication
from samo.parallel.collectives import Group
from samo.parallel.layout import Tensor1D, plan_buckets
from samo.parallel.members import Member
from samo.weights import Weight

__all__ = []

_AT_ONCE: Final = 2
"""Buckets whose new values are gathered at the same time; each takes memory for all of its weights."""


class Settings(NamedTuple):
    """What `samo.replicate` was asked for; must be the same on all ranks."""

    shard: Literal["state"] | None
    wire_dtype: torch.dtype | None
    bucket_bytes: float
    average: bool
    overlap: bool


class ReplicaTeam:
    """This rank's side of a group of ranks with one copy of the model each."""

    def __init__(self, group: Group, settings: Settings) -> None:
        self.group: Final = group
        self.settings: Final = settings
        self.is_syncing = True
        self.buckets: Final[list[Bucket]] = []
        self._next = 0
        self._task: int | None = None  # the autograd run at whose end gradients are waited for
        # Before the end of a pass: from the second on, since the first one shows whose gradients
        # autograd sums over their uses.
        self._may_launch = False
        self._is_repeated = False
        # Whether dense gradients may be summed in this pass. Buckets wait for its end then: when one is
        # complete may differ between ranks, and sums and buckets must start in one order on all.
        self._is_watched = False
        self._stepped: list[Bucket] = []

    def lay_out(self, weights: Mapping[str, Weight]) -> None:
        """Build the buckets and give every weight its place."""
        trained = {name: weight for name, weight in weights.items() if weight.param.requires_grad}
        plans = plan_buckets(
            [
                Tensor1D(name, w.kept, w.grad_dtype.itemsize, (w.dtype, w.grad_dtype))
                for name, w in trained.items()
            ],
            bucket_bytes=self.settings.bucket_bytes,
            num_ranks=self.group.size if self.settings.shard == "state" else 1,
        )
        self.forget()
        for name, weight in weights.items():
            weight.leaf.grad = None
            weight.replica = None if name in trained else Member(self, weight, None)
        for number, plan in enumerate(plans):
            members = [trained[name] for name in plan.names]
            bucket = Bucket(
                plan,
                members,
                self.group,
                wire_dtype=self.settings.wire_dtype,
                is_averaged=self.settings.average,
                what=f"the gradients of bucket {number + 1} of {len(plans)} ('{plan.names[0]}' first)",
            )
            self.buckets.append(bucket)
            for index, weight in enumerate(members):
                weight.replica = Member(self, weight, bucket, index)
                weight.drop_buffer()

    def forget(self) -> None:
        """Drop the buckets."""
        self.buckets.clear()
        self._end_pass(is_reduced=True)
        self._may_launch = False

    # Backward: weights tell of uses and gradients ------------------------------------------------

    def on_use(self) -> None:
        """Learn that a forward pass, or a recomputation inside backward, uses a weight."""
        if torch._C._current_graph_task_id() != -1:
            # A recomputation: gradients may come in a run inside this one, which ends earlier.
            self._wait_at_the_end()
        elif self._task is not None:
            self._recover()

    def on_gradient(self) -> None:
        """Learn that a gradient comes."""
        self._wait_at_the_end()

    @property
    def is_nested(self) -> bool:
        """Whether this is a backward pass inside the one at whose end gradients are waited for."""
        return torch._C._current_graph_task_id() != self._task

    def on_repeated_use(self) -> None:
        """Learn that a graph is run again, whose uses are not awaited any more: launch nothing early."""
        self._is_repeated = True

    def launch_complete(self) -> None:
        """Start the reduction of the next buckets, as far as they are complete."""
        is_early = self._may_launch and self.settings.overlap
        if not (self.is_syncing and is_early) or self._is_repeated or self._is_watched:
            return
        while self._next < len(self.buckets) and _is_complete(self.buckets[self._next]):
            self._launch()

    def _wait_at_the_end(self) -> None:
        if self._task is None:
            self._task = torch._C._current_graph_task_id()
            weights = (weight for bucket in self.buckets for weight in bucket.weights)
            self._is_watched = any(weight.watcher is not None for weight in weights)
            Variable._execution_engine.queue_callback(functools.partial(self._end, self._task))

    def _end(self, task: int) -> None:
        if task == self._task:
            if self.is_syncing:
                self._reduce()
            else:
                self._end_pass(is_reduced=False)

    def _launch(self) -> None:
        self.buckets[self._next].launch()
        self._next += 1

    @torch.no_grad()
    def _reduce(self) -> None:
        """Launch what is left, wait for everything, and hand out the gradients."""
        while self._next < len(self.buckets):
            self._launch()
        here = [
            weight.leaf.grad is not None or bucket.carries(index)
            for bucket in self.buckets
            for index, weight in enumerate(bucket.weights)
        ]
        used = torch.tensor(here, dtype=torch.uint8, device=self.buckets[0].flat.device)
        pending = self.group.all_reduce(
            used, op=dist.ReduceOp.MAX, kind="flags", what="the list of parameters in use"
        )
        for bucket in self.buckets:
            bucket.wait()
        pending.wait()
        flags = iter(used.tolist())
        for bucket in self.buckets:
            bucket.finish([bool(next(flags)) for _ in bucket.weights])
        self.group.meter.reductions += 1
        self._end_pass(is_reduced=True)
        self._may_launch = True

    def _end_pass(self, *, is_reduced: bool) -> None:
        for bucket in self.buckets:
            for member in _members(bucket):
                member.end_pass(is_reduced=is_reduced)
        self._next, self._task, self._is_repeated = 0, None, False

    def _recover(self) -> None:
        """Begin anew after a backward pass that raised."""
        launched = self._next
        if launched:
            raise CompressionError(
                f"a backward pass was interrupted after {launched} of {len(self.buckets)} reductions over "
                "ranks had begun, so the other ranks wait or are ahead; start again from the last "
                "checkpoint"
            )
        self._end_pass(is_reduced=False)

    # Steps ---------------------------------------------------------------------------------------

    def before_step(self, weights: list[Weight]) -> None:
        """Refuse gradients that are not reduced, or were changed by who saw only a part of them.

        Raises:
            CompressionError: They are.
        """
        for weight in (weight.whole for weight in weights):
            member = weight.replica
            is_reduced = not isinstance(member, Member) or member.is_reduced
            if not is_reduced and weight.leaf.grad is not None:
                raise CompressionError(
                    f"the gradient of '{weight.name}' was accumulated under samo.no_sync, or in a backward "
                    "pass that raised, and never reduced over ranks; leave the last micro-batch out of "
                    "no_sync, or drop gradients with model.zero_grad()"
                )
        for weight in weights:
            weight.whole.check()
            weight.scaler = weight.whole.scaler
        self._stepped = []
        stepped = {id(weight) for weight in weights if weight.leaf.grad is not None}
        for bucket in self.buckets:
            if not bucket.is_sharded or not any(id(w.part) in stepped for w in bucket.weights):
                continue
            if bucket.is_edited:
                raise CompressionError(
                    "gradients were changed since backward, as torch.nn.utils.clip_grad_norm_ does, which "
                    "sees this rank's part of them alone; use samo.clip_grad_norm_(model, max_norm), or, "
                    "where the change is meant, call accept_gradients() of what samo.replicate returned"
                )
            for whole in bucket.weights:
                whole.check()  # all of them are published, also those that others update
            self._stepped.append(bucket)

    @torch.no_grad()
    def after_step(self, weights: list[Weight]) -> None:
        """Let the model on every rank compute with the values that all ranks have updated."""
        under_way: list[Publication] = []
        for bucket in self._stepped:
            bucket.accept()  # an optimizer may write to gradients too
            under_way.append(bucket.publish())
            if len(under_way) == _AT_ONCE:
                under_way.pop(0).finish()
        for publication in under_way:
            publication.finish()
        self._stepped = []

    def any(self, flag: Tensor) -> Tensor:
        """Return whether a flag is set on any rank; reduced gradients are the same on all."""
        if self.settings.shard is None or self.group.size == 1:
            return flag
        common = flag.to(torch.uint8)
        self.group.all_reduce(
            common, op=dist.ReduceOp.MAX, kind="flags", what="whether a step is skipped"
        ).wait()
        return common.bool()

    def add_up(self, tensor: Tensor, what: str) -> Tensor:
        """Return the sum of a tensor over all ranks, in fp32 or wider."""
        if self.group.size == 1:
            return tensor
        total = tensor.to(
            master_dtype(tensor.dtype), copy=True, memory_format=torch.contiguous_format
        )
        self.group.all_reduce(total, kind="gradients", what=what, pruned=total.nbytes).wait()
        return total


def _members(bucket: Bucket) -> list[Member]:
    replicas = [weight.replica for weight in bucket.weights]
    return [replica for replica in replicas if isinstance(replica, Member)]


def _is_complete(bucket: Bucket) -> bool:
    replicas = (weight.replica for weight in bucket.each_weight())
    return all(isinstance(replica, Member) and replica.is_complete for replica in replicas)
