"""``samo launch``: several ranks of this machine with one command, on torch's own launcher."""

import logging
import os
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from samo.cli import LAUNCH_FLAGS, LAUNCHED, Launch, Train, parse
from samo.errors import ConfigError
from samo.train.config import resolve
from samo.train.config_mesh import MeshConfig, place

__all__ = []

_LAST_LINES: Final = 8


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
    settings = _settings(command.command)
    with ExitStack() as held:
        logs = command.logs
        if logs is None:
            logs = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="samo-launch-")))
        logs.mkdir(parents=True, exist_ok=True)
        return _launch(command, settings, logs)


def _launch(command: Launch, settings: MeshConfig, logs: Path) -> int:
    threads = max((os.cpu_count() or 1) // command.num_ranks, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from samo.cli.agent import Agent, Fall
    from samo.distributed.watchdog import PATIENCE_S
    from samo.train.typed import LAUNCH

    logging.disable(logging.ERROR)  # it says in many lines what we say in one
    codes: list[int] = []

    def tell(fall: Fall) -> None:
        said, code = fall.blame(partial(place, settings, command.num_ranks))
        codes.append(code)
        if code == 2:  # wrong usage: all ranks have it alike, and the first has said so
            return
        _show_last_words(logs, command.num_ranks)
        sys.stderr.write(f"samo: {said}\n")
        if len(codes) <= command.max_restarts:
            which = f"restart {len(codes)} of {command.max_restarts}"
            sys.stderr.write(f"samo: all ranks start again, from the last checkpoint ({which})\n")

    meeting = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",
            run_id=f"{LAUNCH}{os.getpid()}",
            min_nodes=1,
            max_nodes=1,
        )
    )
    agent = Agent(
        WorkerSpec(
            role="default",
            local_world_size=command.num_ranks,
            entrypoint=sys.executable,
            args=("-m", "samo", *command.command),
            rdzv_handler=meeting,
            max_restarts=command.max_restarts,
            monitor_interval=0.1,
        ),
        DefaultLogsSpecs(
            log_dir=str(logs),
            redirects={rank: Std.ALL for rank in range(1, command.num_ranks)},
        ),
        limit_s=settings.timeout_s + PATIENCE_S,
        on_fall=tell,
    )
    try:
        result = agent.run()
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        meeting.shutdown()
    if result.is_failed() and not codes:  # where a rank cannot be looked at without taking its code
        tell(Fall({rank: failure.exitcode for rank, failure in result.failures.items()}))
    return codes[-1] if result.is_failed() else 0


def _settings(words: tuple[str, ...]) -> MeshConfig:
    """Return the grid that was asked for; refuse what every rank would refuse, once, before there are any.

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
    assert isinstance(parsed, Train), "the only command that is launched"
    if parsed.resume is None:
        resolve(parsed)
    return parsed.mesh


def _show_last_words(logs: Path, num_ranks: int) -> None:
    """Show the end of what each rank said that does not speak to the terminal."""
    attempts = logs.glob("*/attempt_*")
    newest = max(attempts, key=lambda folder: folder.stat().st_mtime, default=logs)
    for rank in range(1, num_ranks):
        lines: list[str] = []
        for file in sorted(newest.glob(f"{rank}/std*.log")):
            lines += file.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines[-_LAST_LINES:]:
            sys.stderr.write(f"[{rank}] {line}\n")
