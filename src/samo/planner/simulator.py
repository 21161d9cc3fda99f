"""Run the pipeline's engines over a simulated network: virtual time, links that keep their order.

It shows what a schedule does before anything is computed, and proves in tests that engines never
wait for each other and never hold more than they promised. `simulate_step` takes its times from the
cost model.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from samo.pipeline.engine import Action, Engine, MessageKind, Progress, in_flight_limits
from samo.pipeline.timeline import Event, Pass, Timeline
from samo.planner.cost import link_s, message_bytes, stage_times
from samo.planner.hardware import Cluster
from samo.planner.memory import Job, Layout

__all__ = ["FixedOrder", "Schedule", "simulate", "simulate_step"]

Schedule = Literal["message-driven", "backward-first", "1f1b", "gpipe"]
Duration = Callable[[int, Pass, int], float]
Delay = Callable[[int, int], float]
Message = tuple[MessageKind, int]
"""A message and its micro-batch."""


class BackwardFirst(Engine):
    """Takes every backward pass that is possible before any forward pass."""

    alternates = False


class FixedOrder(Engine):
    """A stage that computes in an order fixed beforehand, and waits if the next message is late.

    Example:
        >>> from samo.planner.simulator import FixedOrder
        >>> FixedOrder("1f1b", stage=0, num_stages=2, num_micro_batches=3).order
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        num_stages: int,
        num_micro_batches: int,
        *,
        in_flight: int | None = None,
    ) -> None:
        if schedule not in ("1f1b", "gpipe"):
            raise ValueError(f"schedule must be '1f1b' or 'gpipe', got {schedule!r}")
        first = num_stages if in_flight is None else in_flight
        ahead = num_micro_batches if schedule == "gpipe" else max(first - stage, 1)
        self.order = list(_alternate(min(ahead, num_micro_batches), num_micro_batches))
        self._place = 0
        self._one = Progress(stage, num_stages, num_micro_batches, num_micro_batches)
        super().__init__([self._one])

    def next(self) -> Action:
        """Decide: the next pass of the order, if its message is there."""
        if self._place == len(self.order):
            return Action("step")
        is_backward = self.order[self._place][0] == "B"
        if not (self._one.can_go_backward if is_backward else self._one.can_go_forward):
            return Action("receive")
        self._place += 1
        return self._one.backward() if is_backward else self._one.forward()


