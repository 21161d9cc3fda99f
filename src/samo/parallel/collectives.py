"""The collective operations in use, under one name in all versions of torch, counted and guarded.

A group of its own for each `samo.replicate`: what a user sends over the mesh meanwhile cannot get in
between, and its timeout is ours. Each operation counts its bytes, times itself, and turns a failure into
a `PeerError` that says what was waited for.
"""

import datetime
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from samo.errors import PeerError
from samo.kernels.rounding import master_dtype
from samo.parallel.peers import Peers
from samo.parallel.traffic import Kind, TrafficMeter

__all__ = []

_FEW_RANKS: Final = 4
"""So many were tried: with more, a ring is better than a tree from each."""

_PIECE: Final = 2**16
"""Entries that are added up at a time: their fp32 sums stay in a core's cache."""


class Pending:
    """An operation under way."""

    def __init__(
        self, group: "Group", works: list[Any], what: str, finish: Callable[[], None] | None
    ) -> None:
        self._group, self._works, self._what, self._finish = group, works, what, finish
        self._begun_s = time.perf_counter()

    def wait(self) -> None:
        """Wait until the result is there.

        Raises:
            PeerError: A rank stopped, or did not come in time.
        """
        begun = time.perf_counter()
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            waited = time.perf_counter() - self._begun_s
            raise self._group.peers.error(self._what, waited, error) from error
        self._group.meter.exposed_s += time.perf_counter() - begun
        if self._finish is not None:
            self._finish()


