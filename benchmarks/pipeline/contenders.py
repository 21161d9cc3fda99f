"""Pipelines over the same layers, one layer a rank."""

import io
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import samo
from benchmarks.pipeline.passes import SleepyLayer

__all__ = ["BASELINE", "Contender", "DeepSpeed", "Samo", "build"]

BASELINE: Final = "torch Schedule1F1B"
SAME: Final[dict[str, dict[str, Any]]] = {
    BASELINE: {"schedule": "1f1b"},
    "message-driven, limits 4 4 4 4": {"in_flight": 4},
    "message-driven, limits 4 3 2 1": {"in_flight": [4, 3, 2, 1]},
}
"""Settings of samo.Pipeline at the limits of 1F1B: on the first stage, and on every stage."""
ONE_MORE: Final[dict[str, dict[str, Any]]] = {
    "torch Schedule1F1B, one more": {"schedule": "1f1b"},
    "message-driven, limits 5 5 5 5": {"in_flight": 5},
    "message-driven, limits 5 4 3 2": {"in_flight": [5, 4, 3, 2]},
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
    """samo.Pipeline, in its own order or in torch's."""

    def __init__(
        self, name: str, layers: Sequence[SleepyLayer], mesh: DeviceMesh, micro_batches: int
    ) -> None:
        self.name = name
        self.pipeline = samo.Pipeline(
            list(layers), LOSS, mesh, micro_batches, timeout_s=120, **(SAME | ONE_MORE)[name]
        )
        self.module = self.pipeline.module
        if name == "torch Schedule1F1B, one more":
            schedule: Any = self.pipeline._runner._schedule  # type: ignore[union-attr]
            schedule._num_stages += (
                1  # of which it only computes how many forward passes come first
            )

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return self.pipeline.step(x, target=y)

    def close(self) -> None:
        self.pipeline.close()


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
    found: list[Contender] = [Samo(name, layers(), mesh, micro_batches) for name in names]
    if has_deepspeed:
        found.insert(1, DeepSpeed(layers(), micro_batches))
    return found
