"""Gradual pruning, and what it shares with SET and RigL: which weights, states and settings."""

from typing import Any

import pytest
import torch
from torch import nn

import samo
from tests.pruning.test_dynamic import (
    NAMES,
    build,
    changes,
    dense_of,
    largest,
    train_step,
    weights_of,
)

# Gradual pruning


def test_gradual_pruning_keeps_the_largest_of_what_was_kept() -> None:
    model = build(None)
    opt = samo.AdamW(model.parameters(), lr=1e-2)
    pruning = samo.GradualPruning(model, opt, 0.9, start=4, stop=27, every=5, initial=0.3)
    seen = []
    for step, name, dense, before, after in changes(pruning, model, opt, 30):
        seen.append((step, name))
        part = min(1.0, (step - 4) / 23)
        numel = dense.numel()
        count = numel - round(numel * (0.9 + (0.3 - 0.9) * (1 - part) ** 3))
        assert torch.equal(after, largest(dense, before, count))
        assert torch.equal(dense_of(model)[name], dense * after)
    assert seen == [(step, name) for step in (4, 9, 14, 19, 24, 27) for name in NAMES]


def test_a_model_sparser_than_the_final_sparsity_is_refused() -> None:
    model = build(0.9)
    opt = samo.AdamW(model.parameters())
    with pytest.raises(samo.MaskError, match=r"every tensor is already sparser than sparsity 0.5"):
        samo.GradualPruning(model, opt, sparsity=0.5, start=1, stop=10, every=2)
    samo.GradualPruning(model, opt, sparsity=0.9, start=1, stop=10, every=2)  # as in a resumed run
    mixed = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    samo.compress_(mixed, samo.prune(mixed, 0.8, rules={"2.weight": 0.25}))
    pruning = samo.GradualPruning(mixed, samo.AdamW(mixed.parameters()), 0.9, 0, 3, 1)
    found = [pruning.step() for _ in range(3)]  # 0.633, 0.867 and 0.9: the first waits for it
    sparsities = [[round(m.sparsity, 3) for m in masks.values()] for masks in found if masks]
    assert sparsities == [[0.8, 0.633], [0.867, 0.867], [0.9, 0.9]]


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


def schedule(kind: str, model: nn.Module, opt: Any) -> Any:
    if kind == "gradual":
        return samo.GradualPruning(model, opt, 0.97, start=0, stop=1, every=1)
    return samo.DynamicSparse(model, opt, grow=kind, every=1, stop=9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "why"),
    [("random", "frozen"), ("gradient", "frozen"), ("gradual", "no optimizer")],
)
def test_weights_that_nothing_trains_keep_mask_and_values(kind: str, why: str) -> None:
    model = build(0.9)
    if why == "frozen":
        model[0].requires_grad_(False)
    opt = samo.AdamW((model if why == "frozen" else model[2]).parameters())
    moving = schedule(kind, model, opt)
    before = [model[0].weight.detach().clone(), model[2].weight.detach().clone()]
    masks = None
    for _ in range(3):
        train_step(model, opt)
        masks = moving.step() or masks
    assert masks is not None
    assert list(masks) == ["0.weight", "2.weight"]
    assert torch.equal(model[0].weight, before[0])
    assert not torch.equal(masks["2.weight"].to_bool(), before[1] != 0)


def test_masks_of_norms_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    before = samo.prune(model, 0.5, rules={"1.weight": 0.5})
    samo.compress_(model, before)
    opt = samo.AdamW(model.parameters())
    masks = samo.GradualPruning(model, opt, 0.9, start=0, stop=1, every=1).step()
    assert masks is not None
    assert masks["1.weight"] == before["1.weight"]
    assert masks["0.weight"].kept == 410


def test_masked_lstms_and_embeddings_are_pruned_too() -> None:
    model = nn.ModuleDict({"rows": nn.Embedding(32, 8), "lstm": nn.LSTM(8, 8)})
    samo.compress_(model, samo.prune(model, rules={"rows.weight": 0.5, "lstm.weight_*": 0.5}))
    opt = samo.AdamW(model.parameters())
    masks = samo.GradualPruning(model, opt, 0.75, start=0, stop=1, every=1).step()
    assert masks is not None
    assert {mask.sparsity for mask in masks.values()} == {0.75}


# What the weights are


