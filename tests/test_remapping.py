"""Other masks for a compressed model: what is kept by both stays, bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

import samo
from samo import exchange, transfer
from samo.kernels.rounding import convert_rest, join, split
from samo.owners import owned_weights
from samo.weights import Weight
from tests.meters import LargestTensor

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "exact": lambda params: samo.AdamW(params, lr=1e-2),
    "ages": lambda params: samo.AdamW(params, lr=1e-2, entry_steps=True),
    "lean": lambda params: samo.AdamW(params, lr=1e-2, state="lean"),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
}


def trained(
    make: Make, dtype: torch.dtype, masks: samo.Masks, *, steps: int = 2, **options: Any
) -> tuple[nn.Module, Optimizer]:
    """Return a model of two layers after a few steps, with gradients of one more."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(70, 60), nn.Tanh(), nn.Linear(60, 50))
    samo.compress_(model, masks, dtype=dtype, **options)
    if dtype == torch.float16:
        samo.LossScaler(model, init_scale=1.0)
    opt = make(samo.parameters(model))
    for step in range(steps + 1):
        model(torch.randn(4, 70).to(dtype)).float().square().mean().backward()
        if step < steps:
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
    for name, weight in owned_weights(model).items():
        keep = samo.Mask.whole(weight.shape) if weight.mask is None else weight.mask
        vectors: dict[str, Any] = {"rest": weight.rest, "grad": weight.leaf.grad}
        vectors |= opt.state[weight.leaf]
        found[f"{name} value"] = weight.param.detach().clone().cpu()
        for key, value in vectors.items():
            if not isinstance(value, Tensor):
                continue
            if value.dim() == 0 or "scale" in key:
                found[f"{name} {key}"] = value.clone().cpu()
                continue
            dense = torch.zeros(weight.shape, dtype=value.dtype)
            dense[keep.to_bool().cpu()] = value.cpu()
            found[f"{name} {key}"] = dense
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@given(
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    densities=st.tuples(*[st.sampled_from([0.0, 0.02, 0.1, 0.5, 0.9, 1.0])] * 4),
)
@settings(max_examples=10)
def test_what_both_masks_keep_moves_bit_for_bit_and_all_else_is_zero(
    kind: str,
    dtype: torch.dtype,
    seeds: tuple[int, int],
    densities: tuple[float, float, float, float],
) -> None:
    old, new = random_masks(seeds[0], densities[:2]), random_masks(seeds[1], densities[2:])
    model, opt = trained(OPTIMIZERS[kind], dtype, old)
    leaves = list(samo.parameters(model))
    before = dense_state(model, opt)
    assert samo.remap_(model, new, opt) is model
    after = dense_state(model, opt)
    assert before.keys() == after.keys()
    for what, value in after.items():
        expected = before[what].clone()
        name = what.split()[0]
        if name in new and expected.shape == new[name].shape:
            expected[~(old[name] & new[name]).to_bool()] = 0
        assert torch.equal(value, expected), what
    for (name, leaf), same in zip(samo.named_parameters(model), leaves):
        assert leaf is same
        assert name not in new or leaf.numel() == new[name].kept
    held = samo.ledger(model, opt)
    assert held.measured_bytes == held.predicted_bytes
    opt.step()  # gradients that were there are used
    model(torch.randn(4, 70).to(dtype)).float().square().mean().backward()
    opt.step()
    for name, mask in new.items():
        assert not model.get_parameter(name)[~mask.to_bool()].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["exact", "lean"])
def test_given_values_are_the_masters_of_the_entries_kept_anew(
    kind: str, dtype: torch.dtype
) -> None:
    old, new = random_masks(0, (0.3, 0.5)), random_masks(1, (0.5, 0.2))
    model, opt = trained(OPTIMIZERS[kind], dtype, old)
    fresh = (new["0.weight"].words & ~old["0.weight"].words).clone()
    fresh_mask = samo.Mask((60, 70), fresh)
    fill = torch.randn(fresh_mask.kept)
    samo.remap_(model, new, opt, fill={"0.weight": fill})
    values, rest = split(fill, dtype)
    weight = owned_weights(model)["0.weight"]
    assert torch.equal(weight.param[fresh_mask.to_bool()], values)
    if rest is not None:
        kept = torch.zeros(60, 70)
        kept[new["0.weight"].to_bool()] = weight.masters()
        assert weight.rest is not None
        expected = join(values, convert_rest(rest, weight.rest.dtype))
        assert torch.equal(kept[fresh_mask.to_bool()], expected)
        assert kind == "lean" or torch.equal(expected, fill)


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 9)
    )


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


