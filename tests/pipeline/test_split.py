"""Which layers a stage gets, where their weights come from, and how a batch is cut."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings, strategies as st
from safetensors.torch import save_file
from torch import nn

import samo
from samo.integrations.causal_lm import checkpoint_blocks
from samo.models import gpt
from samo.pipeline.microbatch import cut, loss_weights
from samo.pipeline.partition import partition
from samo.pipeline.split import parameter_costs, take_apart
from samo.pipeline.stage import Stage, build_stage
from tests.pipeline.cases import FAMILIES, tiny_gpt, tiny_hf, tokens

CPU = torch.device("cpu")


def all_cuts(count: int, num_stages: int):
    if num_stages == 1:
        yield [(0, count)]
        return
    for last in range(num_stages - 1, count):
        for before in all_cuts(last, num_stages - 1):
            yield [*before, (last, count)]


@settings(max_examples=100)
@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=7), num_stages=st.integers(1, 5))
@example(costs=[1, 6, 2, 4, 6, 1], num_stages=4)  # the best start is not the fastest start
def test_a_partition_is_the_best_of_all(costs, num_stages) -> None:
    if len(costs) < num_stages:
        with pytest.raises(ValueError, match="layers cannot be cut into"):
            partition(costs, num_stages)
        return

    def rank(cuts: list[tuple[int, int]]) -> tuple[int, int]:
        sums = [sum(costs[start:stop]) for start, stop in cuts]
        return max(sums), sum(total**2 for total in sums)

    possible = list(all_cuts(len(costs), num_stages))
    found = partition(costs, num_stages)
    assert found in possible  # so no layer is lost, and no stage is empty
    assert rank(found) == min(map(rank, possible))


def model_of(family: str) -> Any:
    return tiny_gpt() if family == "gpt" else tiny_hf(family)


def stages_of(model: Any, num_stages: int) -> list[Stage]:
    layers = take_apart(model)
    cuts = partition(parameter_costs(layers), num_stages)
    return [build_stage(layers, [piece], device=CPU) for piece in cuts]


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("family", ["gpt", *FAMILIES])
def test_stages_in_sequence_compute_the_model_and_its_gradients(
    family: str, is_plain: bool
) -> None:
    model = model_of(family)
    if family != "gpt" and not is_plain:
        model = tiny_hf(family, is_tied=True)
        model.config._attn_implementation = "eager"
        checkpoint_blocks(model)
    copies = [copy.deepcopy(model) for _ in range(3)]
    x, _ = tokens()
    expected = model(x) if family == "gpt" else model(x, use_cache=False).logits
    expected.square().sum().backward()
    for num_stages, whole in enumerate(copies, start=1):
        stages = stages_of(whole, num_stages)
        hidden = x
        for stage in stages:
            hidden = stage(hidden)
        assert torch.equal(hidden, expected)
        hidden.square().sum().backward()
        names = [name for stage in stages for name in stage.state_dict()]
        assert sorted(names) == sorted(model.state_dict())
        for stage in stages:
            for name, param in stage.named_parameters():
                assert torch.equal(param.grad, model.get_parameter(name).grad), name


@pytest.mark.parametrize("family", ["gpt", *FAMILIES])
def test_a_model_on_meta_takes_memory_for_its_own_stage_alone(family: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        layers = take_apart(model_of(family))
    model = model_of(family)
    whole = model.state_dict()
    save_file({k: v.contiguous() for k, v in whole.items()}, tmp_path / "a.safetensors")
    cuts = partition(parameter_costs(layers), 2)
    stage = build_stage(layers, [cuts[1]], device=CPU, weights=tmp_path)
    assert all(torch.equal(value, whole[name]) for name, value in stage.state_dict().items())
    assert next(iter(layers.units[0].modules.values())).weight.is_meta
    first = build_stage(layers, [cuts[0]], device=CPU)
    assert first(tokens()[0]).isfinite().all()
    if family == "llama":  # rotary tables, which no file holds
        real = build_stage(take_apart(model), [cuts[0]], device=CPU)
        for (name, table), (_, wanted) in zip(first.named_buffers(), real.named_buffers()):
            assert torch.equal(table, wanted), name


def test_new_weights_do_not_depend_on_the_number_of_stages() -> None:
    def built(piece: tuple[int, int]) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            layers = take_apart(tiny_gpt())
        return build_stage(layers, [piece], device=CPU, seed=7).state_dict()

    whole = built((0, 5))
    for piece in [(0, 2), (2, 3), (3, 5)]:
        assert all(torch.equal(value, whole[name]) for name, value in built(piece).items())
    assert abs(float(whole["blocks.0.mlp.0.weight"].std()) / 0.02 - 1) < 0.1


def test_a_module_that_is_used_twice_is_computed_twice() -> None:
    twice, x = nn.Linear(2, 2), torch.ones(1, 2)
    model = nn.Sequential(twice, nn.Tanh(), twice)
    for layers in (model, list(model)):
        found = take_apart(layers)
        assert found.tied == (("0.weight", "2.weight"), ("0.bias", "2.bias"))
        stage = build_stage(found, [(0, 2), (2, 3)], device=CPU)
        assert torch.equal(stage(stage(x), piece=1), model(x))


def test_functions_build_only_the_layers_of_a_stage() -> None:
    built = []

    def make(number: int) -> nn.Module:
        module = nn.Linear(2, 2)
        if not module.weight.is_meta:
            built.append(number)
        return module

    build_stage(take_apart([partial(make, i) for i in range(4)]), [(1, 3)], device=CPU)
    assert built == [1, 2]


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Row(nn.Sequential):
    pass


class GPT(nn.Module):
    """Of another package, with nothing known about it."""


class Doubled(gpt.GPT):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().forward(*args, **kwargs)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


def test_a_subclass_that_computes_the_same_is_split_as_its_parent() -> None:
    assert len(take_apart(Row(nn.Linear(2, 2), nn.Tanh())).units) == 2
    whole = tiny_gpt()
    compressed = samo.compress_(tiny_gpt(), samo.prune(whole, 0.5))  # has a class of its own
    assert len(take_apart(compressed).units) == len(take_apart(whole).units)


ONE = nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Linear(2, 2), "a pipeline takes nn.Sequential.*got Linear"),
        (Residual(nn.Linear(2, 2)), r"an nn.Sequential with its own forward\(\)"),
        (GPT(), "samo's GPT, or one of .* got GPT"),
        (Doubled(tiny_gpt().config), "got Doubled"),
        ([3], "layer 0 is or returns int; pass a module"),
        ([lambda: 3], "layer 0 is or returns int"),
        ([torch.relu], r"layer 0 cannot be built .*; pass a module, such as nn.ReLU\(\)"),
    ],
)
def test_models_that_cannot_be_split_are_refused(model, text) -> None:
    with pytest.raises(TypeError, match=text):
        take_apart(model)


@pytest.mark.parametrize(
    ("layer", "weights", "text"),
    [
        (Bare().to("meta"), None, "'0.scale' was on the meta device and got no values"),
        (ONE[0], {"0.bias": torch.ones(2)}, "weights lack 1 of this rank's 2 tensors: 0.weight;"),
        (ONE[0], {"0.bias": torch.ones(3)}, r"have '0.bias' as \(3,\), the model as \(2,\)"),
        (ONE[0], "no-such-file", "'no-such-file' is neither a safetensors file nor a folder"),
    ],
)
def test_weights_that_do_not_fit_are_refused(layer, weights, text) -> None:
    with pytest.raises(ValueError, match=text):
        build_stage(take_apart([layer]), [(0, 1)], device=CPU, weights=weights)


def test_micro_batches_have_the_weight_of_a_mean_over_the_batch() -> None:
    logits, target = torch.randn(7, 5, dtype=torch.float64), torch.randint(0, 5, (7,))
    target[[1, 4, 5]] = -100
    pieces = cut((logits, target), 3, "x")
    targets = [(t,) for _, t in pieces]
    factors = loss_weights(targets, "mean")()
    total = sum(F.cross_entropy(x, t) * w for (x, t), w in zip(pieces, factors))
    torch.testing.assert_close(total, F.cross_entropy(logits, target))
    assert loss_weights(targets, "sum")() == [1.0, 1.0, 1.0]
    assert loss_weights([(t.double(),) for (t,) in targets], "mean")() == [3 / 7, 2 / 7, 2 / 7]


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        (None, TypeError, "x must be a tensor with rows .* got NoneType"),
        ((), TypeError, "x must be a tensor with rows"),
        (torch.ones(3), ValueError, r"x has \[3\] rows for 4 micro-batches"),
        ((torch.ones(4), torch.ones(5)), ValueError, r"x has \[4, 5\] rows"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch, error, text) -> None:
    with pytest.raises(error, match=text):
        cut(batch, 4, "x")
