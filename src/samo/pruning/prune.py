"""`prune`: choose the weights to keep, by magnitude or at random, per tensor or over all.

`decide` groups the tensors that are compared with one another; each group is pruned on its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

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


class Group(NamedTuple):
    """Tensors that are compared with one another, and how many weights they keep together."""

    names: tuple[str, ...]
    kept: int
    sparsity: float
    pattern: Pattern | None = None
    input_dim: int = 0  # where the neighbours of the pattern are


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
    neighbours = None if pattern is None else parse_pattern(pattern)
    if neighbours is not None:
        if scope != "tensor":
            raise ValueError(
                f"pattern '{pattern}' gives every tensor the same sparsity, which contradicts "
                f"scope='{scope}'; omit one of them"
            )
        sparsity = pattern_sparsity(neighbours, sparsity)
    sparsity = _check_sparsity("sparsity", sparsity)
    rules = rules or {}
    for name, value in rules.items():
        _check_sparsity(f"rules['{name}']", value)
    wanted = _choose(model, parameters, skip, rules)
    ruled = [_group(parameters, [name], p) for name, p in wanted.items() if p is not None]
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
        raise ValueError(f"{argument} must be one of {', '.join(choices)}, got {value!r}")


def _choose(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    skip: Iterable[str],
    rules: Mapping[str, float],
) -> dict[str, float | None]:
    """Return the weights to prune, in the order of the model, with the sparsity of their rule."""
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
        # 'layers.0.*' means the matrices of layer 0, not its norms and biases as well.
        wanted.update(dict.fromkeys(hits & default or hits, value))
    wanted = {name: value for name, value in wanted.items() if not is_empty(parameters[name])}
    if not wanted:
        raise ValueError(
            f"none of the {len(parameters):,} parameters of the model would be pruned; "
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
    shape = tuple(parameter.shape)
    input_dim = layout_of(model, name, len(shape)).input_dim
    if input_dim is None:
        raise ValueError(
            f"'{name}' of shape {shape} does not say which dimension is its inputs; set "
            "`is_transposed` of its module (True: (experts, in, out), False: (experts, out, in))"
        )
    if shape[input_dim] % pattern.group:
        raise ValueError(
            f"'{name}' of shape {shape} has {shape[input_dim]:,} inputs, not a multiple of "
            f"{pattern.group}; prune it without the pattern by rules={{'{name}': 0.5}} or not with "
            f"skip=['{name}']"
        )
    kept = parameter.numel() // pattern.group * pattern.kept
    return Group((name,), kept, pattern.sparsity, pattern, input_dim)


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


def _check_sparsity(argument: str, value: float | None) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{argument} must be at least 0 and less than 1, got {value!r}")
    return value
