"""Timing: contenders take turns, GPU events measure time, and every time comes with its spread."""

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

__all__ = []

_CPU: Final = torch.device("cpu")
_FLUSH_BYTES: Final = 2**30
"""More than any cache."""


class Clock:
    """The clock of a device: CUDA events on a GPU, ``time.perf_counter`` elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Record the time at which the device reaches this point."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait for the device."""
        if self._is_cuda:
            torch.cuda.synchronize()

    def ms(self, first: Any, second: Any) -> float:
        """Return the milliseconds between two marks, after `wait`."""
        return float(first.elapsed_time(second) if self._is_cuda else (second - first) * 1e3)


def in_turns(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 2,
    device: torch.device = _CPU,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return the milliseconds of contenders that take turns, so that a slow phase slows them all.

    The order changes from round to round, since caches and memory depend on the predecessor.
    ``prepare`` is called before each run and not timed.

    Example:
        >>> from samo.bench.timing import in_turns
        >>> times = in_turns({"sum": lambda: sum(range(9)), "max": lambda: max(range(9))}, rounds=3)
        >>> {name: len(found) for name, found in times.items()}
        {'sum': 3, 'max': 3}
    """
    clock = Clock(device)
    for _ in range(warm_up):
        for run in contenders.values():
            prepare()
            run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random(0)
    for _ in range(rounds):
        marks = {}
        for name in order.sample(list(contenders), len(contenders)):
            prepare()
            start = clock.mark()
            contenders[name]()
            marks[name] = (start, clock.mark())
        clock.wait()
        for name, (start, stop) in marks.items():
            times[name].append(clock.ms(start, stop))
    return times


def flusher(device: torch.device) -> Callable[[], object]:
    """Return a function that flushes a GPU's cache; on a CPU it does nothing."""
    if device.type != "cuda":
        return lambda: None
    buffer = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    # Twice: this takes a fast GPU half a millisecond, in which the host launches what is timed.
    return lambda: buffer.zero_().zero_()


def free(device: torch.device) -> None:
    """Collect garbage and return cached memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return the median and the 20th and 80th percentile, with five digits."""
    ordered = sorted(times)
    last = len(ordered) - 1
    at = {"p20": 0.2, "median": 0.5, "p80": 0.8}
    return {name: float(f"{ordered[round(part * last)]:.5g}") for name, part in at.items()}


def ratio(times: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the median of the ratios within rounds, whose times saw the same machine."""
    return spread([a / b for a, b in zip(times, baseline)])["median"]
