"""Try all layouts of a mesh, and choose the fastest that fits.

Everything is enumerated: stages that divide the GPUs, micro-batches that are powers of two,
replicas with DDP or shards with FSDP2, resident or streamed weights, exact or lean state, with and
without checkpointing. Where resident weights do not fit and streamed ones do, a budget takes what
is left of the memory.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from samo.errors import ConfigError
from samo.memory.predict import Scheme
from samo.planner.cost import StepTime, step_time
from samo.planner.hardware import Cluster
from samo.planner.memory import Job, Layout, Memory, peak
from samo.utils.formatting import size

_ROUND: Final = 10**8
"""A budget is a multiple of this many bytes."""
_COMFORTABLE: Final = 0.9
"""Fraction of the memory that a plan may take before a smaller one is as good."""
_TOLERANCE: Final = 0.02
"""Times that differ by less are equal: the model is not more exact than that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A layout with what it takes."""

    layout: Layout
    memory: Memory
    time: StepTime
    usable_bytes: float  # of a GPU

    @property
    def fits(self) -> bool:
        """Whether a GPU has enough memory."""
        return self.memory.needed_bytes <= self.usable_bytes

    @property
    def is_tight(self) -> bool:
        """Whether little of the memory would be left."""
        return self.memory.needed_bytes > _COMFORTABLE * self.usable_bytes

    @property
    def key(self) -> tuple[bool, float, float]:
        """What options are ordered by: those that fit, fastest first; of others, smallest first."""
        needed = self.memory.needed_bytes
        return (False, self.time.total, needed) if self.fits else (True, needed, self.time.total)


def evaluate(job: Job, layout: Layout, cluster: Cluster) -> Option:
    """Return what a layout takes."""
    return Option(
        layout=layout,
        memory=peak(job, layout),
        time=step_time(job, layout, cluster),
        usable_bytes=cluster.hardware.usable_bytes,
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
        kinds, states = ("resident", "streamed"), ("exact", "lean")
    for pipe in range(1, min(len(job.network.layers), cluster.num_gpus) + 1):
        data, rest = divmod(cluster.num_gpus, pipe)
        if rest or data > job.batch:
            continue
        mesh = Layout(scheme=scheme, pipe=pipe, data=data)
        can_shard = pipe == 1 and data > 1 and scheme in ("samo", "dense", "8-bit")
        most = -(-job.batch // data)
        sizes = {min(2**power, most) for power in range(most.bit_length() + 1)}
        sizes |= {-(-job.batch // (count * data)) for count in range(2, 17)}
        for rows, again in itertools.product(sorted(sizes), (False, True)):
            own = replace(mesh, micro_batch=rows, checkpointing=again)
            if not own.can_cut(job):
                continue
            for state, weights in itertools.product(states, kinds):
                yield replace(own, state=state, weights=weights)
            if can_shard:
                yield replace(own, shard=True, weights=kinds[-1])


def search(
    job: Job,
    cluster: Cluster,
    scheme: Scheme = "samo",
    among: Iterable[Layout] | None = None,
    *,
    budgets: bool = True,
) -> list[Option]:
    """Return all options of a scheme, or those ``among`` the given layouts, best first."""
    found = []
    for layout in layouts(job, cluster, scheme) if among is None else among:
        option = evaluate(job, layout, cluster)
        found.append(option)
        is_streamed = layout.weights == "streamed" and not layout.shard and budgets
        if is_streamed and option.fits and (budget := _budget(job, layout, cluster)):
            found.append(evaluate(job, replace(layout, weights=budget), cluster))
    return sorted(found, key=lambda option: option.key)


def ranked(options: list[Option]) -> list[Option]:
    """Return options best first: of those about as fast as the fastest, roomy and exact ones."""
    fastest = min((option.time.total for option in options if option.fits), default=0.0)

    def key(option: Option) -> tuple[Any, ...]:
        if option.fits and option.time.total <= (1 + _TOLERANCE) * fastest:
            # Of tight ones, the smaller is the better.
            tight = option.memory.needed_bytes if option.is_tight else 0.0
            return (0, tight > 0, option.layout.state == "lean", tight, option.time.total)
        return (1, *option.key)

    return sorted(options, key=key)


def choose(
    job: Job, cluster: Cluster, among: Iterable[Layout] | None = None, *, budgets: bool = True
) -> tuple[Option, str]:
    """Return the fastest option that fits, and why; of those within 2 %, with room to spare, exact.

    Args:
        job: What to train.
        cluster: Where; `samo.planner.this_machine.this_cluster` describes this machine.
        among: The layouts to choose from; by default all of the cluster.
        budgets: Whether streamed weights stand for a budget of resident ones, too.

    Raises:
        ConfigError: None of them fits.
    """
    found = search(job, cluster, among=among, budgets=budgets)
    fitting = [option for option in found if option.fits]
    usable = f"{size(cluster.hardware.usable_bytes)} on each rank"
    if not fitting:
        least = f"{size(found[0].memory.needed_bytes)} ({_named(found[0])})" if found else "nothing"
        raise ConfigError(
            f"no layout that these settings allow fits on {cluster.num_gpus} x "
            f"{cluster.hardware.name}: the smallest takes {least} of {usable}; "
            "lower --batch-size or --context, or use more ranks"
        )
    best = ranked(found)[0]
    plain = min(found, key=_complexity)
    why = f"the fastest of {len(fitting)} layouts that fit"
    if _complexity(best) > _complexity(plain):
        other = f"{size(plain.memory.needed_bytes)}, too much"
        if plain.fits:
            other = f"{plain.time.total / best.time.total:.2f} of its time"
        why += f"; {_named(plain)} takes {other}"
    return best, f"{_named(best)}: {size(best.memory.needed_bytes)} of {usable}, {why}"


def _budget(job: Job, layout: Layout, cluster: Cluster) -> int:
    """Return the most bytes of dense weights that fit, 0 if all or none do."""
    usable = cluster.hardware.usable_bytes

    def fits(weights: Literal["resident"] | int) -> bool:
        return peak(job, replace(layout, weights=weights)).needed_bytes <= usable

    if fits("resident"):
        return 0
    low, high = 0, int(usable) // _ROUND + 1  # of which the first fits and the last does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * _ROUND) else (low, middle)
    return low * _ROUND


def _complexity(option: Option) -> tuple[Any, ...]:
    """Return what the plainest layout has least of: it is what one would have tried first."""
    own = option.layout
    kinds = own.pipe, own.shard, own.state == "lean", own.weights != "resident", own.checkpointing
    return (*kinds, -own.micro_batch)


def _named(option: Option) -> str:
    own = option.layout
    mesh = f"{own.mesh} (stages x replicas), " if own.num_ranks > 1 else ""
    cut = f", micro-batches of {own.micro_batch}" if own.pipe > 1 else ""
    return f"{mesh}{own}{cut}"
