"""FSDP2 on a GPU over NCCL, one rank for each: streams, freed storages and our kernels."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import samo
from samo.core.shards import whole
from tests.gpu.test_cuda import no_waiting

pytestmark = pytest.mark.gpu

BAD = 3


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(dtype: torch.dtype | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(48, 130), nn.Tanh(), nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 8)
    ).cuda()
    samo.compress_(model, samo.prune(model, 0.8), dtype=dtype, weights="streamed")
    return model


def train(model: nn.Module, opt: torch.optim.Optimizer, *, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    for step in range(8):
        x = torch.randn(16, 48, generator=draw).to("cuda", dtype)
        model(x).float().square().mean().backward()
        if step == BAD:
            model.get_parameter("2.weight").grad.mul_(float("nan"))
        with no_waiting() if step else nullcontext():  # the first one makes communicators
            opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("kind", ["fp32", "bf16 compute", "bf16 policy"])
def test_a_sharded_model_trains_as_a_whole_one(kind: str, reshards: bool) -> None:
    """One rank's sums are nobody else's: bit for bit."""
    compute = None if kind == "fp32" else torch.bfloat16
    dtype = compute or torch.float32
    sharded, plain = build(None if kind == "bf16 policy" else compute), build(compute)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if kind == "bf16 policy" else None, reduce_dtype=torch.float32
    )
    for layer in (sharded[0], sharded[2], sharded[4]):
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshards)
    fully_shard(sharded, mp_policy=policy)
    opts = [samo.AdamW(model.parameters(), lr=1e-2) for model in (sharded, plain)]
    train(sharded, opts[0], dtype=dtype)
    train(plain, opts[1], dtype=dtype)
    assert [opt.skipped_steps for opt in opts] == [1, 1]
    pairs = list(zip(sharded.parameters(), plain.parameters()))
    if kind == "bf16 policy":  # gradients are rounded to bfloat16 before they are reduced
        for ours, theirs in pairs:
            torch.testing.assert_close(whole(ours), theirs, rtol=0.05, atol=0.02)
    else:
        assert all(torch.equal(whole(ours), theirs) for ours, theirs in pairs)
    start = build().state_dict()["0.weight"]
    assert not torch.equal(whole(sharded[0].weight), start)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own
def test_no_dense_weight_and_no_whole_values_stay() -> None:
    width, count, workspaces = 4096, 16, 2**26
    torch.compiler.reset()  # other tests' code and CUDA graphs
    gc.collect()
    before = torch.cuda.memory_allocated()
    layers = [nn.Linear(width, width, bias=False, device="cuda") for _ in range(count)]
    model = nn.Sequential(*layers)
    samo.compress_(model, samo.prune(model, 0.9), dtype=torch.bfloat16, weights="streamed")
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    opt = samo.AdamW(model.parameters())
    x = torch.randn(2, width, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        model(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    torch.cuda.synchronize()
    gc.collect()  # frames of torch's first steps hold tensors in circles
    held = torch.cuda.memory_allocated()
    assert held - before < 1.05 * samo.ledger(model, opt).measured_bytes + workspaces
    torch.cuda.reset_peak_memory_stats()
    model(x).float().square().mean().backward()
    dense, values = 2 * width**2, 4 * width**2 // 10
    # At a time one weight and its gradient, the whole values of some layers, and gradients of all.
    most = 4 * dense + (count + 4) * values + workspaces
    assert most < count * dense
    assert torch.cuda.max_memory_allocated() - held < most
