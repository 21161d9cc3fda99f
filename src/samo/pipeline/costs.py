"""What each layer costs, by its weights: what `partition` cuts by."""

from torch import nn

from samo.pipeline.layers import Layers

__all__ = ["parameter_costs"]


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
