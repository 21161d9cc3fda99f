"""`prune`: choose the weights to keep, by magnitude or at random, in each group of tensors."""

from collections.abc import Iterable, Mapping
from typing import get_args

from torch import Tensor, nn

from samo.errors import MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters
from samo.pruning.nm import keep_pattern
from samo.pruning.scope import Group, Scope, check_choice, decide
from samo.pruning.topk import Entries, Method, compare_dtype, keep_largest
from samo.utils.validation import check_model, whole_number

__all__ = ["prune"]


def prune(
    model: nn.Module,
    sparsity: float | None = None,
    *,
    method: Method = "magnitude",
    scope: Scope = "tensor",
    pattern: str | None = None,
    skip: Iterable[str] = (),
    rules: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Masks:
    """Choose which weights of a model to keep. The model itself is not changed.

    Counts are exact: of ``n`` weights ``round(n * sparsity)`` are pruned. Ties are broken by a hash
    of name, place and ``seed``, which favours no layer or row and is the same on every device.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> samo.prune(model, sparsity=0.9)
        Masks(2 tensors, 820 of 8,192 weights kept, sparsity 0.900)
        >>> masks = samo.prune(model, sparsity=0.9, scope="global", rules={"0.weight": 0.5})
        >>> masks["0.weight"].kept
        2048
        >>> samo.prune(model, pattern="2:4").sparsity
        0.5

    Args:
        model: The model; the weights that `samo.prunable` names are pruned.
        sparsity: Fraction to prune, at least 0 and less than 1. At 0 a tensor gets no mask. May be
            omitted with a ``pattern``, which implies it.
        method: ``"magnitude"`` keeps the largest weights, ``"random"`` any.
        scope: ``"tensor"`` prunes each tensor to ``sparsity``; ``"global"`` compares all of them,
            so that tensors with small weights lose more; ``"erk"`` prunes the model to ``sparsity``
            and each tensor to a density proportional to the sum of its sizes over their product
            (Erdos-Renyi-Kernel), at most 1, so that small tensors keep more.
        pattern: ``"n:m"``, such as ``"2:4"``: keep n of every m neighbours along a weight's inputs.
        skip: Shell-style patterns of weights to leave dense. Takes precedence over ``rules``.
        rules: Sparsities for weights that match a shell-style pattern, each tensor on its own,
            regardless of ``scope`` and ``pattern``; the last match wins. A pattern applies to the
            weights of `samo.prunable` that it matches or, if it matches none of them, as
            ``"lm_head.weight"``, to all that it matches.
        seed: Breaks ties, and draws the weights of ``method="random"``.
    """
    check_model(model)
    seed = whole_number("seed", seed)
    check_choice("method", method, get_args(Method))
    parameters = dense_parameters(model)
    masks: dict[str, Mask] = {}
    for group in decide(model, parameters, sparsity, scope, pattern, skip, rules):
        masks.update(_masks({name: parameters[name] for name in group.names}, group, method, seed))
    return Masks({name: masks[name] for name in parameters if name in masks})


def _masks(
    parameters: Mapping[str, Tensor], group: Group, method: Method, seed: int
) -> dict[str, Mask]:
    dtype = compare_dtype(parameter.dtype for parameter in parameters.values())
    entries = [Entries(n, p.detach(), method, dtype, seed) for n, p in parameters.items()]
    for tensor in entries:
        _check_values(tensor)
    if group.pattern is not None:
        words = [keep_pattern(tensor, group.pattern, group.input_dim) for tensor in entries]
    else:
        words = keep_largest(entries, group.kept)
    masks = {entry.name: Mask(entry.dense.shape, bits) for entry, bits in zip(entries, words)}
    for name, mask in masks.items():
        if mask.kept == 0:
            raise MaskError(
                f"sparsity {group.sparsity} would keep none of the weights of '{name}'; prune it "
                f"less with rules={{'{name}': 0.5}} or not with skip=['{name}']"
            )
    return masks


def _check_values(entries: Entries) -> None:
    name, dense = entries.name, entries.dense
    if dense.is_meta:
        raise ValueError(f"'{name}' is on device 'meta' and has no values to choose from")
    if not dense.is_floating_point():
        raise ValueError(
            f"'{name}' is {dense.dtype}, but only floating-point weights can be pruned; leave it "
            f"out with skip=['{name}']"
        )
    bad = entries.count_not_finite() if entries.method == "magnitude" else 0
    if bad:
        raise ValueError(
            f"{bad:,} of the {dense.numel():,} weights of '{name}' are NaN or infinite; repair the "
            f"checkpoint, use method='random' or leave it out with skip=['{name}']"
        )
