"""Masks that change on a CUDA device: the bits of a CPU's."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import samo
from tests.core.test_remap import dense_state, random_masks, trained
from tests.core.twins import WAYS
from tests.meters import assert_same

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", WAYS)
def test_a_remap_on_a_gpu_is_that_of_a_cpu(kind: str) -> None:
    old, new = random_masks(0, (0.3, 0.5)), random_masks(1, (0.5, 0.2))
    model, opt = trained(kind, old)
    there = copy.deepcopy(model).cuda()
    for ours, theirs in zip(model.parameters(), there.parameters(), strict=True):
        theirs.grad = None if ours.grad is None else ours.grad.cuda()
    there_opt = WAYS[kind][1](there.parameters())
    there_opt.load_state_dict(opt.state_dict())
    samo.remap_(model, new, opt)
    samo.remap_(there, new, there_opt)
    assert_same(dense_state(model, opt), dense_state(there, there_opt))
    assert torch.equal(there[0].weight.cpu(), model[0].weight)
    there_opt.step()


@pytest.mark.parametrize("grow", ["random", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_move_and_the_model_trains(grow: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2000, 1200), nn.Tanh(), nn.Linear(1200, 50)).cuda()
    masks = samo.prune(model, 0.9, method="random")
    samo.compress_(model, masks, dtype=dtype)
    opt = samo.AdamW(model.parameters(), lr=1e-3, entry_steps=True)
    moving = samo.DynamicSparse(model, opt, grow=grow, every=3, stop=20)
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
            assert not model.get_submodule(name[0]).weight[~mask.to_bool()].any()
    assert losses[-1] < 0.5 * losses[0]
