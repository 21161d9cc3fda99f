"""Scopes and patterns against plain retellings: ERK as in RigL's loop, n:m group by group."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from samo.mask import bitmap
from samo.pruning import topk
from samo.pruning.pattern import Pattern, parse_pattern
from samo.pruning.prune import prune
from samo.pruning.scope import erk_counts
from tests.pruning.test_prune import model_of, models, reference_hashes

SHAPES = st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=4), min_size=1, max_size=6)


# Erdos-Renyi-Kernel


def erk_densities(shapes: list[list[int]], density: float) -> list[float]:
    """Find densities as RigL does: make the worst layer dense until none is over 1."""
    dense: set[int] = set()
    while True:
        divisor, rhs = 0.0, 0.0
        raw = {}
        for i, shape in enumerate(shapes):
            n = math.prod(shape)
            if i in dense:
                rhs -= n * (1 - density)
            else:
                rhs += n * density
                raw[i] = sum(shape) / n
                divisor += raw[i] * n
        epsilon = rhs / divisor
        worst = max(raw.values())
        if worst * epsilon <= 1 + 1e-12:
            return [1.0 if i in dense else epsilon * raw[i] for i in range(len(shapes))]
        dense |= {i for i, value in raw.items() if value == worst}


@given(SHAPES, st.floats(0.01, 0.99))
def test_erk_counts_are_those_of_rigl_rounded_and_add_up(
    shapes: list[list[int]], density: float
) -> None:
    numels = [math.prod(shape) for shape in shapes]
    kept = round(sum(numels) * density)
    counts = erk_counts([(1, shape) for shape in shapes], kept)
    assert sum(counts) == kept
    if kept < sum(numels):  # where all is kept, RigL's loop runs out of layers
        expected = erk_densities(shapes, kept / sum(numels))
        for count, numel, share in zip(counts, numels, expected):
            assert count <= numel
            assert abs(count - numel * share) < 1 + 1e-6


def test_what_rounding_leaves_goes_to_the_largest_fractions() -> None:
    # Shares of 10 in proportion to 4, 6 and 10 of 20: 2, 3 and 5; of 11: 2.2, 3.3 and 5.5.
    matrices = [(1, (2, 2)), (1, (3, 3)), (1, (5, 5))]
    assert erk_counts(matrices, 10) == [2, 3, 5]
    assert erk_counts(matrices, 11) == [2, 3, 6]
    assert erk_counts(matrices, 38) == [4, 9, 25]
    assert erk_counts(matrices, 0) == [0, 0, 0]


def test_erk_prunes_each_tensor_to_its_count_by_magnitude() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Linear(40, 30), nn.Linear(300, 200))
    masks = prune(model, 0.9, scope="erk")
    shapes = [(16, 8, 3, 3), (30, 40), (200, 300)]
    numel = sum(math.prod(shape) for shape in shapes)
    counts = erk_counts([(1, shape) for shape in shapes], numel - round(numel * 0.9))
    assert [mask.kept for mask in masks.values()] == counts
    for name, mask in masks.items():
        weight = model.get_parameter(name).detach()
        alone = prune(model_of(weight), 1 - mask.kept / mask.numel)["0.weight"]
        assert mask == alone


def test_rules_and_skip_take_precedence_over_erk_and_patterns() -> None:
    weights = [torch.randn(64, 64), torch.randn(64, 256), torch.randn(32, 30), torch.randn(9, 9)]
    for how in ({"sparsity": 0.75, "scope": "erk"}, {"pattern": "1:4"}):
        masks = prune(model_of(*weights), **how, rules={"2.*": 0.5}, skip=["3.*"])
        assert list(masks) == ["0.weight", "1.weight", "2.weight"]
        assert masks["2.weight"].kept == 480
        assert masks["0.weight"].kept + masks["1.weight"].kept == (64 * 64 + 64 * 256) // 4


def test_erk_counts_stacked_experts_as_single_matrices() -> None:
    stacked = nn.ModuleDict({"experts": nn.Module(), "proj": nn.Linear(50, 50)})
    stacked["experts"].up = nn.Parameter(torch.randn(8, 30, 20))
    apart = prune(model_of(*torch.randn(8, 30, 20), torch.randn(50, 50)), 0.9, scope="erk")
    kept = prune(stacked, 0.9, scope="erk")["experts.up"].kept
    assert kept == apart.kept - apart["8.weight"].kept


# n:m


def test_a_malformed_pattern_is_refused() -> None:
    assert parse_pattern("1:4") == Pattern(1, 4)
    for text in ("", "2", "2/4", "2:4:8", " 2:4", "a:b", "2:4\n", "0:4", "4:4", "-1:4"):
        with pytest.raises(ValueError, match=r"pattern must be 'n:m' with 0 < n < m, such as"):
            parse_pattern(text)


def keep_of_groups(
    weight: Tensor, name: str, n: int, m: int, dim: int, seed: int = 0, method: str = "magnitude"
) -> Tensor:
    """Keep n of every m neighbours along ``dim``, by sorting each group on its own."""
    hashes = reference_hashes(name, weight.numel(), seed).astype(np.int64).reshape(weight.shape)
    size = weight.double().abs().numpy() if method == "magnitude" else np.zeros(weight.shape)
    sizes, hashes = np.moveaxis(size, dim, -1), np.moveaxis(hashes, dim, -1)
    keep = np.zeros(sizes.shape, bool)
    for row in np.ndindex(*sizes.shape[:-1]):
        for first in range(0, sizes.shape[-1], m):
            group = slice(first, first + m)
            order = np.lexsort((-hashes[row][group], -sizes[row][group]))
            keep[row][first + order[:n]] = True
    return torch.from_numpy(np.moveaxis(keep, -1, dim).copy())


@st.composite
def pattern_cases(draw: st.DrawFn) -> tuple[nn.Sequential, int, int]:
    m = draw(st.integers(2, 12))
    n = draw(st.integers(1, m - 1))
    weights = [
        weight[:, : weight.shape[1] // m * m].detach()
        for weight in draw(models()).parameters()
        if weight.shape[1] >= m
    ]
    return model_of(*weights, torch.ones(3, 2 * m).to(torch.bfloat16)), n, m


@settings(max_examples=25)
@given(pattern_cases(), st.integers(0, 9), st.sampled_from(["magnitude", "random"]))
def test_a_pattern_keeps_the_largest_of_each_group(
    case: tuple[nn.Sequential, int, int], seed: int, method: Any
) -> None:
    model, n, m = case
    masks = prune(model, pattern=f"{n}:{m}", seed=seed, method=method)
    for name, parameter in model.named_parameters():
        expected = keep_of_groups(parameter.detach(), name, n, m, 1, seed, method)
        assert torch.equal(masks[name].to_bool(), expected)
    assert masks.kept * m == masks.numel * n


class Conv1D(nn.Module):
    """A stand-in for Hugging Face's layer: (in, out)."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size_in, size_out))


