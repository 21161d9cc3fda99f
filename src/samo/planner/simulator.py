"""Run the pipeline's engines over a simulated network: virtual time, links that keep their order.

It shows what a schedule does before anything is computed, and proves in tests that engines never
wait for each other and never hold more than they promised. `simulate_step` takes its times from the
cost model.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

from samo.pipeline.engine import Action, Engine, MessageKind, Progress, in_flight_limits
from samo.pipeline.timeline import Event, Pass, Timeline
from samo.planner.cost import link_s, message_bytes, stage_times
from samo.planner.hardware import Cluster
from samo.planner.memory import Job, Layout

Duration = Callable[[int, Pass, int], float]
Delay = Callable[[int, int], float]
Message = tuple[MessageKind, int]
"""A message and its micro-batch."""


def simulate(
    num_stages: int,
    num_micro_batches: int,
    *,
    in_flight: int | Sequence[int] | None = None,
    engine: type[Engine] = Engine,
    stages_per_rank: int = 1,
    duration: Duration = lambda stage, what, micro_batch: 1.0 if what == "forward" else 2.0,
    delay: Delay = lambda source, target: 0.0,
    occupied: Delay = lambda source, target: 0.0,
    watch: Callable[[Engine], object] = lambda engine: None,
) -> Timeline:
    """Compute one batch in virtual time.

    Example:
        >>> from samo.planner.simulator import simulate
        >>> print(simulate(3, 4).text(width=36))
        stage 0  001122........----33----..----..----
        stage 1  ..001122..----..----33----..----....
        stage 2  ....00----11----22----33----........
        >>> simulate(2, 2, in_flight=1).peak_in_flight(0)
        1

    Args:
        num_stages: Number of stages.
        num_micro_batches: Micro-batches.
        in_flight: As for `samo.Pipeline`.
        engine: What decides: samo's own, or another one to compare with.
        stages_per_rank: As for `samo.Pipeline`; a rank computes one of its stages at a time.
        duration: Seconds of a pass, by stage, pass and micro-batch.
        delay: Seconds a message takes on its way, by source and target.
        occupied: Seconds for which it keeps its link from sending the next one, besides.
        watch: Called with an engine after every change of it.

    Raises:
        RuntimeError: All stages wait for each other.
    """
    limits = in_flight_limits(in_flight, num_stages)
    num_ranks = num_stages // stages_per_rank
    engines = [
        engine(
            Progress(stage, num_stages, num_micro_batches, limits[stage])
            for stage in range(rank, num_stages, num_ranks)
        )
        for rank in range(num_ranks)
    ]
    events: list[Event] = []
    agenda: list[tuple[float, int, int, Message | Action | None]] = []
    number = itertools.count()  # of equal times, first come, first served
    free_at: dict[tuple[int, int], float] = defaultdict(float)
    last_arrival: dict[tuple[int, int], float] = defaultdict(float)

    def enter(when: float, stage: int, entry: Message | Action | None) -> None:
        heapq.heappush(agenda, (when, next(number), stage, entry))

    def send(stage: int, target: int, now: float, message: Message) -> None:
        link = (stage, target)
        free_at[link] = max(now, free_at[link]) + occupied(*link)
        last_arrival[link] = max(free_at[link] + delay(*link), last_arrival[link])  # in order
        enter(last_arrival[link], target, message)

    for rank in range(num_ranks):
        enter(0.0, rank, None)
    inbox: list[list[tuple[int, Message]]] = [[] for _ in engines]
    doing = ["receive"] * num_ranks
    while agenda:
        now, _, stage, entry = heapq.heappop(agenda)
        rank = stage % num_ranks
        if isinstance(entry, Action):  # a pass that is over
            doing[rank] = "receive"
            if entry.kind == "forward" and stage + 1 < num_stages:
                send(stage, stage + 1, now, ("activation", entry.micro_batch))
            elif entry.kind == "backward" and stage > 0:
                send(stage, stage - 1, now, ("gradient", entry.micro_batch))
        elif entry is not None:
            inbox[rank].append((stage, entry))
        if doing[rank] != "receive":
            continue
        own = engines[rank]
        for target, message in inbox[rank]:
            own.stages[target].receive(*message)
            watch(own)
        inbox[rank].clear()
        action = own.next()
        watch(own)
        kind, micro_batch, stage = action
        doing[rank] = kind
        if kind == "forward" or kind == "backward":
            end = now + duration(stage, kind, micro_batch)
            events.append(Event(now, end, stage, kind, micro_batch))
            enter(end, stage, action)
    if waiting := [rank for rank, kind in enumerate(doing) if kind != "step"]:
        raise RuntimeError(f"ranks {waiting} wait for messages that nobody will send")
    return Timeline(num_stages, num_micro_batches, events)


def simulate_step(job: Job, layout: Layout, cluster: Cluster) -> Timeline:
    """Simulate the passes of a step with the times of the cost model; all replicas do the same."""
    passes = stage_times(job, layout, cluster)
    latency = link_s(0, layout, cluster)
    occupied = link_s(message_bytes(job, layout), layout, cluster) - latency
    # Streamed weights are expanded in both passes, in backward twice with checkpointing.
    again = 3 if layout.checkpointing else 2
    forward = [one.forward + one.expand / again for one in passes]
    backward = [one.total - ahead for one, ahead in zip(passes, forward)]
    return simulate(
        layout.pipe,
        layout.micro_batches(job),
        duration=lambda stage, what, _: (forward if what == "forward" else backward)[stage],
        delay=lambda source, target: latency,
        occupied=lambda source, target: occupied,
    )
