"""Which tensors `prune` compares with one another, and how many weights they keep together.

    tensor    each tensor keeps the same fraction
    global    all tensors are compared, so those with small weights lose more
    erk       small tensors keep more: density proportional to (sum of sizes) / (product of sizes)
    owl       blocks with more outliers keep more

ERK is the Erdos-Renyi-Kernel rule of RigL (Evci et al. 2020), clipped to 1; the excess is spread.
OWL is Outlier Weighed Layerwise sparsity (Yin et al. 2023); ``calibrated.py`` counts outliers.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Final, Literal, NamedTuple, get_args

from torch import Tensor, nn

from samo.mask.prunable import is_empty, layout_of, matching, prunable
from samo.pruning.pattern import Pattern, parse_pattern, pattern_sparsity

Scope = Literal["tensor", "global", "erk", "owl"]

Ratios = Callable[[Sequence[str]], Sequence[float]]
"""Returns the fraction of outliers in the block of each named tensor."""

_OWL_RANGE: Final = 0.16
"""Between the densities of the blocks with the most and the fewest outliers: OWL's 2 * 0.08."""


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
    ratios: Ratios | None = None,
) -> list[Group]:
    """Decide what `prune` compares and how many weights it keeps; only OWL reads values."""
    check_choice("scope", scope, get_args(Scope))
    if scope == "owl" and ratios is None:
        raise ValueError(
            "scope='owl' counts outliers of the layers' inputs, which takes calibration data; pass "
            "it to samo.prune(..., calibration=batches), or choose another scope"
        )
    neighbours = None if pattern is None else parse_pattern(pattern)
    if neighbours is not None:
        if scope != "tensor":
            raise ValueError(
                f"pattern '{pattern}' gives every tensor the same sparsity, which contradicts "
                f"scope='{scope}'; omit one of them"
            )
        sparsity = pattern_sparsity(neighbours, sparsity)
    rules = {} if rules is None else rules
    if not isinstance(rules, Mapping):
        raise ValueError(
            f"rules must be a dict such as {{'layers.0.*': 0.5}}, got {type(rules).__name__}"
        )
    if sparsity is None and rules:
        sparsity = 0.0
    sparsity = _check_sparsity("sparsity", sparsity)
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
    elif scope == "owl":
        assert ratios is not None
        numels = [parameters[name].numel() for name in others]
        counts = owl_counts(numels, ratios(others), sparsity)
        groups = [
            Group((name,), kept, 1 - kept / numel)
            for name, kept, numel in zip(others, counts, numels)
        ]
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
            "samo.prunable(model) lists the default, rules={'lstm.weight_*': 0.9} would add to it"
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


def erk_counts(matrices: Sequence[tuple[int, Sequence[int]]], kept: int) -> list[int]:
    """Share ``kept`` weights among tensors by the Erdos-Renyi-Kernel rule.

    Shares are rounded down, and the rest goes to the largest fractions, earlier tensors first.
    ``matrices`` has the number of matrices stacked in each tensor, usually 1, and their sizes:
    1,100 kept of (1, (10, 10)) and (1, (100, 100)) are 100 and 1,000.
    """
    numels = [count * math.prod(sizes) for count, sizes in matrices]
    # A count is density times numel, so counts are proportional to the sums of sizes.
    parts = [count * sum(sizes) for count, sizes in matrices]
    left, total = Fraction(kept), sum(parts)
    shares = [Fraction()] * len(parts)
    # Those that keep everything come first: what is over raises the shares of the others.
    for i in sorted(range(len(parts)), key=lambda i: Fraction(numels[i], parts[i])):
        shares[i] = min(left * parts[i] / total, Fraction(numels[i]))
        left, total = left - shares[i], total - parts[i]
    return _rounded(shares, kept)


def owl_counts(numels: Sequence[int], ratios: Sequence[float], sparsity: float) -> list[int]:
    """Share the kept weights among tensors by the outlier ratios of their blocks.

    Densities rise linearly with the ratio, over a range of 0.16 and with the mean that ``sparsity``
    asks for; over a narrower one if a tensor would keep more than all or less than half the mean.
    """
    total = sum(numels)
    mean, exact = 1 - Fraction(sparsity), [Fraction(ratio) for ratio in ratios]
    center = sum(map(operator.mul, exact, numels), Fraction()) / total
    offsets = [ratio - center for ratio in exact]
    most, least = max(offsets), min(offsets)
    slope = Fraction()
    if most > least:
        slope = min(Fraction(_OWL_RANGE) / (most - least), (1 - mean) / most, mean / 2 / -least)
    shares = [(mean + slope * offset) * numel for offset, numel in zip(offsets, numels)]
    return _rounded(shares, total - round(total * sparsity))


def _rounded(shares: Sequence[Fraction], total: int) -> list[int]:
    """Round shares to a total: those with the largest fractions up, earlier ones first."""
    counts = [math.floor(share) for share in shares]
    by_fraction = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_fraction[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _check_sparsity(argument: str, value: float | None) -> float:
    if isinstance(value, int | float) and 0 <= value < 1:
        return value
    percent = value if isinstance(value, int | float) and 2 <= value < 100 else 90
    raise ValueError(
        f"{argument} must be at least 0 and less than 1, got {value!r}; {percent / 100:g} prunes "
        f"{percent:g} %"
    )
