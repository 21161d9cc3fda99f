"""Other masks for a compressed model: what is kept by both stays, bit for bit; all or nothing."""

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import samo
from samo.core import remap
from samo.core.compress import masks as masks_in
from samo.core.modules import named_weights
from tests.core.twins import WAYS, X, compressed, step
from tests.meters import LargestTensor, assert_same
from tests.ranks import run_ranks


def trained(kind: str, masks: samo.Masks) -> tuple[nn.Module, Optimizer]:
    """Return a model of two layers after two steps, with gradients of one more."""
    options, make = WAYS[kind]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(70, 60), nn.Tanh(), nn.Linear(60, 50))
    samo.compress_(model, masks, **options)
    opt = make(model.parameters())
    for number in range(3):
        model(torch.randn(4, 70).to(options["dtype"])).float().square().mean().backward()
        if number < 2:
            opt.step()
            opt.zero_grad()
    return model, opt


def random_masks(seed: int, densities: tuple[float, float]) -> samo.Masks:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape, density in zip(("0.weight", "2.weight"), ((60, 70), (50, 60)), densities):
        keep = torch.rand(shape, generator=generator) < density
        keep[0, 0] = True
        made[name] = samo.Mask.from_bool(keep)
    return samo.Masks(made)


def dense_state(model: nn.Module, opt: Optimizer) -> dict[str, Tensor]:
    """Return everything stored, scattered into dense tensors; what is stored once, as it is."""
    found = {}
    weights = dict(named_weights(model))
    for name, param in model.named_parameters():
        mask = weights[name].mask if name in weights else None
        for key, value in {"value": param.detach(), "grad": param.grad, **opt.state[param]}.items():
            if not isinstance(value, Tensor):
                continue
            found[f"{name} {key}"] = value.clone().cpu()
            if mask is not None and value.dim() and "scale" not in key:
                dense = torch.zeros(mask.shape, dtype=value.dtype)
                dense[mask.to_bool().cpu()] = value.cpu()
                found[f"{name} {key}"] = dense
    return found


@pytest.mark.parametrize("kind", WAYS)
@given(
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    densities=st.tuples(*[st.sampled_from([0.0, 0.02, 0.1, 0.5, 0.9, 1.0])] * 4),
)
@settings(max_examples=6)
def test_what_both_masks_keep_moves_bit_for_bit_and_all_else_is_zero(
    kind: str, seeds: tuple[int, int], densities: tuple[float, float, float, float]
) -> None:
    old, new = random_masks(seeds[0], densities[:2]), random_masks(seeds[1], densities[2:])
    model, opt = trained(kind, old)
    params = list(model.parameters())
    before = dense_state(model, opt)
    assert samo.remap_(model, new, opt) is model
    expected = {}
    for what, value in before.items():
        name = what.split()[0]
        expected[what] = value.clone()
        if name in new and value.shape == new[name].shape:
            expected[what][~(old[name] & new[name]).to_bool()] = 0
    assert_same(expected, dense_state(model, opt))
    assert all(param is same for param, same in zip(model.parameters(), params, strict=True))
    assert masks_in(model) == new
    for name, mask in new.items():
        dense = model.get_submodule(name[0]).weight
        value = expected[f"{name} value"]
        assert torch.equal(dense, value.to(dense.dtype))
        assert model.get_parameter(name).numel() == mask.kept
    opt.step()  # gradients that were there are used
    dtype = WAYS[kind][0]["dtype"]
    model(torch.randn(4, 70).to(dtype)).float().square().mean().backward()
    opt.step()
    for name, mask in new.items():
        dense = model.get_submodule(name[0]).weight
        assert not dense[~mask.to_bool()].any()
        assert torch.equal(
            dense[mask.to_bool()], model.get_parameter(name).detach().to(dense.dtype)
        )


def test_the_same_masks_change_nothing() -> None:
    masks = random_masks(0, (0.5, 0.5))
    model, opt = trained("bf16", masks)
    address = model.get_parameter("0.weight").data_ptr()
    before = dense_state(model, opt)
    samo.remap_(model, masks, opt)
    assert model.get_parameter("0.weight").data_ptr() == address
    assert_same(before, dense_state(model, opt))


def test_several_optimizers_follow() -> None:
    model = nn.Sequential(nn.Linear(70, 60), nn.Tanh(), nn.Linear(60, 50))
    samo.compress_(model, random_masks(0, (0.5, 0.5)))
    optimizers: list[Optimizer] = [
        samo.AdamW(model[0].parameters()),
        torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
    ]
    for _ in range(2):
        model(torch.randn(4, 70)).square().mean().backward()
        for opt in optimizers:
            opt.step()
        samo.remap_(model, random_masks(2, (0.2, 0.8)), optimizers)
        model.zero_grad()
    params = dict(model.named_parameters())
    assert optimizers[0].state[params["0.weight"]]["exp_avg"].shape == params["0.weight"].shape
    buffer = optimizers[1].state[params["2.weight"]]["momentum_buffer"]
    assert buffer.shape == params["2.weight"].shape
    assert buffer.any()


