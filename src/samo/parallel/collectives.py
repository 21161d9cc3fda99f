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

from samo.kernels.rounding import master_dtype
from samo.parallel.peers import Peers
from samo.parallel.traffic import Kind, TrafficMeter

__all__ = []


class Pending:
    """An operation under way."""

    def __init__(
        self, group: "Group", work: Any, what: str, finish: Callable[[], None] | None
    ) -> None:
        self._group, self._work, self._what, self._finish = group, work, what, finish
        self._begun_s = time.perf_counter()

    def wait(self) -> None:
        """Wait until the result is there.

        Raises:
            PeerError: A rank stopped, or did not come in time.
        """
        if self._work is not None:
            begun = time.perf_counter()
            try:
                self._work.wait()
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
        self._group: Final = dist.new_group(
            list(self.ranks),
            timeout=datetime.timedelta(seconds=timeout_s),
            backend=self.backend,
            use_local_synchronization=True,  # other groups of the mesh need not come along
        )
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
        self, own: Tensor, flat: Tensor, *, kind: Kind, what: str, pruned: int = 0
    ) -> Pending:
        """Sum ``flat`` over all ranks; each gets its own of equal parts, which may lie in ``flat``.

        gloo would sum all of it on every rank. There, ranks exchange their parts and add up what they
        got: half of the time, and 16-bit gradients are summed in fp32, in the order of ranks.
        """
        self.meter.count(kind, "reduce_scatter", flat.nbytes, pruned)
        if self.backend != "gloo" or self.size == 1:
            return self._start(
                what,
                lambda: _reduce_scatter(own, flat, group=self._group, async_op=True),
                alone=lambda: own.copy_(flat),
            )
        parts = torch.empty_like(flat)

        def add_up() -> None:
            total = torch.zeros(own.shape, dtype=master_dtype(own.dtype), device=own.device)
            for part in parts.view(self.size, -1):
                total += part
            own.copy_(total)

        return self._start(
            what,
            lambda: dist.all_to_all_single(parts, flat, group=self._group, async_op=True),
            finish=add_up,
        )

    def all_gather(
        self, out: Tensor, own: Tensor, *, kind: Kind, what: str, pruned: int = 0
    ) -> Pending:
        """Put the parts of all ranks together."""
        self.meter.count(kind, "all_gather", out.nbytes, pruned)
        return self._start(
            what,
            lambda: _all_gather(out, own, group=self._group, async_op=True),
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
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        device = torch.device("cuda" if self.backend == "nccl" else "cpu")
        sizes = self._gather_all(torch.tensor([own.numel()], device=device), what).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
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
            return Pending(self, None, what, finish)
        self.meter.begin(time.perf_counter())
        try:
            work = begin()
        except RuntimeError as error:  # a connection that is known to be closed
            raise self.peers.error(what, 0.0, error) from error
        meter = self.meter
        work.get_future().add_done_callback(lambda _: meter.end(time.perf_counter()))
        return Pending(self, work, what, finish)


def _named(*names: str) -> Callable[..., Any]:
    """Return the function of torch.distributed under the first of its names that this version has."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


_all_gather: Final = _named("all_gather_single", "all_gather_into_tensor")
_reduce_scatter: Final = _named("reduce_scatter_single", "reduce_scatter_tensor")
