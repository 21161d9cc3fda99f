"""`prune`: choose the weights to keep, by magnitude or at random, per tensor or over the whole model.

`decide` groups the tensors that are compared with one another and counts what each group keeps;
then each group is pruned on its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn

from samo.errors import MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters, is_empty, layout_of, matching, prunable
from samo.pruning.densities import Pattern, erk_counts, parse_pattern, pattern_sparsity
from samo.pruning.nm import keep_pattern
from samo.pruning.topk import Entries, Method, compare_dtype, keep_largest
from samo.utils.validation import check_model, whole_number

__all__ = ["prune"]

Scope = Literal["tensor", "global", "erk"]


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
        sparsity: Fraction to prune, at least 0 and less than 1. At 0 a tensor gets no mask. May be
            omitted with a ``pattern``, which implies it.
        method: ``"magnitude"`` keeps the weights furthest from 0, ``"random"`` any.
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

    Returns:
        A mask for each pruned tensor, on the tensor's device, in the order of the model.

    Raises:
        TypeError: ``model`` is not a module, ``skip`` not patterns, or ``rules`` not a mapping.
        ValueError: A setting is out of range or contradicts another, a pattern matches nothing,
            there is nothing to prune, a weight is not a finite floating-point number, or the inputs
            of one cannot be divided into groups of m.
        MaskError: A tensor would keep nothing.
    """
    check_model(model)
    seed = whole_number("seed", seed)
    check_choice("method", method, get_args(Method))
    parameters = dense_parameters(model)
    masks: dict[str, Mask] = {}
    for group in decide(model, parameters, sparsity, scope, pattern, skip, rules):
        masks.update(_masks({name: parameters[name] for name in group.names}, group, method, seed))
    return Masks({name: masks[name] for name in parameters if name in masks})


class Group(NamedTuple):
    """Tensors that are compared with one another, and how many weights they keep together."""

    names: tuple[str, ...]
    kept: int
    sparsity: float
    pattern: Pattern | None = None
    input_dim: int = 0
    """Where the neighbours of the pattern are."""


def decide(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    sparsity: float | None,
    scope: Scope,
    pattern: str | None,
    skip: Iterable[str],
    rules: Mapping[str, float] | None,
) -> list[Group]:
    """Decide what `prune` compares and how many weights it keeps, without reading values."""
    check_choice("scope", scope, get_args(Scope))
    skip = check_patterns(skip, rules)
    neighbours = None
    if pattern is not None:
        if scope != "tensor":
            raise ValueError(
                f"pattern '{pattern}' gives every tensor the same sparsity, which contradicts "
                f"scope='{scope}'; omit one of them"
            )
        if sparsity is not None:
            _check_sparsity("sparsity", sparsity)
        neighbours = parse_pattern(pattern)
        sparsity = pattern_sparsity(neighbours, sparsity)
    sparsity = _check_sparsity("sparsity", sparsity)
    rules = rules or {}
    for name, value in rules.items():
        _check_sparsity(f"rules['{name}']", value)
    wanted = _choose(model, parameters, skip, rules)
    ruled = [
        _group(parameters, [name], value) for name, value in wanted.items() if value is not None
    ]
    others = [name for name, value in wanted.items() if value is None]
    if sparsity == 0 or not others:
        groups = []
    elif neighbours is not None:
        groups = [_pattern_group(model, name, parameters[name], neighbours) for name in others]
    elif scope == "erk":
        groups = _erk_groups(model, parameters, others, sparsity)
    else:
        together = [others] if scope == "global" else [[name] for name in others]
        groups = [_group(parameters, names, sparsity) for names in together]
    return [group for group in [*groups, *ruled] if group.sparsity > 0]


def check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{argument}={value!r} is unknown; it is one of {', '.join(choices)}")


def check_patterns(skip: object, rules: object) -> list[str]:
    """Return ``skip`` as a list; raise a TypeError if it or ``rules`` has the wrong type."""
    is_one = isinstance(skip, str) or not isinstance(skip, Iterable)
    patterns: list[Any] = [skip] if is_one else list(skip)  # type: ignore[call-overload]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            "skip must be names or shell-style patterns of weights, for example ['layers.0.*'], got "
            f"{skip!r:.60}"
        )
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(
            "rules must map patterns of weights to sparsities, for example {'lm_head.weight': 0.5}, "
            f"got {rules!r:.60}"
        )
    return patterns


