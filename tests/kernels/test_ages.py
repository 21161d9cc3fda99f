"""Step counts of entries: without late entries they change nothing, with them they correct."""

import copy
import pathlib
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

import samo
from samo.kernels import (
    AdamWSettings,
    AdamWUpdate,
    AgedUpdate,
    Path,
    ages as ages_module,
    choose,
    choose_aged,
    cpu_ages,
    reference,
)
from samo.kernels.ages import OLDEST, adamw_aged_, ages_at
from samo.kernels.rounding import join, split
from tests.meters import assert_ulps

SETTINGS = AdamWSettings(0.9, 0.999, 1e-8)
ON_GPU = torch.cuda.is_available()


@pytest.fixture(
    params=[
        "auto",
        "reference",
        pytest.param(
            "triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
        ),
    ]
)
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """All ways to update entries; that of a GPU on one, or in Triton's interpreter."""
    with torch.device("cuda" if ON_GPU and request.param == "triton" else "cpu"):
        yield request.param


def build(
    dtype: torch.dtype, *, entry_steps: bool, kernels: Path = "reference"
) -> tuple[nn.Module, samo.AdamW]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 9))
    masks = samo.prune(model, sparsity=0.7)
    samo.compress_(model, masks, dtype=dtype, kernels=kernels)
    opt = samo.AdamW(
        model.parameters(), lr=3e-3, weight_decay=0.1, entry_steps=entry_steps, kernels=kernels
    )
    return model, opt


