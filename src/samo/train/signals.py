"""Ctrl-C, SIGTERM and SIGHUP as requests: the loop finishes its step, saves, and ends."""

import signal
import threading
from types import FrameType
from typing import Any, Final

__all__ = ["Interrupt"]

_SIGNALS: Final = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Interrupt:
    """Records the first signal; the second one has the effect that it had before."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.__exit__()
