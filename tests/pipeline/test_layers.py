"""Which layers a stage gets, how they come to their weights, and how a batch is cut."""

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from torch import nn

import samo
from samo.models import gpt
from samo.pipeline.filling import build_stage
from samo.pipeline.layers import take_apart
from samo.pipeline.microbatch import cut, weights
from samo.pipeline.partition import parameter_costs, partition
from tests.pipeline.cases import tiny_gpt, tiny_hf, tokens

CPU = torch.device("cpu")

# Cuts --------------------------------------------------------------------------------------------


def all_cuts(count: int, num_stages: int):
    if num_stages == 1:
        yield [(0, count)]
        return
    for last in range(num_stages - 1, count):
        for before in all_cuts(last, num_stages - 1):
            yield [*before, (last, count)]


@settings(max_examples=200)
@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    num_stages=st.integers(1, 5),
)
def test_a_partition_is_the_best_of_all(costs, num_stages) -> None:
    if len(costs) < num_stages:
        with pytest.raises(ValueError, match="layers cannot be cut into"):
            partition(costs, num_stages)
        return
    possible = list(all_cuts(len(costs), num_stages))
    found = partition(costs, num_stages)
    assert found in possible  # so no layer is lost, and none is empty
    slowest = min(max(sum(costs[a:b]) for a, b in cuts) for cuts in possible)
    assert max(sum(costs[a:b]) for a, b in found) == slowest


def test_wrong_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="costs must be 0 or more"):
        partition([1, -1], 1)


# Layers and weights ------------------------------------------------------------------------------


def in_pieces(model: Any, num_stages: int, *inputs: torch.Tensor) -> Any:
    layers = take_apart(copy.deepcopy(model))
    output: Any = inputs
    for piece in partition(parameter_costs(layers), num_stages):
        stage = build_stage(layers, [piece], device=CPU)
        output = stage(*(output if isinstance(output, tuple) else (output,)))
    return output


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("family", ["gpt", "gpt2", "llama"])
def test_stages_in_a_row_compute_what_the_model_computes(family: str, num_stages: int) -> None:
    model = tiny_gpt() if family == "gpt" else tiny_hf(family)
    x, _ = tokens()
    expected = model(x) if family == "gpt" else model(x, use_cache=False).logits
    assert torch.equal(in_pieces(model, num_stages, x), expected)


def test_eager_attention_of_hugging_face_keeps_its_mask() -> None:
    model = tiny_hf("llama")
    model.config._attn_implementation = "eager"
    x, _ = tokens()
    assert torch.equal(in_pieces(model, 2, x), model(x, use_cache=False).logits)


@pytest.mark.parametrize("family", ["gpt", "gpt2", "llama"])
def test_no_name_is_lost_or_new(family: str) -> None:
    model = tiny_gpt() if family == "gpt" else tiny_hf(family)
    layers = take_apart(model)
    names: list[str] = []
    for piece in partition(parameter_costs(layers), 3):
        names += build_stage(layers, [piece], device=CPU).state_dict()
    assert sorted(names) == sorted(model.state_dict())


@pytest.mark.parametrize("family", ["gpt", "gpt2", "llama"])
def test_a_model_on_meta_takes_memory_for_its_own_stage_alone(family: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        shape = tiny_gpt() if family == "gpt" else tiny_hf(family)
    model = tiny_gpt() if family == "gpt" else tiny_hf(family)
    save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "a.safetensors"
    )
    layers = take_apart(shape)
    cuts = partition(parameter_costs(layers), 2)
    stage = build_stage(layers, [cuts[1]], device=CPU, weights=tmp_path)
    whole = model.state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in stage.state_dict().items())
    first = build_stage(layers, [cuts[0]], device=CPU)
    assert not any(t.is_meta for t in (*first.parameters(), *first.buffers()))
    hidden = first(tokens()[0])
    assert hidden.isfinite().all()
    if family == "llama":  # rotary tables, which no file holds
        real = build_stage(take_apart(model), [cuts[0]], device=CPU)
        for (name, table), (_, wanted) in zip(first.named_buffers(), real.named_buffers()):
            assert torch.equal(table, wanted), name


def test_new_weights_do_not_depend_on_the_number_of_stages() -> None:
    with torch.device("meta"):
        model = tiny_gpt()
    whole = build_stage(take_apart(model), [(0, 5)], device=CPU, seed=7).state_dict()
    for piece in [(0, 2), (2, 3), (3, 5)]:
        with torch.device("meta"):
            model = tiny_gpt()
        part = build_stage(take_apart(model), [piece], device=CPU, seed=7)
        assert all(torch.equal(value, whole[name]) for name, value in part.state_dict().items())
    assert abs(float(whole["blocks.0.mlp.0.weight"].std()) / 0.02 - 1) < 0.1


