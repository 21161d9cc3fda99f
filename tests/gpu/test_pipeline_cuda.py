"""Pipelines whose ranks share one GPU: gloo, through pinned host memory."""

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import samo
from tests.pipeline.cases import next_token_loss, optimizer, reference, tiny_gpt, tokens
from tests.ranks import run_ranks


def work(rank: int, num_ranks: int) -> Any:
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("pipe",))
    pipeline = samo.Pipeline(
        copy.deepcopy(tiny_gpt()), next_token_loss, mesh, 4, device="cuda:0", timeout_s=60
    )
    opt = optimizer("sgd", pipeline.module, is_compressed=False)
    losses = []
    for seed in range(3):
        x, y = tokens(7, seed)
        opt.zero_grad()
        losses.append(pipeline.step(x, target=y).cpu())
        opt.step()
    return losses, {name: value.cpu() for name, value in pipeline.module.state_dict().items()}


@pytest.mark.gpu
@pytest.mark.slow
def test_two_ranks_on_one_gpu_equal_one_process() -> None:
    results = run_ranks(2, work, timeout_s=100)
    model = tiny_gpt().cuda()
    opt = optimizer("sgd", model, is_compressed=False)
    batches = [(x.cuda(), y.cuda()) for x, y in (tokens(7, seed) for seed in range(3))]
    losses = reference(model, batches, 4, opt)
    got: dict[str, torch.Tensor] = {}
    for mine, state in results:
        # Kernels of one GPU and one shape: the same arithmetic, but for the order of atomic adds.
        torch.testing.assert_close(mine, [loss.cpu() for loss in losses])
        got |= state
    for name, value in model.state_dict().items():
        torch.testing.assert_close(got[name], value.cpu())
