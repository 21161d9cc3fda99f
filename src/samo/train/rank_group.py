"""The ranks of a run, as one of them sees them: join, collectives, and who caused a failure.

A single process has a `RankGroup` too, whose collectives are no-ops. Plain data, errors and signals
go through the store of the ranks; sums of losses go over the axis `data`, as gradients do.
"""

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, Final, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from samo.distributed import mesh as meshes
from samo.distributed.ranks import Ranks
from samo.distributed.watchdog import Watchdog, listed
from samo.errors import ConfigError, PeerError, SamoError, first_words
from samo.train.config import AUTO, MeshConfig
from samo.train.launch_env import num_ranks
from samo.utils.collectives import backend_of
from samo.utils.environment import is_out_of_memory

Result = TypeVar("Result")

_SIGNALS: Final = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
)
"""SIGTERM, or SIGUSR1 where sbatch --signal asks for it, is how Slurm announces a pre-emption."""

_SAME_S: Final = 5.0


class RankGroup:
    """The mesh, with axes ``pipe`` and ``data``, as one rank sees it; None: a single process."""

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        timeout_s: float = 600.0,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.mesh: Final = mesh
        self.timeout_s: Final = timeout_s
        self.rank = self.stage = 0
        self.size = self.num_stages = self.num_replicas = 1
        self.part = (0, 1)  # index of this rank's part of every batch, and the number of parts
        self.data: dist.ProcessGroup | None = None  # the replicas of this stage, if several
        self.watchdog = watchdog
        self._together = Ranks()
        self._runs = 0
        self._posted = ""
        self._steps: deque[torch.cuda.Event] = deque()
        self._owns_process_group = watchdog is not None
        if mesh is None:
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.num_stages, self.num_replicas = mesh.size(0), mesh.size(1)
        self.stage, replica = divmod(self.rank, self.num_replicas)
        self.part = replica, self.num_replicas
        self._together = Ranks(
            range(self.size), "samo.train", timeout_s, self.look_after, PeerError
        )
        if watchdog is None:
            store, key = self._together.store, f"{self._together.key}/watchdog"
            self.watchdog = Watchdog(store, self.rank, self.size, timeout_s=timeout_s, key=key)
        if self.num_replicas > 1:  # the groups of a mesh have a timeout of half an hour
            axis = mesh["data"].get_group()
            self.data = dist.new_group(
                dist.get_process_group_ranks(axis),
                timeout=timedelta(seconds=timeout_s),
                backend=backend_of(axis, mesh.device_type),
                use_local_synchronization=True,
            )

    @classmethod
    def join(cls, settings: MeshConfig, device: Literal["cpu", "cuda"]) -> "RankGroup":
        """Join the ranks that torchrun or samo launch has started."""
        is_initialized = dist.is_available() and dist.is_initialized()
        size = dist.get_world_size() if is_initialized else num_ranks()
        data = None if settings.data == AUTO else settings.data
        try:
            meshes.check_sizes(settings.num_stages, data, size)
        except ValueError as error:
            hint = "; start ranks with samo launch -n or torchrun" if size == 1 else ""
            raise ConfigError(f"{error}{hint}") from None
        timeout_s = settings.timeout_s
        if size == 1:
            return cls(timeout_s=timeout_s)
        watchdog: Watchdog | None = None
        try:
            if not is_initialized:
                store = meshes.rendezvous(timedelta(seconds=timeout_s))
                rank, end = int(os.environ["RANK"]), partial(_end_process, settings, size)
                watchdog = Watchdog(store, rank, size, timeout_s=timeout_s, on_lost=end)
                meshes.join(device, timedelta(seconds=timeout_s), store)
            mesh = meshes.mesh(settings.num_stages, data, device=device, timeout_s=timeout_s)
            return cls(mesh, timeout_s=timeout_s, watchdog=watchdog)
        except (RuntimeError, OSError) as error:
            missing = () if watchdog is None else watchdog.stopped()
            if watchdog is not None:
                watchdog.close()
            if isinstance(error, SamoError):
                raise
            names = ", ".join(rank_name(settings.num_stages, size, rank) for rank in missing)
            who = f"{names} did not join; see its log" if missing else "start them all"
            raise PeerError(
                f"the {size} ranks did not meet within {timeout_s:g} s: {who}. The backend said: "
                f"{first_words(error)}",
                missing,
                is_diagnosed=bool(missing),
            ) from error

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    # Failures

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Attribute a failure to its root cause, and stop watching at the end of a run."""
        self._runs += 1  # requests of an earlier run do not count
        self._posted = ""
        try:
            yield
        except PeerError as error:
            raise self._attribute(error) from error.__cause__
        except RuntimeError as error:
            stopped = self._stopped(why=f". The backend said: {first_words(error)}")
            if stopped is None or isinstance(error, SamoError) or is_out_of_memory(error):
                raise
            raise self._attribute(stopped) from error
        finally:
            if self.watchdog is not None:
                self.watchdog.close()

    def _attribute(self, error: PeerError) -> PeerError:
        """Return the error with its root cause, which is recorded, and its stage.

        A stage reports the neighbour that sends nothing, which may itself wait for another rank;
        and to its peers a rank that gave up has stopped.
        """
        message, ranks = str(error), error.ranks
        if self.watchdog is not None:
            cause = self.watchdog.root_cause()
            if not cause and not error.is_diagnosed:
                cause = self.watchdog.stopped()
            if cause and self.rank not in cause and cause != ranks:
                message, ranks = f"{listed(cause)} failed, and because of it: {error}", cause
            if ranks:
                self.watchdog.record_root_cause(ranks)
        is_same, is_split = ranks == error.ranks, self.num_stages > 1
        if not ranks or (is_same and (error.stage is not None or not is_split)):
            return error
        if is_split:
            stages = [f"rank {rank} is stage {rank // self.num_replicas}" for rank in ranks]
            message += f" ({', '.join(stages)} of {self.num_stages})"
        return PeerError(message, ranks, is_diagnosed=True)

    def look_after(self, ranks: tuple[int, ...]) -> None:
        """Raise if one of these ranks, which this one waits for, has stopped."""
        if (error := self._stopped(ranks)) is not None:
            raise error

    def _stopped(self, ranks: tuple[int, ...] | None = None, why: str = "") -> PeerError | None:
        stopped = () if self.watchdog is None else self.watchdog.stopped(ranks)
        if not stopped:
            return None
        message = f"{listed(stopped)} stopped; resume from the last checkpoint with --resume"
        return PeerError(message + why, stopped, is_diagnosed=True)

    def leave(self) -> None:
        """Destroy the process group that `join` has made."""
        if self._owns_process_group:
            with suppress(RuntimeError):
                dist.destroy_process_group()
            self._owns_process_group = False

    # Collectives: errors name what a rank waited for

    def run_all(self, what: str, function: Callable[[], Result]) -> Result:
        """Call a function on all ranks; if it fails on one rank, it fails on all."""
        results: list[Result] = []
        self._together.run_all(what, lambda: results.append(function()))
        return results[0]

    def run_on_rank0(self, what: str, function: Callable[[], Result]) -> Result | None:
        """Call a function on rank 0 while the others wait; they return None."""
        return self.run_all(what, lambda: function() if self.is_first else None)

    def run_on_rank0_first(self, what: str, function: Callable[[], Result]) -> Result:
        """Call a function on rank 0, and then on the others."""
        result = self.run_on_rank0(what, function)
        return self.run_all(what, lambda: function() if result is None else result)

    def all_gather(self, what: str, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in their order."""
        found: list[Any] = self._together.run_all(what, lambda: value, lambda values: values)
        return found

    def check_same(self, what: str, value: object) -> None:
        """Refuse ranks that were started differently."""
        first, *others = self.all_gather(f"the {what}", value)
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise ConfigError(
                    f"rank 0 and rank {rank} do not have the same {what}; start all ranks with one "
                    "command"
                )

    def agree(self, step: int, request: str) -> str:
        """Return what any rank requested a step or two ago, so that all act after the same step.

        Every step has a reduction, or messages, that need all ranks. So a rank that has computed
        step ``n + 1`` knows that all have begun it, after they posted their requests of step ``n``.
        On a GPU the host runs ahead of that: it asks a step later, and waits until the one before
        is computed. One process gets its own request at once. The last of several requests counts,
        and a rank repeats a request that was not granted.
        """
        if self.size == 1:
            return request
        delay = 1
        if self.mesh is not None and self.mesh.device_type == "cuda":
            delay = 2
            self._steps.append(torch.cuda.current_stream().record_event())
            if len(self._steps) > 1:
                self._steps.popleft().synchronize()
        with self._waiting("the store of the ranks"):
            found = self._together.read(f"{self._runs} {step}")
            if found:
                self._posted = ""
            elif request and request != self._posted:
                self._together.post(f"{self._runs} {step + delay}", request)
                self._posted = request
            return found

    def all_reduce_(self, tensor: Tensor, what: str) -> Tensor:
        """Sum a tensor over the replicas, in place."""
        if self.data is not None:
            with self._waiting(what):
                dist.all_reduce(tensor, group=self.data)
        return tensor

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Turn an error of a backend into a `PeerError` that names the ranks at fault."""
        assert self.watchdog is not None
        self.watchdog.count_collective()
        started = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            raise self.watchdog.error(what, time.perf_counter() - started, error) from error


class Interrupt:
    """Makes Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 requests: the loop ends its step and saves.

    The first signal is recorded; the second one has the effect that it had before. Slurm signals
    every process, and the launcher passes its own on: within `_SAME_S` they are the same one.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._recorded = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _record(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._recorded = number, now
        elif number == signal.SIGINT or now - self._recorded > _SAME_S:
            self.__exit__()
            signal.raise_signal(number)


def rank_name(num_stages: int, size: int, rank: int) -> str:
    """Return a rank with its stage, as "rank 3 (stage 1 of 2)", if there are several."""
    stage = rank // max(size // num_stages, 1)
    return f"rank {rank}" + (f" (stage {stage} of {num_stages})" if num_stages > 1 else "")


def _end_process(settings: MeshConfig, size: int, lost: tuple[int, ...], silent_s: float) -> None:
    names = ", ".join(rank_name(settings.num_stages, size, rank) for rank in lost)
    sys.stderr.write(
        f"samo: rank {os.environ['RANK']}: no heartbeat from {names or 'the launcher'} for "
        f"{silent_s:.1f} s (--timeout-s {settings.timeout_s:g}); this rank exits. Resume with "
        "--resume\n"
    )
    sys.stderr.flush()
    os._exit(1)  # an exception would not reach a thread that waits inside of a backend
