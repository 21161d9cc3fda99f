"""The ranks of a run: who this one is, and what all of them do together.

A run on one process has a `Ranks` too, which does nothing but what it is given. What ranks must agree
on goes over a group of its own, on the host: texts, errors, signals. Sums of losses go over the axis
`data`, as gradients do.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from samo.distributed import mesh as meshes
from samo.distributed.peers import Peers
from samo.distributed.watchdog import Watch, place_in_code
from samo.errors import ConfigError, PeerError, SamoError, first_words
from samo.train.config_mesh import MeshConfig, place
from samo.train.launches import end_with_launcher

__all__ = []

Result = TypeVar("Result")

HEARTBEAT_S: Final = 0.5
"""Three of them tell a rank that is gone from one that lives: 1.5 s until it is named."""


class Ranks:
    """The grid of ranks as one of them sees it; without a mesh, one process alone.

    Args:
        mesh: The grid, with axes ``pipe`` and ``data``.
        timeout_s: Seconds after which a rank that waits for another gives up.
    """

    def __init__(self, mesh: DeviceMesh | None = None, *, timeout_s: float = 600.0) -> None:
        self.mesh: Final = mesh
        self.timeout_s: Final = timeout_s
        self.rank = self.stage = self.replica = 0
        self.size = self.num_stages = self.num_replicas = 1
        self.data: dist.ProcessGroup | None = (
            None  # the replicas of this stage, if there are several
        )
        self._host: dist.ProcessGroup | None = None
        self._peers: Peers | None = None
        self._has_joined = False
        self._watch: Watch | None = None
        if mesh is None:
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.num_stages, self.num_replicas = mesh.size(0), mesh.size(1)
        self.stage, self.replica = divmod(self.rank, self.num_replicas)
        timeout = timedelta(seconds=timeout_s)
        # On the host whatever the device: nobody waits for a GPU to learn of a signal.
        self._host = dist.new_group(backend="gloo", timeout=timeout)
        key = f"samo/{self._host.group_name}"
        self._peers = Peers(_get_default_store(), key, self.rank, range(self.size), HEARTBEAT_S)
        if self.num_replicas > 1:  # those of a mesh wait for half an hour
            axis = mesh["data"].get_group()
            self.data = dist.new_group(
                dist.get_process_group_ranks(axis),
                timeout=timeout,
                backend=dist.get_backend(axis),
                use_local_synchronization=True,
            )

    @classmethod
    def join(cls, settings: MeshConfig, device: str) -> "Ranks":
        """Meet the other ranks that torchrun or samo launch has started; alone without them.

        Raises:
            ConfigError: The sizes of the grid do not make up the number of ranks.
            PeerError: The others did not come.
        """
        is_here = dist.is_available() and dist.is_initialized()
        num_ranks = dist.get_world_size() if is_here else int(os.environ.get("WORLD_SIZE", "1"))
        data = None if isinstance(settings.data, str) else settings.data
        try:
            meshes.check_sizes({"pipe": settings.pipe, "data": data}, num_ranks)
        except ValueError as error:
            more = "; start ranks with samo launch -n or torchrun" if num_ranks == 1 else ""
            raise ConfigError(f"{error}{more}") from None
        if num_ranks == 1:
            return cls(timeout_s=settings.timeout_s)
        kind: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
        timeout, watch = timedelta(seconds=settings.timeout_s), None
        try:
            if not is_here:
                end_with_launcher()
                store = meshes.launcher_store(timeout)
                if store is not None:  # others hold none before the ranks have met
                    watch = _watch(store, settings, num_ranks)
                meshes.join(kind, timeout, store)
                watch = watch or _watch(_get_default_store(), settings, num_ranks)
            grid = meshes.mesh(settings.pipe, data, device=kind, timeout_s=settings.timeout_s)
            ranks = cls(grid, timeout_s=settings.timeout_s)
        except (RuntimeError, OSError) as error:
            found = None if watch is None else watch.peers.stopped()
            if watch is not None:
                watch.close()
            if isinstance(error, SamoError):
                raise
            said = first_words(error)
            if found is None:
                how = f"{said}; start them all, on machines that reach each other"
                raise PeerError(f"the {num_ranks} ranks did not meet: {how}") from error
            who = ", ".join(place(settings, num_ranks, rank) for rank in found[0])
            raise PeerError(
                f"the {num_ranks} ranks did not meet within {settings.timeout_s:g} s: {who} did not come, or "
                f"stopped. Look at the log of that rank, and start again. The backend said: {said}",
                found[0],
                stage=found[0][0] // (num_ranks // settings.pipe),
            ) from error
        ranks._watch = watch
        ranks._has_joined = not is_here
        return ranks

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and speaks for all."""
        return self.rank == 0

    @property
    def part(self) -> tuple[int, int]:
        """Which part of every batch is this rank's, and of how many."""
        return self.replica, self.num_replicas

    def cause(self, error: Exception) -> SamoError | None:
        """Return what is to be said of an error that ended a run; None if it is nobody else's fault."""
        if isinstance(error, SamoError):
            return error
        is_memory = "memory" in str(error)
        return self.blame(error) if isinstance(error, RuntimeError) and not is_memory else None

    def blame(self, error: RuntimeError) -> PeerError | None:
        """Return who is behind an error of a backend, which names nobody; None if all ranks are alive."""
        found = None if self._peers is None else self._peers.stopped()
        if found is None:
            return None
        said = first_words(error)
        return PeerError(
            f"{found[1]}. Start again from the last checkpoint. The backend said: {said}", found[0]
        )

    def placed(self, error: PeerError) -> PeerError:
        """Return the error with the rank that fell and its stage, where it does not name them.

        A stage blames the neighbour that sends nothing, which may itself be waiting for one that stopped.
        And a rank that gives up is gone from then on: whoever misses it must not blame it for that.
        """
        blamed = self._blamed()
        if blamed is not None and error.ranks != (blamed,):
            error = PeerError(f"rank {blamed} fell, and because of it: {error}", (blamed,))
        elif " stopped (" not in str(error) and self._peers is not None:
            found = self._peers.stopped()
            if found is not None and found[0] != error.ranks:
                error = PeerError(f"{found[1]}, and because of it: {error}", found[0])
        if self.num_stages == 1 or error.stage is not None or not error.ranks:
            return error
        stages = {rank: rank // self.num_replicas for rank in error.ranks}
        where = ", ".join(f"rank {rank} is stage {stage}" for rank, stage in stages.items())
        return PeerError(
            f"{error} ({where} of {self.num_stages})",
            error.ranks,
            stage=next(iter(stages.values())),
        )

    def _blamed(self) -> int | None:
        """Return the rank that another has blamed, if that is neither this one nor unknown."""
        if self._watch is None:
            return None
        with suppress(RuntimeError):
            blamed = self._watch.blamed()
            return None if blamed == self.rank else blamed
        return None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let a run end where another rank is gone, and name that rank with its stage.

        The watch goes on since the ranks met. It ends here: whoever leaves, however that is, is not missed.
        """
        try:
            yield
        except PeerError as error:
            placed = self.placed(error)
            if self._watch is not None and len(placed.ranks) == 1:
                with suppress(RuntimeError):
                    self._watch.blame(placed.ranks[0])
            raise placed from error.__cause__
        finally:
            if self._watch is not None:
                self._watch.close()
                self._watch = None

    def leave(self) -> None:
        """Part from the others, all having come this far."""
        if self._has_joined:
            with suppress(RuntimeError):
                dist.destroy_process_group()
            self._has_joined = False

    # What all ranks do together ------------------------------------------------------------------

    def together(self, what: str, do: Callable[[], Result]) -> Result:
        """Do something that may fail on one rank; then it has failed on all.

        Raises:
            SamoError: What this rank's own work raised.
            PeerError: It went well here, and not on another rank, which is named.
        """
        failure: SamoError | None = None
        result: Result | None = None
        try:
            result = do()
        except SamoError as error:
            failure = error
        said = self.texts(what, "" if failure is None else f"!{failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(said):
            if text:
                raise PeerError(f"rank {rank} stopped: {text[1:]}", (rank,))
        return result  # type: ignore[return-value]

    def first(self, what: str, do: Callable[[], Result]) -> Result | None:
        """Do something on the first rank, for which the others wait; they return None.

        Raises:
            SamoError: It failed on the first rank.
            PeerError: This is another rank.
        """
        return self.together(what, lambda: do() if self.is_first else None)

    def first_then_others(self, what: str, do: Callable[[], Result]) -> Result:
        """Do something on the first rank, and on the others once it is done."""
        result = self.first(what, do)
        if self.size == 1:
            assert result is not None
            return result
        return self.together(what, lambda: do() if result is None else result)

    def texts(self, what: str, text: str) -> list[str]:
        """Return the texts of all ranks, in their order."""
        texts = [text] * self.size
        if self._host is not None:
            with self._waiting(what):
                dist.all_gather_object(texts, text, group=self._host)
        return texts

    def check_same(self, what: str, values: object) -> None:
        """Refuse ranks that were started differently.

        Raises:
            ConfigError: They have different values.
        """
        texts = self.texts(what, json.dumps(values, sort_keys=True, default=str))
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise ConfigError(
                    f"rank {rank} and rank 0 do not have the same {what}; start all ranks with one command"
                )

    def common_signal(self, number: int | None) -> int | None:
        """Return the signal that any rank got: all end after the same step."""
        if self._host is None:
            return number
        highest = torch.tensor(number or 0)
        with self._waiting("whether the run goes on"):
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._host)
        return int(highest) or None

    def add_up(self, tensor: Tensor, what: str) -> Tensor:
        """Sum a tensor over the replicas, in place."""
        if self.data is not None:
            with self._waiting(what):
                dist.all_reduce(tensor, group=self.data)
        return tensor

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Turn a failure of a backend into a `PeerError` that names who did not come, and for what."""
        assert self._peers is not None
        self._peers.operations.add()
        begun = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            raise self._peers.error(what, time.perf_counter() - begun, error) from error


def _watch(store: Any, settings: MeshConfig, num_ranks: int) -> Watch:
    """Look after the other ranks, and end this process where nothing else does."""

    def give_up(rank: int | None, silent_s: float) -> None:
        who = "the launcher's store" if rank is None else place(settings, num_ranks, rank)
        sys.stderr.write(
            f"samo: rank {own}: {who} has given no sign of life for {silent_s:.1f} s, and --timeout-s is "
            f"{settings.timeout_s:g}; this rank ends, which was waiting: {place_in_code()}. Go on with "
            "--resume\n"
        )
        sys.stderr.flush()
        os._exit(1)  # an exception would not reach a thread that waits inside of a backend

    own = int(os.environ["RANK"])
    return Watch(
        store,
        own,
        num_ranks,
        timeout_s=settings.timeout_s,
        interval_s=HEARTBEAT_S,
        give_up=give_up,
    )
