"""Checkpoints of many ranks: which rank holds what, and how ranks act as one.

Every rank writes files with what it alone holds: the first replica of a stage its tensors, and of
DTensors each rank its rows. Only small JSON goes between ranks, through the store that the process
group met with:

    every rank       act, and post the result or why there is none
    the first one    wait for all, decide, and post the outcome
    every rank       return the outcome, or raise: what fails anywhere is raised everywhere

The store needs no backend: a rank that does not answer is known by the key it has not set, and no
connection between the others breaks when the first rank gives it up.
"""

import hashlib
import json
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

from samo.checkpoint.tensors import is_dtensor, rows_of
from samo.errors import CheckpointError, PeerError, first_words

if TYPE_CHECKING:
    from samo.pipeline.pipeline import Pipeline

__all__ = []


# Acting as one -----------------------------------------------------------------------------------

_calls: Final[Counter[str]] = Counter()
"""How many calls these ranks have made: each counts for itself, and all agree on keys in the store."""


class Ranks:
    """The ranks that save or load together; each makes a new one for each call.

    Args:
        ranks: Global ranks, the same on all of them; the first decides. By default one process.
        caller: The function that they all call.
        timeout_s: Seconds without progress on any rank after which those that are missing are given
            up.
    """

    def __init__(self, ranks: Sequence[int] = (), caller: str = "", timeout_s: float = 0.0) -> None:
        self.ranks: Final = tuple(ranks) or (0,)
        self.rank: Final = dist.get_rank() if ranks else 0
        self.place: Final = self.ranks.index(self.rank)
        if self.is_alone:
            return
        # The others wait longer: the first rank finds out which one is silent, and tells them.
        grace_s = min(timeout_s, 5.0)
        self._limit_s: Final = timeout_s if self.place == 0 else timeout_s + grace_s
        self._grace: Final = timedelta(seconds=grace_s)
        self._step = 0
        self._noted = 0.0
        meeting = f"{caller}/{hashlib.sha256(str(self.ranks).encode()).hexdigest()[:16]}"
        _calls[meeting] += 1
        store = _get_default_store()
        self._store: Final = dist.PrefixStore(  # type: ignore[attr-defined]
            f"{meeting}/{_calls[meeting]}",
            store.clone() if hasattr(store, "clone") else store,  # other threads wait on that one
        )

    @property
    def is_alone(self) -> bool:
        """Whether this is one process."""
        return len(self.ranks) == 1

    def run_all(
        self,
        what: str,
        act: Callable[[], Any],
        decide: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """Call ``act`` on all ranks and return its result, once all are done.

        Args:
            what: What ranks wait for, for errors.
            act: Called on each rank.
            decide: Called on the first rank with the results of all, in their order; returns what
                all ranks return instead. Both are JSON then.

        Raises:
            CheckpointError: Another rank failed. This rank's own error is raised as it is.
            PeerError: Another rank does not answer.
        """
        if self.is_alone:
            return act() if decide is None else decide([act()])
        self._step += 1
        error, value, answer = self._attempt(act, is_sent=decide is not None)
        with self._store_errors():
            if self.place == 0:
                decided, outcome = self._decide(what, answer, decide)
                error = error or decided
                self._post(outcome)
            else:
                self._store.set(self._key(f"answer {self.rank}"), json.dumps(answer))
                self._wait(what, {self._key("outcome"): self.ranks[0]})
                outcome = json.loads(self._store.get(self._key("outcome")))
                if self._store.add(self._key("readers"), 1) == outcome["readers"]:
                    self._store.set(self._key("read"), "")
        if error is not None:
            raise error
        if "failure" in outcome:
            raise _error(**outcome["failure"])
        return value if decide is None else outcome["value"]

    def note_progress(self) -> None:
        """Tell ranks that wait that this one is at work."""
        if not self.is_alone and time.monotonic() - self._noted > 0.1 * self._limit_s:
            self._noted = time.monotonic()
            self._store.add("progress", 1)

    def _key(self, name: str) -> str:
        return f"{self._step}/{name}"

    def _attempt(
        self, call: Callable[[], Any], *, is_sent: bool = True
    ) -> tuple[BaseException | None, Any, dict[str, Any]]:
        """Return the error of a call, its result, and either as JSON."""
        try:
            value = call()
            return None, value, {"value": value if is_sent else None}
        except BaseException as error:
            failure = {
                "rank": self.rank,
                "kind": type(error).__name__,
                "message": str(error) or traceback.format_exception_only(error)[-1].strip(),
                "lost": list(error.ranks) if isinstance(error, PeerError) else [],
            }
            return error, None, {"failure": failure}

    def _decide(
        self, what: str, own: dict[str, Any], decide: Callable[[list[Any]], Any] | None
    ) -> tuple[BaseException | None, dict[str, Any]]:
        error, answers, failure = self._attempt(lambda: [own, *self._gather(what)])
        if error is not None:
            return error, failure
        for answer in answers:
            if "failure" in answer:
                return None, answer
        if decide is None:
            return None, {"value": None}
        error, _, outcome = self._attempt(lambda: decide([answer["value"] for answer in answers]))
        return error, outcome

    def _gather(self, what: str) -> list[dict[str, Any]]:
        keys = {self._key(f"answer {rank}"): rank for rank in self.ranks[1:]}
        self._wait(what, keys)
        answers = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return answers

    def _post(self, outcome: dict[str, Any]) -> None:
        """Post the outcome, and wait for its readers: the store may end with this process."""
        lost = outcome.get("failure", {}).get("lost", ())
        outcome["readers"] = sum(rank not in lost for rank in self.ranks[1:])
        self._store.set(self._key("outcome"), json.dumps(outcome))
        if outcome["readers"]:
            with suppress(dist.DistStoreError):
                self._store.wait([self._key("read")], self._grace)
                for name in () if lost else ("outcome", "readers", "read"):
                    self._store.delete_key(self._key(name))

    def _wait(self, what: str, missing: dict[str, int]) -> None:
        """Wait until ranks have set their keys, for as long as any rank makes progress."""
        begun, progress = time.monotonic(), 0
        while missing:
            try:
                self._store.wait(list(missing), timedelta(seconds=min(1.0, self._limit_s)))
                return
            except dist.DistNetworkError:
                raise
            except dist.DistStoreError:  # that second is over
                missing = {
                    key: rank for key, rank in missing.items() if not self._store.check([key])
                }
            if (now := self._store.add("progress", 0)) != progress:
                begun, progress = time.monotonic(), now
            if missing and time.monotonic() - begun > self._limit_s:
                lost = tuple(missing.values())
                raise PeerError(
                    f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} did not answer for "
                    f"{self._limit_s:g} s while rank {self.rank} waited for {what}: killed, stopped, or "
                    "not in this call, which all ranks make. Look at the log of that rank, and start the "
                    "ranks again",
                    lost,
                )

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise PeerError(
                f"rank {self.rank} lost the store of its process group, which rank 0 holds or the "
                f"launcher: {first_words(error)}. Look at their logs, and start the ranks again",
                (0,),
            ) from error


