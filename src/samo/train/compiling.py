"""Compiled blocks: which they are, and how long compiling takes."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

__all__ = []

BACKEND = "inductor"
"""What compiles; tests have a quicker one that computes as eager mode does."""

_BLOCK: Final = re.compile(r"blocks\.\d+")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a GPT, or of a stage of one.

    Example:
        >>> from samo.models.gpt import GPT, GPTConfig
        >>> from samo.train.compiling import blocks_of
        >>> model = GPT(GPTConfig(num_layers=3, width=16, num_heads=2))
        >>> blocks_of(model) == list(model.blocks)
        True
    """
    return [module for path, module in model.named_modules() if _BLOCK.fullmatch(path)]


def compile_blocks(model: nn.Module) -> None:
    """Let torch compile each block when it is first called, and again when what it is has changed.

    Equal blocks share their code. Where gradients are added up between ranks, a block is as much as can be
    compiled at once without holding that up.
    """
    for block in blocks_of(model):
        block.compile(backend=BACKEND)


class Clock:
    """Counts the seconds that torch compiles, also in backward passes.

    Args:
        on_start: Called when it begins to.
    """

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._on_start: Final = on_start
        self._began = 0.0
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what is compiled inside."""
        from torch._dynamo.callback import callback_handler  # it takes a second to load

        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(self._start)
            callback_handler.remove_end_callback(self._end)

    def take(self) -> float:
        """Return the seconds since it was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _start(self, args: Any) -> None:
        self._began = time.perf_counter()
        self._on_start()

    def _end(self, args: Any) -> None:
        self._seconds += time.perf_counter() - self._began