def test_a_tied_weight_is_moved_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    model["b"].weight = model["a"].weight
    samo.compress_(model, samo.Masks({"a.weight": samo.Mask.ones((8, 8))}))
    eye = samo.Mask.from_bool(torch.eye(8, dtype=torch.bool))
    values = model["a"].weight.detach().clone()
    samo.remap_(model, samo.Masks({"a.weight": eye, "b.weight": eye}))
    assert torch.equal(model["b"].weight, values * torch.eye(8))
    samo.remap_(model, samo.Masks({"b.weight": samo.Mask.ones((8, 8))}))  # its other name
    assert model["a"]._parameters["weight"].numel() == 64
    other = samo.Mask.from_bool(torch.ones(8, 8, dtype=torch.bool).tril())
    with pytest.raises(samo.MaskError, match="are one tied parameter but have different masks"):
        samo.remap_(model, samo.Masks({"a.weight": eye, "b.weight": other}))


def test_a_large_weight_moves_over_several_pieces() -> None:
    numel = 2**20 + 5000
    old = samo.Mask.from_bool(torch.rand(numel) < 0.3)
    new = samo.Mask.from_bool(torch.rand(numel) < 0.2)
    values = torch.randn(old.kept, dtype=torch.float64)
    count = new.kept - (old & new).kept
    added = torch.randn(count, dtype=torch.float64)
    moved, dropped = remap.move({"x": values}, old, new, {"x": added})
    dense = torch.zeros(numel, dtype=torch.float64)
    dense[old.to_bool()] = values
    assert torch.equal(dropped["x"], dense[old.to_bool() & ~new.to_bool()])
    dense[new.to_bool() & ~old.to_bool()] = added
    assert torch.equal(moved["x"], dense[new.to_bool()])
    stay = torch.rand(old.kept) < 0.5
    narrowed = remap.narrow(old, samo.Mask.from_bool(stay).words)
    expected = torch.zeros(numel, dtype=torch.bool)
    expected[old.to_bool()] = stay
    assert torch.equal(narrowed.to_bool(), expected)


def test_nothing_as_large_as_a_large_weight_is_made() -> None:
    model = nn.Sequential(nn.Linear(2048, 2048, bias=False))
    old, new = (samo.prune(model, 0.95, method="random", seed=seed) for seed in (0, 1))
    samo.compress_(model, old, dtype=torch.bfloat16)
    opt = samo.AdamW(model.parameters(), entry_steps=True)
    model(torch.randn(1, 2048).bfloat16()).float().square().mean().backward()
    opt.step()
    with LargestTensor() as meter:
        samo.remap_(model, new, opt)
    assert 0 < meter.numel <= 2**20 < old.numel


# Graphs from before


@pytest.mark.parametrize("densities", [(0.5, 0.5), (0.2, 0.3)], ids=["moved", "fewer"])
def test_a_backward_pass_over_the_old_mask_is_refused(densities: tuple[float, float]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 60))
    whole = random_masks(0, (0.5, 0.5))
    samo.compress_(model, samo.Masks({"0.weight": whole["0.weight"]}))
    loss = model(torch.randn(4, 70)).square().mean()  # saves the input, not the weight
    new = random_masks(1, densities)["0.weight"]
    samo.remap_(model, samo.Masks({"0.weight": new}))
    with pytest.raises(samo.CompressionError, match=r"the mask of '0.weight' changed between"):
        loss.backward()
    assert model.get_parameter("0.weight").grad is None
    model(torch.randn(4, 70)).square().mean().backward()
    assert model.get_parameter("0.weight").grad.numel() == new.kept


# What is refused


def test_masks_that_do_not_fit_are_refused() -> None:
    model = nn.Sequential(nn.Linear(70, 60), nn.Tanh(), nn.Linear(60, 50))
    with pytest.raises(samo.CompressionError, match="the model is not compressed"):
        samo.remap_(model, samo.Masks({}))
    old, masks = random_masks(0, (0.5, 0.5)), random_masks(1, (0.5, 0.5))
    part = copy.deepcopy(model)
    samo.compress_(part, samo.Masks({"0.weight": old["0.weight"]}))
    with pytest.raises(samo.MaskError, match=r"'2.weight' has no mask .*Mask.ones\(\(50, 60\)\)"):
        samo.remap_(part, masks)
    samo.compress_(model, old)
    with pytest.raises(TypeError, match=r"opt must be a torch.optim.Optimizer .* got str"):
        samo.remap_(model, masks, "opt")  # type: ignore[arg-type]
    with pytest.raises(samo.MaskError, match=r"the masks leave out '2.weight', which is pruned"):
        samo.remap_(model, samo.Masks({"0.weight": masks["0.weight"]}))
    with pytest.raises(samo.MaskError, match="has shape"):
        samo.remap_(model, samo.Masks({**masks, "2.weight": masks["0.weight"]}))
    assert masks_in(model) == old


