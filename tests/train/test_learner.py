"""A training step: all tokens have the same weight, in both phases."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import samo
from samo.data.batches import IGNORE, Batch
from samo.models.gpt import GPT, GPTConfig
from samo.train.config import OptimConfig
from samo.train.learner import Learner, padded
from samo.train.learning_rate import learning_rate
from tests.train.helpers import new_learner

SMALL = GPTConfig(num_layers=1, width=32, num_heads=2, context=16, vocab_size=64)
PHASES = pytest.mark.parametrize("phase", ["dense", "samo"])


def learner(dtype: str = "float32", phase: str = "dense", **settings: Any) -> Learner:
    torch.manual_seed(0)
    one = new_learner(GPT(SMALL), dtype=dtype, **settings)
    if phase == "samo":
        one.prune(samo.prune(one.model, 0.5))
    return one


def batch(size: int, real: int = 16, seed: int = 1) -> Batch:
    """Return a batch in which each sequence has ``real`` targets, the rest padding."""
    tokens = torch.randint(0, 64, (size, 17), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[:, real:] = IGNORE
    return Batch(tokens[:, :-1], targets, size * real, size * real)


def test_the_loss_is_the_mean_over_all_real_tokens_of_a_step() -> None:
    """Three full sequences and one of two tokens: a mean of means would weigh those two like 48."""
    one = learner()
    batches = [batch(3, seed=1), batch(1, real=2, seed=2)]
    loss = one.backward(batches)
    with torch.no_grad():
        logits = [one.model(b.inputs_BT).flatten(0, 1) for b in batches]
    targets = [b.targets_BT.flatten() for b in batches]
    expected = F.cross_entropy(torch.cat(logits), torch.cat(targets))  # padding is left out
    torch.testing.assert_close(loss, expected)
    assert one.evaluate(batches) == pytest.approx(float(loss), rel=1e-6)
    assert one.model.training
    mean_of_means = sum(map(F.cross_entropy, logits, targets)) / 2
    assert abs(float(mean_of_means - expected)) > 1e-3


@PHASES
def test_the_gradient_does_not_depend_on_how_sequences_are_spread_over_passes(phase: str) -> None:
    whole, pieces = learner(phase=phase), learner(phase=phase)
    inputs, targets, *_ = batch(4, real=16)
    targets = targets.clone()
    targets[3, 3:] = IGNORE
    loss = whole.backward([Batch(inputs, targets, 51, 51)])
    split = pieces.backward(
        [Batch(inputs[:3], targets[:3], 48, 48), Batch(inputs[3:], targets[3:], 3, 3)]
    )
    torch.testing.assert_close(loss, split)
    for ours, theirs in zip(whole.model.parameters(), pieces.model.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@PHASES
def test_every_dtype_learns_and_its_state_is_as_predicted(dtype: str, phase: str) -> None:
    one = learner(dtype, phase)
    losses = []
    for _ in range(12):
        losses.append(float(one.backward([batch(4)])))
        one.step(1e-2)
    assert losses[-1] < losses[0] - 0.5
    assert one.skipped_steps == 0
    account = one.accounted(step=12)
    assert account.measured == account.predicted
    assert account.measured["gradients"] > 0
    assert account.num_params == one.num_params
    assert (account.measured_bytes < account.dense_bytes) == (phase == "samo")
    assert (account.paper_bytes is None) == (phase == "dense")


@PHASES
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(phase: str) -> None:
    one = learner(phase=phase)
    one.backward([batch(2)])
    one.step(1e-3)
    before = {name: tensor.clone() for name, tensor in one.model.state_dict().items()}
    hook = one.model.head.register_forward_hook(lambda *args: args[2] * float("inf"))
    one.backward([batch(2)])
    hook.remove()
    assert not one.step(1e-3).isfinite()
    assert one.skipped_steps == 1
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    ("state", "fp32_gradients", "types"),
    [
        ("exact", False, (torch.float32, torch.bfloat16)),
        ("exact", True, (torch.float32, torch.float32)),
        ("lean", False, (torch.bfloat16, torch.bfloat16)),
    ],
)
def test_values_and_gradients_of_a_bfloat16_model_have_the_types_asked_for(
    state: str, fp32_gradients: bool, types: tuple[torch.dtype, torch.dtype]
) -> None:
    one = learner("bfloat16", fp32_gradients=fp32_gradients, state=state)
    masks = samo.prune(one.model, 0.5)
    one.prune(masks)
    one.backward([batch(2)])
    for name, param in one.model.named_parameters():
        assert param.grad is not None
        if name in masks:
            assert (param.dtype, param.grad.dtype) == types


def test_rates_and_decay_follow_the_density() -> None:
    one = learner(density_power=-1.0, weight_decay=0.1)
    one.prune(samo.Masks.ones(one.model))
    one.backward([batch(2)])
    one.step(1e-3)
    assert {group["lr"] for group in one.opt.param_groups} == {1e-3}
    masks = samo.prune(one.model, 0.75)
    samo.remap_(one.model, masks, one.opt)
    one.remapped(masks)
    one.backward([batch(2)])
    one.step(1e-3)
    rates = {id(p): group for group in one.opt.param_groups for p in group["params"]}
    for name, param in one.model.named_parameters():
        group = rates[id(param)]
        density = masks[name].kept / masks[name].numel if name in masks else 1.0
        assert group["lr"] == pytest.approx(1e-3 / density), name
        decay = 0.1 if name in masks or param.dim() >= 2 else 0.0
        assert group["lr"] * group["weight_decay"] == pytest.approx(1e-3 * decay), name
        assert param in one.opt.state


def test_the_loss_scale_survives_pruning() -> None:
    one = learner("float16")
    assert one.scaler is not None
    one.backward([batch(2)])
    one.step(1e-3)
    one.scaler.update(512.0)
    one.prune(samo.prune(one.model, 0.5))
    assert one.scaler.get_scale() == 512.0
    assert one.scaler.state_dict()["_growth_tracker"] == 1


# The learning rate


def rates(schedule: Any, steps: int, *, warmup: int = 0, final: float = 0.0) -> list[float]:
    config = OptimConfig(lr=2.0, warmup_steps=warmup, schedule=schedule, final_lr=final)
    return [learning_rate(step, steps, config) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", {50: 1.0}),
        ("linear", {25: 1.5, 99: 0.02}),
        ("constant", {99: 2.0}),
        ("wsd", {79: 2.0, 90: 1.0, 99: 0.1}),
    ],
)
def test_schedules_have_their_shapes(schedule: str, expected: dict[int, float]) -> None:
    found = rates(schedule, 99)
    assert found[-1] > 0  # every step trains
    assert {step: pytest.approx(found[step - 1], abs=1e-12) for step in expected} == expected
    for warmup, steps in ((7, 50), (60, 50)):  # also longer than the run
        values = rates(schedule, steps, warmup=warmup, final=0.1)
        assert all(a < b for a, b in itertools.pairwise(values[:warmup]))
        assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(values[warmup:]))
        assert all(0 <= value <= 2.0 for value in values)


def test_the_rate_ends_at_its_final_fraction_and_stays_there() -> None:
    assert rates("cosine", 100, warmup=10, final=0.1)[-1] == pytest.approx(0.2, rel=1e-2)
    config = OptimConfig(lr=2.0, warmup_steps=0, final_lr=0.5)
    assert learning_rate(500, 100, config) == pytest.approx(1.0)


def test_a_rank_without_sequences_takes_part_and_adds_nothing() -> None:
    one = learner()
    first = batch(2)
    none = first.inputs_BT[:0]
    rest = Batch(none, none, 9, 9, positions_BT=none)
    assert one.evaluate([first, rest]) == pytest.approx(one.evaluate([first]) * 32 / 41)
    assert all(rows.shape == (3, 16) for rows in padded(rest, 3) if isinstance(rows, torch.Tensor))
    assert padded(first, 1).inputs_BT.equal(first.inputs_BT)
