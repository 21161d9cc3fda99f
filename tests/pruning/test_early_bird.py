"""Tickets against a plain version of the published rule, on recorded masks and on models in training."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import samo
from samo.mask import bitmap
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.pruning.early_bird import Settling

Distance = Literal["kept", "hamming"]


def masks_of(*flat: Sequence[bool] | np.ndarray) -> Masks:
    return Masks(
        {f"{i}.weight": Mask.from_bool(torch.tensor(bits).bool()) for i, bits in enumerate(flat)}
    )


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


@st.composite
def bit_pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Draw two arrays of bits, and where to cut them into tensors."""
    size = draw(st.integers(1, 400))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    a, b = (rng.random(size) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])) for _ in range(2))
    return a, b, sorted(draw(st.sets(st.integers(1, size), max_size=3)) - {size})


# Distances and the rule


@settings(max_examples=50)
@given(bit_pairs())
def test_distances_of_packed_bits_are_those_of_numpy(
    pair: tuple[np.ndarray, np.ndarray, list[int]],
) -> None:
    a, b, cuts = pair
    one, two = masks_of(*np.split(a, cuts)), masks_of(*np.split(b, cuts))
    assert one.hamming(two) == published_distance(a, b, "hamming")
    assert one.distance(two) == published_distance(a, b, "kept")
    assert [mask.common(two[name]) for name, mask in one.items()] == [
        int((x & y).sum()) for x, y in zip(np.split(a, cuts), np.split(b, cuts))
    ]


def test_distances_never_unpack_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (masks_of(np.random.default_rng(i).random(5000) < 0.1) for i in (0, 1))

    def unpack(*_: Any) -> Tensor:
        raise AssertionError("unpacked")

    monkeypatch.setattr(bitmap, "unpack", unpack)
    assert a.distance(b) > 0.8
    assert a.hamming(b) > 0.1


@settings(max_examples=60)
@given(
    drifting_masks(),
    st.integers(2, 6),
    st.sampled_from([0.0, 0.1, 0.2, 0.3]),
    st.sampled_from(["kept", "hamming"]),
)
def test_the_rule_is_the_published_one(
    masks: list[np.ndarray], queue: int, threshold: float, distance: Distance
) -> None:
    settling = Settling(queue, threshold, distance, keeps_all=False)
    drawn = None
    for place, mask in enumerate(masks):
        if settling.add(masks_of(mask)):
            drawn = place
            break
    expected, rows = published_rule(masks, queue, threshold, distance)
    assert drawn == expected
    assert settling.rows == rows
    assert len(settling.masks) <= queue


@settings(max_examples=25)
@given(drifting_masks(), st.integers(2, 6))
def test_history_changes_nothing_but_the_length_of_the_rows(
    masks: list[np.ndarray], queue: int
) -> None:
    banded, full = (Settling(queue, 0.1, "kept", keeps_all=keeps) for keeps in (False, True))
    for i, mask in enumerate(masks):
        assert banded.add(masks_of(mask)) == full.add(masks_of(mask))
        assert banded.recent == full.recent == banded.rows[-1]
        assert full.rows[-1] == [published_distance(mask, other, "kept") for other in masks[:i]]


def test_a_distance_equal_to_the_threshold_settles() -> None:
    a, b = np.arange(20) < 10, (np.arange(20) >= 3) & (np.arange(20) < 13)  # 7 of 10 in common
    assert published_distance(a, b, "kept") == 0.3
    settling = Settling(2, 0.3, "kept", keeps_all=False)
    assert not settling.add(masks_of(a))
    assert settling.add(masks_of(b))


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
    ("distance", "dtype"), [("kept", torch.bfloat16), ("hamming", torch.float32)]
)
@pytest.mark.parametrize(
    "how",
    [
        {"sparsity": 0.8},
        {"sparsity": 0.8, "scope": "global", "seed": 3},
        {"sparsity": 0.8, "scope": "erk", "rules": {"0.*": 0.5}},
        {"pattern": "1:4", "skip": ["1.*"]},
    ],
    ids=str,
)
def test_a_ticket_is_drawn_when_the_masks_of_prune_settle(
    how: Any, distance: Distance, dtype: torch.dtype
) -> None:
    model = linear(32, 64, 32, dtype=dtype)
    bird = samo.EarlyBird(model, **how, distance=distance, threshold=0.05, queue=3)
    recorded: list[Masks] = []
    ticket = None
    while ticket is None:
        drift_(model, len(recorded))
        recorded.append(samo.prune(model, **how))
        ticket = bird.observe()
    flat = [
        np.concatenate([mask.to_bool().numpy().ravel() for mask in masks.values()])
        for masks in recorded
    ]
    expected, rows = published_rule(flat, 3, 0.05, distance)
    assert expected == len(recorded) - 1 >= 3
    assert bird.distances == rows
    assert ticket == recorded[-1] == bird.masks
    assert bird.steps == list(range(len(recorded)))
    assert bird.reason.startswith(f"settled at observation {len(recorded)}: distances 0.0")