TWINS: dict[str, tuple[Make, Make]] = {
    "AdamW": (
        lambda params: samo.AdamW(params, lr=3e-3, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1, foreach=False),
    ),
    "ages": (
        lambda params: samo.AdamW(params, lr=3e-3, weight_decay=0.1, entry_steps=True),
        lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1, foreach=False),
    ),
    "SGD": (
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_training_over_prunings_equals_masked_dense_training_bit_for_bit(name: str) -> None:
    make_ours, make_theirs = TWINS[name]
    model = build()
    dense = copy.deepcopy(model)
    masks = samo.prune(model, sparsity=0.5)
    masks.apply_(dense)
    samo.compress_(model, masks, kernels="reference")
    ours, theirs = make_ours(samo.parameters(model)), make_theirs(dense.parameters())
    for step in range(60):
        if step in (20, 40):
            masks = samo.prune(model, sparsity=0.7 if step == 20 else 0.9) & masks
            samo.remap_(model, masks, ours)
            masks.apply_(dense)
        x = torch.randn(16, 40)
        ours.zero_grad()
        loss_of(model, x).backward()
        ours.step()
        theirs.zero_grad()
        loss_of(dense, x).backward()
        for tensor_name, mask in masks.items():
            mask.zero_(dense.get_parameter(tensor_name).grad)
        theirs.step()
        masks.apply_(dense)
        for tensor_name, param in dense.named_parameters():
            assert torch.equal(model.get_parameter(tensor_name), param), (step, tensor_name)


@pytest.mark.parametrize("kind", ["exact", "ages", "sgd"])
def test_a_tensor_without_a_mask_may_get_one(kind: str) -> None:
    old = samo.Masks({"0.weight": random_masks(0, (0.5, 1.0))["0.weight"]})
    new = random_masks(1, (0.3, 0.4))
    model, opt = trained(OPTIMIZERS[kind], torch.bfloat16, old)
    before = dense_state(model, opt)
    samo.remap_(model, new, opt)
    keep = new["2.weight"].to_bool()
    for what, value in dense_state(model, opt).items():
        if what == "2.weight age":
            assert (value[keep] == 2).all()
        elif what.startswith("2.weight") and value.dim():
            assert torch.equal(value, before[what] * keep)
    opt.step()


def test_the_same_masks_change_nothing() -> None:
    masks = random_masks(0, (0.5, 0.5))
    model, opt = trained(OPTIMIZERS["exact"], torch.bfloat16, masks)
    held = owned_weights(model)["0.weight"].rest
    before = dense_state(model, opt)
    samo.remap_(model, masks, opt)
    assert owned_weights(model)["0.weight"].rest is held
    after = dense_state(model, opt)
    assert all(torch.equal(value, before[what]) for what, value in after.items())


def test_several_optimizers_follow() -> None:
    model = nn.Sequential(nn.Linear(70, 60), nn.Tanh(), nn.Linear(60, 50))
    samo.compress_(model, random_masks(0, (0.5, 0.5)))
    optimizers: list[Optimizer] = [
        samo.AdamW(samo.parameters(model[0])),
        torch.optim.SGD(samo.parameters(model[2]), lr=0.1, momentum=0.9),
    ]
    for _ in range(2):
        model(torch.randn(4, 70)).square().mean().backward()
        for opt in optimizers:
            opt.step()
        samo.remap_(model, random_masks(2, (0.2, 0.8)), optimizers)
        model.zero_grad()
    leaves = dict(samo.named_parameters(model))
    assert optimizers[0].state[leaves["0.weight"]]["exp_avg"].shape == leaves["0.weight"].shape
    assert (
        optimizers[1].state[leaves["2.weight"]]["momentum_buffer"].shape == leaves["2.weight"].shape
    )
    assert optimizers[1].state[leaves["2.weight"]]["momentum_buffer"].any()


def test_a_tied_weight_is_moved_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    model["b"].weight = model["a"].weight
    samo.compress_(model, samo.Masks({"a.weight": samo.Mask.whole((8, 8))}))
    eye = samo.Mask.from_bool(torch.eye(8, dtype=torch.bool))
    values = model["a"].weight.detach().clone()
    samo.remap_(model, samo.Masks({"a.weight": eye, "b.weight": eye}))
    assert torch.equal(model["b"].weight, values * torch.eye(8))
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
    moved, dropped = transfer.move({"x": values}, old, new, {"x": added})
    dense = torch.zeros(numel, dtype=torch.float64)
    dense[old.to_bool()] = values
    assert torch.equal(dropped["x"], dense[old.to_bool() & ~new.to_bool()])
    dense[new.to_bool() & ~old.to_bool()] = added
    assert torch.equal(moved["x"], dense[new.to_bool()])
    stay = torch.rand(old.kept) < 0.5
    narrowed = transfer.narrow(old, samo.Mask.from_bool(stay).words)
    expected = torch.zeros(numel, dtype=torch.bool)
    expected[old.to_bool()] = stay
    assert torch.equal(narrowed.to_bool(), expected)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_nothing_as_large_as_a_large_weight_is_made(kernels: Any) -> None:
    model = nn.Sequential(nn.Linear(2048, 2048, bias=False))
    old, new = (samo.prune(model, 0.95, method="random", seed=seed) for seed in (0, 1))
    samo.compress_(model, old, dtype=torch.bfloat16, kernels=kernels)
    opt = samo.AdamW(samo.parameters(model), entry_steps=True)
    model(torch.randn(1, 2048).bfloat16()).float().square().mean().backward()
    opt.step()
    with LargestTensor() as meter:
        samo.remap_(model, new, opt)
    assert 0 < meter.numel <= 2**20 < model.get_parameter("0.weight").numel()


def test_a_deep_copy_forgets_who_stepped_the_model() -> None:
    model, _ = trained(OPTIMIZERS["exact"], torch.float32, random_masks(0, (0.5, 0.5)))
    new = random_masks(1, (0.5, 0.5))
    samo.remap_(copy.deepcopy(model), new)
    with pytest.raises(
        samo.CompressionError, match=r"was last updated by an optimizer \(AdamW\) whose state"
    ):
        samo.remap_(model, new)


# All or nothing


@pytest.mark.parametrize("kind", ["exact", "ages", "lean", "sgd"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_failure_in_the_middle_is_undone(
    kind: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = random_masks(0, (0.3, 0.5)), random_masks(1, (0.5, 0.2))
    model, opt = trained(OPTIMIZERS[kind], torch.bfloat16, old)
    before = dense_state(model, opt)
    calls = iter(range(100))

    def fail_second(*args: Any) -> Any:
        if next(calls) == 1:
            raise error
        return transfer.move(*args)

    monkeypatch.setattr(exchange, "move", fail_second)
    with pytest.raises(error):
        samo.remap_(model, new, opt)
    assert next(calls) == 3  # first, second, and the first again
    assert {name: w.mask for name, w in owned_weights(model).items() if w.mask} == dict(old)
    after = dense_state(model, opt)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[what]) for what, value in after.items())
    opt.step()


def test_a_tensor_that_just_got_its_first_mask_is_undone_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = samo.Masks({"2.weight": random_masks(0, (1.0, 0.5))["2.weight"]})
    model, opt = trained(OPTIMIZERS["ages"], torch.bfloat16, old)
    before = dense_state(model, opt)
    calls = iter(range(100))

    def fail_second(*args: Any) -> Any:
        if next(calls) == 1:
            raise MemoryError
        return transfer.move(*args)

    monkeypatch.setattr(exchange, "move", fail_second)
    with pytest.raises(MemoryError):
        samo.remap_(model, random_masks(1, (0.3, 0.3)), opt)
    after = dense_state(model, opt)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[what]) for what, value in after.items())


