"""Gradual pruning, and what it shares with SET and RigL: which weights, states and settings."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import samo
from samo.pruning import schedules
from samo.pruning.dynamic import _pattern_of
from tests.pruning.test_dynamic import NAMES, backward, build, dense_of, masks_of, weights_of

# Schedules


def test_schedules_are_those_of_the_papers() -> None:
    for step in range(10, 111):
        expected = 0.95 + (0.2 - 0.95) * (1 - (step - 10) / 100) ** 3
        assert schedules.cubic_sparsity(step, 10, 110, 0.2, 0.95) == pytest.approx(expected)
        expected = 0.4 / 2 * (1 + math.cos(step * math.pi / 200))
        assert schedules.cosine_fraction(step, 200, 0.4) == pytest.approx(expected)
    assert schedules.cubic_sparsity(0, 10, 110, 0.2, 0.95) == pytest.approx(0.2)
    assert schedules.cubic_sparsity(500, 10, 110, 0.2, 0.95) == 0.95


# Gradual pruning


def test_gradual_pruning_keeps_the_largest_of_what_was_kept() -> None:
    model = build(None)
    opt = samo.AdamW(model.parameters(), lr=1e-2)
    pruning = samo.GradualPruning(model, opt, 0.9, start=4, stop=27, every=5, initial=0.3)
    kept = masks_of(model)
    changes = []
    for step in range(1, 31):
        backward(model, torch.randn(8, 40))
        opt.step()
        opt.zero_grad()
        before = dense_of(model)
        masks = pruning.step()
        if masks is None:
            continue
        changes.append(step)
        for name in NAMES:
            part = min(1.0, (step - 4) / 23)
            numel = before[name].numel()
            count = numel - round(numel * (0.9 + (0.3 - 0.9) * (1 - part) ** 3))
            score = before[name].abs().masked_fill(~kept[name], -1).view(-1)
            expected = torch.zeros(numel, dtype=torch.bool)
            expected[score.argsort(descending=True)[:count]] = True
            kept[name] = expected.view_as(before[name])
            assert torch.equal(masks[name].to_bool(), kept[name])
            assert torch.equal(dense_of(model)[name], before[name] * kept[name])
    assert changes == [4, 9, 14, 19, 24, 27]


def test_a_model_that_is_sparser_than_the_schedule_waits_for_it() -> None:
    model = build(0.8)
    opt = samo.AdamW(model.parameters())
    pruning = samo.GradualPruning(model, opt, 0.9, start=0, stop=10, every=1)
    masks = [pruning.step() for _ in range(10)]
    assert [found is not None for found in masks].index(True) == 5  # 0.9 * (1 - 0.4**3) = 0.84
    assert masks[-1] is not None
    assert masks[-1].sparsity == pytest.approx(0.9, abs=1e-3)


def test_a_model_sparser_than_the_final_sparsity_is_refused() -> None:
    model = build(0.9)
    opt = samo.AdamW(model.parameters())
    with pytest.raises(
        samo.MaskError, match=r"sparser already \(0\.900, in every tensor\) than sparsity 0\.5, so"
    ):
        samo.GradualPruning(model, opt, sparsity=0.5, start=1, stop=10, every=2)
    samo.GradualPruning(model, opt, sparsity=0.9, start=1, stop=10, every=2)  # as in a resumed run
    mixed = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    samo.compress_(mixed, samo.prune(mixed, 0.9, rules={"2.weight": 0.25}))
    opt = samo.AdamW(mixed.parameters())
    masks = samo.GradualPruning(mixed, opt, 0.5, start=0, stop=1, every=1).step()
    assert masks is not None
    assert [round(mask.sparsity, 3) for mask in masks.values()] == [0.9, 0.5]


def test_a_resumed_gradual_pruning_keeps_counting_and_catches_up_after_the_stop() -> None:
    model = build(None)
    opt = samo.AdamW(model.parameters())
    settings = {"sparsity": 0.9, "start": 0, "stop": 10, "every": 5, "initial": 0.5}
    first, second, late = (samo.GradualPruning(model, opt, **settings, seed=n) for n in (5, 6, 7))
    assert [n for n in range(1, 5) if first.step() is not None] == []  # at step `every` first
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.state_dict()["seed"] == 5
    masks = second.step()
    assert masks is not None
    assert masks.sparsity == pytest.approx(0.85, abs=1e-3)
    late.load_state_dict({**first.state_dict(), "steps": 15})
    masks = late.step()
    assert masks is not None
    assert masks.sparsity == pytest.approx(0.9, abs=1e-3)
    assert late.step() is None


# Which weights and masks


def two_layers(sparsity: float = 0.9) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    return samo.compress_(model, samo.prune(model, sparsity))


def schedule(kind: str, model: nn.Module, opt: Any) -> Any:
    if kind == "gradual":
        return samo.GradualPruning(model, opt, 0.97, start=0, stop=1, every=1)
    return samo.DynamicSparse(model, opt, grow=kind, every=1, stop=9)  # type: ignore[arg-type]


def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 64)).square().mean().backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("kind", ["random", "gradient", "gradual"])
@pytest.mark.parametrize("why", ["frozen", "no optimizer"])
def test_weights_that_nothing_trains_keep_mask_and_values(kind: str, why: str) -> None:
    model = two_layers()
    if why == "frozen":
        model[0].requires_grad_(False)
    opt = samo.AdamW((model if why == "frozen" else model[2]).parameters())
    moving = schedule(kind, model, opt)
    before = [model[0].weight.detach().clone(), model[2].weight.detach().clone()]
    masks = None
    for _ in range(3):
        step(model, opt)
        masks = moving.step() or masks
    assert masks is not None
    assert list(masks) == ["0.weight", "2.weight"]
    assert torch.equal(model[0].weight, before[0])
    assert not torch.equal(masks["2.weight"].to_bool(), before[1] != 0)


@pytest.mark.parametrize("kind", ["random", "gradient", "gradual"])
def test_a_model_of_which_nothing_is_trained_is_refused(kind: str) -> None:
    model = two_layers()
    elsewhere = two_layers()
    other = samo.AdamW(elsewhere.parameters())
    with pytest.raises(samo.MaskError, match=r"none of the 2 tensors with a mask can change it"):
        schedule(kind, model, other)


def test_masks_with_a_structure_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    samo.compress_(model, samo.prune(model, pattern="2:4"))
    opt = samo.AdamW(model.parameters())
    with pytest.raises(samo.MaskError, match=r"the mask of '0.weight' has the pattern 2:4, which"):
        samo.DynamicSparse(model, opt, every=1, stop=9)

    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)
    model = nn.Sequential(*layers)
    kept = torch.arange(16) < 7
    ticket = samo.Masks(
        {
            "0.weight": samo.Mask.from_bool(kept.view(16, 1, 1, 1).expand(model[0].weight.shape)),
            "1.weight": samo.Mask.from_bool(kept),
            "1.bias": samo.Mask.from_bool(kept),
            "3.weight": samo.Mask.from_bool(kept.view(1, 16, 1, 1).expand(model[3].weight.shape)),
        }
    )
    samo.compress_(model, ticket)
    opt = samo.AdamW(model.parameters())
    with pytest.raises(samo.MaskError, match=r"'1.weight' keeps 7 of 16 channels, and entries"):
        samo.DynamicSparse(model, opt, every=1, stop=9)
    pruning = samo.GradualPruning(model, opt, 0.9, start=0, stop=1, every=1)
    masks = pruning.step()  # entries are only dropped, and scales are no matrices
    assert masks is not None
    assert masks["1.weight"] == ticket["1.weight"]
    assert masks["1.bias"] == ticket["1.bias"]
    assert (masks & ticket) == masks
    assert masks["0.weight"] != ticket["0.weight"]


@pytest.mark.parametrize("pattern", ["2:4", "1:16"])
@pytest.mark.parametrize("layer", [nn.Linear(64, 48), nn.Conv2d(32, 8, 3)], ids=["linear", "conv"])
def test_patterns_are_told_from_random_masks(pattern: str, layer: nn.Module) -> None:
    kept, group = map(int, pattern.split(":"))
    drawn = samo.prune(layer, pattern=pattern)["weight"]
    assert _pattern_of(drawn, 1) == pattern
    like = samo.prune(layer, 1 - kept / group, method="random")["weight"]
    assert _pattern_of(like, 1) is None
    assert _pattern_of(samo.Mask.whole(drawn.shape), 1) is None


@pytest.mark.parametrize("grow", ["random", "gradient"])
@pytest.mark.parametrize("is_deleted", [True, False])
def test_one_object_moves_the_masks_of_a_weight(grow: Any, is_deleted: bool) -> None:
    model = two_layers()
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(model, opt, grow=grow, every=1, stop=9)
    with pytest.raises(
        samo.CompressionError, match=r"another DynamicSparse already moves the mask of '0.weight'"
    ):
        samo.DynamicSparse(model, opt, every=2, stop=9)
    step(model, opt)
    assert moving.step() is not None
    twin = copy.deepcopy(model)  # nothing moves the masks of the copy yet
    samo.DynamicSparse(twin, samo.AdamW(twin.parameters()), every=2, stop=9)
    if is_deleted:
        del moving
    else:
        moving.detach()
    samo.DynamicSparse(model, opt, every=2, stop=9)


# What the weights are


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_written_to_the_model_are_what_is_compared(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    samo.compress_(model, samo.Masks.whole(model), dtype=dtype)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    pruning = samo.GradualPruning(model, opt, 0.5, start=0, stop=1, every=1)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(64, 64))
    expected = samo.prune(model, 0.5)["0.weight"]
    masks = pruning.step()
    assert masks is not None
    assert expected.distance(masks["0.weight"]) < 0.01  # bfloat16 has equals


@pytest.mark.parametrize("kind", ["random", "gradient", "gradual"])
def test_weights_that_are_not_finite_are_refused(kind: str) -> None:
    model = two_layers()
    opt = samo.AdamW(model.parameters())
    moving = schedule(kind, model, opt)
    model(torch.randn(4, 64)).square().mean().backward()
    weight = weights_of(model)["0.weight"]
    before = weight.mask
    with torch.no_grad():
        weight.values[int(weight.values.abs().argmax())] = torch.nan
    with pytest.raises(ValueError, match=r"1 of the 410 kept weights of '0.weight' are NaN or inf"):
        moving.step()
    assert weight.mask is before


# Gradients


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_set_to_zero_leave_no_scores_behind(set_to_none: bool) -> None:
    found = []
    for discards in (True, False):
        model = build()
        opt = samo.AdamW(model.parameters())
        moving = samo.DynamicSparse(model, opt, grow="gradient", every=1, stop=100)
        if discards:
            backward(model, 100 * torch.randn(8, 40))
            opt.zero_grad(set_to_none=set_to_none)
        backward(model, torch.randn(8, 40, generator=torch.Generator().manual_seed(5)))
        found.append(moving.step())
    assert found[0] == found[1]


def test_what_growth_holds_is_what_the_documents_say() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    samo.compress_(model, samo.prune(model, 0.9, method="random"))
    opt = samo.AdamW(model.parameters())
    for candidates in (1, 4):
        moving = None  # detaches the last one
        moving = samo.DynamicSparse(
            model, opt, grow="gradient", every=1, stop=10**6, candidates=candidates
        )
        model(torch.randn(2, 1024)).sum().backward()
        weight = weights_of(model)["0.weight"]
        found, kept = moving._growths["0.weight"]._found, weight.kept
        held = found.survivors.nbytes + found.candidates.nbytes + found.scores.nbytes
        bitmap = weight.mask.nbytes
        assert held == pytest.approx(bitmap + kept / 8 + 4 * candidates * 0.3 * kept, abs=32)


# State and settings


def test_a_state_of_other_settings_is_refused() -> None:
    model = build()
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(model, opt, every=2, stop=9, seed=5)
    state = moving.state_dict()
    moving.detach()
    other = samo.DynamicSparse(model, opt, every=3, stop=9)
    with pytest.raises(ValueError, match=r"by DynamicSparse with every=2, but this one has 3;"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"not the state of a DynamicSparse \(no 'steps', 'seed'"):
        other.load_state_dict({})
    with pytest.raises(ValueError, match=r"'steps' of the saved state must be a whole number of 0"):
        other.load_state_dict({**other.state_dict(), "steps": "many"})
    assert other.state_dict()["steps"] == 0


DYNAMIC: list[tuple[dict[str, Any], str]] = [
    ({"grow": "magic"}, r"grow='magic' is unknown; it is one of random, gradient"),
    ({"drop": "0.3"}, r"drop must be a number, got '0.3'"),
    ({"drop": 0}, r"in \(0, 1\], got 0"),
    ({"every": 2.5}, r"every must be a whole number of 1 or more, got 2.5"),
    ({"every": 0}, r"every must be a whole number of 1 or more, got 0"),
    ({"stop": True}, r"stop must be a whole number of 1 or more, got True"),
    ({"every": 9}, r"every 9 steps until step 9, which is never"),
    ({"seed": "x"}, r"seed must be a whole number, got 'x'"),
    ({"candidates": 0}, r"candidates must be a whole number of 1 or more, got 0"),
]


@pytest.mark.parametrize(("options", "message"), DYNAMIC, ids=str)
def test_bad_settings_of_dynamic_sparse_are_refused(options: Any, message: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=message):
        samo.DynamicSparse(
            model, samo.AdamW(model.parameters()), **{"every": 2, "stop": 9, **options}
        )


GRADUAL: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sparsity": "0.9"}, ValueError, r"sparsity must be a number, got '0.9'"),
    ({"initial": None}, ValueError, r"initial must be a finite number, got None"),
    ({"initial": 0.95}, ValueError, r"0 <= initial <= sparsity < 1, got initial=0.95 and"),
    ({"start": 0.5}, ValueError, r"start must be a whole number, got 0.5"),
    ({"start": 9}, ValueError, "got start=9, stop=9, every=1"),
    ({"seed": 1.5}, ValueError, r"seed must be a whole number, got 1.5"),
    ({"sparsity": 0.9995}, samo.MaskError, r"keep none of the 576 weights of '2.weight'"),
]


@pytest.mark.parametrize(("options", "error", "message"), GRADUAL, ids=str)
def test_bad_settings_of_gradual_pruning_are_refused(
    options: Any, error: type[Exception], message: str
) -> None:
    model = build()
    usual = {"sparsity": 0.9, "start": 0, "stop": 9, "every": 1}
    with pytest.raises(error, match=message):
        samo.GradualPruning(model, samo.AdamW(model.parameters()), **{**usual, **options})


@pytest.mark.parametrize("kind", ["random", "gradual"])
def test_a_wrong_optimizer_or_model_is_refused(kind: str) -> None:
    model = build()
    for opt, found in ((None, "NoneType"), (model, "Sequential"), ("opt", "str"), ([1], "int")):
        with pytest.raises(TypeError, match=f"opt must be a torch.optim.Optimizer .* got {found};"):
            schedule(kind, model, opt)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        schedule(kind, "model", None)  # type: ignore[arg-type]
    bare = samo.compress_(nn.Linear(3, 3), samo.Masks({}), dtype=torch.bfloat16)
    for without in (nn.Linear(3, 3), bare):
        with pytest.raises(samo.CompressionError, match="no parameter of the model has a mask"):
            schedule(kind, without, samo.AdamW(without.parameters()))
    if kind == "random":
        whole = build(None)
        with pytest.raises(samo.MaskError, match=r"all 3,136 weights are kept, so none is left"):
            schedule(kind, whole, samo.AdamW(whole.parameters()))


def test_numpy_integers_are_integers() -> None:
    model = build()
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(model, [opt], every=np.int64(2), stop=9, seed=np.int64(3))
    assert type(moving.state_dict()["seed"]) is int
