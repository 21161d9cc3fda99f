"""Compiled blocks, and the time that compiling takes."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

__all__ = []

BACKEND = "inductor"
"""Backend of torch.compile; tests use a faster one that computes as eager mode does."""

_BLOCK: Final = re.compile(r"blocks\.\d+")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a GPT, or of a stage of one."""
    return [module for path, module in model.named_modules() if _BLOCK.fullmatch(path)]


def compile_blocks(model: nn.Module) -> None:
    """Compile each block on its first call, and again when it has changed.

    Equal blocks share their code. Larger units would delay the reduction of gradients between
    ranks.
    """
    for block in blocks_of(model):
        block.compile(backend=BACKEND)


class CompileClock:
    """Measures the time that torch compiles, also in backward passes.

    ``on_start`` is called when compiling starts for the first time since `take`.
    """

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._on_start: Final = on_start
        self._began = 0.0
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure compiling inside of the context."""
        from torch._dynamo.callback import callback_handler  # it takes a second to load

        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(self._start)
            callback_handler.remove_end_callback(self._end)

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _start(self, args: Any) -> None:
        if not self._seconds:
            self._on_start()
        self._began = time.perf_counter()

    def _end(self, args: Any) -> None:
        self._seconds += time.perf_counter() - self._began
