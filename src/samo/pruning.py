"""Choose the weights to keep: by magnitude or at random, tensor by tensor or over the model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, get_args

import torch
from torch import nn

from samo.candidates import matching, prunable
from samo.errors import MaskError
from samo.masks import Mask, Masks
from samo.selection import Entries, Method, keep_largest

__all__ = ["prune"]

Scope = Literal["tensor", "global"]

_HALF_DTYPES: Final = {torch.float16, torch.bfloat16}


def prune(
    model: nn.Module,
    sparsity: float,
    *,
    method: Method = "magnitude",
    scope: Scope = "tensor",
    skip: Iterable[str] = (),
    rules: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Masks:
    """Choose which weights of a model to keep. The model itself is not changed.

    Counts are exact: of ``n`` weights ``round(n * sparsity)`` are pruned. Weights of equal magnitude
    are told apart by a hash of name, place and ``seed``, so that no layer or row is favoured, and the
    masks are the same on any device.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)
        ... )
        >>> samo.prune(model, sparsity=0.9)
        Masks(2 tensors, 820 of 8,192 weights kept, sparsity 0.900)
        >>> masks = samo.prune(model, sparsity=0.9, scope="global", rules={"0.weight": 0.5})
        >>> masks["0.weight"].kept
        2048

    Args:
        model: The model; the weights that `samo.prunable` names are pruned.
        sparsity: Fraction to prune, at least 0 and less than 1. At 0 a tensor gets no mask.
        method: ``"magnitude"`` keeps the weights furthest from 0 (float64 is compared after rounding
            to float32), ``"random"`` keeps any.
        scope: ``"tensor"`` prunes each tensor to ``sparsity``; ``"global"`` compares all of them, so
            that tensors with small weights lose more.
        skip: Shell-style patterns of weights to leave alone, whatever ``rules`` say.
        rules: Sparsities for the weights that match a pattern, each tensor on its own; the last match
            counts. A pattern sets those of `samo.prunable` that it matches; if there are none, as
            with ``"lm_head.weight"``, it adds what it matches.
        seed: Chooses between equals, and the weights of ``method="random"``.

    Returns:
        A mask for each pruned tensor, on the tensor's device, in the order of the model.

    Raises:
        ValueError: A setting is out of range, a pattern matches nothing, there is nothing to prune,
            or a weight is not a finite floating-point number.
        MaskError: Nothing of a tensor would be kept.
    """
    _check_choice("method", method, get_args(Method))
    _check_choice("scope", scope, get_args(Scope))
    _check_sparsity("sparsity", sparsity)
    for pattern, value in (rules or {}).items():
        _check_sparsity(f"rules['{pattern}']", value)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    skip = [skip] if isinstance(skip, str) else list(skip)
    wanted = _choose(model, parameters, skip, rules or {})

    groups = [([name], sparsity if value is None else value) for name, value in wanted.items()]
    if scope == "global":
        ruled = [([name], value) for name, value in wanted.items() if value is not None]
        groups = [([name for name, value in wanted.items() if value is None], sparsity), *ruled]

    masks: dict[str, Mask] = {}
    for names, value in groups:
        if names and value > 0:
            group = _entries({name: parameters[name] for name in names}, method, seed)
            masks.update(_masks(group, value))
    return Masks({name: masks[name] for name in wanted if name in masks})


def _choose(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    skip: list[str],
    rules: Mapping[str, float],
) -> dict[str, float | None]:
    """Return the weights to prune, in the order of the model; with the sparsity, if a rule sets it."""
    candidates = prunable(model)
    # A tied weight has several names: a pattern may match any of them, one of them gets the mask.
    names: dict[int, str] = {}
    for name in [*candidates, *parameters]:
        names.setdefault(id(parameters[name]), name)

    def match(patterns: Iterable[str], argument: str) -> set[str]:
        return {names[id(parameters[name])] for name in matching(patterns, parameters, argument)}

    skipped = match(skip, "skip")
    default = set(candidates) - skipped
    wanted: dict[str, float | None] = dict.fromkeys(default)
    for pattern, value in rules.items():
        hits = match([pattern], "rules") - skipped
        if not hits:
            raise ValueError(
                f"rules pattern '{pattern}' matches only parameters that skip={skip!r} leaves "
                "alone; drop the rule or narrow the skip"
            )
        # 'layers.0.*' means the matrices of layer 0, not its norms and biases as well.
        wanted.update(dict.fromkeys(hits & default or hits, value))
    if not wanted:
        raise ValueError(
            f"none of the {len(parameters):,} parameters of the model is to be pruned (skip={skip!r}); "
            "samo.prunable(model) lists the default, rules={'name': sparsity} adds to it"
        )
    return {name: wanted[name] for name in parameters if name in wanted}


def _entries(
    parameters: Mapping[str, nn.Parameter], method: Method, seed: int
) -> Sequence[Entries]:
    """Check the tensors that are compared with one another, and say how."""
    dtypes = {parameter.dtype for parameter in parameters.values()}
    # 16 bits of one kind are counted in one pass; all else meets in float32, which holds both kinds.
    compared_as = dtypes.pop() if len(dtypes) == 1 and dtypes <= _HALF_DTYPES else torch.float32
    group = []
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(
                f"'{name}' has no values (device 'meta') to choose from; to predict bytes without them "
                "use samo.prunable(model) and samo.memory.predict"
            )
        if not parameter.is_floating_point():
            raise ValueError(
                f"'{name}' is {parameter.dtype} on device '{parameter.device}', but only "
                f"floating-point weights with values can be pruned; leave it out with skip=['{name}']"
            )
        entries = Entries(name, parameter.detach(), method, compared_as, seed)
        bad = entries.count_not_finite() if method == "magnitude" else 0
        if bad:
            raise ValueError(
                f"{bad:,} of the {parameter.numel():,} weights of '{name}' are NaN or infinite (as "
                f"{compared_as}) and have no magnitude to compare; repair the checkpoint, use "
                f"method='random' or leave it out with skip=['{name}']"
            )
        group.append(entries)
    return group


def _masks(group: Sequence[Entries], sparsity: float) -> dict[str, Mask]:
    numel = sum(entries.dense.numel() for entries in group)
    kept = numel - round(numel * sparsity)
    masks: dict[str, Mask] = {}
    if kept:
        for entries, words in zip(group, keep_largest(group, kept)):
            masks[entries.name] = Mask(entries.dense.shape, words)
    empty = [entries.name for entries in group if not kept or masks[entries.name].kept == 0]
    if empty:
        raise MaskError(
            f"sparsity {sparsity} would keep none of the weights of '{empty[0]}' and could not train it "
            f"({len(empty)} of {len(group)} tensors; {kept:,} of {numel:,} weights kept in all); "
            f"prune it less with rules={{'{empty[0]}': 0.5}} or not with skip=['{empty[0]}']"
        )
    return masks


def _check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{argument}={value!r} is unknown; it is one of {', '.join(choices)}")


def _check_sparsity(argument: str, value: float) -> None:
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"{argument} is {value!r}, but sparsity is the fraction pruned: at least 0 and less than 1, "
            "for example 0.9 for 90 %"
        )
