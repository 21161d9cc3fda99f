"""Pipelines over the same layers, one layer a rank."""

import io
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import samo
from benchmarks.pipeline.passes import SleepyLayer

BASELINE: Final = "torch Schedule1F1B"
SAME: Final[dict[str, Any]] = {
    BASELINE: 0,
    "message-driven, limits 4 4 4 4": 4,
    "message-driven, limits 4 3 2 1": [4, 3, 2, 1],
}
"""At the limits of 1F1B: its own, and those of samo.Pipeline for the first or every stage."""
ONE_MORE: Final[dict[str, Any]] = {
    "torch Schedule1F1B, one more": 1,
    "message-driven, limits 5 5 5 5": 5,
    "message-driven, limits 5 4 3 2": [5, 4, 3, 2],
}
"""The same with one micro-batch more."""
LOSS: Final = nn.functional.mse_loss


class Contender(ABC):
    """A pipeline, as it is timed."""

    name: str
    module: nn.Module

    @property
    def layer(self) -> SleepyLayer:
        """The one layer of this rank."""
        (layer,) = (m for m in self.module.modules() if isinstance(m, SleepyLayer))
        return layer

    @abstractmethod
    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute forward and backward of a batch and return its loss."""

    def close(self) -> None:  # noqa: B027
        """End what runs in the background, if anything does."""


class Samo(Contender):
    """samo.Pipeline."""

    def __init__(
        self, name: str, layers: Sequence[SleepyLayer], mesh: DeviceMesh, micro_batches: int
    ) -> None:
        self.name = name
        self.pipeline = samo.Pipeline(
            list(layers),
            LOSS,
            mesh,
            micro_batches,
            in_flight=(SAME | ONE_MORE)[name],
            timeout_s=120,
        )
        self.module = self.pipeline.module

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return self.pipeline.step(x, target=y)

    def close(self) -> None:
        self.pipeline.close()


class Torch(Contender):
    """torch's Schedule1F1B; it takes no limit, so its warm-up is changed from outside."""

    def __init__(
        self, name: str, layers: Sequence[SleepyLayer], mesh: DeviceMesh, micro_batches: int
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.name, group = name, mesh.get_group()
        self.rank, self.num_ranks = mesh.get_local_rank(), mesh.size()
        self.module = layers[self.rank]
        device = torch.device("cpu")
        stage = PipelineStage(self.module, self.rank, self.num_ranks, device, group=group)
        self.schedule = Schedule1F1B(stage, n_microbatches=micro_batches, loss_fn=LOSS)
        # Of which it only computes how many forward passes come first.
        self.schedule._num_stages += (SAME | ONE_MORE)[name]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        inputs, is_last = (x,) if self.rank == 0 else (), self.rank == self.num_ranks - 1
        losses: list[Tensor] = []
        self.schedule.step(*inputs, target=y if is_last else None, losses=losses)
        loss = torch.stack(losses).mean() if is_last else torch.zeros(())
        dist.broadcast(loss, self.num_ranks - 1)  # samo's ranks all get it too
        return loss


class DeepSpeed(Contender):
    """DeepSpeed's pipeline engine: ``train_batch``, with an optimizer that changes nothing."""

    def __init__(self, layers: Sequence[SleepyLayer], micro_batches: int) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):  # it prints its settings
            warnings.simplefilter("ignore")
            import deepspeed
            from deepspeed.pipe import PipelineModule

            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
            self.module = PipelineModule(
                list(layers),
                num_stages=len(layers),
                loss_fn=LOSS,
                partition_method="uniform",
                activation_checkpoint_interval=0,
            )
            # It takes a step by itself; without it weights and losses would differ from the
            # others'.
            optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
            self.engine, *_ = deepspeed.initialize(
                model=self.module,
                optimizer=optimizer,
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_steps": micro_batches,
                    "steps_per_print": None,
                },
            )
        self.name = f"DeepSpeed {deepspeed.__version__} PipelineEngine"

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return self.engine.train_batch(zip(x.split(1), y.split(1)))

    def close(self) -> None:
        self.engine.destroy()


def build(
    layers: Callable[[], Sequence[SleepyLayer]],
    mesh: DeviceMesh,
    micro_batches: int,
    *,
    is_one_more: bool,
    has_deepspeed: bool,
) -> list[Contender]:
    """Return the contenders, each with layers of its own.

    Args:
        layers: Returns new layers.
        mesh: The ranks.
        micro_batches: Micro-batches of a step.
        is_one_more: Whether those with one more in flight take part.
        has_deepspeed: Whether DeepSpeed takes part.
    """
    names = [*SAME, *(ONE_MORE if is_one_more else {})]
    found: list[Contender] = []
    for name in names:
        kind = Torch if name.startswith(BASELINE) else Samo
        found.append(kind(name, layers(), mesh, micro_batches))
    if has_deepspeed:
        found.insert(1, DeepSpeed(layers(), micro_batches))
    return found
