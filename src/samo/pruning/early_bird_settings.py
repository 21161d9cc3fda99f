"""Which settings of `samo.EarlyBird` can be meant, and which contradict each other."""

from collections.abc import Mapping
from typing import Any, get_args

import torch

from samo.pruning.settling import Distance
from samo.utils.validation import finite_number, whole_number

__all__ = []


def check_settings(settings: Mapping[str, Any], device: torch.device | str | None) -> None:
    """Refuse what cannot be meant; what `samo.prune` checks is left to it.

    Raises:
        ValueError: A setting is out of range, or contradicts another.
    """
    distance, known = settings["distance"], get_args(Distance)
    if distance not in known:
        raise ValueError(f"distance={distance!r} is unknown; it is one of {', '.join(known)}")
    for name, least in (("every", 1), ("queue", 2), ("limit", 1)):
        if name != "limit" or settings[name] is not None:
            whole_number(name, settings[name], least)
    whole_number("seed", settings["seed"])
    if not 0 <= finite_number("threshold", settings["threshold"]) < 1:
        raise ValueError(
            f"threshold must be at least 0 and less than 1, got {settings['threshold']}; 0.1 is usual"
        )
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device is {device!r}, which torch does not know; give one such as 'cpu', or leave it out"
        ) from error
    if settings["history"] and device is not None and torch.device(device).type != "cpu":
        raise ValueError(
            f"history holds all masks on the CPU, and device is '{device}'; leave one of them out"
        )
