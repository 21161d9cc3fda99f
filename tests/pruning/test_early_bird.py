"""Tickets against a plain version of the published rule."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import samo
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.pruning.early_bird import Distance, Settling, distance_of


def masks_of(*flat: np.ndarray) -> Masks:
    return Masks({f"{i}": Mask.from_bool(torch.tensor(bits).bool()) for i, bits in enumerate(flat)})


def published_distance(a: np.ndarray, b: np.ndarray, distance: Distance) -> float:
    if distance == "hamming":
        return float((a != b).sum()) / a.size
    most = max(a.sum(), b.sum())
    return float(most - (a & b).sum()) / float(most) if most else 0.0


def published_rule(
    masks: Sequence[np.ndarray], queue: int, threshold: float, distance: Distance
) -> tuple[int | None, list[list[float]]]:
    """The published loop: a list of masks, the oldest popped, the newest against the others."""
    held: list[np.ndarray] = []
    rows = []
    for place, mask in enumerate(masks):
        if len(held) == queue:
            held.pop(0)
        held.append(mask)
        distances = [published_distance(held[-1], other, distance) for other in held[:-1]]
        rows.append(distances)
        if len(held) == queue and all(d <= threshold for d in distances):
            return place, rows
    return None, rows


@st.composite
def drifting_masks(draw: st.DrawFn) -> list[np.ndarray]:
    """Draw masks that change less and less, as in training, or suddenly again."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 200))
    kept = draw(st.integers(0, size))
    scores = rng.normal(size=size)
    found = []
    for _ in range(draw(st.integers(1, 14))):
        scores = scores + rng.normal(size=size) * draw(st.sampled_from([0.0, 0.01, 0.1, 0.3, 3.0]))
        keep = np.zeros(size, bool)
        keep[np.argsort(-np.abs(scores))[:kept]] = True
        found.append(keep)
    return found


@settings(max_examples=40)
@given(
    drifting_masks(),
    st.integers(2, 6),
    st.sampled_from([0.0, 0.1, 0.2, 0.3]),
    st.sampled_from(["kept", "hamming"]),
)
def test_the_rule_is_the_published_one(
    masks: list[np.ndarray], queue: int, threshold: float, distance: Distance
) -> None:
    settling = Settling(queue, threshold, distance)
    drawn = None
    for place, mask in enumerate(masks):
        cuts = [len(mask) // 3]  # distances are over all tensors together
        is_settled = settling.add(masks_of(*np.split(mask, cuts)))
        if is_settled:
            drawn = place
            break
    expected, rows = published_rule(masks, queue, threshold, distance)
    assert drawn == expected
    assert settling.rows == rows
    assert len(settling.masks) <= queue


def test_a_distance_equal_to_the_threshold_settles() -> None:
    a, b = np.arange(20) < 10, (np.arange(20) >= 3) & (np.arange(20) < 13)  # 7 of 10 in common
    settling = Settling(2, 0.3, "kept")
    assert not settling.add(masks_of(a))
    assert settling.add(masks_of(b))
    assert distance_of(Masks({}), Masks({})) == 0


# Watching a model


def linear(*sizes: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))).to(dtype)


