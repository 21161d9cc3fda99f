"""When masks change and by how much: numbers in, numbers out."""

import math

__all__ = []


def cubic_sparsity(step: int, start: int, stop: int, initial: float, final: float) -> float:
    """Return the sparsity at a step: fast at first, while there is much to spare, then ever slower.

    Example:
        >>> [round(cubic_sparsity(step, 0, 100, 0.0, 0.9), 3) for step in (0, 50, 100, 200)]
        [0.0, 0.787, 0.9, 0.9]
    """
    part = min(max((step - start) / (stop - start), 0.0), 1.0)
    return final + (initial - final) * (1 - part) ** 3


def is_pruning_step(step: int, start: int, stop: int, every: int) -> bool:
    """Return whether masks shrink at a step: every so often from ``start`` on, and at ``stop``.

    Example:
        >>> [step for step in range(20) if is_pruning_step(step, 3, 10, 4)]
        [3, 7, 10]
    """
    return start <= step <= stop and ((step - start) % every == 0 or step == stop)


def cosine_fraction(step: int, stop: int, drop: float) -> float:
    """Return the fraction of the kept entries to replace at a step.

    Example:
        >>> [round(cosine_fraction(step, 100, 0.3), 3) for step in (0, 50, 100)]
        [0.3, 0.15, 0.0]
    """
    return drop / 2 * (1 + math.cos(math.pi * step / stop))


def is_replacing_step(step: int, stop: int, every: int) -> bool:
    """Return whether entries are replaced at a step: every so often until before ``stop``.

    Example:
        >>> [step for step in range(20) if is_replacing_step(step, 12, 4)]
        [4, 8]
    """
    return 0 < step < stop and step % every == 0


def warmup_factor(steps: int, stop: int, every: int, warmup: int) -> float:
    """Return the factor on the learning rate of the step after ``steps``.

    It rises in ``warmup`` steps from nearly nothing to 1 after entries were replaced.

    Example:
        >>> [warmup_factor(steps, 100, 10, 4) for steps in (9, 10, 11, 12, 13, 14)]
        [1.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    last = min(steps, stop - 1) // every * every
    return 1.0 if last == 0 or not warmup else min(1.0, (steps - last + 1) / warmup)
