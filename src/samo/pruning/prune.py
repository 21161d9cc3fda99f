"""Choose the weights to keep: by magnitude or at random, tensor by tensor or over the model.

First it is decided which tensors are compared with one another and how many weights such a group
keeps (`decide`); then each group is looked at on its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn

from samo.errors import MaskError
from samo.mask.layouts import Layout, dense_parameters, layouts
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import is_empty, matching, prunable
from samo.pruning.densities import Pattern, erk_counts, parse_pattern, pattern_sparsity
from samo.pruning.nm import keep_pattern
from samo.pruning.topk import Entries, Method, keep_largest
from samo.utils.validation import check_model, whole_number

__all__ = ["prune"]

Scope = Literal["tensor", "global", "erk"]

_HALF_DTYPES: Final = {torch.float16, torch.bfloat16}


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
        >>> samo.prune(model, pattern="2:4").sparsity
        0.5

    Args:
        model: The model; the weights that `samo.prunable` names are pruned.
        sparsity: Fraction to prune, at least 0 and less than 1. At 0 a tensor gets no mask. With a
            ``pattern`` it follows from that and can be left out.
        method: ``"magnitude"`` keeps the weights furthest from 0 (float64 is compared after rounding
            to float32), ``"random"`` keeps any.
        scope: ``"tensor"`` prunes each tensor to ``sparsity``; ``"global"`` compares all of them, so
            that tensors with small weights lose more; ``"erk"`` prunes all of them together to
            ``sparsity``, each to a density proportional to the sum of its sizes over their product
            (Erdos-Renyi-Kernel), at most 1: small tensors keep more, whatever their values.
        pattern: ``"n:m"``, such as ``"2:4"``: keep n of every m neighbours along a weight's inputs.
        skip: Shell-style patterns of weights to leave alone, whatever ``rules`` say.
        rules: Sparsities for the weights that match a pattern, each tensor on its own, apart from
            ``scope`` and ``pattern``; the last match counts. A pattern sets those of `samo.prunable` that it matches; if there are none, as
            with ``"lm_head.weight"``, it adds what it matches.
        seed: Chooses between equals, and the weights of ``method="random"``.

    Returns:
        A mask for each pruned tensor, on the tensor's device, in the order of the model.

    Raises:
        TypeError: ``model`` is no module, ``skip`` no list of patterns, or ``rules`` no mapping.
        ValueError: A setting is out of range or contradicts another, a pattern matches nothing, there
            is nothing to prune, a weight is not a finite floating-point number, or the inputs of one
            cannot be cut into groups of m.
        MaskError: Nothing of a tensor would be kept.
    """
    check_model(model)
    seed = whole_number("seed", seed)
    _check_choice("method", method, get_args(Method))
    parameters = dense_parameters(model)
    decision = decide(
        model, sparsity, scope=scope, pattern=pattern, skip=skip, rules=rules, parameters=parameters
    )
    masks: dict[str, Mask] = {}
    for group in decision:
        entries = _entries({name: parameters[name] for name in group.names}, method, seed)
        masks.update(_masks(entries, group))
    return Masks({name: masks[name] for name in parameters if name in masks})


def decide(
    model: nn.Module,
    sparsity: float | None,
    *,
    scope: Scope,
    pattern: str | None,
    skip: Iterable[str],
    rules: Mapping[str, float] | None,
    parameters: Mapping[str, Tensor] | None = None,
) -> list["Group"]:
    """Decide what `prune` compares and how many weights it keeps, without a look at their values.

    Raises:
        ValueError: As `prune`, but for weights that have no values or bad ones.
    """
    _check_choice("scope", scope, get_args(Scope))
    neighbours = _check_pattern(pattern, sparsity, scope)
    fraction = pattern_sparsity(neighbours, sparsity) if neighbours is not None else sparsity
    _check_sparsity("sparsity", fraction)
    assert fraction is not None
    skip = check_choice_of(skip, rules)
    for name, value in (rules or {}).items():
        _check_sparsity(f"rules['{name}']", value)
    if parameters is None:
        parameters = dense_parameters(model)
    wanted = _choose(model, parameters, skip, rules or {})
    ruled = [
        _group(parameters, [name], value) for name, value in wanted.items() if value is not None
    ]
    others = [name for name, value in wanted.items() if value is None]
    groups: list[Group]
    if fraction == 0 or not others:
        groups = []
    elif neighbours is not None:
        found = layouts(model)
        groups = [
            _pattern_group(name, parameters[name], found.get(name), neighbours) for name in others
        ]
    elif scope == "erk":
        groups = _erk_groups(parameters, others, fraction, layouts(model))
    else:
        together = [others] if scope == "global" else [[name] for name in others]
        groups = [_group(parameters, names, fraction) for names in together]
    return [group for group in [*groups, *ruled] if group.sparsity > 0]


