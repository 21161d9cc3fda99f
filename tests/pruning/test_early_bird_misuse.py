"""What an `EarlyBird` is not for, and settings that are none."""

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import samo


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8))


def test_a_compressed_model_is_refused() -> None:
    model = layer()
    bird = samo.EarlyBird(model, 0.5)
    assert bird.observe() is None
    samo.compress_(model, samo.prune(model, 0.5))
    with pytest.raises(samo.CompressionError, match=r"samo.GradualPruning or samo.DynamicSparse"):
        samo.EarlyBird(model, 0.5)
    with pytest.raises(samo.CompressionError, match=r"masks stay as they are, and would settle"):
        bird.observe()


SETTINGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "threshold": ({"threshold": "0.1"}, ValueError, r"threshold must be a number, got '0.1'"),
    "every": ({"every": 2.5}, ValueError, r"every must be a whole number of 1 or more, got 2.5"),
    "every nan": ({"every": float("nan")}, ValueError, r"every must be a whole number"),
    "seed": ({"seed": "x"}, ValueError, r"seed must be a whole number, got 'x'"),
    "device": ({"device": "nosuch"}, ValueError, r"device is 'nosuch', which torch does not know"),
    "rules": ({"rules": ["0.weight"]}, TypeError, r"rules must map patterns .* got \['0.weight'\]"),
    "skip": ({"skip": 5}, TypeError, r"skip must be names or shell-style patterns .* got 5"),
    "skip of numbers": ({"skip": [5]}, TypeError, r"skip must be names .* got \[5\]"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_none_are_refused(case: str) -> None:
    options, error, message = SETTINGS[case]
    with pytest.raises(error, match=message):
        samo.EarlyBird(layer(), 0.5, **options)


@pytest.mark.parametrize("case", ["rules", "skip", "skip of numbers"])
def test_prune_refuses_them_alike(case: str) -> None:
    options, error, message = SETTINGS[case]
    with pytest.raises(error, match=message):
        samo.prune(layer(), 0.5, **options)


def test_what_is_no_model_or_seed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        samo.EarlyBird("model", 0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        samo.prune("model", 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seed must be a whole number, got 1.5"):
        samo.prune(layer(), 0.5, seed=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)], ids=["numpy", "torch"])
def test_steps_of_any_kind_are_numbers_and_can_be_saved(step: Any) -> None:
    model = layer()
    bird = samo.EarlyBird(model, 0.5)
    bird.observe(step)
    assert type(bird.steps[0]) is int
    with tempfile.TemporaryDirectory() as folder:
        samo.save(f"{folder}/at", model, extra=bird.state_dict())
    with pytest.raises(ValueError, match=r"step must be a whole number, got 'third'"):
        bird.observe("third")  # type: ignore[arg-type]


def test_a_state_with_gaps_is_refused() -> None:
    bird = samo.EarlyBird(layer(), 0.5)
    bird.observe()
    state = bird.state_dict()
    with pytest.raises(ValueError, match=r"lacks calls, distances, how, masks, settings, steps;"):
        bird.load_state_dict({"early_bird": {}})
    del state["early_bird/0/0.weight"]
    with pytest.raises(ValueError, match=r"lacks the mask 'early_bird/0/0.weight' \(1 of 1\)"):
        bird.load_state_dict(state)
