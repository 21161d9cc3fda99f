"""Ways to train one pruned model on several ranks; each counts what it sends."""

import time
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from samo.bench.contenders import held_bytes
from samo.models import GPT
from samo.parallel.traffic import TrafficMeter

LR = 3e-4


class Contender(ABC):
    """A way to train the pruned model on all ranks."""

    name: str
    model: nn.Module
    optimizer: Any

    def step(self, tokens: Tensor, *, is_synced: bool = True) -> float:
        """Run forward, backward and update; return the seconds of backward."""
        context = nullcontext() if is_synced else self.no_sync()
        with context:
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
            begun = time.perf_counter()
            loss.backward()
            taken = time.perf_counter() - begun
        if is_synced:
            self.update()
        self.clear()
        return taken

    def update(self) -> None:
        self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()

    @abstractmethod
    def no_sync(self) -> Any:
        """Return a context in which nothing is sent."""

    @abstractmethod
    def traffic(self) -> samo.Traffic:
        """Return what was sent so far."""

    @abstractmethod
    def communicate(self) -> None:
        """Send what one step sends, and do nothing else."""

    @abstractmethod
    def state_bytes(self) -> dict[str, int]:
        """Return the bytes held between steps, measured and, where there is one, predicted."""


class DDP(Contender):
    """DistributedDataParallel on dense bfloat16 weights, multiplied by their masks after each step."""

    def __init__(self, model: GPT, masks: samo.Masks, group: Any, *, is_overlapped: bool) -> None:
        self.name = "DDP" + ("" if is_overlapped else ", one bucket")
        masks.apply_(model)
        pruned = masks.parameters_of(model)
        self.pruned = [pruned[name].data for name in masks]
        self.masks = [mask.to_bool().to(torch.bfloat16) for mask in masks.values()]
        self._pruned_fraction = sum(p.numel() for p in self.pruned) / sum(
            p.numel() for p in model.parameters()
        )
        self.inner = model
        self.model = nn.parallel.DistributedDataParallel(
            model,
            process_group=group,
            bucket_cap_mb=None if is_overlapped else 1e6,  # None: its own choice
            gradient_as_bucket_view=True,
        )
        self.group = group
        self.meter = TrafficMeter(dist.get_world_size(group))
        self.sizes: list[int] = []
        self.model.register_comm_hook(None, self._reduce)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def _reduce(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """What DDP does by itself, counted: an all-reduce of the dense bucket, then the mean."""
        flat = bucket.buffer()
        if bucket.index() == 0:
            self.sizes = []
        self.sizes.append(flat.numel())
        self.meter.count(
            "gradients", "all_reduce", flat.nbytes, int(flat.nbytes * self._pruned_fraction)
        )
        self.meter.begin(time.perf_counter())
        future = dist.all_reduce(flat, group=self.group, async_op=True).get_future()

        def finish(done: Any) -> Tensor:
            self.meter.end(time.perf_counter())
            return flat.div_(dist.get_world_size(self.group))

        return future.then(finish)

    def update(self) -> None:
        self.optimizer.step()
        torch._foreach_mul_(self.pruned, self.masks)

    def no_sync(self) -> Any:
        return self.model.no_sync()

    def traffic(self) -> samo.Traffic:
        return self.meter.read()

    def communicate(self) -> None:
        flats = [torch.zeros(size, dtype=torch.bfloat16) for size in self.sizes]
        works = [dist.all_reduce(flat, group=self.group, async_op=True) for flat in flats]
        for work in works:
            work.wait()

    def state_bytes(self) -> dict[str, int]:
        held = held_bytes([self.inner], [self.optimizer], self.masks)
        return {"measured": held, "predicted": 0}


class Samo(Contender):
    """samo.replicate, in either mode."""

    def __init__(
        self,
        model: GPT,
        masks: samo.Masks,
        data: Any,
        *,
        shard: Literal["state"] | None,
        bucket_mb: float,
        is_overlapped: bool,
    ) -> None:
        self.name = f"samo, shard={shard}" + ("" if is_overlapped else ", overlap off")
        self.model = samo.compress_(model, masks)
        self.replicas = samo.replicate(
            model, data, shard=shard, bucket_bytes=bucket_mb * 1e6, overlap=is_overlapped
        )
        self.optimizer = samo.AdamW(samo.parameters(model), lr=LR)

    def clear(self) -> None:
        self.model.zero_grad()

    def no_sync(self) -> Any:
        return samo.no_sync(self.model)

    def traffic(self) -> samo.Traffic:
        return samo.traffic(self.model)

    def communicate(self) -> None:
        buckets = self.replicas.team.buckets
        for bucket in buckets:
            bucket.launch()
        for bucket in buckets:
            bucket.wait()
            bucket.forget()
        under_way = [bucket.publish() for bucket in buckets if bucket.is_sharded]
        for publication in under_way:
            publication.wait()

    def state_bytes(self) -> dict[str, int]:
        account = samo.ledger(self.model, self.optimizer)
        return {
            "measured": account.measured_bytes + account.other_bytes,
            "predicted": account.predicted_bytes,
        }
