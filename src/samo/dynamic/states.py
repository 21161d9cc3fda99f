"""What a schedule of masks saves, and what it accepts when a run goes on."""

from collections.abc import Mapping
from typing import Any

from samo.arguments import whole_number

__all__ = []


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
