"""Remaps that fail midway, state that does not start at 0, replicas that must be rebuilt."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import samo
from samo.core import remap, transfer
from samo.core.compress import masks as masks_in
from tests.core.test_remap import assert_same, dense_state, random_masks, trained, weights_of
from tests.ranks import run_ranks


class Failing:
    """Kernels whose ``expand_`` raises when it has written a part, once."""

    def __init__(self, kernels: Any, error: type[BaseException]) -> None:
        self._kernels, self._error, self._times = kernels, error, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def expand_(self, values: Any, mask: Any, dense: Tensor) -> None:
        if not self._times:
            return self._kernels.expand_(values, mask, dense)
        self._times -= 1
        dense.detach()[0].fill_(7.0)
        raise self._error


@pytest.mark.parametrize("kind", ["bf16", "lean", "sgd"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_failure_while_values_are_written_is_undone(
    kind: str, error: type[BaseException]
) -> None:
    old, new = random_masks(0, (0.3, 0.5)), random_masks(1, (0.5, 0.2))
    model, opt = trained(kind, old)
    before, dense = dense_state(model, opt), [model[0].weight.clone(), model[2].weight.clone()]
    weight = weights_of(model)["2.weight"]
    weight.layout = weight.layout._replace(kernels=Failing(weight.layout.kernels, error))
    with pytest.raises(error):
        samo.remap_(model, new, opt)
    assert masks_in(model) == old
    assert_same(before, dense_state(model, opt))
    assert torch.equal(model[0].weight, dense[0])
    assert torch.equal(model[2].weight, dense[1])
    samo.remap_(model, new, opt)
    opt.step()


def test_what_cannot_be_put_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = trained("bf16", random_masks(0, (0.3, 0.5)))
    calls = iter(range(100))

    def fail_from_second_on(*args: Any) -> Any:
        if next(calls):
            raise MemoryError
        return transfer.move(*args)

    monkeypatch.setattr(remap, "move", fail_from_second_on)
    with pytest.raises(MemoryError) as caught:
        samo.remap_(model, random_masks(1, (0.5, 0.2)), opt)
    assert "'0.weight' could not be rolled back" in caught.value.__notes__[0]


def one_layer(sparsity: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    return samo.compress_(model, samo.prune(model, sparsity))


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
    opt = make(model.parameters())
    step(model, opt)
    step(model, opt)
    old = masks_in(model)["0.weight"].to_bool().view(-1)
    param = model.get_parameter("0.weight")
    before = opt.state[param][key].clone()
    samo.remap_(model, samo.Masks.whole(model), opt)
    after = opt.state[param][key]
    assert torch.equal(after[old], before)
    assert (after[~old] == value).all()
    step(model, opt)


@pytest.mark.parametrize(
    "make",
    [
        samo.AdamW,
        torch.optim.Adagrad,
        lambda params: torch.optim.AdamW(params, foreach=True),
        lambda params: torch.optim.AdamW(params, fused=True),
    ],
    ids=["samo", "Adagrad", "foreach", "fused"],
)
def test_loaded_state_of_another_length_is_noticed_at_the_next_step(make: Any) -> None:
    model = one_layer()
    other = make(model.parameters())
    step(model, other)
    saved = other.state_dict()
    other.state.clear()
    opt = make(model.parameters())
    opt.load_state_dict(saved)  # has made no step, so that remap_ does not know of it
    samo.remap_(model, samo.Masks.whole(model), other)
    with pytest.raises(samo.CompressionError, match=r"of \(2048,\) for '0.weight' of \(4096,\)"):
        step(model, opt)


# Replicas


def wrapped_again(rank: int, num_ranks: int, kept: float, is_sharded: bool) -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns where warnings are errors

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 60), nn.Tanh(), nn.Linear(60, 50)).double()
    samo.compress_(model, random_masks(0, (0.5, 0.5)), kernels="reference")
    ddp: nn.Module = DistributedDataParallel(model)
    make = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    opt = (make if is_sharded else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    refused = ""
    for number in range(6):
        x = torch.randn(8, 70, generator=torch.Generator().manual_seed(number)).double()
        opt.zero_grad()
        try:
            loss = ddp(x.chunk(num_ranks)[rank]).square().mean()
        except samo.CompressionError as error:
            refused = str(error)
            ddp = DistributedDataParallel(model)
            loss = ddp(x.chunk(num_ranks)[rank]).square().mean()
        loss.backward()
        opt.step()
        if number == 2:
            new = random_masks(1, (kept, kept))
            if kept == 0.5:  # as many as before
                masks = random_masks(0, (0.5, 0.5))
                new = samo.Masks(
                    {n: samo.Mask.from_bool(m.to_bool().flip(0)) for n, m in masks.items()}
                )
            samo.remap_(ddp, samo.Masks({f"module.{n}": mask for n, mask in new.items()}), opt)
    return {"state": samo.dense_state_dict(model), "refused": refused}


CASES = [(kept, is_sharded) for kept in (0.5, 0.2) for is_sharded in (False, True)]


def every_case(rank: int, num_ranks: int) -> list[dict[str, Any]]:
    wrapped_too_early()
    return [wrapped_again(rank, num_ranks, *case) for case in CASES]


def test_replicas_go_on_with_equal_counts_and_are_refused_with_others_until_rebuilt() -> None:
    (alone,) = run_ranks(1, every_case)
    both = run_ranks(2, every_case)
    for index, (kept, _) in enumerate(CASES):
        for found in (both[0][index], both[1][index]):
            assert bool(found["refused"]) == (kept == 0.2)
            assert kept == 0.5 or "rebuild it: ddp = DistributedDataParallel(" in found["refused"]
            for name, value in found["state"].items():
                assert torch.equal(value, both[0][index]["state"][name])
                one = alone[index]["state"][name]
                torch.testing.assert_close(value, one, rtol=1e-9, atol=1e-12)


def wrapped_too_early() -> None:
    """Replicas that have not run yet are refused too, and buffers that hold the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns where warnings are errors

    model = one_layer()
    opt = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True
    )
    with pytest.raises(samo.CompressionError, match="parameters_as_bucket_view=False"):
        samo.remap_(model, samo.Masks.whole(model), opt)
    model = nn.Sequential(nn.Linear(70, 60), nn.Tanh(), nn.Linear(60, 50))
    samo.compress_(model, random_masks(0, (0.5, 0.5)))
    ddp = DistributedDataParallel(model)
    samo.remap_(model, random_masks(1, (0.2, 0.2)))
    with pytest.raises(samo.CompressionError, match="rebuild it"):
        ddp(torch.randn(4, 70))