def drift_(model: nn.Module, step: int) -> None:
    """Change the weights less and less, the same on every run."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1 / (1 + step) ** 2
            parameter.add_(noise.to(parameter.dtype))


@pytest.mark.parametrize(
    ("distance", "dtype", "how"),
    [
        ("kept", torch.bfloat16, {"sparsity": 0.8}),
        ("hamming", torch.float32, {"sparsity": 0.8, "scope": "global", "seed": 3}),
        ("kept", torch.float32, {"sparsity": 0.8, "scope": "erk", "rules": {"0.*": 0.5}}),
        ("hamming", torch.bfloat16, {"pattern": "1:4", "skip": ["1.*"]}),
    ],
    ids=str,
)
def test_a_ticket_is_drawn_when_the_masks_of_prune_settle(
    how: Any, distance: Distance, dtype: torch.dtype
) -> None:
    model = linear(32, 64, 32, dtype=dtype)
    bird = samo.EarlyBird(model, **how, distance=distance, threshold=0.05, queue=3)
    settling = Settling(3, 0.05, distance)
    for step in range(20):
        drift_(model, step)
        masks = samo.prune(model, **how)
        is_settled = settling.add(masks)
        ticket = bird.observe()
        assert bird.distances == settling.rows
        assert ticket == (masks if is_settled else None) == bird.masks
        if is_settled:
            break
    assert 3 <= step < 19
    assert bird.reason.startswith(f"settled after {step + 1} observations: distances 0.0")


def test_after_the_draw_the_ticket_stays_and_the_model_is_left_alone() -> None:
    model = linear(16, 16)
    model(torch.randn(2, 16)).sum().backward()
    before = [(p.detach().clone(), p.grad.clone(), p._version) for p in model.parameters()]
    bird = samo.EarlyBird(model, 0.5, queue=2)
    assert bird.observe() is None
    ticket = bird.observe()
    assert ticket is not None
    for parameter, (value, grad, version) in zip(model.parameters(), before):
        assert torch.equal(parameter, value)
        assert torch.equal(parameter.grad, grad)
        assert parameter._version == version
    samo.compress_(model, ticket)
    assert bird.observe() is ticket is bird.masks is bird.draw_now()
    assert bird._settling.masks == []


def test_a_failed_observation_leaves_no_trace_and_draw_now_takes_the_weights_of_now() -> None:
    model = linear(32, 32)
    bird = samo.EarlyBird(model, 0.9, queue=3)
    bird.observe()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"1 of the 1,024 weights of '0\.weight' are NaN"):
        bird.observe()
    assert bird.distances == [[]]
    with torch.no_grad():
        model[0].weight[0, 0] = 1
    drift_(model, 0)
    ticket = bird.draw_now()
    assert ticket == samo.prune(model, 0.9)
    assert bird.reason.startswith("not settled after 1 observations: distances none, queue 3")
    assert bird.observe() is ticket


# Resuming


@pytest.mark.parametrize(
    ("break_at", "how"), [(0, {}), (3, {}), (6, {"distance": "hamming"}), (12, {})]
)
def test_a_resumed_watch_draws_the_same(break_at: int, how: Any, tmp_path: Path) -> None:
    def watch(bird: samo.EarlyBird, model: nn.Module, start: int, stop: int) -> None:
        for step in range(start, stop):
            drift_(model, step)
            bird.observe()

    def fresh() -> tuple[nn.Sequential, samo.EarlyBird]:
        model = linear(32, 32)
        return model, samo.EarlyBird(model, 0.8, queue=3, threshold=0.05, **how)

    model, whole = fresh()
    watch(whole, model, 0, 12)
    assert whole.masks is not None

    model, first = fresh()
    watch(first, model, 0, break_at)
    samo.save(tmp_path / "checkpoint", model, extra={"step": 7, **first.state_dict()})
    model, second = fresh()
    second.load_state_dict(samo.load(tmp_path / "checkpoint", model))
    watch(second, model, break_at, 12)
    assert second.masks == whole.masks
    assert second.reason == whole.reason
    assert second.distances == whole.distances
    assert second._settling.masks == whole._settling.masks


def test_a_wrong_state_is_refused_and_changes_nothing() -> None:
    bird = samo.EarlyBird(linear(16, 16), 0.5)
    bird.observe()
    state = bird.state_dict()
    other = samo.EarlyBird(linear(16, 8), 0.5)
    with pytest.raises(ValueError, match="a mask of 128 weights needs 4 int32 words"):
        other.load_state_dict(state)
    assert other.distances == []
    with pytest.raises(ValueError, match=r"by EarlyBird with sparsity=0.5, but this one has 0.6;"):
        samo.EarlyBird(linear(16, 16), 0.6).load_state_dict(state)
    with pytest.raises(ValueError, match=r"the state has no 'early_bird'"):
        bird.load_state_dict({"step": 1})
    del state["early_bird/0/0.weight"]
    with pytest.raises(KeyError, match=r"early_bird/0/0.weight"):
        bird.load_state_dict(state)
    assert bird.distances == [[]]


# Settings


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"sparsity": 1.0}, ValueError, "sparsity must be at least 0 and less than 1, got 1.0"),
        ({"sparsity": 0}, ValueError, "sparsity 0 prunes nothing"),
        ({"queue": 1}, ValueError, "queue must be a whole number of 2 or more, got 1"),
        ({"threshold": 1.5}, ValueError, "threshold must be at least 0 and less than 1, got 1.5"),
        ({"distance": "l2"}, ValueError, "distance must be one of kept, hamming, got 'l2'"),
        ({"skip": ["x.*"]}, ValueError, r"skip pattern 'x\.\*' matches no parameter"),
        ({"seed": "x"}, ValueError, "seed must be a whole number, got 'x'"),
        ({"model": "model"}, TypeError, r"model must be a torch.nn.Module, got str"),
    ],
)
def test_bad_settings_are_refused(how: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        samo.EarlyBird(**{"model": linear(16, 16), "sparsity": 0.5, **how})


def test_a_compressed_model_is_refused() -> None:
    model = linear(8, 8)
    bird = samo.EarlyBird(model, 0.5)
    assert bird.observe() is None
    samo.compress_(model, samo.prune(model, 0.5))
    with pytest.raises(samo.CompressionError, match=r"samo.GradualPruning and samo.DynamicSparse"):
        samo.EarlyBird(model, 0.5)
    with pytest.raises(samo.CompressionError, match=r"its masks are fixed"):
        bird.observe()