def test_state_that_cannot_be_moved_is_refused() -> None:
    masks = random_masks(0, (0.5, 0.5))
    model, opt = trained("sgd", masks)
    state = opt.state[model.get_parameter("2.weight")]
    state["history"] = torch.zeros(3, 4)
    with pytest.raises(samo.CompressionError, match=r"keeps 'history' of shape \(3, 4\) for"):
        samo.remap_(model, random_masks(1, (0.5, 0.5)), opt)
    state["history"] = [1, 2]
    with pytest.raises(samo.CompressionError, match=r"keeps 'history' of \[1, 2\] for '2.weight'"):
        samo.remap_(model, random_masks(1, (0.5, 0.5)), opt)
    assert masks_in(model) == masks


def test_state_that_lbfgs_keeps_with_another_parameter_is_refused() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    samo.compress_(model, samo.prune(model, 0.5))
    opt = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(torch.eye(8)).square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    for passed, message in ((opt, r"LBFGS keeps '\w+' of .* for '1.weight'"), (None, "not passed")):
        with pytest.raises(samo.CompressionError, match=message):
            samo.remap_(model, samo.prune(model, 0.75), passed)


@pytest.mark.parametrize("kind", ["fp32", "sgd"])
def test_an_optimizer_that_was_left_out_is_refused_until_it_is_gone(kind: str) -> None:
    model, opt = trained(kind, random_masks(0, (0.5, 0.5)))
    new = random_masks(1, (0.5, 0.5))
    copied = copy.deepcopy(model)
    named = rf"\({type(opt).__name__}\) that was not passed has state"
    with pytest.raises(samo.CompressionError, match=named):
        samo.remap_(model, new)
    samo.remap_(copied, new)  # which no optimizer has stepped
    if kind == "sgd":
        opt.state.clear()
    else:
        del opt
        gc.collect()
    samo.remap_(model, new)


# Failures, initial state, replicas


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
    weight = dict(named_weights(model))["2.weight"]
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
    calls, move = iter(range(100)), remap.move

    def fail_from_second_on(*args: Any) -> Any:
        if next(calls):
            raise MemoryError
        return move(*args)

    monkeypatch.setattr(remap, "move", fail_from_second_on)
    with pytest.raises(MemoryError) as caught:
        samo.remap_(model, random_masks(1, (0.5, 0.2)), opt)
    assert "'0.weight' could not be rolled back" in caught.value.__notes__[0]


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
    model = compressed()
    opt = make(model.parameters())
    step(model, opt, X)
    step(model, opt, X)
    old = masks_in(model)["0.weight"].to_bool().view(-1)
    param = model.get_parameter("0.weight")
    before = opt.state[param][key].clone()
    samo.remap_(model, samo.Masks.ones(model), opt)
    after = opt.state[param][key]
    assert torch.equal(after[old], before)
    assert (after[~old] == value).all()
    step(model, opt, X)


@pytest.mark.parametrize(
    "make",
    [
        samo.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        lambda params: torch.optim.AdamW(params, foreach=True),
        lambda params: torch.optim.AdamW(params, fused=True),
    ],
    ids=["samo", "Adagrad", "RMSprop", "foreach", "fused"],
)
def test_loaded_state_of_another_length_is_noticed_at_the_next_step(make: Any) -> None:
    model = compressed()
    other = make(model.parameters())
    step(model, other, X)
    saved = other.state_dict()
    other.state.clear()
    opt = make(model.parameters())
    opt.load_state_dict(saved)  # has made no step, so that remap_ does not know of it
    samo.remap_(model, samo.Masks.ones(model), other)
    with pytest.raises(samo.CompressionError, match=r"of \(192,\) for '0.weight' of \(384,\)"):
        step(model, opt, X)


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


REPLICAS = [(kept, is_sharded) for kept in (0.5, 0.2) for is_sharded in (False, True)]


def every_case(rank: int, num_ranks: int) -> list[dict[str, Any]]:
    wrapped_too_early()
    return [wrapped_again(rank, num_ranks, *case) for case in REPLICAS]


def test_replicas_go_on_with_equal_counts_and_are_refused_with_others_until_rebuilt() -> None:
    (alone,) = run_ranks(1, every_case)
    both = run_ranks(2, every_case)
    for index, (kept, _) in enumerate(REPLICAS):
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

    model = compressed()
    opt = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True
    )
    with pytest.raises(samo.CompressionError, match="parameters_as_bucket_view=False"):
        samo.remap_(model, samo.Masks.ones(model), opt)
    model = nn.Sequential(nn.Linear(70, 60), nn.Tanh(), nn.Linear(60, 50))
    dense = DistributedDataParallel(model)
    samo.compress_(model, random_masks(0, (0.5, 0.5)))
    compressed_since = DistributedDataParallel(model)
    samo.remap_(model, random_masks(1, (0.2, 0.2)))
    for ddp in (dense, compressed_since):
        with pytest.raises(
            samo.CompressionError, match=r"before compress_ or remap_ .* rebuild it"
        ):
            ddp(torch.randn(4, 70))
