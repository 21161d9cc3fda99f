"""The launcher, as torchrun and samo launch describe it in the environment of a rank."""

import ctypes
import glob
import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from samo.errors import PeerError, RunError
from samo.train.run_dir import RunDir, kind_of

RUN_ID_PREFIX: Final = "samo-"
"""Start of the run ids of samo launch; others are torchrun's."""
RESTARTS: Final = "SAMO_RESTART_COUNT"
"""How often samo launch has started the ranks again."""
_PR_SET_PDEATHSIG: Final = 1


def num_ranks() -> int:
    """Return the number of ranks that were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Return whether this is rank 0, which writes files and prints."""
    return os.environ.get("RANK", "0") == "0"


def is_restarted() -> bool:
    """Return whether the launcher has started this rank again after a failure."""
    return any(os.environ.get(n, "0") != "0" for n in (RESTARTS, "TORCHELASTIC_RESTART_COUNT"))


def launcher() -> str:
    """Return an id of this launch that stays the same over restarts; "" without a launcher."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return "" if run is None else f"{run}/{os.getppid()}"


def restarted_dir(out: Path | None, parent: Path, name: str) -> Path | None:
    """Return the run directory of this launch before it was restarted, or None if there is none.

    It is ``out``; if that is None, `samo.train.run_dir.free_dir` has chosen it in ``parent``.
    """
    for path in [out] if out is not None else sorted(parent.glob(f"{glob.escape(name)}*")):
        with suppress(RunError):
            if RunDir.find(path).read_run().get("launcher") == launcher():
                return path
    return None


def end_with_launcher() -> None:
    """Let Linux kill this rank when the launcher dies: without its store, ranks cannot save."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None or sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if run.startswith(RUN_ID_PREFIX) and run != f"{RUN_ID_PREFIX}{os.getppid()}":
        raise PeerError("the launcher has ended before this rank was ready; start it again")


def command_line() -> str:
    """Return the command that the user typed, with its launcher."""
    name = Path(sys.argv[0]).name
    command = _launched("samo" if name == "__main__.py" else name)
    return f"{command} {shlex.join(sys.argv[1:])}".strip()


def prune_command(model: Path) -> str:
    """Return a sensible command that prunes a language model."""
    return f"samo prune {shlex.quote(str(model))} --sparsity 0.5 --method wanda --calibration FILE"


def resume_command(run: Path) -> str:
    """Return the command that resumes a run, on the same number of ranks."""
    start = _launched("samo")
    # The environment does not tell torchrun's arguments.
    note = f"   # on {num_ranks()} ranks" if start.startswith("torchrun") else ""
    command = kind_of(run)
    return f"{start} {command} --resume {shlex.quote(str(run))}{note}"


def _launched(name: str) -> str:
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return name
    is_ours = run.startswith(RUN_ID_PREFIX)
    return f"samo launch -n {num_ranks()}" if is_ours else "torchrun ... -m samo"
