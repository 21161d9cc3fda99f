"""`param_groups`: weight decay and learning rates, by the dense shapes and densities of weights."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from samo.core.modules import named_weights
from samo.mask.prunable import matching


def param_groups(
    model: nn.Module,
    *,
    lr: float | Tensor | None = None,
    weight_decay: float = 0.0,
    density_power: float = 0.0,
    no_decay: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Return plain parameter groups: matrices with weight decay, norms and biases without.

    ``p.dim() >= 2`` would take the 1-D values of pruned weights for biases; this looks at the dense
    shape.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.LayerNorm(10))
        >>> model = samo.compress_(model, samo.prune(model, sparsity=0.9))
        >>> groups = samo.param_groups(model, lr=1e-3, weight_decay=0.1)
        >>> [(group["weight_decay"], len(group["params"])) for group in groups]
        [(0.1, 1), (0.0, 3)]
        >>> opt = torch.optim.AdamW(groups)

    Args:
        model: A model, compressed or not.
        lr: Learning rate; by default the optimizer's own.
        weight_decay: Decay of the parameters with two dimensions or more.
        density_power: Multiply the learning rate of a pruned weight by its density to this power,
            from -3 to 3, and leave its decay as it is. With -1, a weight at 90 % sparsity learns 10
            times as fast, which helps models that are pruned early.
        no_decay: Shell-style patterns of further names without decay, such as ``"wte.*"``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"param_groups takes the model, got {type(model).__name__}; pass model, without "
            ".parameters()"
        )
    if not isinstance(density_power, int | float) or not -3 <= density_power <= 3:
        raise ValueError(f"density_power must be a number from -3 to 3, got {density_power!r}")
    if density_power and lr is None:
        raise ValueError(
            f"density_power={density_power} scales a learning rate; pass lr= here as well"
        )
    parameters = dict(model.named_parameters())
    exempt = matching(no_decay, parameters, "no_decay")
    # By name: FSDP2 replaces the values by another parameter.
    weights = dict(named_weights(model, remove_duplicate=False))
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, param in parameters.items():
        weight = weights.get(name)
        mask = None if weight is None else weight.mask
        scale = 1.0 if mask is None or not mask.kept else (mask.kept / mask.numel) ** density_power
        decays = len(param.shape if weight is None else weight.shape) >= 2 and name not in exempt
        group: dict[str, Any] = {
            "params": [],
            "weight_decay": weight_decay / scale if decays else 0.0,
        }
        if lr is not None:
            group["lr"] = lr * scale if scale != 1.0 else lr
        groups.setdefault((scale, decays), group)["params"].append(param)
    return list(groups.values())
