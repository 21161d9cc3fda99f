"""Passes that sleep as long as a seed says, and count themselves."""

import random
import time
from typing import Any, Final

import torch
from torch import Tensor, nn

FORWARD_MS: Final = 7.5
"""Mean time of a forward pass; a backward pass takes twice as long."""


class SleepyLayer(nn.Module):
    """Sleeps in both passes: the same times for every contender.

    Args:
        stage: Number of its stage.
        deviation: Standard deviation of the logarithm of a pass's time.
        micro_batches: Micro-batches of a step.
        scale: Factor of all times.
    """

    def __init__(self, stage: int, deviation: float, micro_batches: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.stage, self.deviation, self.scale = stage, deviation, scale
        self.micro_batches = micro_batches
        self.most_held = 0
        self.start(0)

    def start(self, step: int) -> None:
        """Begin a step: micro-batches are counted from 0 again."""
        self.step = step
        self.counts = {"forward": 0, "backward": 0}

    def sleep(self, what: str) -> None:
        """Sleep for the next micro-batch's pass."""
        # torch computes the first micro-batch of all once more, to find shapes.
        number = self.counts[what] % self.micro_batches
        self.counts[what] += 1
        self.most_held = max(self.most_held, self.counts["forward"] - self.counts["backward"])
        draw = random.Random(f"{self.step} {self.stage} {what} {number}")
        # Of mean 1, so that cases compare.
        factor = draw.lognormvariate(-(self.deviation**2) / 2, self.deviation)
        factor *= 2 if what == "backward" else 1
        time.sleep(FORWARD_MS * self.scale * factor / 1e3)

    def forward(self, x: Tensor) -> Tensor:
        self.sleep("forward")
        return _SleepyBackward.apply(x * self.weight, self)


class _SleepyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SleepyLayer) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.layer.sleep("backward")
        return grads[0], None
