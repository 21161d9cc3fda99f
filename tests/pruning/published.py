"""Wanda and SparseGPT on whole models, in plain loops written from the published formulas."""

from typing import Any

import torch
from torch import Tensor, nn

import samo


def blocks_of(model: nn.Module) -> list[nn.Module]:
    base = getattr(model, "transformer", None) or getattr(model, "model", model)
    return list(getattr(base, "h", None) or getattr(base, "layers", None) or base.blocks)


def inputs_of(model: nn.Module, layer: nn.Module, data: list[Any]) -> list[Tensor]:
    """Return what a layer is given when the whole model runs, as rows, for each batch."""
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in data:
            model(batch)
    hook.remove()
    return seen


def kept_in(total: int, part: int, parts: int) -> int:
    return total * (part + 1) // parts - total * part // parts


def wanda_keep(weight: Tensor, rows: list[Tensor], sparsity: float, pattern: Any) -> Tensor:
    """Keep the largest |w_ij| * ||x_j|| of each output."""
    squares = sum((x.square().sum(0) for x in rows), torch.zeros(()))
    scores = weight.abs() * squares.sqrt()
    keep = torch.zeros_like(weight, dtype=torch.bool)
    total = weight.numel() - round(weight.numel() * sparsity)
    for row in range(len(weight)):
        if pattern is None:
            best = scores[row].argsort(descending=True)[: kept_in(total, row, len(weight))]
            keep[row, best] = True
            continue
        kept, group = pattern
        for start in range(0, weight.shape[1], group):
            order = scores[row, start : start + group].argsort(descending=True)
            keep[row, start + order[:kept]] = True
    return keep


def sparsegpt_keep_(
    weight: Tensor, rows: list[Tensor], sparsity: float, pattern: Any, width: int
) -> Tensor:
    """Prune ``weight`` column by column, changing all columns to the right at once."""
    columns = weight.shape[1]
    hessian = sum((x.t() @ x for x in rows), torch.zeros(()))
    hessian = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(columns)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian)).t()
    keep = torch.zeros_like(weight, dtype=torch.bool)
    total = weight.numel() - round(weight.numel() * sparsity)
    for column in range(columns):
        if pattern is None and column % width == 0:
            end = min(column + width, columns)
            costs = weight[:, column:end] ** 2 / upper.diagonal()[column:end] ** 2
            count = total * end // columns - total * column // columns
            cut = costs.flatten().sort(descending=True).values[count - 1]
            keep[:, column:end] = costs >= cut
        elif pattern is not None and column % pattern[1] == 0:
            end = column + pattern[1]
            costs = weight[:, column:end] ** 2 / upper.diagonal()[column:end] ** 2
            best = costs.argsort(dim=1, descending=True)[:, : pattern[0]]
            keep[:, column:end] = torch.zeros_like(costs, dtype=torch.bool).scatter(1, best, True)
        error = (weight[:, column] * ~keep[:, column]) / upper[column, column]
        weight[:, column + 1 :] -= error[:, None] * upper[column, column + 1 :]
        weight[:, column] *= keep[:, column]
    return keep


def reference(
    model: nn.Module, data: list[Any], method: str, sparsity: float, pattern: Any, width: int
) -> dict[str, Tensor]:
    """Prune a model in place, block by block, and return what is kept."""
    names = {id(module): name for name, module in model.named_modules()}
    wanted = samo.prunable(model)
    kept: dict[str, Tensor] = {}
    model.eval()
    for block in blocks_of(model):
        layers = [m for m in block.modules() if f"{names[id(m)]}.weight" in wanted]
        rows = [inputs_of(model, layer, data) for layer in layers]
        for layer, x in zip(layers, rows):
            is_conv1d = type(layer).__name__ == "Conv1D"
            weight = layer.weight.detach()
            matrix = weight.t().clone() if is_conv1d else weight.clone()
            if method == "wanda":
                keep = wanda_keep(matrix, x, sparsity, pattern)
                matrix *= keep
            else:
                keep = sparsegpt_keep_(matrix, x, sparsity, pattern, width)
            weight.copy_(matrix.t() if is_conv1d else matrix)
            kept[f"{names[id(layer)]}.weight"] = keep.t() if is_conv1d else keep
    return kept
