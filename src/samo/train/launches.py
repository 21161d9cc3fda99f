"""Who started this process: torchrun and samo launch say so in the environment. Imports no torch."""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from samo.errors import RunError
from samo.train.folder import RunFolder

__all__ = []

_PR_SET_PDEATHSIG: Final = 1


def num_ranks() -> int:
    """Return the number of ranks that were started together.

    Example:
        >>> from samo.train.launches import num_ranks
        >>> num_ranks()
        1
    """
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Return whether this is the rank that speaks for all.

    Example:
        >>> from samo.train.launches import is_first_rank
        >>> is_first_rank()
        True
    """
    return os.environ.get("RANK", "0") == "0"


def is_restarted() -> bool:
    """Return whether the launcher has started this rank again after a failure.

    Example:
        >>> from samo.train.launches import is_restarted
        >>> is_restarted()
        False
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def launcher() -> str:
    """Return what tells one launch from another, the same over its restarts; "" without a launcher.

    Example:
        >>> from samo.train.launches import launcher
        >>> launcher()
        ''
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return "" if run is None else f"{run}/{os.getppid()}"


def restarted_folder(out: Path | None, parent: Path, name: str) -> Path | None:
    """Return the folder in which this launch trained before it was restarted; None if it made none.

    Args:
        out: The folder that was asked for, or None if it was chosen.
        parent: Where it was chosen.
        name: Its name, which may have got a number.
    """
    candidates = [out] if out is not None else sorted(parent.glob(f"{name}*"))
    for folder in candidates:
        with suppress(RunError):
            if RunFolder.find(folder).read_run().get("launcher") == launcher():
                return folder
    return None


def end_with_launcher() -> None:
    """Get a SIGTERM when the launcher dies, even of a SIGKILL, which it cannot pass on."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