def test_values_written_to_the_model_are_what_is_compared() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    samo.compress_(model, samo.Masks.ones(model), dtype=torch.bfloat16)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    pruning = samo.GradualPruning(model, opt, 0.5, start=0, stop=1, every=1)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(64, 64))
    expected = samo.prune(model, 0.5)["0.weight"]
    masks = pruning.step()
    assert masks is not None
    assert expected.common(masks["0.weight"]) > 0.99 * 2048  # bfloat16 has equals


@pytest.mark.parametrize("kind", ["random", "gradient", "gradual"])
def test_weights_that_are_not_finite_are_refused(kind: str) -> None:
    model = build(0.9)
    opt = samo.AdamW(model.parameters())
    moving = schedule(kind, model, opt)
    train_step(model, opt)
    weight = weights_of(model)["0.weight"]
    before = weight.mask
    with torch.no_grad():
        weight.values[int(weight.values.abs().argmax())] = torch.nan
    with pytest.raises(ValueError, match=r"1 of the 256 kept weights of '0.weight' are NaN or inf"):
        moving.step()
    assert weight.mask is before


# State and settings


def test_a_state_of_other_settings_is_refused() -> None:
    model = build()
    opt = samo.AdamW(model.parameters())
    moving = samo.DynamicSparse(model, opt, every=2, stop=9, seed=5)
    state = moving.state_dict()
    other = samo.DynamicSparse(model, opt, every=3, stop=9)
    with pytest.raises(ValueError, match=r"by DynamicSparse with every=2, but this one has 3;"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"'steps' of the saved state must be a whole number of 0"):
        other.load_state_dict({**other.state_dict(), "steps": "many"})
    assert other.state_dict()["steps"] == 0


SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("dynamic", {"grow": "magic"}, r"grow must be one of random, gradient, got 'magic'"),
    ("dynamic", {"drop": "0.3"}, r"drop must be a finite number, got '0.3'"),
    ("dynamic", {"drop": 0}, r"fraction of kept entries to replace, got 0"),
    ("dynamic", {"every": 2.5}, r"every must be a whole number of 1 or more, got 2.5"),
    ("dynamic", {"every": 9}, r"stop must be a whole number of 10 or more, got 9"),
    ("dynamic", {"seed": "x"}, r"seed must be a whole number, got 'x'"),
    ("dynamic", {"candidates": 0}, r"candidates must be a whole number of 1 or more, got 0"),
    ("gradual", {"sparsity": "0.9"}, r"sparsity must be a finite number, got '0.9'"),
    ("gradual", {"initial": 0.95}, r"0 <= initial <= sparsity < 1, got initial=0.95 and"),
    ("gradual", {"start": 0.5}, r"start must be a whole number of 0 or more, got 0.5"),
    ("gradual", {"start": 9}, "stop must be a whole number of 10 or more, got 9"),
    ("gradual", {"sparsity": 0.9995}, r"keep none of the 576 weights of '2.weight'"),
]


@pytest.mark.parametrize(("kind", "options", "message"), SETTINGS, ids=str)
def test_bad_settings_are_refused(kind: str, options: Any, message: str) -> None:
    model = build()
    make: Any = samo.DynamicSparse if kind == "dynamic" else samo.GradualPruning
    usual = {} if kind == "dynamic" else {"sparsity": 0.9, "start": 0}
    with pytest.raises(ValueError, match=message):
        make(model, samo.AdamW(model.parameters()), **{**usual, "every": 2, "stop": 9, **options})


def test_a_wrong_optimizer_or_model_is_refused() -> None:
    with pytest.raises(samo.MaskError, match=r"none of the 2 tensors with a mask is a matrix"):
        schedule("gradual", build(0.9), samo.AdamW(build(0.9).parameters()))
    with pytest.raises(TypeError, match=r"opt must be a torch.optim.Optimizer .* got Sequential"):
        schedule("random", build(), build())
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        schedule("gradual", "model", None)  # type: ignore[arg-type]
    bare = samo.compress_(nn.Linear(3, 3), samo.Masks({}), dtype=torch.bfloat16)
    with pytest.raises(samo.CompressionError, match="the model has no masks"):
        schedule("gradual", bare, samo.AdamW(bare.parameters()))
    whole = build(None)
    with pytest.raises(samo.MaskError, match=r"all weights are kept, so none is left to grow"):
        schedule("random", whole, samo.AdamW(whole.parameters()))