def test_functions_make_only_the_layers_of_a_stage() -> None:
    made = []

    def layer(number: int):
        def make() -> nn.Module:
            module = nn.Linear(2, 2)
            if not module.weight.is_meta:
                made.append(number)
            return module

        return make

    build_stage(take_apart([layer(i) for i in range(4)]), [(1, 3)], device=CPU)
    assert made == [1, 2]


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Row(nn.Sequential):
    pass


class GPT(nn.Module):
    """Somebody else's, of which nothing is known."""


class Doubled(gpt.GPT):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().forward(*args, **kwargs)


def test_a_subclass_that_computes_the_same_is_cut_as_its_parent() -> None:
    assert len(take_apart(Row(nn.Linear(2, 2), nn.Tanh())).units) == 2
    whole = tiny_gpt()
    compressed = samo.compress_(tiny_gpt(), samo.prune(whole, 0.5))  # has a class of its own
    assert len(take_apart(compressed).units) == len(take_apart(whole).units)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: take_apart(nn.Linear(2, 2)),
            TypeError,
            "a pipeline takes nn.Sequential.*got Linear",
        ),
        (
            lambda: take_apart(Residual(nn.Linear(2, 2))),
            TypeError,
            "Residual is an nn.Sequential with a forward.. of its own",
        ),
        (lambda: take_apart(GPT()), TypeError, "one of samo.GPT, .* got GPT"),
        (lambda: take_apart(Doubled(tiny_gpt().config)), TypeError, "got Doubled"),
        (lambda: take_apart(cast("Any", [3])), TypeError, "layer 0 is a int; give a module"),
        (
            lambda: take_apart(cast("Any", [lambda: 3])),
            TypeError,
            "layer 0 is a function that returned int",
        ),
        (
            lambda: take_apart(nn.Sequential(nn.Linear(2, 2)), [("0.wieght", "0.bias")]),
            ValueError,
            "tied weight '0.wieght' is no parameter .did you mean '0.weight'",
        ),
        (
            lambda: take_apart(nn.Sequential(nn.Linear(2, 2)), [("0.weight", "0.bias")]),
            ValueError,
            "must have one shape, got",
        ),
        (
            lambda: build_stage(take_apart([Bare().to("meta")]), [(0, 1)], device=CPU),
            ValueError,
            "'0.scale' was on the meta device and got no values",
        ),
        (
            lambda: build_stage(
                take_apart([nn.Linear(2, 2)]),
                [(0, 1)],
                device=CPU,
                weights={"0.bias": torch.ones(2)},
            ),
            ValueError,
            "weights lack 1 of this stage's 2 tensors: 0.weight; give",
        ),
        (
            lambda: build_stage(
                take_apart([nn.Linear(2, 2)]),
                [(0, 1)],
                device=CPU,
                weights={"0.bias": torch.ones(3)},
            ),
            ValueError,
            r"weights hold '0.bias' as \(3,\), the model as \(2,\)",
        ),
        (
            lambda: build_stage(
                take_apart([nn.Linear(2, 2)]), [(0, 1)], device=CPU, weights="no-such-file"
            ),
            ValueError,
            "'no-such-file' is no safetensors file and no folder",
        ),
    ],
)
def test_what_cannot_be_cut_or_filled_is_refused(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()


# Micro-batches -----------------------------------------------------------------------------------


def test_micro_batches_weigh_what_a_mean_over_the_batch_would_give() -> None:
    logits, target = torch.randn(7, 5, dtype=torch.float64), torch.randint(0, 5, (7,))
    target[[1, 4, 5]] = -100
    pieces = cut((logits, target), 3, "x")
    factors = weights([(t,) for _, t in pieces], "mean", None)
    total = sum(F.cross_entropy(x, t) * w for (x, t), w in zip(pieces, factors))
    torch.testing.assert_close(total, F.cross_entropy(logits, target))
    assert weights([(t,) for _, t in pieces], "sum", None) == [1.0, 1.0, 1.0]
    assert weights([(t,) for _, t in pieces], "mean", lambda t: len(t)) == [3 / 7, 2 / 7, 2 / 7]


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        (None, TypeError, "x must be a tensor with rows or a tuple of them, got NoneType"),
        ((), TypeError, "x must be a tensor with rows"),
        (torch.ones(3), ValueError, r"x has \[3\] rows for 4 micro-batches"),
        ((torch.ones(4), torch.ones(5)), ValueError, r"x has \[4, 5\] rows"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch, error, text) -> None:
    with pytest.raises(error, match=text):
        cut(batch, 4, "x")
