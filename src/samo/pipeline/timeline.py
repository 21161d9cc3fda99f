"""When each stage computed what: checked, as text, and for trace viewers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["Event", "Timeline"]

Pass = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """One pass of one micro-batch through one stage, from ``start`` to ``end`` in seconds."""

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
        ValueError: A pass is missing, comes twice, overlaps another one or comes before its input.
    """

    num_stages: int
    num_micro_batches: int
    events: Sequence[Event]

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(sorted(self.events)))
        self._check()

    @property
    def span(self) -> float:
        """Seconds from the first start to the last end."""
        return max(e.end for e in self.events) - self.events[0].start

    @property
    def bubble(self) -> float:
        """Fraction of all stages' time that was idle."""
        busy = sum(e.end - e.start for e in self.events)
        return 1.0 - busy / (self.span * self.num_stages) if self.span else 0.0

    def of_stage(self, stage: int) -> list[Event]:
        """Return the passes of one stage in order of time."""
        return [event for event in self.events if event.stage == stage]

    def peak_in_flight(self, stage: int) -> int:
        """Return the largest number of micro-batches between their forward and their backward pass."""
        now = peak = 0
        for event in self.of_stage(stage):
            now += 1 if event.what == "forward" else 0
            peak = max(peak, now)
            now -= 1 if event.what == "backward" else 0
        return peak

    def text(self, width: int = 100) -> str:
        """Return a row for each stage: digits of micro-batches going forward, dashes backward, dots idle."""
        scale = width / self.span if self.span else 0.0
        rows = []
        for stage in range(self.num_stages):
            row = ["."] * width
            for event in self.of_stage(stage):
                first = round((event.start - self.events[0].start) * scale)
                last = max(round((event.end - self.events[0].start) * scale), first + 1)
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
        passes: dict[tuple[int, Pass, int], Event] = {}
        last: dict[int, Event] = {}
        for event in self.events:
            key = (event.stage, event.what, event.micro_batch)
            if key in passes:
                raise ValueError(f"{_name(event)} comes twice")
            if event.end < event.start:
                raise ValueError(f"{_name(event)} ends at {event.end:g}, before it starts")
            if event.stage in last and event.start < last[event.stage].end:
                raise ValueError(
                    f"{_name(event)} starts while {_name(last[event.stage])} is computed"
                )
            passes[key] = last[event.stage] = event
        wanted = {
            (stage, what, micro_batch)
            for stage in range(self.num_stages)
            for what in _PASSES
            for micro_batch in range(self.num_micro_batches)
        }
        for stage, what, micro_batch in sorted(wanted - passes.keys()):
            raise ValueError(f"{what} {micro_batch} of stage {stage} is missing")
        if len(passes) > len(wanted):
            raise ValueError(
                f"there are {len(passes)} passes for {self.num_stages} stages and "
                f"{self.num_micro_batches} micro-batches"
            )
        for (stage, what, micro_batch), event in passes.items():
            if what == "forward":
                before = passes.get((stage - 1, "forward", micro_batch))
            elif stage == self.num_stages - 1:
                before = passes[stage, "forward", micro_batch]
            else:
                before = passes[stage + 1, "backward", micro_batch]
            if before is not None and event.start < before.end:
                raise ValueError(f"{_name(event)} starts before {_name(before)} has ended")


_PASSES: Final[tuple[Pass, Pass]] = ("forward", "backward")


def _name(event: Event) -> str:
    return f"{event.what} {event.micro_batch} of stage {event.stage}"
