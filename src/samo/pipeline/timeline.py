"""When each stage computed what: as text, and for trace viewers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Pass = Literal["forward", "backward"]


class Event(NamedTuple):
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
        >>> line = Timeline(1, 1, [Event(0, 1, 0, "forward", 0), Event(1, 3, 0, "backward", 0)])
        >>> print(line.text(width=6))
        stage 0  00----
        >>> line.span
        3
    """

    num_stages: int
    num_micro_batches: int
    events: Sequence[Event]

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(sorted(self.events)))

    @property
    def span(self) -> float:
        """Seconds from the first start to the last end."""
        return max(e.end for e in self.events) - self.events[0].start

    def of_stage(self, stage: int) -> list[Event]:
        """Return the passes of one stage in order of time."""
        return [event for event in self.events if event.stage == stage]

    def peak_in_flight(self, stage: int) -> int:
        """Return the largest number of micro-batches between forward and backward pass."""
        now = peak = 0
        for event in self.of_stage(stage):
            now += 1 if event.what == "forward" else -1
            peak = max(peak, now)
        return peak

    def text(self, width: int = 100) -> str:
        """Return a row for each stage: forward passes as digits, backward as dashes, idle dots."""
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
        """Return JSON for chrome://tracing and Perfetto, a row for each stage, in microseconds."""
        rows: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": s, "args": {"name": f"stage {s}"}}
            for s in range(self.num_stages)
        ]
        for start, end, stage, what, micro_batch in self.events:
            row = {"ph": "X", "name": f"{what} {micro_batch}", "cat": what, "pid": 0, "tid": stage}
            rows.append(
                row | {"ts": (start - self.events[0].start) * 1e6, "dur": (end - start) * 1e6}
            )
        return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})
