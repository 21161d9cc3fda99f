"""Checks of arguments: numbers, models and optimizers."""

import math
import operator
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return an integer of any type (Python, numpy, one-element tensor) as a Python int."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or (least is not None and found < least):
        rule = "" if least is None else f" of {least} or more"
        raise ValueError(f"{name} must be a whole number{rule}, got {value!r}")
    return found


def finite_number(name: str, value: Any) -> float:
    """Return a number of any type as a finite float."""
    try:
        found = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of a tensor's size
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return found


def check_model(model: object) -> None:
    """Raise TypeError unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def optimizers_of(opt: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Return one optimizer or several as a list; raise TypeError for anything else."""
    given: Any = opt
    is_one = isinstance(opt, Optimizer | str | nn.Module) or not isinstance(opt, Iterable)
    found = [given] if is_one else list(given)
    for one in found:
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"opt must be a torch.optim.Optimizer or several, got {type(one).__name__}; build "
                "one on model.parameters()"
            )
    return found
