"""Timing: contenders take turns, GPU events measure time, and every time comes with its spread."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

_CPU: Final = torch.device("cpu")


def mark(device: torch.device) -> Any:
    """Record the time at which the device reaches this point: a CUDA event or a time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(first: Any, second: Any) -> float:
    """Return the milliseconds between two marks; waits for the second."""
    if isinstance(first, float):
        return (second - first) * 1e3
    second.synchronize()
    return float(first.elapsed_time(second))


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
    """
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
            start = mark(device)
            contenders[name]()
            marks[name] = (start, mark(device))
        for name, (start, stop) in marks.items():
            times[name].append(elapsed_ms(start, stop))
    return times


def flusher(device: torch.device) -> Callable[[], object]:
    """Return a function that flushes a GPU's cache; on a CPU it does nothing."""
    if device.type != "cuda":
        return lambda: None
    buffer = torch.empty(2**30, dtype=torch.int8, device=device)  # more than any cache
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
    found = {
        "p20": ordered[round(0.2 * last)],
        "median": statistics.median(ordered),
        "p80": ordered[round(0.8 * last)],
    }
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def ratio(times: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the median of the ratios within rounds, whose times saw the same machine."""
    return spread([a / b for a, b in zip(times, baseline)])["median"]
