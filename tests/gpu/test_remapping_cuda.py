"""Masks that change on a CUDA device: the bits of a CPU's."""

from typing import Any

import pytest
import torch
from torch import nn

import samo
from samo.kernels import AgedUpdate
from samo.kernels.ages import adamw_aged_
from samo.owners import owned_weights
from tests.test_ages import SETTINGS, copy_of, update_of
from tests.test_remapping import OPTIMIZERS, dense_state, random_masks, trained

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_remap_on_a_gpu_is_that_of_a_cpu(kind: str, dtype: torch.dtype) -> None:
    old, new = random_masks(0, (0.3, 0.5)), random_masks(1, (0.5, 0.2))
    model, opt = trained(OPTIMIZERS[kind], dtype, old)
    there = nn.Sequential(nn.Linear(70, 60), nn.Tanh(), nn.Linear(60, 50)).cuda()
    samo.compress_(there, old.to("cuda"), dtype=dtype)
    for name, weight in owned_weights(model).items():
        other = owned_weights(there)[name]
        with torch.no_grad():
            other.param.copy_(weight.param)
        other.check()
        rest = weight.ensure_rest(is_lean=kind == "lean")
        other.rest = None if rest is None else rest.cuda()
        other.leaf.grad = None if weight.leaf.grad is None else weight.leaf.grad.cuda()
    there_opt = OPTIMIZERS[kind](samo.parameters(there))
    there_opt.load_state_dict(opt.state_dict())
    samo.remap_(model, new, opt)
    samo.remap_(there, new, there_opt)
    moved = dense_state(there, there_opt)
    for what, value in dense_state(model, opt).items():
        assert torch.equal(moved[what], value), what


def test_ages_on_a_gpu_are_those_of_a_cpu() -> None:
    ours = update_of(500.0)
    ages = torch.randint(0, 400, ours.grad_Z.shape, dtype=torch.int16)
    there: Any = copy_of(ours)._replace(
        mask=ours.mask.to("cuda"),
        **{
            name: getattr(ours, name).cuda()
            for name in ("dense", "grad_Z", "exp_avg_Z", "exp_avg_sq_Z", "step")
        },
    )
    there_ages = ages.cuda()
    adamw_aged_([AgedUpdate(ours, ages)], SETTINGS, None)
    adamw_aged_([AgedUpdate(there, there_ages)], SETTINGS, torch.tensor(False, device="cuda"))
    assert torch.equal(there_ages.cpu(), ages)
    # torch's CUDA operations fuse a product and a sum here and there.
    torch.testing.assert_close(there.dense.cpu(), ours.dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("grow", ["random", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_move_and_the_model_trains(grow: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2000, 1200), nn.Tanh(), nn.Linear(1200, 50)).cuda()
    masks = samo.prune(model, 0.9, method="random")
    samo.compress_(model, masks, dtype=dtype)
    opt = samo.AdamW(samo.parameters(model), lr=1e-3, entry_steps=True)
    moving = samo.DynamicSparse(model, opt, grow=grow, every=3, stop=20, warmup=2)
    x = torch.randn(64, 2000, device="cuda", dtype=dtype)
    losses = []
    for _ in range(20):
        loss = (model(x).float() - 1).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        changed = moving.step()
        losses.append(loss.item())
        for name, mask in (changed or {}).items():
            assert mask.kept == masks[name].kept
            assert not model.get_parameter(name)[~mask.to_bool()].any()
    assert losses[-1] < 0.5 * losses[0]