# What is refused


@pytest.fixture
def model() -> nn.Module:
    return trained(OPTIMIZERS["exact"], torch.float32, random_masks(0, (0.5, 0.5)), steps=0)[0]


def test_a_model_that_is_not_compressed_is_refused() -> None:
    with pytest.raises(samo.CompressionError, match="the model is not compressed"):
        samo.remap_(build(), samo.Masks({}))


def test_what_is_no_mask_and_no_optimizer_is_refused(model: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"masks must be samo\.Masks, got dict"):
        samo.remap_(model, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"opt must be a torch.optim.Optimizer .* got str"):
        samo.remap_(model, random_masks(0, (0.5, 0.5)), "opt")  # type: ignore[arg-type]


def test_masks_that_do_not_fit_are_refused(model: nn.Module) -> None:
    masks = random_masks(1, (0.5, 0.5))
    with pytest.raises(samo.MaskError, match=r"the masks leave out '2.weight', which is pruned"):
        samo.remap_(model, samo.Masks({"0.weight": masks["0.weight"]}))
    none = samo.Mask.from_bool(torch.zeros(50, 60, dtype=torch.bool))
    with pytest.raises(samo.MaskError, match=r"'2.weight' keeps none of its 3,000 weights"):
        samo.remap_(model, samo.Masks({**masks, "2.weight": none}))
    with pytest.raises(samo.MaskError, match="has shape"):
        samo.remap_(model, samo.Masks({**masks, "2.weight": masks["0.weight"]}))