def test_every_counts_calls_and_steps_are_named_by_the_caller() -> None:
    model = linear(16, 16)
    bird = samo.EarlyBird(model, 0.5, every=3, queue=3)
    found = [bird.observe(step=100 * call) for call in range(7)]
    assert bird.steps == [0, 300, 600]
    assert [masks is not None for masks in found] == [False] * 6 + [True]


def test_after_the_draw_the_ticket_stays_and_the_model_is_left_alone() -> None:
    model = linear(16, 16)
    bird = samo.EarlyBird(model, 0.5, queue=2, limit=2)
    bird.observe()
    ticket = bird.observe()
    assert ticket is not None
    samo.compress_(model, ticket)
    assert bird.observe() is ticket is bird.masks is bird.draw_now()
    assert len(bird.steps) == 2
    assert bird._settling.masks == []


def test_the_model_and_its_gradients_are_not_touched() -> None:
    model = linear(16, 16)
    model(torch.randn(2, 16)).sum().backward()
    before = [(p.detach().clone(), p.grad.clone(), p._version) for p in model.parameters()]
    bird = samo.EarlyBird(model, 0.5)
    bird.observe()
    for parameter, (value, grad, version) in zip(model.parameters(), before):
        assert torch.equal(parameter, value)
        assert torch.equal(parameter.grad, grad)
        assert parameter._version == version


def test_a_failed_observation_leaves_no_trace() -> None:
    model = linear(16, 16)
    bird = samo.EarlyBird(model, 0.5, every=2)
    bird.observe()
    bird.observe()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"1 of the 256 weights of '0\.weight' are NaN"):
        bird.observe()
    with torch.no_grad():
        model[0].weight[0, 0] = 0.0
    assert bird.observe() is None
    assert bird.steps == [0, 2]


# Tickets that do not settle


def restless(limit: int | None, **how: Any) -> tuple[nn.Sequential, samo.EarlyBird]:
    model = linear(32, 32)
    return model, samo.EarlyBird(model, 0.9, queue=3, limit=limit, **how)


def observe_noise(model: nn.Sequential, bird: samo.EarlyBird, times: int) -> None:
    for step in range(times):
        with torch.no_grad():
            model[0].weight.copy_(
                torch.randn(32, 32, generator=torch.Generator().manual_seed(step))
            )
        bird.observe()


def test_the_limit_raises_with_the_distances() -> None:
    model, bird = restless(limit=4, every=2)
    observe_noise(model, bird, 6)
    message = (
        r"no ticket after 4 observations, the limit: distances 0\.\d{3}, 0\.\d{3} to the previous "
        r"2 masks, threshold 0\.1; take the masks as they are with draw_now\(\)"
    )
    for _ in range(2):  # the observation that reaches the limit, and every call after it
        with pytest.raises(samo.TicketError, match=message):
            observe_noise(model, bird, 1)
    assert len(bird.steps) == 4
    assert bird.masks is None


def test_a_limit_before_the_queue_is_full_says_so() -> None:
    model, bird = restless(limit=2)
    with pytest.raises(samo.TicketError, match=r"the queue holds 2 of 3 masks, distances 0\.\d+;"):
        observe_noise(model, bird, 2)


def test_draw_now_takes_the_weights_of_now_and_gives_a_reason() -> None:
    model, bird = restless(limit=None)
    observe_noise(model, bird, 5)
    assert bird.reason.startswith("not settled after 5 observations: distances 0.")
    model, bird = restless(limit=1)
    with pytest.raises(samo.TicketError, match="after 1 observation, the limit"):
        bird.observe()
    drift_(model, 0)
    ticket = bird.draw_now()
    assert ticket == samo.prune(model, 0.9)
    assert bird.reason.startswith("drawn on demand after 1 observation: the queue holds 1 of 3")
    assert bird.observe() is ticket
    assert repr(bird) == f"EarlyBird(Sequential, 0.9, {bird.reason})"


# Resuming


@pytest.mark.parametrize(("break_at", "how"), [(0, {}), (3, {"every": 2}), (6, {"history": True})])
def test_a_resumed_watch_draws_the_same(break_at: int, how: Any, tmp_path: Path) -> None:
    def watch(bird: samo.EarlyBird, model: nn.Module, start: int, stop: int) -> None:
        for step in range(start, stop):
            drift_(model, step)
            bird.observe(step)

    def fresh() -> tuple[nn.Sequential, samo.EarlyBird]:
        model = linear(32, 32)
        return model, samo.EarlyBird(model, 0.8, queue=3, threshold=0.05, limit=20, **how)

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
    assert second.steps == whole.steps
    assert second._settling.masks == whole._settling.masks