def _choose(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    skip: list[str],
    rules: Mapping[str, float],
) -> dict[str, float | None]:
    """Return the weights to prune, in the order of the model, with the sparsity that a rule sets."""
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
                f"rules pattern '{pattern}' matches only parameters that skip={skip!r} leaves dense; "
                "remove the rule or narrow the skip"
            )
        # 'layers.0.*' means the matrices of layer 0, not its norms and biases as well.
        wanted.update(dict.fromkeys(hits & default or hits, value))
    wanted = {name: value for name, value in wanted.items() if not is_empty(parameters[name])}
    if not wanted:
        raise ValueError(
            f"none of the {len(parameters):,} parameters of the model would be pruned (skip={skip!r}); "
            "samo.prunable(model) lists the default, rules={'name': sparsity} adds to it"
        )
    return {name: wanted[name] for name in parameters if name in wanted}


def _group(parameters: Mapping[str, Tensor], names: Sequence[str], sparsity: float) -> Group:
    numel = sum(parameters[name].numel() for name in names)
    return Group(tuple(names), numel - round(numel * sparsity), sparsity)


def _erk_groups(
    model: nn.Module, parameters: Mapping[str, Tensor], names: Sequence[str], sparsity: float
) -> list[Group]:
    matrices: list[tuple[int, Sequence[int]]] = []
    for name in names:
        shape = tuple(parameters[name].shape)
        is_stack = layout_of(model, name, len(shape)).is_stack
        matrices.append((shape[0], shape[1:]) if is_stack else (1, shape))
    counts = erk_counts(matrices, _group(parameters, names, sparsity).kept)
    return [Group((name,), kept, sparsity) for name, kept in zip(names, counts)]


def _pattern_group(model: nn.Module, name: str, parameter: Tensor, pattern: Pattern) -> Group:
    shape, text = tuple(parameter.shape), f"{pattern.kept}:{pattern.group}"
    input_dim = layout_of(model, name, len(shape)).input_dim
    apart = f"prune it without the pattern by rules={{'{name}': 0.5}} or not with skip=['{name}']"
    if input_dim is None:
        raise ValueError(
            f"'{name}' of shape {shape} does not say which dimension is its inputs, along which "
            f"pattern '{text}' groups; set `is_transposed` of its module (True: (experts, in, out), "
            f"False: (experts, out, in)), or {apart}"
        )
    if shape[input_dim] % pattern.group:
        raise ValueError(
            f"'{name}' of shape {shape} has {shape[input_dim]:,} inputs (dimension {input_dim}), and "
            f"pattern '{text}' needs a multiple of {pattern.group}; {apart}"
        )
    kept = parameter.numel() // pattern.group * pattern.kept
    return Group((name,), kept, pattern.sparsity, pattern, input_dim)


def _masks(
    parameters: Mapping[str, Tensor], group: Group, method: Method, seed: int
) -> dict[str, Mask]:
    dtype = compare_dtype(parameter.dtype for parameter in parameters.values())
    entries = [
        Entries(name, parameter.detach(), method, dtype, seed)
        for name, parameter in parameters.items()
    ]
    for tensor in entries:
        _check_values(tensor)
    if group.pattern is not None:
        words = [keep_pattern(tensor, group.pattern, group.input_dim) for tensor in entries]
    else:
        words = keep_largest(entries, group.kept)
    masks = {
        tensor.name: Mask(tensor.dense.shape, packed) for tensor, packed in zip(entries, words)
    }
    empty = [name for name, mask in masks.items() if mask.kept == 0]
    if empty:
        numel = sum(mask.numel for mask in masks.values())
        raise MaskError(
            f"sparsity {group.sparsity} would keep none of the weights of '{empty[0]}', which could "
            f"not train then ({len(empty)} of {len(masks)} tensors; {group.kept:,} of {numel:,} weights "
            f"kept in total); prune it less with rules={{'{empty[0]}': 0.5}} or not with "
            f"skip=['{empty[0]}']"
        )
    return masks


def _check_values(entries: Entries) -> None:
    name, dense = entries.name, entries.dense
    if dense.is_meta:
        raise ValueError(
            f"'{name}' has no values (device 'meta') to choose from; to predict bytes without them use "
            "samo.prunable(model) and samo.memory.predict"
        )
    if not dense.is_floating_point():
        raise ValueError(
            f"'{name}' is {dense.dtype} on device '{dense.device}', but only floating-point weights "
            f"can be pruned; leave it out with skip=['{name}']"
        )
    bad = entries.count_not_finite() if entries.method == "magnitude" else 0
    if bad:
        raise ValueError(
            f"{bad:,} of the {dense.numel():,} weights of '{name}' are NaN or infinite and have no "
            "magnitude to compare; repair the checkpoint, use method='random' or leave it out with "
            f"skip=['{name}']"
        )


def _check_sparsity(argument: str, value: float | None) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"{argument} is {value!r}, but sparsity is the fraction pruned: at least 0 and less than 1, "
            "for example 0.9 for 90 %"
        )
    return value
