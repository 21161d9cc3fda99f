"""Pipelines on one GPU: ranks over TCP, and two streams of one process."""

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import samo
from samo.pipeline.runner import Batch
from tests.pipeline.cases import next_token_loss, optimizer, reference, tiny_gpt, tokens
from tests.pipeline.local import check_trained, run_threads, transports
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


def in_float16(model: torch.nn.Module, step: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with a scale that overflows at first; return its course and the change of weights."""
    samo.compress_(model, masks_for(model), dtype=torch.float16)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    scales = []
    for seed in range(12):
        step(scaler, *tokens(8, seed))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scales.append(scaler.get_scale())
    changes = {n: (param.detach() - before[n]).cpu() for n, param in model.named_parameters()}
    return scales, changes


def masks_for(model: torch.nn.Module) -> samo.Masks:
    masks, here = samo.prune(tiny_gpt(), 0.5), dict(model.named_parameters())
    return samo.Masks({name: mask for name, mask in masks.items() if name in here})


def replicas_in_float16(rank: int, num_ranks: int) -> Any:
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    pipeline = samo.Pipeline(tiny_gpt(), next_token_loss, mesh, 2, device="cuda:0", timeout_s=60)
    place = mesh["data"].get_local_rank()

    def step(scaler: torch.amp.GradScaler, x: torch.Tensor, y: torch.Tensor) -> None:
        pipeline.step(x.chunk(2)[place], target=y.chunk(2)[place], scaler=scaler)

    return in_float16(pipeline.module, step)


@pytest.mark.gpu
@pytest.mark.slow
def test_replicated_stages_in_float16_skip_the_steps_of_one_process() -> None:
    results = run_ranks(4, replicas_in_float16, timeout_s=100)
    model = tiny_gpt().cuda()

    def step(scaler: torch.amp.GradScaler, x: torch.Tensor, y: torch.Tensor) -> None:
        for part, wanted in zip(
            x.cuda().chunk(4), y.cuda().chunk(4)
        ):  # 2 replicas, 2 micro-batches
            scaler.scale(next_token_loss(model(part), wanted) * 0.5).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.div_(2)

    scales, wanted = in_float16(model, step)
    assert scales[0] < 2.0**24  # it did overflow
    assert scales[-1] == scales[-2]  # and found its way
    seen: set[str] = set()
    for found, changes in results:
        assert found == scales
        seen |= changes.keys()
        for name, change in changes.items():
            # Sums in float16, in any order: 1 part in 2,048 for each of some.
            assert (change - wanted[name]).abs().max() <= 0.01 * wanted[name].abs().max(), name
    assert seen == wanted.keys()


class Wide(torch.nn.Module):
    """Takes a while on a GPU, and returns a non-contiguous tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).t().contiguous().t()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 2048])
def test_two_streams_of_one_process_equal_one(width: int) -> None:
    """The transport for NCCL, with copies in its place: a packet that is too early is not right."""
    torch.manual_seed(0)
    stages: list[torch.nn.Module] = [Wide(width).cuda(), Wide(width).cuda()]
    whole = copy.deepcopy(stages)
    inputs = [(torch.randn(width, width, device="cuda"),) for _ in range(6)]

    def loss(number: int, output: torch.Tensor) -> torch.Tensor:
        return output.square().mean() * (number + 1)

    batches = [Batch(6, inputs), Batch(6, loss=loss)]
    both = transports(inputs[0][0].device, torch.cuda)
    results = run_threads(both, stages, batches, steps=3, cuda=torch.cuda)
    check_trained(stages, whole, results, inputs, loss)