def test_a_parameter_added_later_is_refused(model: nn.Module) -> None:
    model.late = nn.Parameter(torch.zeros(4), requires_grad=False)
    masks = samo.Masks({**random_masks(1, (0.5, 0.5)), "late": samo.Mask.whole((4,))})
    with pytest.raises(samo.CompressionError, match="parameter 'late' is not compressed"):
        samo.remap_(model, masks)


def test_values_that_do_not_fit_are_refused(model: nn.Module) -> None:
    old, new = random_masks(0, (0.5, 0.5)), random_masks(1, (0.5, 0.5))
    before = model.get_parameter("0.weight").detach().clone()
    count = new["0.weight"].kept - (old["0.weight"] & new["0.weight"]).kept
    with pytest.raises(ValueError, match=r"fill has values for '1.weight' \(did you mean"):
        samo.remap_(model, new, fill={"1.weight": torch.ones(3)})
    with pytest.raises(ValueError, match=f"keeps {count:,} entries anew; give one floating-point"):
        samo.remap_(model, new, fill={"0.weight": torch.ones(count + 1)})
    with pytest.raises(ValueError, match=r"torch.int64 of shape"):
        samo.remap_(model, new, fill={"0.weight": torch.ones(count, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"are NaN, infinite or too large for torch.float32"):
        samo.remap_(model, new, fill={"0.weight": torch.full((count,), float("nan"))})
    with pytest.raises(ValueError, match=r"fill has 2 values for '0.weight', but its mask stays"):
        samo.remap_(model, old, fill={"0.weight": torch.ones(2)})
    assert torch.equal(model.get_parameter("0.weight"), before)


def test_lean_state_of_a_tensor_without_a_mask_is_refused() -> None:
    old = samo.Masks({"0.weight": random_masks(0, (0.5, 1.0))["0.weight"]})
    model, opt = trained(OPTIMIZERS["lean"], torch.bfloat16, old)
    with pytest.raises(samo.CompressionError, match=r"'2.weight' has no mask so far, and lean"):
        samo.remap_(model, random_masks(1, (0.5, 0.5)), opt)


def test_state_that_cannot_be_moved_is_refused() -> None:
    masks = random_masks(0, (0.5, 0.5))
    model, opt = trained(OPTIMIZERS["sgd"], torch.float32, masks)
    weight: Weight = owned_weights(model)["2.weight"]
    opt.state[weight.leaf]["history"] = torch.zeros(3, 4)
    with pytest.raises(samo.CompressionError, match=r"keeps 'history' of shape \(3, 4\) for"):
        samo.remap_(model, random_masks(1, (0.5, 0.5)), opt)
    opt.state[weight.leaf]["history"] = [1, 2]
    with pytest.raises(samo.CompressionError, match=r"keeps 'history' of \[1, 2\] for '2.weight'"):
        samo.remap_(model, random_masks(1, (0.5, 0.5)), opt)
    assert owned_weights(model)["0.weight"].mask == masks["0.weight"]


def test_an_optimizer_that_was_left_out_is_refused_until_it_is_gone() -> None:
    model, opt = trained(OPTIMIZERS["sgd"], torch.float32, random_masks(0, (0.5, 0.5)))
    new = random_masks(1, (0.5, 0.5))
    with pytest.raises(samo.CompressionError, match=r"by an optimizer \(SGD\) whose state belongs"):
        samo.remap_(model, new)
    del opt
    samo.remap_(model, new)


def test_a_loaded_optimizer_that_was_left_out_is_refused() -> None:
    masks = random_masks(0, (0.5, 0.5))
    _, opt = trained(OPTIMIZERS["exact"], torch.float32, masks)
    model, other = trained(OPTIMIZERS["exact"], torch.float32, masks, steps=0)
    other.load_state_dict(opt.state_dict())
    with pytest.raises(samo.CompressionError, match=r"last updated by an optimizer \(AdamW\)"):
        samo.remap_(model, random_masks(1, (0.5, 0.5)))