def test_groups_run_along_the_inputs_of_every_kind_of_layer() -> None:
    for module, dim in [
        (nn.Linear(8, 5), 1),
        (nn.Conv1d(8, 5, 3), 1),
        (nn.Conv2d(8, 6, 3, groups=2), 1),
        (nn.ConvTranspose2d(8, 5, 3), 0),
        (Conv1D(8, 5), 0),
    ]:
        mask = prune(module, pattern="1:4")["weight"]
        expected = keep_of_groups(module.weight.detach(), "weight", 1, 4, dim)
        assert torch.equal(mask.to_bool(), expected), module


def test_experts_say_where_their_inputs_are() -> None:
    model = nn.ModuleDict({"experts": nn.Module()})
    model["experts"].up = nn.Parameter(torch.randn(2, 8, 12))
    with pytest.raises(ValueError, match=r"'experts.up' of shape .*, 12\) does not say which dim"):
        prune(model, pattern="2:4")
    for is_transposed, dim in ((True, 1), (False, 2)):
        model["experts"].is_transposed = is_transposed  # type: ignore[assignment]
        mask = prune(model, pattern="2:4")["experts.up"]
        weight = model["experts"].up.detach()
        assert torch.equal(mask.to_bool(), keep_of_groups(weight, "experts.up", 2, 4, dim))


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'0\.weight' .* has 3 inputs, not a multiple of 4"):
        prune(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), pattern="2:4")
    model = model_of(torch.randn(9, 9))
    assert prune(model, 0.6666667, pattern="1:3") == prune(model, pattern="1:3")
    with pytest.raises(ValueError, match=r"prunes 0.666667 of the weights, which contradicts"):
        prune(model, 0.9, pattern="1:3")
    with pytest.raises(ValueError, match="contradicts scope='erk'; omit one of them"):
        prune(model, pattern="1:3", scope="erk")


@pytest.mark.parametrize(("shape", "kind"), [((512, 300), nn.Linear), ((300, 129), Conv1D)])
def test_groups_continue_over_chunks(
    shape: tuple[int, int], kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(kind(shape[1], shape[0]) if kind is nn.Linear else kind(*shape))
    expected = prune(model, pattern="2:3")
    monkeypatch.setattr(bitmap, "_CHUNK_BLOCKS", 1)
    assert prune(model, pattern="2:3") == expected


@pytest.mark.parametrize("most", [2, 8], ids=["sorted", "compared"])
def test_neighbours_whose_hashes_collide_are_taken_in_order(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topk, "_MOST_COMPARED", most)
    monkeypatch.setattr(topk, "hashes", lambda name, seed, index: (index % 2).to(torch.int32))
    keep = prune(model_of(torch.ones(3, 12)), pattern="4:6")["0.weight"].to_bool()
    group = [True, True, False, True, False, True]  # the odd places, and the first even one
    assert torch.equal(keep, torch.tensor(group * 2).repeat(3, 1))
