"""The ranks of a run: which one this is, and what all of them do together.

A run on one process has `Ranks` too, whose collectives are no-ops. Strings, errors and signals go
over a gloo group of all ranks, on any device; sums of losses go over the axis `data`, as gradients
do.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from samo.distributed import mesh as meshes
from samo.distributed.watchdog import Watchdog, listed
from samo.errors import ConfigError, PeerError, SamoError, first_words
from samo.train.config import MeshConfig
from samo.train.launch_env import end_with_launcher, num_ranks

__all__ = []

Result = TypeVar("Result")


class Ranks:
    """The mesh as one rank sees it; without a mesh, a single process.

    Args:
        mesh: The mesh, with axes ``pipe`` and ``data``.
        timeout_s: Seconds that a rank waits for another one.
        watchdog: The watchdog of this process, if it has one already.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        *,
        timeout_s: float = 600.0,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.mesh: Final = mesh
        self.timeout_s: Final = timeout_s
        self.rank = self.stage = self.replica = 0
        self.size = self.num_stages = self.num_replicas = 1
        self.data: dist.ProcessGroup | None = None  # the replicas of this stage, if several
        self.watchdog = watchdog
        self._host: dist.ProcessGroup | None = None
        self._owns_process_group = watchdog is not None
        if mesh is None:
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.num_stages, self.num_replicas = mesh.size(0), mesh.size(1)
        self.stage, self.replica = divmod(self.rank, self.num_replicas)
        timeout = timedelta(seconds=timeout_s)
        # On the host, so that no rank waits for a GPU to hear of a signal.
        self._host = dist.new_group(backend="gloo", timeout=timeout)
        if watchdog is None:
            key = f"samo/{self._host.group_name}"
            store = _get_default_store()
            self.watchdog = Watchdog(store, self.rank, self.size, timeout_s=timeout_s, key=key)
        if self.num_replicas > 1:  # the groups of a mesh have a timeout of half an hour
            axis = mesh["data"].get_group()
            self.data = dist.new_group(
                dist.get_process_group_ranks(axis),
                timeout=timeout,
                backend=dist.get_backend(axis),
                use_local_synchronization=True,
            )

    @classmethod
    def join(cls, settings: MeshConfig, device: str) -> "Ranks":
        """Join the ranks that torchrun or samo launch has started; without them, a single process."""
        is_initialized = dist.is_available() and dist.is_initialized()
        size = dist.get_world_size() if is_initialized else num_ranks()
        data = None if isinstance(settings.data, str) else settings.data
        try:
            meshes.check_sizes({"pipe": settings.pipe, "data": data}, size)
        except ValueError as error:
            hint = "; start ranks with samo launch -n or torchrun" if size == 1 else ""
            raise ConfigError(f"{error}{hint}") from None
        if size == 1:
            return cls(timeout_s=settings.timeout_s)
        kind: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
        watchdog: Watchdog | None = None
        try:
            if not is_initialized:
                end_with_launcher()
                store = meshes.rendezvous(timedelta(seconds=settings.timeout_s))
                watchdog = Watchdog(
                    store,
                    int(os.environ["RANK"]),
                    size,
                    timeout_s=settings.timeout_s,
                    on_lost=partial(_end_process, settings, size),
                )
                meshes.join(kind, timedelta(seconds=settings.timeout_s), store)
            mesh = meshes.mesh(settings.pipe, data, device=kind, timeout_s=settings.timeout_s)
            return cls(mesh, timeout_s=settings.timeout_s, watchdog=watchdog)
        except (RuntimeError, OSError) as error:
            missing: tuple[int, ...] = ()
            if watchdog is not None:
                missing = watchdog.stopped()
                watchdog.close()
            if isinstance(error, SamoError):
                raise
            said = first_words(error)
            if not missing:
                raise PeerError(
                    f"the {size} ranks did not meet: {said}; start them all, on machines that reach each "
                    "other"
                ) from error
            names = ", ".join(rank_name(settings, size, rank) for rank in missing)
            raise PeerError(
                f"the {size} ranks did not meet within {settings.timeout_s:g} s: {names} did not join, or "
                f"stopped. Look at the log of that rank, and start again. The backend said: {said}",
                missing,
                stage=missing[0] // (size // settings.pipe),
                is_diagnosed=True,
            ) from error

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def part(self) -> tuple[int, int]:
        """Index of this rank's part of every batch, and the number of parts."""
        return self.replica, self.num_replicas

    def cause(self, error: Exception) -> SamoError | None:
        """Return the error to report for one that ended a run; None if it is this rank's own failure.

        An error of a backend becomes a `PeerError` if another rank has stopped.
        """
        if isinstance(error, SamoError):
            return error
        if self.watchdog is None or is_out_of_memory(error):
            return None
        stopped = self.watchdog.stopped()
        if not stopped:
            return None
        return PeerError(
            f"{listed(stopped)} stopped. Start again from the last checkpoint. The backend said: "
            f"{first_words(error)}",
            stopped,
            is_diagnosed=True,
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Attribute a failure to its root cause, and stop watching at the end."""
        try:
            yield
        except PeerError as error:
            attributed = self._attribute(error)
            if self.watchdog is not None and attributed.ranks:
                self.watchdog.record_root_cause(attributed.ranks)
            raise attributed from error.__cause__
        finally:
            if self.watchdog is not None:
                self.watchdog.close()

    def _attribute(self, error: PeerError) -> PeerError:
        """Return the error with its root cause, rank and stage.

        A stage reports the neighbour that sends nothing, which may itself wait for another rank;
        and a rank that gave up has stopped for those who wait for it.
        """
        if self.watchdog is not None:
            cause = self.watchdog.root_cause()
            if not cause and not error.is_diagnosed:
                cause = self.watchdog.stopped()
            if cause and self.rank not in cause and cause != error.ranks:
                message = f"{listed(cause)} failed, and because of it: {error}"
                error = PeerError(message, cause, is_diagnosed=True)
        if self.num_stages == 1 or error.stage is not None or not error.ranks:
            return error
        stages = {rank: rank // self.num_replicas for rank in error.ranks}
        where = ", ".join(f"rank {rank} is stage {stage}" for rank, stage in stages.items())
        return PeerError(
            f"{error} ({where} of {self.num_stages})",
            error.ranks,
            stage=stages[error.ranks[0]],
            is_diagnosed=error.is_diagnosed,
        )

    def leave(self) -> None:
        """Destroy the process group that `join` has made; all ranks have come this far."""
        if self._owns_process_group:
            with suppress(RuntimeError):
                dist.destroy_process_group()
            self._owns_process_group = False

    # Collectives ----------------------------------------------------------------------------------

    def run_all(self, what: str, function: Callable[[], Result]) -> Result:
        """Call a function on all ranks; if it fails on one rank, it fails on all."""
        failure: SamoError | None = None
        result: Result | None = None
        try:
            result = function()
        except SamoError as error:
            failure = error
        messages = self.all_gather_str(what, "" if failure is None else f"!{failure}")
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message:
                raise PeerError(f"rank {rank} stopped: {message[1:]}", (rank,), is_diagnosed=True)
        return result  # type: ignore[return-value]

    def run_on_rank0(self, what: str, function: Callable[[], Result]) -> Result | None:
        """Call a function on rank 0 while the others wait; they return None."""
        return self.run_all(what, lambda: function() if self.is_first else None)

    def run_on_rank0_first(self, what: str, function: Callable[[], Result]) -> Result:
        """Call a function on rank 0, and then on the others."""
        result = self.run_on_rank0(what, function)
        return self.run_all(what, lambda: function() if result is None else result)

    def all_gather_str(self, what: str, text: str) -> list[str]:
        """Return the strings of all ranks, in their order."""
        texts = [text] * self.size
        if self._host is not None:
            with self._waiting(what):
                dist.all_gather_object(texts, text, group=self._host)
        return texts

    def check_same(self, what: str, values: object) -> None:
        """Refuse ranks that were started differently."""
        texts = self.all_gather_str(what, json.dumps(values, sort_keys=True, default=str))
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise ConfigError(
                    f"rank {rank} and rank 0 do not have the same {what}; start all ranks with one command"
                )

    def any_signal(self, number: int | None) -> int | None:
        """Return the signal that any rank has received, so that all stop after the same step."""
        if self._host is None:
            return number
        highest = torch.tensor(number or 0)
        with self._waiting("the signals of all ranks"):
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._host)
        return int(highest) or None

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


def rank_name(mesh: MeshConfig, size: int, rank: int) -> str:
    """Return a rank with its pipeline stage, if there are several.

    Example:
        >>> from samo.train.config import MeshConfig
        >>> from samo.train.ranks import rank_name
        >>> rank_name(MeshConfig(pipe=2), 4, 3)
        'rank 3 (stage 1 of 2)'
    """
    stage = rank // max(size // mesh.pipe, 1)
    return f"rank {rank}" + (f" (stage {stage} of {mesh.pipe})" if mesh.pipe > 1 else "")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, of a GPU or of the host.

    Example:
        >>> from samo.train.ranks import is_out_of_memory
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes do not match"))
        (True, False)
    """
    # torch's CPU allocator raises a plain RuntimeError; only its name tells it from others.
    is_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return is_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _end_process(settings: MeshConfig, size: int, lost: tuple[int, ...], silent_s: float) -> None:
    names = ", ".join(rank_name(settings, size, rank) for rank in lost)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = [call for call in traceback.extract_stack(frame) if "samo" in call.filename]
    where = " > ".join(f"{Path(call.filename).stem}.{call.name}" for call in calls[-3:])
    sys.stderr.write(
        f"samo: rank {os.environ['RANK']}: {names or 'the store of the launcher'} has given no sign of life "
        f"for {silent_s:.1f} s, and --timeout-s is {settings.timeout_s:g}; this rank ends, which was waiting "
        f"in {where or 'another library'}. Resume with --resume\n"
    )
    sys.stderr.flush()
    os._exit(1)  # an exception would not reach a thread that waits inside of a backend
