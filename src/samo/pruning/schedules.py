"""When masks change and by how much, and what of that is saved: numbers in, numbers out."""

import math
from collections.abc import Mapping
from typing import Any

from samo.utils.validation import whole_number

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


def pack(steps: int, seed: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state to save.

    Example:
        >>> pack(3, 0, {"every": 5})
        {'steps': 3, 'seed': 0, 'settings': {'every': 5}}
    """
    return {"steps": steps, "seed": seed, "settings": dict(settings)}


def unpack(kind: str, state: Any, seed: int, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the steps and the seed of a saved state; one without settings or seed is an older one.

    Example:
        >>> unpack("GradualPruning", {"steps": 3}, 7, {"every": 5})
        (3, 7)

    Raises:
        ValueError: It is no such state, or of other settings.
    """
    if not isinstance(state, Mapping) or "steps" not in state:
        raise ValueError(
            f"there is no state of a {kind} here (no 'steps'); save it with "
            "samo.save(..., extra={'changes': x.state_dict()}) and load extra['changes']"
        )
    saved = state.get("settings", settings)
    for name, value in settings.items():
        if saved.get(name) != value:
            raise ValueError(
                f"the saved state is of a {kind} with {name}={saved.get(name)!r}, and this one has "
                f"{value!r}; build it with the settings it had"
            )
    steps = whole_number("'steps' of the saved state", state["steps"], least=0)
    return steps, whole_number("'seed' of the saved state", state.get("seed", seed))