def simulate(
    num_stages: int,
    num_micro_batches: int,
    *,
    in_flight: int | Sequence[int] | None = None,
    schedule: Schedule = "message-driven",
    stages_per_rank: int = 1,
    duration: Duration = lambda stage, what, micro_batch: 1.0 if what == "forward" else 2.0,
    delay: Delay = lambda source, target: 0.0,
    occupied: Delay = lambda source, target: 0.0,
    watch: Callable[[Engine], None] | None = None,
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
        in_flight: As for `samo.Pipeline`; for "1f1b" a number, the limit of its first stage.
        schedule: "message-driven", "backward-first", or one of fixed order.
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
    engines: list[Engine] = []
    for rank in range(num_ranks):
        if schedule in ("1f1b", "gpipe"):
            engines.append(
                FixedOrder(schedule, rank, num_stages, num_micro_batches, in_flight=limits[0])
            )
            continue
        stages = [
            Progress(stage, num_stages, num_micro_batches, limits[stage])
            for stage in range(rank, num_stages, num_ranks)
        ]
        engines.append((Engine if schedule == "message-driven" else BackwardFirst)(stages))
    return _Run(engines, num_stages, num_micro_batches, duration, delay, occupied, watch).run()


@dataclass
class _Run:
    engines: list[Engine]
    num_stages: int
    num_micro_batches: int
    duration: Duration
    delay: Delay
    occupied: Delay
    watch: Callable[[Engine], None] | None
    events: list[Event] = field(default_factory=list)
    agenda: list[tuple[float, int, int, Message | Action | None]] = field(default_factory=list)
    last_arrival: dict[tuple[int, int], float] = field(default_factory=dict)
    free_at: dict[tuple[int, int], float] = field(default_factory=dict)
    num_entries: int = 0

    def run(self) -> Timeline:
        num_ranks = len(self.engines)
        is_busy, is_done = [False] * num_ranks, [False] * num_ranks
        inbox: list[deque[tuple[int, Message]]] = [deque() for _ in range(num_ranks)]
        for rank in range(num_ranks):
            self._enter(0.0, rank, None)
        while self.agenda:
            now, _, stage, entry = heapq.heappop(self.agenda)
            rank = stage % num_ranks
            if isinstance(entry, Action):  # its pass is over
                is_busy[rank] = False
                self._send(entry, now)
            elif entry is not None:
                inbox[rank].append((stage, entry))
            if is_busy[rank] or is_done[rank]:
                continue
            engine = self.engines[rank]
            while inbox[rank]:
                target, received = inbox[rank].popleft()
                engine.stages[target].receive(*received)
                self._show(engine)
            action = engine.next()
            self._show(engine)
            is_done[rank] = action.kind == "step"
            is_busy[rank] = self._compute(action, now)
        if not all(is_done):
            waiting = [rank for rank, done in enumerate(is_done) if not done]
            raise RuntimeError(f"ranks {waiting} wait for messages that nobody will send")
        return Timeline(self.num_stages, self.num_micro_batches, self.events)

    def _compute(self, action: Action, now: float) -> bool:
        """Begin a pass, if the action is one."""
        kind, micro_batch, stage = action
        if kind != "forward" and kind != "backward":
            return False
        end = now + self.duration(stage, kind, micro_batch)
        self.events.append(Event(now, end, stage, kind, micro_batch))
        self._enter(end, stage, action)
        return True

    def _send(self, action: Action, now: float) -> None:
        """Send the result of a pass to the stage that needs it, if there is one."""
        is_forward, stage = action.kind == "forward", action.stage
        target = stage + (1 if is_forward else -1)
        if not 0 <= target < self.num_stages:
            return
        link = (stage, target)
        sent = max(now, self.free_at.get(link, 0.0)) + self.occupied(*link)
        self.free_at[link] = sent
        arrival = max(sent + self.delay(*link), self.last_arrival.get(link, 0.0))  # FIFO
        self.last_arrival[link] = arrival
        self._enter(
            arrival, target, ("activation" if is_forward else "gradient", action.micro_batch)
        )

    def _enter(self, when: float, stage: int, entry: Message | Action | None) -> None:
        self.num_entries += 1
        heapq.heappush(self.agenda, (when, self.num_entries, stage, entry))

    def _show(self, engine: Engine) -> None:
        if self.watch is not None:
            self.watch(engine)


def simulate_step(
    job: Job, layout: Layout, cluster: Cluster, *, schedule: Schedule = "message-driven"
) -> Timeline:
    """Simulate the passes of a step with the times of the cost model; all replicas do the same.

    Example:
        >>> from samo.planner.hardware import HARDWARE, Cluster
        >>> from samo.planner.memory import Job, Layout
        >>> from samo.planner.network import named
        >>> from samo.planner.simulator import simulate_step
        >>> job = Job(network=named("gpt3-13b").pruned(0.9), batch=2048, context=2048)
        >>> cluster = Cluster(hardware=HARDWARE["v100-16"], num_gpus=2048)
        >>> layout = Layout(pipe=16, data=128, checkpointing=True)
        >>> round(simulate_step(job, layout, cluster).span, 1)
        6.1
    """
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
        schedule=schedule,
        duration=lambda stage, what, _: (forward if what == "forward" else backward)[stage],
        delay=lambda source, target: latency,
        occupied=lambda source, target: occupied,
    )


def _alternate(ahead: int, num_micro_batches: int) -> Iterator[str]:
    """Yield ``ahead`` forward passes, then backward and forward in turns, then what is left."""
    yield from (f"F{i}" for i in range(ahead))
    for i in range(num_micro_batches):
        yield f"B{i}"
        if ahead + i < num_micro_batches:
            yield f"F{ahead + i}"