def _error(rank: int, kind: str, message: str, lost: list[int]) -> Exception:
    """Return the error of another rank."""
    if kind == PeerError.__name__:
        return PeerError(message, tuple(lost))
    kind = "" if kind == CheckpointError.__name__ else f"{kind}: "
    return CheckpointError(f"rank {rank} failed: {kind}{message}")


# Which rank holds what ---------------------------------------------------------------------------


class Layout(NamedTuple):
    """A model, or this rank's stage of one, and its place among the ranks."""

    module: nn.Module
    ranks: Ranks
    first: int = 0
    """The first replica of this stage."""
    is_part: bool = False
    """Whether other ranks have other layers."""
    is_sharded: bool = False
    """Whether other ranks have other rows of its tensors."""
    aliases: Mapping[str, str] = MappingProxyType({})
    """Tied names, to the one that the checkpoint knows."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first replica of its stage."""
        return self.ranks.rank == self.first

    def writes(self, tensor: Tensor) -> bool:
        """Return whether this rank writes a tensor, or its rows of it."""
        rows = rows_of(tensor)
        return self.is_first if rows is None or self.ranks.is_alone else self.first in rows.ranks


def layout_of(
    model: "nn.Module | Pipeline", mesh: DeviceMesh | None, timeout_s: float, caller: str
) -> Layout:
    """Return how a model lies on ranks.

    Args:
        model: A model, also wrapped by DistributedDataParallel or sharded by FSDP2, or a pipeline.
        mesh: All ranks; by default those of the pipeline, of DistributedDataParallel or of
            DTensors.
        timeout_s: How long to wait for a rank.
        caller: For errors.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: The timeout is out of range.
        CheckpointError: The mesh lacks ranks that hold a part of the model.
    """
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be over 0, got {timeout_s}")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a DeviceMesh, got {type(mesh).__name__}; build one with samo.mesh()"
        )
    module: Any = model
    aliases: dict[str, str] = {}
    if not isinstance(model, nn.Module):
        from samo.pipeline.pipeline import Pipeline  # which one process does not need

        if isinstance(model, Pipeline):
            module = model.module
            mesh = model.mesh if mesh is None else mesh
            places = {name: place for place, name in enumerate(model.names)}
            for group in model.tied:
                first = min(group, key=lambda name: places[name])
                aliases |= {name: first for name in group if name != first}
    replicas: list[int] = []
    if isinstance(module, DistributedDataParallel):
        replicas = dist.get_process_group_ranks(module.process_group)
        module = module.module
    sharded = _mesh_of_shards(module)
    if sharded is not None:
        replicas = sharded.mesh.flatten().tolist()
    stages = [replicas] if mesh is None else _stages(mesh)
    ranks = [rank for stage in stages for rank in stage]
    if not set(replicas) <= set(ranks):
        raise CheckpointError(
            f"the model lies on ranks {replicas} and the mesh has ranks {ranks} alone; give {caller} all "
            "of them: mesh=samo.mesh(pipe, data)"
        )
    if len(ranks) <= 1:
        return Layout(module, Ranks(), aliases=aliases)
    here = dist.get_rank()
    if here not in ranks:
        raise CheckpointError(
            f"rank {here} is not in the mesh, which has ranks {ranks}; only its ranks call {caller}"
        )
    return Layout(
        module,
        Ranks(ranks, caller, timeout_s),
        next(stage[0] for stage in stages if here in stage),
        len(stages) > 1,
        sharded is not None,
        aliases,
    )


def _mesh_of_shards(module: Any) -> DeviceMesh | None:
    """Return the mesh of a model's DTensors, after FSDP2 has put them back in place of whole ones."""
    if not isinstance(module, nn.Module) or not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.fsdp import FSDPModule  # slow to load

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return next((param.device_mesh for param in module.parameters() if is_dtensor(param)), None)


def _stages(mesh: DeviceMesh) -> list[list[int]]:
    """Return the ranks of each stage, in the order of the mesh."""
    names = mesh.mesh_dim_names or ()
    ranks = mesh.mesh
    if "pipe" not in names:
        return [ranks.flatten().tolist()]
    place = names.index("pipe")
    stages: list[list[int]] = ranks.movedim(place, 0).reshape(ranks.shape[place], -1).tolist()
    return stages
