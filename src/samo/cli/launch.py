"""``samo launch``: several ranks of this machine with one command, on torch's own launcher."""

import logging
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from samo.cli import LAUNCH_FLAGS, LAUNCHED, Launch, Train, parse
from samo.config import resolve
from samo.errors import ConfigError

__all__ = []

_LAST_LINES: Final = 8
_SHUTDOWN_S: Final = 60
"""Seconds that ranks have to save and leave after Ctrl-C, before they are killed."""


def run(command: Launch) -> int:
    """Start the ranks, wait for them, and return the exit code of the first that failed."""
    if not 1 <= command.num_ranks < 2**16:
        raise ConfigError(f"--num-ranks (-n) must be 1 or more, got {command.num_ranks}")
    if command.max_restarts < 0:
        raise ConfigError(f"--max-restarts must be 0 or more, got {command.max_restarts}")
    if command.command[:1] not in [(name,) for name in LAUNCHED]:
        got = f"got {command.command[0]!r}" if command.command else "nothing was named"
        raise ConfigError(
            f"samo launch starts one of: {', '.join(LAUNCHED)}; {got}: samo launch -n 4 train notes.txt"
        )
    _check_words(command.command)
    with ExitStack() as held:
        logs = command.logs
        if logs is None:
            logs = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="samo-launch-")))
        logs.mkdir(parents=True, exist_ok=True)
        return _launch(command, logs)


def _check_words(words: tuple[str, ...]) -> None:
    """Refuse what every rank would refuse, once and before there are any.

    Raises:
        ConfigError: A setting cannot be used, or a flag stands in the wrong place.
        SystemExit: An unknown flag (2), or help (0).
    """
    for word in words:
        if word.partition("=")[0] in LAUNCH_FLAGS:
            raise ConfigError(
                f"{word} is a flag of samo launch, and stands before the word {words[0]}: samo launch "
                f"{word} ... {words[0]} ..."
            )
    parsed = parse(words)
    if isinstance(parsed, Train) and parsed.resume is None:
        resolve(parsed)


def _launch(command: Launch, logs: Path) -> int:
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_S))
    threads = max((os.cpu_count() or 1) // command.num_ranks, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from samo.training.typed import LAUNCH

    logging.disable(logging.ERROR)  # it says in many lines what we say in one
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=command.num_ranks,
        run_id=f"{LAUNCH}{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=command.max_restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(logs),
            redirects={rank: Std.ALL for rank in range(1, command.num_ranks)},
        ),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "samo", *command.command)
    except ChildFailedError as error:
        first = min(error.failures.values(), key=lambda failure: failure.timestamp)
        _show_last_words(logs, command.num_ranks)
        code = first.exitcode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if code == 2:  # wrong usage: all ranks have it alike, and the first has said so
            return code
        sys.stderr.write(f"samo: rank {first.local_rank} {how}, the first of the ranks to fail\n")
        return 128 - code if code < 0 else code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _show_last_words(logs: Path, num_ranks: int) -> None:
    """Show the end of what each rank said that does not speak to the terminal."""
    for rank in range(1, num_ranks):
        lines: list[str] = []
        for file in sorted(logs.glob(f"*/attempt_*/{rank}/std*.log")):
            lines += file.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines[-_LAST_LINES:]:
            sys.stderr.write(f"[{rank}] {line}\n")
