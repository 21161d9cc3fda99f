"""A run as it is typed: the command that started it, and the one that goes on with it."""

import os
import shlex
import sys
from pathlib import Path
from typing import Final

from samo.train.launches import num_ranks

__all__ = []

LAUNCH: Final = "samo-"
"""What the launches of samo launch are called by, and a number; others are torchrun's."""


def command_line() -> str:
    """Return the command that was typed, with what launched it.

    Example:
        >>> import sys
        >>> from samo.train.typed import command_line
        >>> before, sys.argv = sys.argv, ["/usr/lib/samo/__main__.py", "train", "my notes.txt"]
        >>> command_line()
        "samo train 'my notes.txt'"
        >>> sys.argv = before
    """
    name = Path(sys.argv[0]).name
    return f"{_start('samo' if name == '__main__.py' else name)} {shlex.join(sys.argv[1:])}".strip()


def go_on_line(folder: Path) -> str:
    """Return the command that goes on with a run, on as many ranks as it has here.

    Example:
        >>> from pathlib import Path
        >>> from samo.train.typed import go_on_line
        >>> go_on_line(Path("runs/notes"))
        'samo train --resume runs/notes'
    """
    start = _start("samo")
    # How torchrun was told of its machines nobody says here.
    ranks = f"   # on {num_ranks()} ranks again" if start.startswith("torchrun") else ""
    return f"{start} train --resume {shlex.quote(str(folder))}{ranks}"


def _start(name: str) -> str:
    """Return what stands before the word train."""
    launch, ranks = os.environ.get("TORCHELASTIC_RUN_ID"), num_ranks()
    if launch is None:
        return name
    return f"samo launch -n {ranks}" if launch.startswith(LAUNCH) else "torchrun ... -m samo"
