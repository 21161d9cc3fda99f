"""One layout for a job on the hardware at hand, and the line that says why."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from samo.errors import ConfigError
from samo.planner.hardware import Cluster
from samo.planner.memory import Job, Layout, Scheme
from samo.planner.render import describe
from samo.planner.search import COMFORTABLE, Option, room, search
from samo.utils.formatting import size

__all__ = ["Choice", "choose"]

_TOLERANCE: Final = 0.02
"""Times that differ by less are equal: the model is not more exact than that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The layout to train with, and the reason in one line."""

    option: Option
    reason: str

    @property
    def layout(self) -> Layout:
        """How to train."""
        return self.option.layout


def choose(
    job: Job,
    cluster: Cluster,
    *,
    scheme: Scheme = "samo",
    among: Iterable[Layout] | None = None,
    budgets: bool = True,
) -> Choice:
    """Return the fastest layout that fits; of those within 2 %, with room to spare, exact.

    Example:
        >>> from samo.planner.choose import choose
        >>> from samo.planner.hardware import HARDWARE, Cluster
        >>> from samo.planner.memory import Job
        >>> from samo.planner.network import named, sparsities
        >>> sparsity = tuple(sparsities(0.9).items())
        >>> job = Job(network=named("gpt3-13b"), sparsity=sparsity, batch=1, context=1024)
        >>> choose(job, Cluster(hardware=HARDWARE["rtx4090"])).layout.state
        'lean'

    Args:
        job: What to train.
        cluster: Where; `samo.planner.local.this_hardware` describes this machine.
        scheme: "autocast" for dense training.
        among: The layouts to choose from; by default all of the cluster.
        budgets: Whether streamed weights stand for a budget of resident ones, too.

    Raises:
        ConfigError: None of them fits.
    """
    found = search(job, cluster, scheme, among, budgets=budgets)
    space = room(cluster)
    fitting = [option for option in found if option.fits]
    if not fitting:
        least = f"{size(found[0].memory.needed_bytes)} ({_named(found[0])})" if found else "nothing"
        raise ConfigError(
            f"no layout that these settings allow fits on {cluster.num_gpus} x "
            f"{cluster.hardware.name}: the smallest takes {least} of {size(space)} on each rank; "
            "lower --batch-size or --context, or use more ranks"
        )
    best = ranked(found, space)[0]
    plain = min(found, key=_complexity)
    why = f"the fastest of {len(fitting)} layouts that fit"
    if _complexity(best) > _complexity(plain):
        other = f"{size(plain.memory.needed_bytes)}, too much"
        if plain.fits:
            other = f"{plain.time.total / best.time.total:.2f} of its time"
        why += f"; {_named(plain)} takes {other}"
    taken = f"{size(best.memory.needed_bytes)} of {size(space)} on each rank"
    return Choice(option=best, reason=f"{_named(best)}: {taken}, {why}")


def ranked(options: list[Option], space: float) -> list[Option]:
    """Return options best first: of those about as fast as the fastest, roomy and exact ones."""
    fastest = min((option.time.total for option in options if option.fits), default=0.0)

    def key(option: Option) -> tuple[Any, ...]:
        if option.fits and option.time.total <= (1 + _TOLERANCE) * fastest:
            needed = option.memory.needed_bytes
            tight = needed if needed > COMFORTABLE * space else 0.0  # then the smaller, the better
            return (0, tight > 0, option.layout.state == "lean", tight, option.time.total)
        return (1, *option.key)

    return sorted(options, key=key)


def _complexity(option: Option) -> tuple[Any, ...]:
    """Return what the plainest layout has least of: it is what one would have tried first."""
    own = option.layout
    kinds = own.pipe, own.shard, own.state == "lean", own.weights != "resident", own.checkpointing
    return (*kinds, -own.micro_batch)


def _named(option: Option) -> str:
    own = option.layout
    mesh = f"{own.pipe} x {own.data} (stages x replicas), " if own.num_ranks > 1 else ""
    cut = f", micro-batches of {own.micro_batch}" if own.pipe > 1 else ""
    return mesh + describe(option) + cut