def check_choice_of(skip: object, rules: object) -> list[str]:
    """Return ``skip`` as a list.

    Raises:
        TypeError: It holds no patterns, or ``rules`` does not map patterns to sparsities.
    """
    patterns: list[Any] = (
        [skip] if isinstance(skip, str) or not isinstance(skip, Iterable) else list(skip)
    )
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"skip must be names or shell-style patterns of weights, as ['layers.0.*'], got {skip!r:.60}"
        )
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(
            f"rules must map patterns of weights to sparsities, as {{'lm_head.weight': 0.5}}, got "
            f"{rules!r:.60}"
        )
    return patterns


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are compared with one another, and how many weights they keep together."""

    names: tuple[str, ...]
    kept: int
    sparsity: float
    pattern: Pattern | None = None
    """How many are kept of every group of neighbours, if that is set."""
    input_dim: int = 0
    """Where the neighbours are."""


def _group(parameters: Mapping[str, Tensor], names: Sequence[str], sparsity: float) -> Group:
    numel = sum(parameters[name].numel() for name in names)
    return Group(tuple(names), numel - round(numel * sparsity), sparsity)


def _erk_groups(
    parameters: Mapping[str, Tensor],
    names: Sequence[str],
    sparsity: float,
    found: Mapping[str, Layout],
) -> list[Group]:
    matrices = []
    for name in names:
        shape, layout = tuple(parameters[name].shape), found.get(name)
        is_stack = layout is not None and layout.is_stack
        matrices.append((shape[0], shape[1:]) if is_stack else (1, shape))
    counts = erk_counts(matrices, _group(parameters, names, sparsity).kept)
    return [Group((name,), kept, sparsity) for name, kept in zip(names, counts)]


def _pattern_group(name: str, parameter: Tensor, layout: Layout | None, pattern: Pattern) -> Group:
    shape = tuple(parameter.shape)
    apart = f"prune it without the pattern by rules={{'{name}': 0.5}} or not with skip=['{name}']"
    if layout is None or layout.input_dim is None:
        raise ValueError(
            f"'{name}' of shape {shape} does not say which dimension runs over its inputs, along which "
            f"pattern '{pattern.kept}:{pattern.group}' groups; set `is_transposed` of its module (True: "
            f"(experts, in, out), False: (experts, out, in)), or {apart}"
        )
    if shape[layout.input_dim] % pattern.group:
        raise ValueError(
            f"'{name}' of shape {shape} has {shape[layout.input_dim]:,} inputs (dimension "
            f"{layout.input_dim}), and pattern '{pattern.kept}:{pattern.group}' needs a multiple of "
            f"{pattern.group}; {apart}"
        )
    kept = parameter.numel() // pattern.group * pattern.kept
    return Group((name,), kept, pattern.sparsity, pattern, layout.input_dim)


def _choose(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
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
    wanted = {name: value for name, value in wanted.items() if not is_empty(parameters[name])}
    if not wanted:
        raise ValueError(
            f"none of the {len(parameters):,} parameters of the model is to be pruned (skip={skip!r}); "
            "samo.prunable(model) lists the default, rules={'name': sparsity} adds to it"
        )
    return {name: wanted[name] for name in parameters if name in wanted}


def _entries(parameters: Mapping[str, Tensor], method: Method, seed: int) -> Sequence[Entries]:
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


def _masks(entries: Sequence[Entries], group: Group) -> dict[str, Mask]:
    if group.pattern is not None:
        (tensor,) = entries
        words = keep_pattern(tensor, group.pattern, group.input_dim)
        return {tensor.name: Mask(tensor.dense.shape, words)}
    numel = sum(tensor.dense.numel() for tensor in entries)
    masks: dict[str, Mask] = {}
    if group.kept:
        for tensor, words in zip(entries, keep_largest(entries, group.kept)):
            masks[tensor.name] = Mask(tensor.dense.shape, words)
    empty = [tensor.name for tensor in entries if not group.kept or masks[tensor.name].kept == 0]
    if empty:
        raise MaskError(
            f"sparsity {group.sparsity} would keep none of the weights of '{empty[0]}' and could not "
            f"train it ({len(empty)} of {len(entries)} tensors; {group.kept:,} of {numel:,} weights kept "
            f"in all); prune it less with rules={{'{empty[0]}': 0.5}} or not with skip=['{empty[0]}']"
        )
    return masks


def _check_pattern(text: str | None, sparsity: float | None, scope: Scope) -> Pattern | None:
    if text is None:
        return None
    if scope != "tensor":
        raise ValueError(
            f"pattern '{text}' gives every tensor the same sparsity, which contradicts scope='{scope}'; "
            "leave one of them out"
        )
    if sparsity is not None:
        _check_sparsity("sparsity", sparsity)
    return parse_pattern(text)


def _check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{argument}={value!r} is unknown; it is one of {', '.join(choices)}")


def _check_sparsity(argument: str, value: float | None) -> None:
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"{argument} is {value!r}, but sparsity is the fraction pruned: at least 0 and less than 1, "
            "for example 0.9 for 90 %"
        )
