"""Density rules against plain retellings: ERK with RigL's loop over densities, n:m group by group."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from samo.errors import MaskError
from samo.mask import bitmap
from samo.mask.prunable import Layout, layout_of
from samo.pruning import nm
from samo.pruning.densities import Pattern, erk_counts, parse_pattern
from samo.pruning.prune import prune
from samo.pruning.topk import Entries
from tests.pruning.test_prune import model_of, models, reference_hashes, transient_bytes

SHAPES = st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=4), min_size=1, max_size=6)


# Erdos-Renyi-Kernel


def erk_densities(shapes: list[list[int]], density: float) -> list[float]:
    """Find densities as RigL does: raise epsilon, and make the worst layer dense until none is over 1."""
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


def test_erk_keeps_everything_or_nothing() -> None:
    matrices = [(1, (3, 4)), (1, (50, 60)), (1, (2, 3, 5))]
    assert erk_counts(matrices, 12 + 3000 + 30) == [12, 3000, 30]
    assert erk_counts(matrices, 0) == [0, 0, 0]


def test_what_rounding_leaves_goes_to_the_largest_fractions() -> None:
    # Shares of 10 in proportion to 4, 6 and 10 of 20: 2, 3 and 5; of 11: 2.2, 3.3 and 5.5.
    matrices = [(1, (2, 2)), (1, (3, 3)), (1, (5, 5))]
    assert erk_counts(matrices, 10) == [2, 3, 5]
    assert erk_counts(matrices, 11) == [2, 3, 6]


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


def test_a_tensor_that_erk_keeps_whole_has_a_full_mask_so_that_counts_add_up() -> None:
    masks = prune(model_of(torch.randn(4, 4), torch.randn(200, 200)), 0.8, scope="erk")
    assert masks["0.weight"].sparsity == 0
    assert masks.kept == 40016 - round(40016 * 0.8)


def test_rules_and_skip_stand_apart_from_erk() -> None:
    weights = [torch.randn(64, 64), torch.randn(64, 256), torch.randn(32, 32), torch.randn(9, 9)]
    masks = prune(model_of(*weights), 0.9, scope="erk", rules={"2.*": 0.5}, skip=["3.*"])
    assert list(masks) == ["0.weight", "1.weight", "2.weight"]
    assert masks["2.weight"].kept == 512
    numel = 64 * 64 + 64 * 256
    assert masks["0.weight"].kept + masks["1.weight"].kept == numel - round(numel * 0.9)
    assert list(prune(model_of(*weights), 0, scope="erk", rules={"2.*": 0.5})) == ["2.weight"]
    assert list(prune(model_of(weights[0]), 0.9, scope="erk", rules={"0.*": 0.5})) == ["0.weight"]


def test_erk_counts_stacked_experts_as_single_matrices() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(8, 30, 20))

    stacked = nn.ModuleDict({"experts": Experts(), "proj": nn.Linear(50, 50)})
    apart = model_of(*torch.randn(8, 30, 20), torch.randn(50, 50))
    assert (
        prune(stacked, 0.9, scope="erk")["experts.up"].kept
        == prune(apart, 0.9, scope="erk").kept - prune(apart, 0.9, scope="erk")["8.weight"].kept
    )


def test_an_erk_share_of_nothing_is_refused() -> None:
    with pytest.raises(MaskError, match=r"would keep none of the weights of '0\.weight'.*1 of 1"):
        prune(model_of(torch.ones(1, 2), torch.ones(500, 500)), 0.9999, scope="erk")


# n:m


BAD_PATTERNS = ["", "2", "2/4", "2:4:8", " 2:4", "a:b", "2:4\n", None, (2, 4), "0:4", "4:4", "-1:4"]


@pytest.mark.parametrize("text", BAD_PATTERNS)
def test_a_malformed_pattern_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"a pattern is 'n:m', n of every m .*for example '2:4'"):
        parse_pattern(text)
    assert parse_pattern("1:4") == Pattern(1, 4)
    assert parse_pattern("1:4").sparsity == 0.75


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


@settings(max_examples=40)
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


@pytest.mark.parametrize(
    ("module", "dim"),
    [
        (nn.Linear(8, 5), 1),
        (nn.Conv1d(8, 5, 3), 1),
        (nn.Conv2d(8, 5, 3), 1),
        (nn.Conv3d(8, 3, 2), 1),
        (nn.Conv2d(8, 6, 3, groups=2), 1),
        (nn.ConvTranspose2d(8, 5, 3), 0),
        (Conv1D(8, 5), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_groups_run_along_the_inputs_of_every_kind_of_layer(module: nn.Module, dim: int) -> None:
    model = nn.Sequential(module)
    weight = model.get_parameter("0.weight")
    mask = prune(model, pattern="1:4")["0.weight"]
    assert torch.equal(mask.to_bool(), keep_of_groups(weight.detach(), "0.weight", 1, 4, dim))


@pytest.mark.parametrize(("is_transposed", "dim"), [(True, 1), (False, 2)])
def test_experts_say_where_their_inputs_are(is_transposed: bool, dim: int) -> None:
    model = nn.ModuleDict({"experts": nn.Module()})
    model["experts"].up = nn.Parameter(torch.randn(2, 8, 12))
    model["experts"].is_transposed = is_transposed  # type: ignore[assignment]
    assert layout_of(model, "experts.up", 3) == Layout(input_dim=dim, is_stack=True)
    mask = prune(model, pattern="2:4")["experts.up"]
    weight = model["experts"].up.detach()
    assert torch.equal(mask.to_bool(), keep_of_groups(weight, "experts.up", 2, 4, dim))


def test_experts_that_do_not_say_are_refused() -> None:
    model = nn.ModuleDict({"experts": nn.Module()})
    model["experts"].up = nn.Parameter(torch.randn(2, 8, 12))
    message = r"'experts\.up' of shape \(2, 8, 12\) does not say which dim.*is_transposed"
    with pytest.raises(ValueError, match=message):
        prune(model, pattern="2:4")


def test_a_shared_weight_has_the_layout_of_its_matrix_layer() -> None:
    model = nn.Sequential(nn.Module(), Conv1D(8, 6), nn.Linear(6, 8))
    model[0].table = model[1].weight
    model[2].weight = model[1].weight
    mask = prune(model, pattern="1:4")["1.weight"]
    assert torch.equal(
        mask.to_bool(), keep_of_groups(model[1].weight.detach(), "1.weight", 1, 4, 0)
    )


def test_inputs_that_the_pattern_does_not_divide_are_refused() -> None:
    message = (
        r"'0\.weight' of shape \(8, 3, 3, 3\) has 3 inputs \(dimension 1\), and pattern '2:4' nee"
    )
    with pytest.raises(ValueError, match=message):
        prune(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), pattern="2:4")


def test_rules_and_skip_stand_apart_from_a_pattern() -> None:
    model = model_of(torch.randn(8, 6), torch.randn(8, 8), torch.randn(8, 7))
    masks = prune(model, pattern="2:4", rules={"0.*": 0.75}, skip=["2.*"])
    assert [mask.kept for mask in masks.values()] == [12, 32]
    assert list(masks) == ["0.weight", "1.weight"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 0.9}, "prunes 0.5 of the weights, which contradicts sparsity"),
        ({"sparsity": "0.5"}, "sparsity is '0.5', but sparsity is the fraction"),
        ({"scope": "global"}, "contradicts scope='global'; omit one of them"),
        ({"scope": "erk"}, "contradicts scope='erk'"),
    ],
)
def test_contradictions_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prune(model_of(torch.randn(8, 8)), pattern="2:4", **arguments)


def test_the_sparsity_of_the_pattern_may_be_said_too() -> None:
    model = model_of(torch.randn(9, 9))
    assert prune(model, 0.6666667, pattern="1:3") == prune(model, pattern="1:3")


@pytest.mark.parametrize(("shape", "kind"), [((512, 300), nn.Linear), ((300, 129), Conv1D)])
def test_groups_continue_over_chunks(
    shape: tuple[int, int], kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(kind(shape[1], shape[0]) if kind is nn.Linear else kind(*shape))
    expected = prune(model, pattern="2:3")
    monkeypatch.setattr(bitmap, "_CHUNK_BLOCKS", 1)
    assert prune(model, pattern="2:3") == expected


def test_a_pattern_needs_no_memory_that_grows_with_the_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk = 2**14
    monkeypatch.setattr(bitmap, "_CHUNK_BLOCKS", chunk // bitmap.BLOCK_BITS)
    small, large = (transient_bytes(torch.randn(n, 1000), pattern="1:10") for n in (50, 200))
    assert small <= 48 * chunk
    assert large <= small + 5 * 8 * (200 * 1000 // bitmap.BLOCK_BITS)  # a few counts a block


@pytest.mark.parametrize("most", [2, 8], ids=["sorted", "compared"])
def test_neighbours_whose_hashes_collide_are_taken_in_order(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nm, "_MOST_COMPARED", most)

    def few_hashes(self: Entries, index: Tensor) -> Tensor:
        return (index % 2).to(torch.int32)

    monkeypatch.setattr(Entries, "hashes", few_hashes)
    keep = prune(model_of(torch.ones(3, 12)), pattern="4:6")["0.weight"].to_bool()
    group = [True, True, False, True, False, True]  # the odd places, and the first even one
    assert torch.equal(keep, torch.tensor(group * 2).repeat(3, 1))


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "how", [{"pattern": "2:4"}, {"pattern": "3:16"}, {"scope": "erk"}], ids=str
)
def test_a_gpu_keeps_what_a_cpu_keeps(how: Any, dtype: torch.dtype) -> None:
    model = model_of(torch.randn(512, 640).round(decimals=1), torch.randn(48, 48)).to(dtype)
    settings = how if "pattern" in how else {"sparsity": 0.9, **how}
    expected = prune(model, **settings)
    assert prune(model.cuda(), **settings).to("cpu") == expected