def test_a_drawn_ticket_comes_back() -> None:
    model = linear(16, 16)
    bird = samo.EarlyBird(model, 0.5)
    ticket = bird.draw_now()
    other = samo.EarlyBird(model, 0.5)
    other.load_state_dict(bird.state_dict())
    drift_(model, 0)
    assert other.observe() == ticket
    assert other.reason == bird.reason


def test_a_state_is_a_copy() -> None:
    model = linear(16, 16)
    bird = samo.EarlyBird(model, 0.5)
    bird.observe()
    state = bird.state_dict()
    bird.observe()
    assert list(state) == ["early_bird", "early_bird/0/0.weight"]
    values = state["early_bird"]
    assert len(values["masks"]) == len(values["distances"]) == len(values["steps"]) == 1
    assert json.loads(json.dumps(values)) == values


def test_a_wrong_state_is_refused() -> None:
    model = linear(16, 16)
    bird = samo.EarlyBird(model, 0.5, limit=3)
    bird.observe()
    state = bird.state_dict()
    samo.EarlyBird(model, 0.5, limit=9).load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"by EarlyBird with sparsity=0.5, but this one has 0.6; build"
    ):
        samo.EarlyBird(model, 0.6).load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"no 'early_bird' among 1 keys\); save it with samo\.save"
    ):
        bird.load_state_dict({"step": 1})
    with pytest.raises(ValueError, match=r"lacks calls, distances, how, masks, settings, steps;"):
        bird.load_state_dict({"early_bird": {}})
    del state["early_bird/0/0.weight"]
    with pytest.raises(ValueError, match=r"lacks the mask 'early_bird/0/0.weight' \(1 of 1\)"):
        bird.load_state_dict(state)


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    bird = samo.EarlyBird(linear(16, 16), 0.5)
    bird.observe()
    other = samo.EarlyBird(linear(16, 8), 0.5)
    other.observe()
    with pytest.raises(samo.MaskError, match=r"mask for '0\.weight' has shape \(16, 16\) but"):
        other.load_state_dict(bird.state_dict())
    assert other.distances == [[]]


# Settings


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"sparsity": 1.0}, ValueError, "sparsity is 1.0, but sparsity is the fraction pruned"),
        ({"sparsity": 0}, ValueError, "sparsity 0 prunes nothing, so there is nothing to watch"),
        ({"every": 0}, ValueError, "every must be a whole number of 1 or more, got 0"),
        ({"every": 2.5}, ValueError, "every must be a whole number of 1 or more, got 2.5"),
        ({"queue": 1}, ValueError, "queue must be a whole number of 2 or more, got 1"),
        ({"limit": True}, ValueError, "limit must be a whole number of 1 or more, got True"),
        ({"threshold": 1.5}, ValueError, "threshold must be at least 0 and less than 1, got 1.5"),
        ({"threshold": "0.1"}, ValueError, "threshold must be a number, got '0.1'"),
        ({"distance": "l2"}, ValueError, "distance='l2' is unknown; it is one of kept, hamming"),
        ({"scope": "row"}, ValueError, "scope='row' is unknown; it is one of tensor, global, erk"),
        ({"skip": ["x.*"]}, ValueError, r"skip pattern 'x\.\*' matches no parameter"),
        ({"skip": [5]}, TypeError, r"skip must be names .* got \[5\]"),
        ({"rules": ["0.weight"]}, TypeError, r"rules must map patterns .* got \['0.weight'\]"),
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
    with pytest.raises(samo.CompressionError, match=r"samo.GradualPruning or samo.DynamicSparse"):
        samo.EarlyBird(model, 0.5)
    with pytest.raises(samo.CompressionError, match=r"its masks are fixed and would settle"):
        bird.observe()


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)], ids=["numpy", "torch"])
def test_steps_of_any_integer_type_can_be_saved(step: Any) -> None:
    bird = samo.EarlyBird(linear(8, 8), 0.5)
    bird.observe(step)
    assert json.dumps(bird.state_dict()["early_bird"]["steps"]) == "[3]"
    with pytest.raises(ValueError, match=r"step must be a whole number, got 'third'"):
        bird.observe("third")  # type: ignore[arg-type]


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_what_a_cpu_draws() -> None:
    results = []
    for where in ("cpu", "cuda"):
        model = linear(64, 64, 64, dtype=torch.bfloat16)
        watched = linear(64, 64, 64, dtype=torch.bfloat16).to(where)
        bird = samo.EarlyBird(watched, 0.9, queue=3)
        for step in range(8):
            drift_(model, step)
            watched.load_state_dict(model.state_dict())
            bird.observe()
        assert bird.masks is not None
        assert bird.masks["0.weight"].words.device.type == where
        results.append((bird.masks.to("cpu"), bird.distances, bird.reason))
    assert results[0] == results[1]
