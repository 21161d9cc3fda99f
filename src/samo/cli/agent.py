"""Torch's agent for the ranks of this machine, which ends the others soon once one has failed.

Torch sends SIGTERM to the others and waits 30 s, with no setting for it, before it kills. A stopped process
never takes a SIGTERM, so it would outlive its run by that; others die of it before they have said what they
know. Here a stopped one is killed at once, and the others after a few seconds, if they have not left by
themselves. Ctrl-C is different: nothing has failed, and ranks have time to save.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

__all__ = []

SAVING_S: Final = 60.0
"""Seconds that ranks have to save and leave after Ctrl-C, before they are killed."""

LEAVING_S: Final = 4.0
"""Seconds that ranks have to say what they know after another has failed."""

_LOOK_S: Final = 0.05

_CAN_LOOK: Final = hasattr(os, "waitid")
"""Not on Windows, nor on macOS before Python 3.13: what torch does must do there."""


class Agent(LocalElasticAgent):
    """Starts ranks, watches them, and starts them again after a failure, as torch's own does.

    Args:
        spec: What to start.
        logs_specs: Where ranks write to.
        limit_s: Seconds for which a rank may be stopped. The others find out by themselves, unless they
            have not come so far yet.
        on_fall: Called when ranks have failed and all are gone.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        limit_s: float,
        on_fall: "Callable[[Fall], None]",
    ) -> None:
        super().__init__(spec, logs_specs)
        self._on_fall: Final = on_fall
        self._limit_s: Final = limit_s
        self._stopped_s: dict[int, float] = {}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not _CAN_LOOK:
            return super()._monitor_workers(worker_group)
        ranks = {worker.global_rank: worker.id for worker in worker_group.workers}
        states = _looks(ranks)
        now_s = time.monotonic()
        self._stopped_s = {
            pid: self._stopped_s.get(pid, now_s)
            for rank, pid in ranks.items()
            if states[rank].kind == "stopped"
        }
        is_late = any(now_s - since_s >= self._limit_s for since_s in self._stopped_s.values())
        fall = Fall(
            {rank: s.status for rank, s in states.items() if s.kind == "ended" and s.status}
        )
        if fall.first or is_late:
            end(ranks, None, LEAVING_S, fall)
            self._on_fall(fall)
        elif any(state.kind != "ended" for state in states.values()):
            return RunResult(state=WorkerState.HEALTHY)  # torch finds a failure when all are gone
        return super()._monitor_workers(worker_group)

    def _shutdown(self, death_sig: Any = signal.SIGTERM, *more: Any, **settings: Any) -> None:
        workers = self.get_worker_group().workers if _CAN_LOOK else []
        end({worker.global_rank: worker.id for worker in workers}, death_sig, SAVING_S)
        super()._shutdown(death_sig, *more, **settings)


@dataclass
class Fall:
    """How ranks came to fail together.

    Example:
        >>> from samo.cli.agent import Fall
        >>> Fall({1: 1, 3: 1}, stopped={2: 19}).blame(lambda rank: f"rank {rank}")
        ('rank 2 was stopped by signal 19, which the others found out; it was killed', 137)

    Attributes:
        first: Exit codes of the ranks that were found to have failed, negative for a signal.
        stopped: Ranks that were stopped then, with the signal.
        stayed: Ranks that had to be killed, since they did not leave.
    """

    first: Mapping[int, int]
    stopped: dict[int, int] = field(default_factory=dict)
    stayed: list[int] = field(default_factory=list)

    def blame(self, place: Callable[[int], str]) -> tuple[str, int]:
        """Return what is to be said of the rank at fault, and the exit code of the launch.

        One that was killed goes before one that was stopped, and that before one that ended by itself:
        such a one may have ended only since it missed another.
        """
        for rank, code in self.first.items():
            if code < 0:
                who = f"{place(rank)} was killed by signal {-code}"
                return f"{who}, the first of the ranks to fail", 128 - code
        for rank, number in self.stopped.items():
            how = f"was stopped by signal {number}, which the others found out; it was killed"
            return f"{place(rank)} {how}", 128 + signal.SIGKILL
        rank, code = next(iter(self.first.items()))
        said = f"{place(rank)} ended with code {code}, the first of the ranks to fail"
        if self.stayed:
            listed = ", ".join(map(place, self.stayed))
            said += f"; killed, since it had not left {LEAVING_S:g} s later: {listed}"
        return said, code


class _State(NamedTuple):
    kind: str
    status: int


def end(
    ranks: Mapping[int, Any], number: int | None, seconds: float, fall: Fall | None = None
) -> None:
    """Send ranks a signal, and kill those that are still there after a time.

    Args:
        ranks: Process numbers by rank.
        number: The signal; None sends nothing, and lets ranks find out by themselves.
        seconds: The time.
        fall: What failed, to be completed; ranks that are stopped are killed at once then.
    """
    deadline = time.monotonic() + seconds
    is_first = True
    while left := {rank: s for rank, s in _looks(ranks).items() if s.kind != "ended"}:
        is_over = time.monotonic() >= deadline
        for rank, state in left.items():
            if fall is not None and state.kind == "stopped":
                fall.stopped.setdefault(rank, state.status)
                _kill(ranks[rank], signal.SIGKILL)
            elif is_over:
                if fall is not None:
                    fall.stayed.append(rank)
                _kill(ranks[rank], signal.SIGKILL)
            elif is_first and number is not None:
                _kill(ranks[rank], number)
        if is_over:
            return
        is_first = False
        time.sleep(_LOOK_S)


def _looks(ranks: Mapping[int, Any]) -> dict[int, _State]:
    """Return how each rank is, without taking its exit code away from who waits for it."""
    return {rank: _look(pid) for rank, pid in ranks.items() if isinstance(pid, int)}


def _look(pid: int) -> _State:
    options = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    try:
        found = os.waitid(os.P_PID, pid, options)
    except ChildProcessError:
        return _State("ended", 0)  # and somebody has its exit code
    if found is None:
        return _State("runs", 0)
    if found.si_code == os.CLD_EXITED:
        return _State("ended", found.si_status)
    if found.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
        return _State("ended", -found.si_status)
    return _State("stopped" if found.si_code == os.CLD_STOPPED else "runs", found.si_status)


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)  # each rank leads a group of its own, with what it has started
