"""What each rank of a grid will hold, from shapes alone: before a rank is started, or a weight exists."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from samo.arguments import whole_number
from samo.candidates import prunable
from samo.core.compress import batch_norms_of, types_of
from samo.memory.predict import Kind, TensorSpec, total
from samo.model_masks import Masks
from samo.pipeline.layers import LayersLike, take_apart
from samo.pipeline.setup import cuts_of
from samo.pipeline.stage import Stage

__all__ = ["predict_ranks"]


def predict_ranks(
    model: LayersLike,
    sparsity: float | Masks,
    *,
    pipe: int = 1,
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    value_dtype: torch.dtype | None = None,
    state: Literal["exact", "lean"] = "exact",
    moments: int = 2,
    has_buckets: bool = False,
    cuts: Sequence[tuple[int, int]] | None = None,
    stages_per_rank: int = 1,
    tied: Sequence[tuple[str, ...]] = (),
) -> list[dict[Kind, int]]:
    """Return the bytes of model state on a rank of each stage, by kind, as `samo.ledger` will measure them.

    The model may be on the meta device, or a list of functions that make layers: nothing is allocated.
    All replicas of a stage hold the same. Activations are not in it.

    Example:
        >>> import torch
        >>> from samo.memory.ranks import predict_ranks
        >>> from samo.models import GPT, GPTConfig
        >>> with torch.device("meta"):
        ...     model = GPT(GPTConfig(num_layers=24, width=2048, num_heads=16))
        >>> for held in predict_ranks(model, 0.9, pipe=4, dtype=torch.bfloat16):
        ...     print(f"{sum(held.values()) / 1e9:.2f} GB")
        1.15 GB
        1.13 GB
        1.13 GB
        1.14 GB

    Args:
        model: What `samo.Pipeline` takes; for one stage any module.
        sparsity: That of `samo.prune`, tensor by tensor; or masks, by the names of the whole model.
        pipe: Stages, as many as ranks along `pipe`.
        dtype: As for `samo.compress_`, and ``grad_dtype`` and ``value_dtype`` too.
        grad_dtype: Type of the gradients.
        value_dtype: Type of the values.
        state: As for `samo.AdamW`.
        moments: Vectors that the optimizer keeps: 2 for AdamW, 1 for SGD with momentum.
        has_buckets: Whether replicas are those of DistributedDataParallel, whose buckets are one more
            copy of all gradients, without ``gradient_as_bucket_view=True``.
        cuts: As for `samo.Pipeline`, and ``stages_per_rank`` and ``tied`` too.
        stages_per_rank: Pieces of the model on each rank, with the schedule "interleaved".
        tied: Groups of parameter names that are one weight, where the model does not show it.

    Raises:
        TypeError: The model is none that can be cut.
        ValueError: A setting is out of range.
    """
    pipe = whole_number("pipe", pipe, least=1)
    pieces = pipe * whole_number("stages_per_rank", stages_per_rank, least=1)
    if not isinstance(sparsity, Masks) and not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be at least 0 and less than 1, got {sparsity}")
    if state not in ("exact", "lean"):
        raise ValueError(f"state must be 'exact' or 'lean', got {state!r}")
    if pieces == 1 and isinstance(model, nn.Module):
        stages: list[nn.Module] = [model]
        groups = tuple(tied)
    else:
        row = take_apart(model, tied)
        found = cuts_of(cuts, row, pieces)
        groups = row.tied
        stages = []
        for rank in range(pipe):
            units = [u for start, stop in found[rank::pipe] for u in row.units[start:stop]]
            stages.append(Stage(units, {p: m for unit in units for p, m in unit.modules.items()}))
    held = []
    for stage in stages:
        kept = _kept(stage, sparsity, groups)
        types = (dtype, grad_dtype, value_dtype)
        specs = _specs(stage, kept, types, moments, is_lean=state == "lean")
        held.append(total(specs, has_buckets=has_buckets))
    return held


def _kept(
    stage: nn.Module, sparsity: float | Masks, groups: Sequence[tuple[str, ...]]
) -> dict[str, int | None]:
    """Return how many entries each parameter keeps, None for all of them; tied ones under one name."""
    params = dict(stage.named_parameters(remove_duplicate=False))
    pruned = {id(params[name]) for name in prunable(stage)}
    kept: dict[str, int | None] = {}
    seen: set[str] = set()
    for name, param in stage.named_parameters():
        names = next((group for group in groups if name in group), (name,))
        if name in seen:
            continue
        seen.update(names)
        if isinstance(sparsity, Masks):
            kept[name] = next((sparsity[n].kept for n in (name, *names) if n in sparsity), None)
            continue
        is_pruned = all(id(params[other]) in pruned for other in names if other in params)
        count = param.numel() - round(param.numel() * sparsity)
        kept[name] = count if is_pruned and sparsity else None
    return kept


def _specs(
    stage: nn.Module,
    kept: dict[str, int | None],
    types: tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None],
    moments: int,
    *,
    is_lean: bool,
) -> list[TensorSpec]:
    norms = batch_norms_of(stage)
    params = dict(stage.named_parameters())
    specs = []
    for name, count in kept.items():
        param = params[name]
        if not param.is_floating_point():
            continue
        asked = None if id(param) in norms else types[0]
        dtype, value_dtype, grad_dtype = (
            str(chosen).removeprefix("torch.")
            for chosen in types_of(param.dtype, asked, *types[1:])
        )
        specs.append(
            TensorSpec(
                numel=param.numel(),
                kept=count,
                dtype=dtype,
                value_dtype=value_dtype,
                grad_dtype=grad_dtype,
                is_trained=param.requires_grad,
                is_lean=is_lean,
                moments=moments,
            )
        )
    return specs
