"""Calls to the system that are recorded, or made to fail."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def record(monkeypatch: pytest.MonkeyPatch, *calls: str) -> list[str]:
    """Return a list that gets each of these calls, and of an fsync the name of the file."""
    done: list[str] = []

    def recording(call: str) -> Callable[..., Any]:
        real = getattr(os, call)

        def recorded(*args: Any) -> Any:
            name = call
            if call == "fsync":
                name = re.sub(
                    "[0-9a-f]{8}", "X", Path(os.readlink(f"/proc/self/fd/{args[0]}")).name
                )
            done.append(name)
            return real(*args)

        return recorded

    for call in calls:
        monkeypatch.setattr(os, call, recording(call))
    return done


def failing_at(number: int, error: BaseException, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises at its call of this number, and works before and after."""
    calls = iter(range(1, 1_000_000))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise error
        return real(*args, **kwargs)

    return call
