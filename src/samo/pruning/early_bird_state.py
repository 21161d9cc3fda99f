"""Whether a saved state is one that an `EarlyBird` can go on from."""

from collections.abc import Mapping
from typing import Any, Final

__all__ = []

KEY: Final = "early_bird"
"""Where plain values are, and what the names of masks begin with."""

_CHANGEABLE: Final = {"limit"}
_FIELDS: Final = {"settings", "calls", "steps", "distances", "how", "masks"}


def check_saved(state: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the plain values of a state.

    Raises:
        ValueError: There is none, something is missing, or it is of other settings.
    """
    if KEY not in state:
        raise ValueError(
            f"there is no state of an EarlyBird here (no '{KEY}' among {len(state)} keys); save it "
            "with samo.save(..., extra=bird.state_dict())"
        )
    values = state[KEY]
    missing = _FIELDS - set(values if isinstance(values, Mapping) else ())
    if missing:
        raise ValueError(
            f"the state of the EarlyBird lacks {', '.join(sorted(missing))}; take another checkpoint"
        )
    for name, value in settings.items():
        saved = values["settings"].get(name)
        if name not in _CHANGEABLE and saved != value:
            raise ValueError(
                f"the saved state is of an EarlyBird with {name}={saved!r}, and this one has "
                f"{value!r}; build it with the settings it had (limit alone may differ)"
            )
    wanted = [f"{KEY}/{key}/{name}" for key, names in values["masks"].items() for name in names]
    lost = [name for name in wanted if name not in state]
    if lost:
        raise ValueError(
            f"the state of the EarlyBird lacks the mask '{lost[0]}' ({len(lost)} of {len(wanted)}); "
            "save all that state_dict() returns"
        )
    return dict(values)
