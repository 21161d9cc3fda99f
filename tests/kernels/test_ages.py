"""Step counts of entries: without late entries they change nothing, with them they correct.

What the kernels make of them is tested with all else that they do, in test_kernels.py.
"""

import copy
import pathlib

import pytest
import torch
from torch import nn

import samo
from samo.kernels import Path


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


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("reference", torch.float64), ("auto", torch.float32), ("auto", torch.bfloat16)],
)
def test_without_late_entries_results_are_the_same_bit_for_bit(
    dtype: torch.dtype, kernels: Path
) -> None:
    plain, plain_opt = build(dtype, entry_steps=False, kernels=kernels)
    aged, aged_opt = build(dtype, entry_steps=True, kernels=kernels)
    train(plain, plain_opt, 10, dtype)
    train(aged, aged_opt, 10, dtype)
    for name, value in plain.state_dict().items():
        assert torch.equal(aged.state_dict()[name], value)
    for ours, theirs in zip(aged.parameters(), plain.parameters()):
        for key, value in plain_opt.state[theirs].items():
            assert torch.equal(aged_opt.state[ours][key], value)
    weight, bias, *_ = aged.parameters()
    assert (aged_opt.state[weight]["age"] == 10).all()
    assert "age" not in aged_opt.state[bias]


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
    samo.remap_(model, samo.Masks({"0.weight": samo.Mask.ones((32, 32))}), opt)
    model(torch.randn(4, 32)).square().mean().backward()
    opt.step()
    late = model[0].weight.abs()[~half.to_bool()]
    expected = 1e-3 if entry_steps else 1e-3 * 0.1 / 0.001**0.5
    torch.testing.assert_close(late, torch.full_like(late, expected), rtol=1e-3, atol=0)


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


def test_a_state_dict_brings_the_ages_back() -> None:
    model, opt = remapped(entry_steps=True)
    ages = opt.state[next(model.parameters())]["age"]
    assert set(ages.unique().tolist()) == {3, 7}
    fresh = copy.deepcopy(model)
    fresh_opt = samo.AdamW(
        fresh.parameters(), lr=3e-3, weight_decay=0.1, entry_steps=True, kernels="reference"
    )
    fresh_opt.load_state_dict(opt.state_dict())
    loaded = fresh_opt.state[next(fresh.parameters())]["age"]
    assert loaded.dtype == torch.int16
    assert torch.equal(loaded, ages)
    for one, its_opt in ((model, opt), (fresh, fresh_opt)):
        train(one, its_opt, 2, torch.bfloat16)
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)


@pytest.mark.parametrize("entry_steps", [True, False])
def test_a_state_dict_with_ages_fits_only_an_optimizer_with_them(entry_steps: bool) -> None:
    model, opt = remapped(entry_steps=entry_steps)
    other = samo.AdamW(model.parameters(), entry_steps=not entry_steps)
    with pytest.raises(samo.MaskError, match=f"entry_steps={entry_steps}"):
        other.load_state_dict(opt.state_dict())


def test_ages_and_counts_out_of_range_are_refused(tmp_path: pathlib.Path) -> None:
    model, opt = remapped(entry_steps=True)
    state = opt.state[next(model.parameters())]
    for key, message in (("age", "ages must be 0 or more, got -7"), ("step", "step must be 0 or")):
        good = state[key].clone()
        state[key].fill_(-7)
        with pytest.raises(samo.MaskError, match=rf"state of '0.weight' is damaged: {message}"):
            opt.load_state_dict(opt.state_dict())
        samo.save(tmp_path / key, model, opt)
        with pytest.raises(samo.CheckpointError, match=rf"state of '0.weight': {message}"):
            samo.load(tmp_path / key, model, opt)
        state[key].copy_(good)
    opt.load_state_dict(opt.state_dict())
