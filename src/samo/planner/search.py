"""Try all layouts of a mesh, and return the fastest that fit.

Everything is enumerated: stages that divide the GPUs, micro-batches that are powers of two,
replicas with DDP or shards with FSDP2, resident or streamed weights, exact or lean state, with and
without checkpointing. Where resident weights do not fit and streamed ones do, a budget takes what
is left of the memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from samo.planner.cost import StepTime, step_time
from samo.planner.hardware import Cluster
from samo.planner.memory import Job, Layout, Memory, Scheme, peak

__all__ = ["Option", "dense_phase", "evaluate", "layouts", "search"]

_ROUND: Final = 10**8
"""A budget is a multiple of this many bytes."""
COMFORTABLE: Final = 0.9
"""Fraction of the memory that a plan may take before a smaller one is as good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A layout with what it takes."""

    layout: Layout
    memory: Memory
    time: StepTime
    fits: bool
    tokens: int  # of a step, over all ranks

    @property
    def key(self) -> tuple[bool, float, float]:
        """What options are ordered by: those that fit, fastest first; of others, smallest first."""
        needed = self.memory.needed_bytes
        return (False, self.time.total, needed) if self.fits else (True, needed, self.time.total)


def room(cluster: Cluster) -> float:
    """Return the bytes that a step may take on a GPU."""
    return cluster.hardware.memory_bytes - cluster.hardware.reserved_bytes


def evaluate(job: Job, layout: Layout, cluster: Cluster) -> Option:
    """Return what a layout takes."""
    memory = peak(job, layout)
    fits = memory.needed_bytes <= room(cluster)
    return Option(
        layout=layout,
        memory=memory,
        time=step_time(job, layout, cluster),
        fits=fits,
        tokens=job.batch * job.context,
    )


def dense_phase(job: Job, own: Layout, cluster: Cluster) -> Option:
    """Return dense steps on the mesh of a layout; `samo train` does not shard them."""
    dense = replace(own, scheme="autocast", weights="resident", state="exact", shard=False)
    return evaluate(job, dense, cluster)


def layouts(job: Job, cluster: Cluster, scheme: Scheme = "samo") -> Iterator[Layout]:
    """Yield all layouts of a scheme on all GPUs, budgets not yet among them."""
    states: tuple[Literal["exact", "lean"], ...] = ("exact",)
    kinds: tuple[Literal["resident", "streamed"], ...] = ("resident",)
    if scheme == "samo":
        kinds = ("resident", "streamed")
        if job.dtype == "bfloat16":
            states = ("exact", "lean")
    for pipe in range(1, min(len(job.network.layers), cluster.num_gpus) + 1):
        data, rest = divmod(cluster.num_gpus, pipe)
        if rest or data > job.batch:
            continue
        for micro_batch in _powers(-(-job.batch // data)):
            mesh = Layout(scheme=scheme, pipe=pipe, data=data, micro_batch=micro_batch)
            for checkpointing in (False, True):
                own = replace(mesh, checkpointing=checkpointing)
                for state in states:
                    for weights in kinds:
                        yield replace(own, state=state, weights=weights)
                if pipe == 1 and data > 1 and scheme in ("samo", "dense", "8-bit"):
                    yield replace(own, shard=True, weights=kinds[-1])


def search(
    job: Job,
    cluster: Cluster,
    scheme: Scheme = "samo",
    among: Iterable[Layout] | None = None,
    *,
    budgets: bool = True,
) -> list[Option]:
    """Return all options of a scheme, or those ``among`` the given layouts, best first.

    Example:
        >>> from samo.planner.hardware import HARDWARE, Cluster
        >>> from samo.planner.memory import Job
        >>> from samo.planner.network import named, sparsities
        >>> from samo.planner.search import search
        >>> sparsity = tuple(sparsities(0.9).items())
        >>> job = Job(network=named("gpt3-2.7b"), sparsity=sparsity, batch=8, context=1024)
        >>> best = search(job, Cluster(hardware=HARDWARE["rtx3090"]))[0]
        >>> best.fits, best.layout.weights, best.layout.checkpointing
        (True, 'resident', False)
    """
    found = []
    for layout in layouts(job, cluster, scheme) if among is None else among:
        option = evaluate(job, layout, cluster)
        found.append(option)
        is_streamed = layout.weights == "streamed" and not layout.shard and budgets
        if is_streamed and option.fits and (budget := _budget(job, layout, cluster)):
            found.append(evaluate(job, replace(layout, weights=budget), cluster))
    return sorted(found, key=lambda option: option.key)


def _budget(job: Job, layout: Layout, cluster: Cluster) -> int:
    """Return the most bytes of dense weights that fit, 0 if all or none do."""

    def fits(weights: Literal["resident"] | int) -> bool:
        needed = peak(job, replace(layout, weights=weights)).needed_bytes
        return needed <= room(cluster)

    if fits("resident"):
        return 0
    low, high = 0, int(room(cluster)) // _ROUND + 1  # of which the first fits and the last does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * _ROUND) else (low, middle)
    return low * _ROUND


def _powers(limit: int) -> Iterator[int]:
    """Yield the powers of two up to a limit, and the limit."""
    size = 1
    while size < limit:
        yield size
        size *= 2
    yield limit
