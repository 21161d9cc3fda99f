"""What each rank of a grid will hold, from shapes alone: before a rank is started, or a weight exists."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from samo.arguments import whole_number
from samo.candidates import prunable
from samo.compression import batch_norms_of, types_of
from samo.masks import Masks
from samo.memory.predict import Kind, TensorSpec, total
from samo.parallel.layout import Tensor1D, plan_buckets
from samo.pipeline.layers import LayersLike, take_apart
from samo.pipeline.setup import cuts_of
from samo.pipeline.stage import Stage

__all__ = ["predict_ranks"]


def predict_ranks(
    model: LayersLike,
    sparsity: float | Masks,
    *,
    pipe: int = 1,
    data: int = 1,
    shard: Literal["state"] | None = None,
    bucket_bytes: float = 5e6,
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    state: Literal["exact", "lean"] = "exact",
    moments: int = 2,
    cuts: Sequence[tuple[int, int]] | None = None,
    stages_per_rank: int = 1,
    tied: Sequence[tuple[str, ...]] = (),
) -> list[dict[Kind, int]]:
    """Return the bytes of model state on a rank of each stage, by kind, as `samo.ledger` will measure them.

    The model may be on the meta device, or a list of functions that make layers: nothing is allocated.
    All replicas of a stage hold the same. With sharded state this is the account of the first one; others
    own the same number of entries of each bucket, the last one less its padding. Activations are not in it.

    Example:
        >>> import torch
        >>> from samo.memory.ranks import predict_ranks
        >>> from samo.models import GPT, GPTConfig
        >>> with torch.device("meta"):
        ...     model = GPT(GPTConfig(num_layers=24, width=2048, num_heads=16))
        >>> for held in predict_ranks(model, 0.9, pipe=4, data=2, shard="state", dtype=torch.bfloat16):
        ...     print(f"{sum(held.values()) / 1e9:.2f} GB")
        0.90 GB
        0.89 GB
        0.89 GB
        0.89 GB

    Args:
        model: What `samo.Pipeline` takes; for one stage any module.
        sparsity: That of `samo.prune`, tensor by tensor; or masks, by the names of the whole model.
        pipe: Stages, as many as ranks along `pipe`.
        data: Replicas of each.
        shard: As for `samo.replicate`, and ``bucket_bytes`` too.
        bucket_bytes: Size of a bucket, which decides who owns what of sharded state.
        dtype: As for `samo.compress_`, and ``grad_dtype`` too.
        grad_dtype: Type of the compressed gradients.
        state: As for `samo.AdamW`.
        moments: Vectors that the optimizer keeps: 2 for AdamW, 1 for SGD with momentum.
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
        specs = _specs(stage, kept, dtype, grad_dtype, is_lean=state == "lean")
        if shard == "state" and data > 1:
            specs = _of_first_replica(specs, data, bucket_bytes)
        held.append(total(specs, moments=moments, replicas=data, shard=shard))
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
    dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
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
        own = None if id(param) in norms else dtype
        chosen, gradient = types_of(param.dtype, own, grad_dtype)
        specs.append(
            TensorSpec(
                numel=param.numel(),
                kept=count,
                dtype=str(chosen).removeprefix("torch."),
                grad_dtype=str(gradient).removeprefix("torch."),
                is_trained=param.requires_grad,
                is_lean=is_lean and chosen != torch.float64,
            )
        )
    return specs


def _of_first_replica(specs: list[TensorSpec], data: int, bucket_bytes: float) -> list[TensorSpec]:
    """Return the parameters with the part of their state that the first replica owns."""
    trained = {str(place): spec for place, spec in enumerate(specs) if spec.is_trained}
    vectors = []
    for name, spec in trained.items():
        size = spec.numel if spec.kept is None else spec.kept
        item_bytes = getattr(torch, spec.grad_dtype).itemsize
        vectors.append(Tensor1D(name, size, item_bytes, (spec.dtype, spec.grad_dtype)))
    owned = {}
    for plan in plan_buckets(vectors, bucket_bytes=bucket_bytes, num_ranks=data):
        for index, name in enumerate(plan.names):
            start, stop = plan.owned(index, 0)
            owned[name] = stop - start
    return [replace(spec, owned=owned.get(str(place))) for place, spec in enumerate(specs)]
