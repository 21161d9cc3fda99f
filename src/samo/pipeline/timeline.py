"""What each stage computed when, as data: checked, as text, and for trace viewers."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

__all__ = ["Event", "Timeline"]

Pass = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """One pass of one micro-batch through one stage, from ``start`` to ``end`` in seconds.

    Example:
        >>> from samo.pipeline.timeline import Event
        >>> Event(0.0, 1.5, 0, "forward", 3).end
        1.5
    """

    start: float
    end: float
    stage: int
    what: Pass
    micro_batch: int


@dataclass(frozen=True)
class Timeline:
    """The passes of one batch through all stages.

    Example:
        >>> from samo.pipeline.timeline import Event, Timeline
        >>> line = Timeline(1, 1, [Event(0, 1, 0, "forward", 0), Event(1, 3, 0, "backward", 0)])
        >>> print(line.text(width=6))
        stage 0  00----
        >>> line.span, line.bubble
        (3, 0.0)

    Raises:
        ValueError: A pass is missing, comes twice, overlaps another one or comes before its cause.
    """

    num_stages: int
    num_micro_batches: int
    events: tuple[Event, ...] = field()

    def __init__(self, num_stages: int, num_micro_batches: int, events: Iterable[Event]) -> None:
        object.__setattr__(self, "num_stages", num_stages)
        object.__setattr__(self, "num_micro_batches", num_micro_batches)
        object.__setattr__(self, "events", tuple(sorted(events)))
        self._check()

    @property
    def span(self) -> float:
        """Seconds from the first start to the last end."""
        return max(e.end for e in self.events) - self.events[0].start

    @property
    def bubble(self) -> float:
        """Fraction of all stages' time in which nothing was computed."""
        busy = sum(e.end - e.start for e in self.events)
        return 1.0 - busy / (self.span * self.num_stages) if self.span else 0.0

    def of_stage(self, stage: int) -> list[Event]:
        """Return the passes of one stage in order of time."""
        return [event for event in self.events if event.stage == stage]

    def peak_in_flight(self, stage: int) -> int:
        """Return how many micro-batches had gone forward and not yet backward, at most."""
        now = peak = 0
        for event in self.of_stage(stage):
            now += 1 if event.what == "forward" else 0
            peak = max(peak, now)
            now -= 1 if event.what == "backward" else 0
        return peak

    def text(self, width: int = 100) -> str:
        """Return a grid of letters: a forward pass as the last digit of its micro-batch, then dashes.

        Backward passes are dashes, ended by the digit where there is room; dots are idle time.
        """
        scale = width / self.span if self.span else 0.0
        origin = self.events[0].start
        rows = []
        for stage in range(self.num_stages):
            row = ["."] * width
            for event in self.of_stage(stage):
                first = round((event.start - origin) * scale)
                last = max(round((event.end - origin) * scale), first + 1)
                mark = str(event.micro_batch % 10) if event.what == "forward" else "-"
                row[first:last] = mark * (min(last, width) - first)
            rows.append(f"stage {stage}  {''.join(row)}")
        return "\n".join(rows)

    def chrome_trace(self) -> str:
        """Return JSON for chrome://tracing and Perfetto: one row for each stage, in microseconds."""
        origin = self.events[0].start
        rows: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": s, "args": {"name": f"stage {s}"}}
            for s in range(self.num_stages)
        ]
        rows += [
            {
                "ph": "X",
                "name": f"{event.what} {event.micro_batch}",
                "cat": event.what,
                "pid": 0,
                "tid": event.stage,
                "ts": (event.start - origin) * 1e6,
                "dur": (event.end - event.start) * 1e6,
            }
            for event in self.events
        ]
        return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})

    def _check(self) -> None:
        ends: dict[tuple[int, Pass, int], Event] = {}
        for event in self.events:
            key = (event.stage, event.what, event.micro_batch)
            if key in ends:
                raise ValueError(f"{_name(event)} comes twice")
            if event.end < event.start:
                raise ValueError(f"{_name(event)} ends at {event.end:g}, before it starts")
            ends[key] = event
        for stage in range(self.num_stages):
            for micro_batch in range(self.num_micro_batches):
                for what in _PASSES:
                    if (stage, what, micro_batch) not in ends:
                        raise ValueError(f"{what} {micro_batch} of stage {stage} is missing")
        if len(ends) > 2 * self.num_stages * self.num_micro_batches:
            raise ValueError(
                f"there are {len(ends)} passes for {self.num_stages} stages and "
                f"{self.num_micro_batches} micro-batches"
            )
        self._check_order(ends)

    def _check_order(self, ends: dict[tuple[int, Pass, int], Event]) -> None:
        by_stage: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            for before in by_stage[event.stage][-1:]:
                if event.start < before.end:
                    raise ValueError(f"{_name(event)} starts while {_name(before)} is computed")
            by_stage[event.stage].append(event)
            if event.what == "forward":
                cause = ends.get((event.stage - 1, "forward", event.micro_batch))
            elif event.stage == self.num_stages - 1:
                cause = ends[event.stage, "forward", event.micro_batch]
            else:
                cause = ends[event.stage + 1, "backward", event.micro_batch]
            if cause is not None and event.start < cause.end:
                raise ValueError(f"{_name(event)} starts before {_name(cause)} has ended")


_PASSES: Final[tuple[Pass, Pass]] = ("forward", "backward")


def _name(event: Event) -> str:
    return f"{event.what} {event.micro_batch} of stage {event.stage}"
