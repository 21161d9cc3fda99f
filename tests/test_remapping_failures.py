"""Remaps that fail in the middle, and optimizers that were not told of one."""

from typing import Any

import pytest
import torch
from torch import nn

import samo
from samo.owners import owned_weights
from tests.test_remapping import OPTIMIZERS, dense_state, random_masks, trained


class Failing:
    """Kernels whose ``expand_`` raises when it has written a part, the first ``times`` times."""

    def __init__(self, kernels: Any, error: type[BaseException], times: int, *, writes: bool):
        self._kernels, self._error, self._times, self._writes = kernels, error, times, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def expand_(self, values: Any, mask: Any, dense: torch.Tensor) -> None:
        if not self._times:
            return self._kernels.expand_(values, mask, dense)
        self._times -= 1
        if self._writes:
            dense.detach()[0].fill_(7.0)
        raise self._error


@pytest.mark.parametrize("kind", ["exact", "ages", "lean", "sgd"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_failure_while_values_are_written_is_undone(
    kind: str, error: type[BaseException]
) -> None:
    old, new = random_masks(0, (0.3, 0.5)), random_masks(1, (0.5, 0.2))
    model, opt = trained(OPTIMIZERS[kind], torch.bfloat16, old)
    before = dense_state(model, opt)
    weight = owned_weights(model)["2.weight"]
    weight.kernels = Failing(weight.kernels, error, 1, writes=True)
    with pytest.raises(error):
        samo.remap_(model, new, opt)
    after = dense_state(model, opt)
    assert {name: w.mask for name, w in owned_weights(model).items() if w.mask} == dict(old)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[what]) for what, value in after.items())
    samo.remap_(model, new, opt)
    opt.step()


def test_without_memory_to_write_at_all_masks_and_state_are_the_old_ones() -> None:
    old = random_masks(0, (0.3, 0.5))
    model, opt = trained(OPTIMIZERS["exact"], torch.bfloat16, old)
    before = dense_state(model, opt)
    weight = owned_weights(model)["2.weight"]
    weight.kernels = Failing(weight.kernels, MemoryError, 9, writes=False)
    with pytest.raises(MemoryError) as caught:
        samo.remap_(model, random_masks(1, (0.5, 0.2)), opt)
    assert "values of '2.weight' could not be put back" in caught.value.__notes__[0]
    after = dense_state(model, opt)
    assert all(torch.equal(value, before[what]) for what, value in after.items())


def one_layer() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    return samo.compress_(model, samo.prune(model, 0.5))


def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 64)).square().mean().backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize(
    ("make", "key", "value"),
    [
        (lambda params: torch.optim.Rprop(params, lr=0.02), "step_size", 0.02),
        (lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.5), "sum", 0.5),
    ],
)
def test_state_that_does_not_begin_at_zero_begins_where_it_does(
    make: Any, key: str, value: float
) -> None:
    model = one_layer()
    opt = make(samo.parameters(model))
    step(model, opt)
    step(model, opt)
    old = owned_weights(model)["0.weight"].mask.to_bool().view(-1)
    leaf = next(iter(samo.parameters(model)))
    before = opt.state[leaf][key].clone()
    samo.remap_(model, samo.Masks.whole(model), opt)
    after = opt.state[leaf][key]
    assert torch.equal(after[old], before)
    assert (after[~old] == value).all()
    step(model, opt)


def test_an_optimizer_with_state_of_an_older_mask_is_noticed_at_its_step() -> None:
    model = one_layer()
    opt = torch.optim.Adagrad(samo.parameters(model), lr=0.01)  # has state before its first step
    samo.remap_(model, samo.Masks.whole(model))
    with pytest.raises(
        samo.CompressionError, match=r"2,048 entries of 'sum' for '0.weight', which"
    ):
        step(model, opt)


def test_fill_that_is_no_tensor_is_refused() -> None:
    model = one_layer()
    whole = samo.Masks.whole(model)
    with pytest.raises(TypeError, match=r"fill must map names to vectors of values, got list"):
        samo.remap_(model, whole, fill=[1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"fill has a list for '0.weight'; give a 1-D tensor"):
        samo.remap_(model, whole, fill={"0.weight": [1.0] * 2048})  # type: ignore[dict-item]
