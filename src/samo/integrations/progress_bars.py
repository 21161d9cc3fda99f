"""The progress bars of transformers, which would show between the lines of samo."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = []


@contextmanager
def hidden_bars() -> Iterator[None]:
    """Hide the bars of transformers, and show them again afterwards if they were shown before."""
    try:
        from transformers.utils import logging
    except ImportError:  # then nothing draws any
        yield
        return
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
