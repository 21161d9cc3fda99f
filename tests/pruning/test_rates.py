"""The learning rate after masks have moved: a factor for the time of a step, and no longer."""

import gc
import weakref

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import samo
from tests.pruning.test_dynamic import backward, build


def fail(*_: object) -> None:
    raise ArithmeticError


def moved(opt: Optimizer, *, warmup: int = 2) -> samo.DynamicSparse:
    """Return what has just moved masks, so that the next rate is the first of its warmup."""
    model = build(0.75)
    opt.add_param_group({"params": list(model.parameters())})
    moving = samo.DynamicSparse(model, opt, every=1, stop=2, warmup=warmup)
    assert moving.step() is not None
    assert moving.lr_factor == 1 / warmup
    return moving


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)


def rates_of_steps(opt: Optimizer) -> list[list[float]]:
    """Return a list to which each step adds the rates it has."""
    seen: list[list[float]] = []
    opt.register_step_pre_hook(
        lambda opt, args, kwargs: seen.append([group["lr"] for group in opt.param_groups])
    )
    return seen


@pytest.mark.parametrize("kind", ["samo", "torch"])
def test_the_rate_rises_after_a_replacement_and_is_the_schedulers_again(kind: str) -> None:
    model = build(0.75)
    groups = samo.param_groups(model, lr=0.5, weight_decay=0.1, density_power=-0.5)
    opt: Optimizer = samo.AdamW(groups) if kind == "samo" else torch.optim.SGD(groups)
    own = [group["lr"] for group in opt.param_groups]
    moving = samo.DynamicSparse(model, opt, every=4, stop=6, warmup=2)
    seen = rates_of_steps(opt)
    for _ in range(7):
        backward(model, torch.randn(8, 40))
        opt.step()
        opt.zero_grad()
        assert [group["lr"] for group in opt.param_groups] == own
        moving.step()
    # A quarter is kept: twice the rate; biases, in a group of their own, have theirs.
    assert own == [pytest.approx(1.0, rel=1e-3), 0.5]
    assert [rates[0] / own[0] for rates in seen] == [1, 1, 1, 1, 0.5, 1, 1]
    assert [rates[1] for rates in seen] == [0.5] * 7


def test_a_factor_that_a_step_left_behind_by_raising_does_not_multiply_with_the_next() -> None:
    opt = sgd()
    moving = moved(opt)
    seen = rates_of_steps(opt)
    handle = opt.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        opt.step()
    handle.remove()
    opt.step()
    assert [rates[1] for rates in seen] == [0.25, 0.25]
    assert opt.param_groups[1]["lr"] == 0.5
    assert moving.lr_factor == 0.5


@pytest.mark.parametrize("is_scheduled_first", [True, False])
def test_a_scheduler_goes_on_from_its_own_rate(is_scheduled_first: bool) -> None:
    model = build(0.75)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    if is_scheduled_first:
        scheduler = ExponentialLR(opt, 0.5)
    moving = samo.DynamicSparse(model, opt, every=1, stop=2, warmup=4)
    if not is_scheduled_first:
        scheduler = ExponentialLR(opt, 0.5)
    moving.step()
    seen = rates_of_steps(opt)
    for _ in range(2):
        opt.step()
        scheduler.step()
        moving.step()
    assert [rate for (rate,) in seen] == [1.0 * 0.25, 0.5 * 0.5]
    assert opt.param_groups[0]["lr"] == 0.25


def test_a_rate_that_is_set_during_a_step_stays() -> None:
    opt = sgd()
    moving = moved(opt)
    opt.register_step_pre_hook(lambda opt, *_: opt.param_groups[1].update(lr=0.125))
    opt.step()
    assert opt.param_groups[1]["lr"] == 0.125
    moving.detach()


@pytest.mark.parametrize("is_deleted", [True, False])
def test_the_factor_ends_with_its_object_or_its_detachment(is_deleted: bool) -> None:
    opt = sgd()
    moving = moved(opt)
    other = build()
    opt.add_param_group({"params": list(other.parameters())})
    with pytest.raises(
        ValueError, match=r"multiplied by another DynamicSparse already .* detach\(\)"
    ):
        samo.DynamicSparse(other, opt, every=3, stop=9, warmup=2)
    if is_deleted:
        reference = weakref.ref(moving)
        del moving
        assert reference() is None
    else:
        moving.detach()
        with pytest.raises(samo.CompressionError, match="was detached and changes nothing"):
            moving.step()
    seen = rates_of_steps(opt)
    opt.step()
    assert seen == [[0.5] * 3]
    again = samo.DynamicSparse(other, opt, every=1, stop=2, warmup=4)
    again.step()
    seen = rates_of_steps(opt)  # hooks are called in their order
    opt.step()
    assert seen[0][2] == 0.125


def test_the_optimizer_does_not_wait_for_the_garbage_collector() -> None:
    opt = sgd()
    moving = moved(opt)
    opt.step()
    reference = weakref.ref(opt)
    gc.disable()
    try:
        del opt, moving
        assert reference() is None
    finally:
        gc.enable()
