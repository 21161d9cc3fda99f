"""Run engines over a simulated network: virtual time, seeded delays, links that keep their order.

It shows what a schedule does before anything is computed, and proves in tests that engines never
wait for each other and never hold more than they promised.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from samo.pipeline.engine import Action, Engine, Message, Prefer, in_flight_limits
from samo.pipeline.timeline import Event, Pass, Timeline

__all__ = ["FixedOrder", "Schedule", "simulate", "uniform_delays"]

Schedule = Literal["message-driven", "1f1b", "gpipe"]
Duration = Callable[[int, Pass, int], float]
Delay = Callable[[int, int], float]


class Decider(Protocol):
    """What the simulator needs of an engine."""

    def receive(self, message: Message) -> None:
        """Take in a message."""

    def next(self) -> Action:
        """Decide."""


class FixedOrder:
    """A stage that computes in an order fixed beforehand, and waits if the next message is late.

    Example:
        >>> from benchmarks.pipeline.simulator import FixedOrder
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
        self._engine = Engine(stage, num_stages, num_micro_batches, num_micro_batches)
        self._place = 0

    def receive(self, message: Message) -> None:
        """Take in a message."""
        self._engine.receive(message)

    def next(self) -> Action:
        """Decide: the next pass of the order, if its message is there."""
        engine = self._engine
        if engine.has_due or self._place == len(self.order):
            return engine.next()
        is_backward = self.order[self._place][0] == "B"
        if not (engine.can_go_backward if is_backward else engine.can_go_forward):
            return Action("receive")
        self._place += 1
        return engine.backward() if is_backward else engine.forward()


def uniform_delays(seed: int, low: float, high: float, *, per_link: float = 0.0) -> Delay:
    """Return delays drawn for each message, around a mean drawn for each link.

    Example:
        >>> from benchmarks.pipeline.simulator import uniform_delays
        >>> delay = uniform_delays(0, 1.0, 2.0)
        >>> 1.0 <= delay(0, 1) <= 2.0
        True
    """
    draw = random.Random(seed)
    offsets: dict[tuple[int, int], float] = {}

    def delay(source: int, target: int) -> float:
        offset = offsets.setdefault((source, target), draw.random() * per_link)
        return offset + draw.uniform(low, high)

    return delay


def simulate(
    num_stages: int,
    num_micro_batches: int,
    *,
    in_flight: int | Sequence[int] | None = None,
    schedule: Schedule = "message-driven",
    prefer: Prefer = "alternate",
    duration: Duration = lambda stage, what, micro_batch: 1.0 if what == "forward" else 2.0,
    delay: Delay = lambda source, target: 0.0,
    watch: Callable[[Engine], None] | None = None,
) -> Timeline:
    """Compute one batch in virtual time.

    Example:
        >>> from benchmarks.pipeline.simulator import simulate
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
        schedule: "message-driven", or one of fixed order.
        prefer: As for `Engine`.
        duration: Seconds of a pass, by stage, pass and micro-batch.
        delay: Seconds a message takes, by source and target.
        watch: Called with an engine after every change of it.

    Raises:
        RuntimeError: All stages wait for each other.
    """
    limits = in_flight_limits(in_flight, num_stages)
    run = _Run(num_stages, num_micro_batches, duration, delay, watch)
    for stage, limit in enumerate(limits):
        run.deciders.append(
            Engine(stage, num_stages, num_micro_batches, limit, prefer=prefer)
            if schedule == "message-driven"
            else FixedOrder(schedule, stage, num_stages, num_micro_batches, in_flight=limits[0])
        )
    return run.run()


@dataclass
class _Run:
    num_stages: int
    num_micro_batches: int
    duration: Duration
    delay: Delay
    watch: Callable[[Engine], None] | None
    deciders: list[Decider] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    agenda: list[tuple[float, int, int, Message | None]] = field(default_factory=list)
    last_arrival: dict[tuple[int, int], float] = field(default_factory=dict)
    num_entries: int = 0

    def run(self) -> Timeline:
        is_busy = [False] * self.num_stages
        is_done = [False] * self.num_stages
        inbox: list[deque[Message]] = [deque() for _ in range(self.num_stages)]
        for stage in range(self.num_stages):
            self._enter(0.0, stage, None)
            is_busy[stage] = True
        while self.agenda:
            now, _, stage, message = heapq.heappop(self.agenda)
            if message is None:
                is_busy[stage] = False
            else:
                inbox[stage].append(message)
            if is_busy[stage] or is_done[stage]:
                continue
            while inbox[stage]:
                self.deciders[stage].receive(inbox[stage].popleft())
                self._show(stage)
            is_busy[stage], is_done[stage] = self._act(stage, now)
        if not all(is_done):
            waiting = [stage for stage, done in enumerate(is_done) if not done]
            raise RuntimeError(f"stages {waiting} wait for messages that nobody will send")
        return Timeline(self.num_stages, self.num_micro_batches, self.events)

    def _act(self, stage: int, now: float) -> tuple[bool, bool]:
        """Do what can be done without time; return whether the stage computes, and is done."""
        while True:
            action = self.deciders[stage].next()
            self._show(stage)
            if action.kind in ("receive", "step"):
                return False, action.kind == "step"
            if action.kind == "forward" or action.kind == "backward":
                end = now + self.duration(stage, action.kind, action.micro_batch)
                self.events.append(Event(now, end, stage, action.kind, action.micro_batch))
                self._enter(end, stage, None)
                return True, False
            self._send(stage, now, action)

    def _send(self, stage: int, now: float, action: Action) -> None:
        target = stage + 1 if action.kind == "send_activation" else stage - 1
        link = (stage, target)
        arrival = max(now + self.delay(*link), self.last_arrival.get(link, 0.0))  # FIFO
        self.last_arrival[link] = arrival
        kind = {"send_activation": "activation", "send_gradient": "gradient", "send_loss": "loss"}
        self._enter(arrival, target, Message(kind[action.kind], action.micro_batch))  # type: ignore[arg-type]

    def _enter(self, when: float, stage: int, message: Message | None) -> None:
        self.num_entries += 1
        heapq.heappush(self.agenda, (when, self.num_entries, stage, message))

    def _show(self, stage: int) -> None:
        decider = self.deciders[stage]
        if self.watch is not None and isinstance(decider, Engine):
            self.watch(decider)


def _alternate(ahead: int, num_micro_batches: int) -> Iterator[str]:
    """Yield ``ahead`` forward passes, then backward and forward in turns, then what is left."""
    yield from (f"F{i}" for i in range(ahead))
    for i in range(num_micro_batches):
        yield f"B{i}"
        if ahead + i < num_micro_batches:
            yield f"F{ahead + i}"
