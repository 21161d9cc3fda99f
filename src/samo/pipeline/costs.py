"""What each layer costs: by its weights, or measured. Both feed `partition`."""

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from samo.pipeline.filling import build_stage
from samo.pipeline.layers import Layers

__all__ = ["measured_costs", "parameter_costs"]


def parameter_costs(layers: Layers) -> list[float]:
    """Return a model of each layer's time: the weights that are multiplied with, and 1 % of the rest.

    Example:
        >>> import torch
        >>> from samo.pipeline.costs import parameter_costs
        >>> from samo.pipeline.layers import take_apart
        >>> parameter_costs(take_apart(torch.nn.Sequential(torch.nn.Linear(10, 5, bias=False))))
        [50.0]
    """
    costs = []
    for unit in layers.units:
        cost = 0.0
        for module in unit.modules.values():
            for part in module.modules():
                is_looked_up = isinstance(part, nn.Embedding)
                for param in part.parameters(recurse=False):
                    is_factor = param.dim() >= 2 and not is_looked_up
                    cost += param.numel() * (1.0 if is_factor else 0.01)
        costs.append(cost)
    return costs


def measured_costs(
    layers: Layers, *inputs: Tensor, device: torch.device | str = "cpu", repeats: int = 5
) -> list[float]:
    """Return the seconds of each layer's forward and backward pass, the median of some.

    Layers on the meta device, and functions that make one, are built one at a time.

    Example:
        >>> import torch
        >>> from samo.pipeline.costs import measured_costs
        >>> from samo.pipeline.layers import take_apart
        >>> layers = take_apart([lambda: torch.nn.Linear(8, 8), lambda: torch.nn.Linear(8, 512)])
        >>> costs = measured_costs(layers, torch.randn(16, 8))
        >>> len(costs), min(costs) > 0
        (2, True)

    Args:
        layers: The whole model.
        inputs: A micro-batch.
        device: Where to measure.
        repeats: Passes of each layer.
    """
    where = torch.device(device)
    values: tuple[Tensor, ...] = tuple(tensor.to(where) for tensor in inputs)
    costs = []
    for place in range(len(layers.units)):
        stage = build_stage(layers, [(place, place + 1)], device=where)
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            output = _both_passes(stage, values)
            if where.type == "cuda":
                torch.cuda.synchronize(where)
            times.append(time.perf_counter() - start)
        stage.zero_grad()
        costs.append(statistics.median(times[1:]))  # the first one warms up
        values = tuple(tensor.detach() for tensor in output)
    return costs


def _both_passes(stage: nn.Module, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    entered = [v.detach().requires_grad_(v.is_floating_point()) for v in values]
    output: Any = stage(*(tensor * 1 for tensor in entered))  # not a leaf: it may work in place
    outputs = output if isinstance(output, tuple) else (output,)
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(tensor) for tensor in roots])
    return outputs
