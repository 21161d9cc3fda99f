"""The learning rate after masks have moved: a factor for the time of a step, and no longer."""

import gc
import weakref

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import samo
from tests.test_dynamic import backward, build


def fail(*_: object) -> None:
    raise ArithmeticError


def rates_of_steps(opt: Optimizer) -> list[float]:
    """Return a list to which each step adds the rate it has."""
    seen: list[float] = []
    opt.register_step_pre_hook(lambda opt, args, kwargs: seen.append(opt.param_groups[0]["lr"]))
    return seen


@pytest.mark.parametrize("kind", ["samo", "torch"])
def test_the_rate_rises_after_a_replacement_and_is_the_schedulers_again(kind: str) -> None:
    model = build(0.75)
    opt: torch.optim.Optimizer
    if kind == "samo":
        opt = samo.AdamW(samo.param_groups(model, 0.1), lr=0.5)
    else:
        opt = torch.optim.SGD(samo.param_groups(model, 0.1), lr=0.5)
    seen: list[list[float]] = []
    moving = samo.DynamicSparse(model, opt, every=4, stop=6, warmup=2, density_power=-0.5)
    opt.register_step_pre_hook(
        lambda opt, args, kwargs: seen.append([group["lr"] for group in opt.param_groups])
    )
    for _ in range(7):
        backward(model, torch.randn(8, 40))
        opt.step()
        opt.zero_grad()
        assert [group["lr"] for group in opt.param_groups] == [0.5, 0.5]
        moving.step()
    # a quarter is kept: twice the rate; biases, in a group of their own, have theirs
    assert [rates[0] for rates in seen] == pytest.approx([1, 1, 1, 1, 0.5, 1, 1], rel=1e-3)
    assert [rates[1] for rates in seen] == [0.5] * 7


def test_a_step_that_raises_leaves_no_factor_behind() -> None:
    model = build()
    opt = torch.optim.SGD(samo.parameters(model), lr=0.5)
    moving = samo.DynamicSparse(model, opt, every=3, stop=9, density_power=1.0)
    assert moving.lr_factor < 1
    handle = opt.register_step_pre_hook(fail)
    backward(model, torch.randn(8, 40))
    with pytest.raises(ArithmeticError):
        opt.step()
    assert opt.param_groups[0]["lr"] == 0.5
    handle.remove()
    opt.step()
    assert opt.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("is_scheduled_first", [True, False])
def test_a_scheduler_goes_on_from_its_own_rate_after_a_step_that_raised(
    is_scheduled_first: bool,
) -> None:
    model = build(0.75)
    opt = torch.optim.SGD(samo.parameters(model), lr=1.0)
    if is_scheduled_first:
        scheduler = ExponentialLR(opt, 0.5)
    moving = samo.DynamicSparse(model, opt, every=3, stop=9, density_power=-0.5)
    if not is_scheduled_first:
        scheduler = ExponentialLR(opt, 0.5)
    seen = rates_of_steps(opt)
    backward(model, torch.randn(8, 40))
    opt.step()
    handle = opt.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        opt.step()
    handle.remove()
    scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.5
    opt.step()
    assert opt.param_groups[0]["lr"] == 0.5
    assert seen == pytest.approx([2.0, 2.0, 1.0], rel=1e-3)
    assert moving.lr_factor == pytest.approx(2.0, rel=1e-3)


def test_a_rate_that_is_set_during_a_step_stays() -> None:
    model = build()
    opt = torch.optim.SGD(samo.parameters(model), lr=0.5)
    moving = samo.DynamicSparse(model, opt, every=3, stop=9, density_power=1.0)
    assert moving.lr_factor < 1
    opt.register_step_post_hook(lambda opt, *_: opt.param_groups[0].update(lr=0.125))
    backward(model, torch.randn(8, 40))
    opt.step()
    assert opt.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("is_deleted", [True, False])
def test_the_factor_ends_with_its_object_or_its_detachment(is_deleted: bool) -> None:
    model = build()
    opt = torch.optim.SGD(samo.parameters(model), lr=0.5)
    moving = samo.DynamicSparse(model, opt, every=3, stop=9, density_power=1.0)
    other = build()
    opt.add_param_group({"params": list(samo.parameters(other))})
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
    backward(model, torch.randn(8, 40))
    opt.step()
    assert seen == [0.5]
    again = samo.DynamicSparse(model, opt, every=3, stop=9, density_power=-0.5)
    opt.step()
    assert seen[1] == 0.5 * again.lr_factor > 0.5


def test_the_optimizer_does_not_wait_for_the_garbage_collector() -> None:
    model = build()
    opt = torch.optim.SGD(samo.parameters(model), lr=0.5)
    moving = samo.DynamicSparse(model, opt, every=3, stop=9, density_power=1.0)
    reference = weakref.ref(opt)
    gc.disable()
    try:
        del opt, moving
        assert reference() is None
    finally:
        gc.enable()
