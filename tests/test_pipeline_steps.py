"""What all stages do alike around a step: skip it, scale the loss, clip gradients."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import samo
from samo.pipeline.schedules import TorchRunner
from tests.pipeline_cases import compress, next_token_loss, tiny_gpt, tokens
from tests.ranks import run_ranks

TIMEOUT = 20


class Larger(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Layer(nn.Module):
    """A layer whose gradients are made larger, so that they overflow before others do."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return Larger.apply(self.linear(x), self.factor)


def scaled(mesh: Any, name: str) -> list[tuple[float, bool]]:
    """Train with a scale that overflows on stage 0 alone; return scales, and whether weights changed."""
    torch.manual_seed(0)
    held: list[samo.LossScaler] = []
    pipeline = samo.Pipeline(
        [Layer(64.0), Layer(1.0)],
        lambda y, wanted: held[0].scale(F.mse_loss(y.float(), wanted.float())),
        mesh,
        2,
        timeout_s=TIMEOUT,
    )
    module = samo.compress_(pipeline.module, samo.prune(pipeline.module, 0.5), dtype=torch.float16)
    held.append(samo.LossScaler(module, init_scale=2.0**16))
    leaves = list(samo.parameters(module))
    opt = samo.AdamW(leaves, lr=1e-3) if name == "samo" else torch.optim.SGD(leaves, lr=1e-3)
    x = torch.linspace(-1, 1, 16).view(4, 4).half()
    found = []
    for _ in range(6):
        before = copy.deepcopy(module.state_dict())
        pipeline.step(x, target=3 * x)
        opt.step()
        opt.zero_grad()
        changed = any(not torch.equal(before[k], v) for k, v in module.state_dict().items())
        found.append((held[0].get_scale(), changed))
    pipeline.close()
    return found


def clipped(mesh: Any, *, is_compressed: bool, norm_type: float) -> Any:
    """Return the norm, and gradients by name after clipping."""
    whole = tiny_gpt(is_tied=True)
    pipeline = samo.Pipeline(copy.deepcopy(whole), next_token_loss, mesh, 2, timeout_s=TIMEOUT)
    if is_compressed:
        compress(pipeline.module, whole)
    x, y = tokens()
    pipeline.step(x, target=y)
    norm = samo.clip_grad_norm_(pipeline, 0.01, norm_type)
    pipeline.close()
    module = pipeline.module
    leaves = dict(samo.named_parameters(module) if is_compressed else module.named_parameters())
    return norm, {name: leaf.grad.clone() for name, leaf in leaves.items()}


def spoilt(mesh: Any, rank: int, *, is_clipped: bool) -> tuple[int, bool]:
    """Return skipped steps, and whether all gradients are NaN, after one on the last stage became inf."""
    pipeline = samo.Pipeline(
        [nn.Linear(4, 4), nn.Linear(4, 4)], F.mse_loss, mesh, 2, timeout_s=TIMEOUT
    )
    module = samo.compress_(pipeline.module, samo.prune(pipeline.module, 0.5))
    opt = samo.AdamW(samo.parameters(module))
    pipeline.step(torch.ones(2, 4), target=torch.zeros(2, 4))
    leaves = list(samo.parameters(module))
    if rank == 1:
        leaves[0].grad[0] = math.inf
    if is_clipped:
        assert not samo.clip_grad_norm_(pipeline, 1.0).isfinite()
    is_nan = all(bool(leaf.grad.isnan().all()) for leaf in leaves)
    opt.step()
    pipeline.close()
    return opt.skipped_steps, is_nan


def work(rank: int, num_ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("pipe",))
    results: dict[str, Any] = {name: scaled(mesh, name) for name in ("samo", "torch")}
    results["spoilt"] = [spoilt(mesh, rank, is_clipped=flag) for flag in (False, True)]
    for is_compressed in (False, True):
        for norm_type in (2.0, math.inf):
            results[f"{is_compressed} {norm_type}"] = clipped(
                mesh, is_compressed=is_compressed, norm_type=norm_type
            )
    return results


def test_stages_skip_scale_and_clip_alike() -> None:
    first, last = run_ranks(2, work)
    # What is written after the batch is seen by one stage, and by all once they clip together.
    assert first["spoilt"] == [(0, False), (1, True)]
    assert last["spoilt"] == [(1, False), (1, True)]
    for name in ("samo", "torch"):
        assert first[name] == last[name]
        scales = [scale for scale, _ in first[name]]
        assert scales[0] == 2.0**15  # it did overflow
        assert scales[-1] == scales[-2]  # and found its way
        assert [changed for _, changed in first[name]][:1] == [False]
        assert first[name][-1][1]
    for is_compressed in (False, True):
        for norm_type in (2.0, math.inf):
            model = tiny_gpt(is_tied=True)
            if is_compressed:
                compress(model, tiny_gpt(is_tied=True))
            x, y = tokens()
            next_token_loss(model(x), y).backward()
            named = dict(
                samo.named_parameters(model) if is_compressed else model.named_parameters()
            )
            wanted = nn.utils.clip_grad_norm_(list(named.values()), 0.01, norm_type)
            for norm, grads in (
                first[f"{is_compressed} {norm_type}"],
                last[f"{is_compressed} {norm_type}"],
            ):
                torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)
                for name, grad in grads.items():
                    here = named["embed.weight" if name == "head.weight" else name].grad
                    torch.testing.assert_close(grad, here, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_micro_batch_without_targets_counts_for_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).to(dtype)
    x, y = torch.randn(6, 4, dtype=dtype), torch.tensor([0, 2, -100, -100, 1, -100])
    pipeline = samo.Pipeline(copy.deepcopy(model), F.cross_entropy, None, 3)
    loss = pipeline.step(x, target=y)
    wanted = F.cross_entropy(model(x), y)
    wanted.backward()
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(loss, wanted.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        pipeline.module.get_parameter("0.weight").grad,
        model[0].weight.grad,
        rtol=tolerance,
        atol=tolerance,
    )
    assert pipeline.eval(
        x, target=torch.full((6,), -100)
    ).isnan()  # a mean over nothing, as torch's


def test_a_stage_that_does_not_agree_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = samo.Pipeline([nn.Linear(2, 2)], F.mse_loss, None, 1)

    def broken(tensors: object, stages: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(pipeline._transport, "add_up", broken)
    monkeypatch.setattr(pipeline._transport, "num_stages", 2)
    with pytest.raises(samo.PeerError, match="another stage did not come"):
        pipeline.of_all_stages(0.0)
    runner = object.__new__(TorchRunner)  # its own needs several ranks
    monkeypatch.setattr(pipeline, "_runner", runner)
    with pytest.raises(samo.PeerError, match=r"did not come \(Connection closed by peer\)"):
        pipeline.of_all_stages(0.0)
    pipeline.close()
    with pytest.raises(samo.PeerError, match="the pipeline was closed"):
        pipeline.of_all_stages(0.0)


def test_what_a_stage_finds_by_itself_is_not_the_fault_of_another() -> None:
    def refuse() -> None:
        raise samo.CompressionError("not reduced")

    def fill() -> None:
        raise torch.OutOfMemoryError("no memory left")

    pipeline = samo.Pipeline([nn.Linear(2, 2)], F.mse_loss, None, 1)
    for runner in (pipeline._runner, object.__new__(TorchRunner)):
        with pytest.raises(samo.CompressionError, match="not reduced"):
            runner.together(refuse)
        with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
            runner.together(fill)