class Group:
    """The ranks of one axis of a mesh, and what they do together.

    Args:
        mesh_group: The process group of the axis.
        timeout_s: Seconds after which an operation gives up.
        heartbeat_s: Seconds between two signs of life.
    """

    def __init__(
        self, mesh_group: dist.ProcessGroup, *, timeout_s: float, heartbeat_s: float
    ) -> None:
        self.ranks: Final = tuple(dist.get_process_group_ranks(mesh_group))
        self.rank: Final = dist.get_rank(mesh_group)
        self.size: Final = len(self.ranks)
        self.backend: Final = dist.get_backend(mesh_group)
        self.meter: Final = TrafficMeter(self.size)
        try:
            self._group: Final = dist.new_group(
                list(self.ranks),
                timeout=datetime.timedelta(seconds=timeout_s),
                backend=self.backend,
                use_local_synchronization=True,  # other groups of the mesh need not come along
            )
        except RuntimeError as error:
            others = tuple(rank for rank in self.ranks if rank != dist.get_rank())
            raise PeerError(
                f"not all of ranks {list(others)} came to make a group within {timeout_s:g} s "
                f"({str(error).splitlines()[0]}); do all ranks of the axis run the same program?",
                ranks=others,
            ) from error
        name = getattr(self._group, "group_name", "group")
        self.peers: Final = Peers(
            distributed_c10d._get_default_store(),
            f"samo/{name}",
            dist.get_rank(),
            self.ranks,
            heartbeat_s,
        )

    def all_reduce(
        self, tensor: Tensor, *, kind: Kind, what: str, op: Any = dist.ReduceOp.SUM, pruned: int = 0
    ) -> Pending:
        """Sum a tensor over all ranks, in place."""
        self.meter.count(kind, "all_reduce", tensor.nbytes, pruned)
        return self._start(
            what, lambda: dist.all_reduce(tensor, op=op, group=self._group, async_op=True)
        )

    def reduce_scatter(
        self,
        own: Tensor,
        flat: Tensor,
        *,
        kind: Kind,
        what: str,
        divisor: int = 1,
        pruned: int = 0,
    ) -> Pending:
        """Sum ``flat`` over all ranks; each gets its own of equal parts, which may lie in ``flat``.

        gloo would sum all of it on every rank. There, ranks exchange their parts and add up what they
        got: half of the time, and 16-bit gradients are summed in fp32, in the order of ranks, divided
        and then rounded.
        """
        self.meter.count(kind, "reduce_scatter", flat.nbytes, pruned)
        if self.backend != "gloo" or self.size == 1:
            return self._start(
                what,
                lambda: _reduce_scatter(own, flat, group=self._group, async_op=True),
                finish=lambda: _divide(own, divisor),
                alone=lambda: own.copy_(flat),
            )
        parts = torch.empty_like(flat)
        return self._start(
            what,
            lambda: dist.all_to_all_single(parts, flat, group=self._group, async_op=True),
            finish=lambda: _add_up(parts.view(self.size, -1), own, divisor),
        )

    def all_gather(
        self, out: Tensor, own: Tensor, *, kind: Kind, what: str, pruned: int = 0
    ) -> Pending:
        """Put the parts of all ranks together.

        On a few ranks of gloo by a broadcast from each, which takes two thirds of the time.
        """
        self.meter.count(kind, "all_gather", out.nbytes, pruned)

        def broadcast_all() -> list[Any]:
            rows = out.view(self.size, -1)
            rows[self.rank].copy_(own)
            return [
                dist.broadcast(row, rank, group=self._group, async_op=True)
                for row, rank in zip(rows, self.ranks)
            ]

        is_small = self.backend == "gloo" and self.size <= _FEW_RANKS
        return self._start(
            what,
            broadcast_all
            if is_small
            else lambda: _all_gather(out, own, group=self._group, async_op=True),
            alone=lambda: out.copy_(own),
        )

    def broadcast(self, tensor: Tensor, *, what: str) -> None:
        """Overwrite a contiguous tensor by that of the group's first rank."""
        self.meter.count("start", "broadcast", tensor.nbytes)
        flat = tensor.detach().reshape(-1).view(torch.uint8)  # gloo knows no 16-bit integers
        if flat.numel():
            self._start(
                what,
                lambda: dist.broadcast(flat, self.ranks[0], group=self._group, async_op=True),
            ).wait()

    def exchange(self, text: str, *, what: str) -> list[str]:
        """Return the texts of all ranks, in their order."""
        own = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
        own = own[: len(text.encode())]  # torch makes no tensor from nothing
        device = torch.device("cuda" if self.backend == "nccl" else "cpu")
        sizes = self._gather_all(torch.tensor([own.numel()], device=device), what).tolist()
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device=device)
        padded[: own.numel()] = own
        all_texts = self._gather_all(padded, what).view(self.size, -1).cpu()
        return [bytes(row[:n].tolist()).decode() for row, n in zip(all_texts, sizes)]

    def _gather_all(self, own: Tensor, what: str) -> Tensor:
        out = torch.empty(self.size * own.numel(), dtype=own.dtype, device=own.device)
        self.all_gather(out, own, kind="start", what=what).wait()
        return out

    def _start(
        self,
        what: str,
        begin: Callable[[], Any],
        *,
        finish: Callable[[], None] | None = None,
        alone: Callable[[], object] | None = None,
    ) -> Pending:
        self.peers.operations.add()
        if self.size == 1:
            if alone is not None:
                alone()
            return Pending(self, [], what, finish)
        begun = time.perf_counter()
        try:
            started = begin()
        except RuntimeError as error:  # a connection that is known to be closed
            raise self.peers.error(what, 0.0, error) from error
        works = started if isinstance(started, list) else [started]
        meter = self.meter
        for work in works:
            meter.begin(begun)
            work.get_future().add_done_callback(lambda _: meter.end(time.perf_counter()))
        return Pending(self, works, what, finish)


def _divide(tensor: Tensor, divisor: int) -> None:
    if divisor != 1:
        tensor.div_(divisor)


def _add_up(parts_RZ: Tensor, out_Z: Tensor, divisor: int) -> None:  # noqa: N803
    """Write the sum of all rows, divided; added in the order of rows and in fp32 or wider."""
    if len(parts_RZ) == 2 and divisor in (1, 2):  # added in fp32, rounded once, halved exactly
        torch.add(*parts_RZ, out=out_Z)
        _divide(out_Z, divisor)
        return
    for columns, out in zip(parts_RZ.split(_PIECE, dim=1), out_Z.split(_PIECE)):
        total = columns[0].to(master_dtype(out.dtype), copy=True)
        for row in columns[1:]:
            total += row
        _divide(total, divisor)
        out.copy_(total)


def _named(*names: str) -> Callable[..., Any]:
    """Return the function of torch.distributed under the first of its names that this version has."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


_all_gather: Final = _named("all_gather_single", "all_gather_into_tensor")
_reduce_scatter: Final = _named("reduce_scatter_single", "reduce_scatter_tensor")