def train(model: nn.Module, opt: samo.AdamW, steps: int, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    for _ in range(steps):
        x = torch.randn(8, 40, dtype=dtype)
        model(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_without_late_entries_results_are_the_same_bit_for_bit(
    dtype: torch.dtype, path: Path
) -> None:
    plain, plain_opt = build(dtype, entry_steps=False, kernels=path)
    aged, aged_opt = build(dtype, entry_steps=True, kernels=path)
    if ON_GPU and path == "triton" and dtype == torch.float64:
        pytest.skip(
            "without a kernel of its own, where a GPU's powers may differ in the last digit"
        )
    steps = 5 if path == "triton" and not ON_GPU else 60  # the interpreter is slow
    train(plain, plain_opt, steps, dtype)
    train(aged, aged_opt, steps, dtype)
    for name, value in plain.state_dict().items():
        assert torch.equal(aged.state_dict()[name], value)
    for ours, theirs in zip(aged.parameters(), plain.parameters()):
        for key, value in plain_opt.state[theirs].items():
            assert torch.equal(aged_opt.state[ours][key], value)
    weight, bias, *_ = aged.parameters()
    assert (aged_opt.state[weight]["age"] == steps).all()
    assert "age" not in aged_opt.state[bias]


def update_of(
    step: float,
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    dense_dtype: torch.dtype | None = torch.bfloat16,
) -> AdamWUpdate:
    mask = samo.Mask.from_bool(torch.rand(50, 60) < 0.3)
    moment = torch.float64 if dtype == torch.float64 else torch.float32
    values, rest = split(torch.randn(mask.kept, dtype=moment), dtype)
    dense = None
    if dense_dtype is not None:
        dense = torch.zeros(50, 60, dtype=dense_dtype)
        dense[mask.to_bool()] = values.to(dense_dtype)
    grad = torch.randn(mask.kept).to(grad_dtype or dtype)
    exp_avg, exp_avg_sq = torch.randn(2, mask.kept, dtype=moment)
    return AdamWUpdate(
        values,
        rest,
        grad,
        exp_avg,
        exp_avg_sq.abs(),
        torch.tensor(step),
        3e-3,
        0.1,
        dense,
        mask,
    )


def copy_of(update: AdamWUpdate) -> AdamWUpdate:
    return AdamWUpdate(*(part.clone() if isinstance(part, Tensor) else part for part in update))


@pytest.mark.parametrize("step", [0.0, 999.0, OLDEST - 1.0, OLDEST + 0.0, 1e6])
@pytest.mark.parametrize("beta2", [0.95, 0.99999])
@pytest.mark.parametrize("dense_dtype", [torch.bfloat16, None], ids=str)
def test_entries_that_were_always_there_follow_the_weight_at_any_step(
    step: float, beta2: float, dense_dtype: torch.dtype | None, path: Path
) -> None:
    ours = update_of(step, dense_dtype=dense_dtype)
    theirs = copy_of(ours)
    settings = SETTINGS._replace(beta2=beta2)
    ages = ages_at(ours.step, ours.grad.numel())
    choose_aged(ours.param.device, path).adamw_aged_([AgedUpdate(ours, ages)], settings, None)
    choose(ours.param.device, path).adamw_([theirs], settings, None)
    for one, other in zip(ours, theirs):
        assert one is other or not isinstance(one, Tensor) or torch.equal(one, other)
    assert (ages == min(step + 1, OLDEST)).all()


def test_each_entry_is_updated_as_a_weight_of_its_age_would_be() -> None:
    ours = update_of(500.0)
    before = copy_of(ours)
    ages = torch.randint(0, 400, ours.grad.shape, dtype=torch.int16)
    expected = ages.clone()
    adamw_aged_([AgedUpdate(ours, ages)], SETTINGS, None)
    assert torch.equal(ages, expected + 1)
    for age in expected.unique().tolist():
        single = copy_of(before)._replace(step=torch.tensor(float(age)))
        reference.adamw_([single], SETTINGS, None)
        mine = expected == age
        assert torch.equal(ours.param[mine], single.param[mine])
        assert torch.equal(ours.exp_avg_sq[mine], single.exp_avg_sq[mine])


TYPES = [
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16, torch.float16),
    (torch.float32, torch.float32, None),
    (torch.float64, torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, None),
    (torch.float16, torch.bfloat16, torch.float16),
]


def master_of(update: AdamWUpdate) -> Tensor:
    return join(update.param, update.rest)


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("beta1", [0.9, 0.4])
@pytest.mark.parametrize("is_lr_tensor", [False, True], ids=["lr", "lr tensor"])
def test_the_fast_paths_are_within_some_ulp_of_the_reference(
    types: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    beta1: float,
    is_lr_tensor: bool,
    path: Path,
) -> None:
    ours = update_of(500.0, *types)
    theirs, before = copy_of(ours), master_of(ours)
    lr = torch.tensor(3e-3, dtype=torch.float64) if is_lr_tensor else 3e-3
    ours, theirs = (update._replace(lr=lr) for update in (ours, theirs))
    ages = torch.randint(0, OLDEST + 1, ours.grad.shape, dtype=torch.int16)
    ages[:3] = OLDEST
    expected = ages.clone()
    settings = SETTINGS._replace(beta1=beta1)
    # Two at once: each finds its own entries, ages, step count and rate.
    others = update_of(3.0, *types)._replace(lr=0.5)
    aged = [AgedUpdate(others, ages_at(others.step, others.grad.numel())), AgedUpdate(ours, ages)]
    choose_aged(ours.param.device, path).adamw_aged_(aged, settings, None)
    adamw_aged_([AgedUpdate(theirs, expected)], settings, None)
    assert torch.equal(ages, expected)
    assert ours.step == theirs.step == 501
    torch.testing.assert_close(ours.exp_avg, theirs.exp_avg)
    torch.testing.assert_close(ours.exp_avg_sq, theirs.exp_avg_sq)
    # As without ages: 3, and 1 for moments that the interpreter rounds twice.
    assert_ulps(master_of(ours), master_of(theirs), before, at_most=4 if path == "triton" else 3)
    if ours.dense is not None:
        assert ours.mask is not None
        keep = ours.mask.to_bool()
        assert torch.equal(ours.dense[keep], ours.param.to(ours.dense.dtype))
        assert not ours.dense[~keep].any()


def test_two_threads_give_the_bits_of_one() -> None:
    mask = samo.Mask.from_bool(torch.rand(400, 500) < 0.4)
    vectors = [torch.randn(mask.kept) for _ in range(2)] + [torch.rand(mask.kept)]
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            for dtype in (torch.float32, torch.bfloat16):
                rest = None if dtype == torch.float32 else torch.zeros(mask.kept, dtype=torch.int16)
                update = AdamWUpdate(
                    torch.ones(mask.kept, dtype=dtype),
                    rest,
                    vectors[0].to(dtype),
                    vectors[1].clone(),
                    vectors[2].clone(),
                    torch.tensor(3.0),
                    3e-3,
                    0.1,
                    torch.zeros(400, 500, dtype=torch.bfloat16),
                    mask,
                )
                ages = torch.arange(mask.kept).remainder(9).to(torch.int16)
                cpu_ages.adamw_aged_([AgedUpdate(update, ages)], SETTINGS, None)
                found.append((update, ages))
        finally:
            torch.set_num_threads(1)
    for (one, ages), (two, others) in zip(found[:2], found[2:]):
        assert torch.equal(one.param, two.param)
        assert torch.equal(one.dense, two.dense)  # type: ignore[arg-type]
        assert torch.equal(ages, others)


def test_copies_may_have_strides_and_ages_a_wrong_size(path: Path) -> None:
    ours = update_of(7.0)
    ages = torch.full(ours.grad.shape, 3, dtype=torch.int16)
    dense = torch.zeros(60, 50, dtype=torch.bfloat16).t()
    kernels = choose_aged(ours.param.device, path)
    kernels.adamw_aged_([AgedUpdate(ours._replace(dense=dense), ages)], SETTINGS, None)
    assert ours.mask is not None
    assert torch.equal(dense[ours.mask.to_bool()], ours.param.bfloat16())
    with pytest.raises(ValueError, match="has the wrong size of age "):
        kernels.adamw_aged_([AgedUpdate(ours, ages[1:].clone())], SETTINGS, None)


def test_each_device_takes_its_fast_path() -> None:
    assert choose_aged(torch.device("cpu")) is cpu_ages
    assert choose_aged(torch.device("cpu"), "reference") is ages_module
    assert choose_aged(torch.device("cuda"), "reference") is ages_module
    cuda_ages = pytest.importorskip("samo.kernels.cuda_ages", reason="needs triton")
    assert choose_aged(torch.device("cpu"), "triton") is cuda_ages
    assert choose_aged(torch.device("cuda")) is cuda_ages


@pytest.mark.parametrize("is_skipped", [True, False])
def test_a_skipped_step_counts_nothing(is_skipped: bool, path: Path) -> None:
    ours = update_of(7.0)
    before = copy_of(ours)
    ages = torch.full(ours.grad.shape, 3, dtype=torch.int16)
    choose_aged(ours.param.device, path).adamw_aged_(
        [AgedUpdate(ours, ages)], SETTINGS, torch.tensor(is_skipped)
    )
    assert (ages == (3 if is_skipped else 4)).all()
    assert ours.step == (7 if is_skipped else 8)
    assert torch.equal(ours.param, before.param) == is_skipped
    assert torch.equal(ours.dense, before.dense) == is_skipped  # type: ignore[arg-type]


@pytest.mark.parametrize("entry_steps", [True, False])
def test_the_first_update_of_a_late_entry_is_no_larger_than_the_rate(entry_steps: bool) -> None:
    """Adam's first update is lr; with the step count of the tensor it is 3.16 times as large."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    half = samo.Mask.from_bool(torch.arange(1024).view(32, 32) % 2 == 0)
    samo.compress_(model, samo.Masks({"0.weight": half}))
    opt = samo.AdamW(
        model.parameters(), lr=1e-3, weight_decay=0.0, eps=0.0, entry_steps=entry_steps
    )
    (values,) = model.parameters()
    model(torch.randn(4, 32)).square().mean().backward()
    opt.step()
    opt.state[values]["step"].fill_(20_000)
    opt.zero_grad()
    samo.remap_(model, samo.Masks({"0.weight": samo.Mask.whole((32, 32))}), opt)
    model(torch.randn(4, 32)).square().mean().backward()
    opt.step()
    late = model[0].weight.abs()[~half.to_bool()]
    expected = 1e-3 if entry_steps else 1e-3 * 0.1 / 0.001**0.5
    torch.testing.assert_close(late, torch.full_like(late, expected), rtol=1e-3, atol=0)


def test_lean_state_has_no_ages() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    samo.compress_(model, samo.prune(model, 0.5))
    with pytest.raises(ValueError, match="entry_steps=True goes with state='exact' alone"):
        samo.AdamW(model.parameters(), state="lean", entry_steps=True)


def test_ages_have_a_kind_of_their_own_in_the_ledger() -> None:
    model, opt = build(torch.bfloat16, entry_steps=True)
    train(model, opt, 1, torch.bfloat16)
    model(torch.randn(8, 40).bfloat16()).float().sum().backward()
    held = samo.ledger(model, opt)
    kept = sum(state["age"].numel() for state in opt.state.values() if "age" in state)
    assert held.pruned.measured["ages"] == held.pruned.predicted["ages"] == 2 * kept
    assert held.pruned.measured["moments"] == held.pruned.predicted["moments"] == 8 * kept
    assert held.unpruned.measured["ages"] == held.unpruned.predicted["ages"] == 0
    assert held.measured_bytes == held.predicted_bytes
    assert "ages of entries" in str(held)
    assert "ages of entries" not in str(samo.ledger(*build(torch.bfloat16, entry_steps=False)))


def test_a_carried_over_state_is_as_old_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    dense = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
        dense.step()
    samo.compress_(model, samo.prune(model, 0.5))
    opt = samo.AdamW(model.parameters(), entry_steps=True)
    opt.carry_over(dense)
    values = next(model.parameters())
    assert torch.equal(opt.state[values]["age"], torch.full((32,), 3, dtype=torch.int16))


def remapped(*, entry_steps: bool) -> tuple[nn.Module, samo.AdamW]:
    model, opt = build(torch.bfloat16, entry_steps=entry_steps)
    train(model, opt, 4, torch.bfloat16)
    samo.remap_(model, samo.prune(model, 0.7, method="random", seed=9), opt)
    train(model, opt, 3, torch.bfloat16)
    return model, opt


def test_a_checkpoint_brings_the_ages_back(tmp_path: pathlib.Path) -> None:
    model, opt = remapped(entry_steps=True)
    ages = opt.state[next(model.parameters())]["age"]
    assert set(ages.unique().tolist()) == {3, 7}
    samo.save(tmp_path / "at", model, opt)

    fresh = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 9))
    samo.compress_(
        fresh, samo.load_masks(tmp_path / "at"), dtype=torch.bfloat16, kernels="reference"
    )
    fresh_opt = samo.AdamW(
        fresh.parameters(), lr=3e-3, weight_decay=0.1, entry_steps=True, kernels="reference"
    )
    samo.load(tmp_path / "at", fresh, fresh_opt)
    loaded = fresh_opt.state[next(fresh.parameters())]["age"]
    assert loaded.dtype == torch.int16
    assert torch.equal(loaded, ages)
    for one, its_opt in ((model, opt), (fresh, fresh_opt)):
        train(one, its_opt, 2, torch.bfloat16)
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)


@pytest.mark.parametrize("entry_steps", [True, False])
def test_a_checkpoint_with_ages_fits_only_an_optimizer_with_them(
    tmp_path: pathlib.Path, entry_steps: bool
) -> None:
    model, opt = remapped(entry_steps=entry_steps)
    samo.save(tmp_path / "at", model, opt)
    other = samo.AdamW(model.parameters(), entry_steps=not entry_steps)
    with pytest.raises(samo.CheckpointError, match=f"samo.AdamW with entry_steps={entry_steps}"):
        samo.load(tmp_path / "at", model, other)
    with pytest.raises(samo.MaskError, match=f"build the optimizer with entry_steps={entry_steps}"):
        other.load_state_dict(opt.state_dict())


def test_a_state_dict_brings_the_ages_back() -> None:
    model, opt = remapped(entry_steps=True)
    twin = copy.deepcopy(model)
    other = samo.AdamW(twin.parameters(), entry_steps=True)
    other.load_state_dict(opt.state_dict())
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        assert torch.equal(
            opt.state[ours].get("age", torch.ones(0)), other.state[theirs].get("age", torch.ones(0))
        )
