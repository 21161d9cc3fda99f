"""Ctrl-C, SIGTERM and SIGHUP as a wish: the loop ends the step, saves, and leaves."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final

__all__ = ["Interrupt"]

_SIGNALS: Final = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""The key, the scheduler, and the connection that is lost."""


class Interrupt:
    """Notes the first of these signals; the second one acts as if nobody had listened.

    Example:
        >>> import signal
        >>> from samo.train.interrupt import Interrupt
        >>> with Interrupt() as interrupt:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     print(interrupt.signal)
        15
    """

    def __init__(self) -> None:
        self.signal: int | None = None  # the number of the one that came
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # others may set no handlers
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
