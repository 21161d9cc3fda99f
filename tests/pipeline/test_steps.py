"""What all stages do alike around a step: skip it, scale the loss, clip gradients."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import samo
from samo.pipeline.torch_schedules import TorchRunner
from tests.pipeline.cases import compress, next_token_loss, tiny_gpt, tokens
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


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer(64.0), Layer(1.0)]


def masks_of_layers() -> samo.Masks:
    return samo.prune(nn.Sequential(*layers()), 0.5)


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "samo":
        return samo.AdamW(module.parameters(), lr=1e-3, kernels="reference")
    return torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)


X = torch.linspace(-1, 1, 16).view(4, 4).half()
Steps = list[tuple[float, float, dict[str, Tensor]]]
"""Loss, scale afterwards and weights, of each step."""


def loss_of(output: Tensor, wanted: Tensor) -> Tensor:
    return F.mse_loss(output.float(), wanted.float())


def scaled(mesh: Any, name: str, schedule: str) -> Steps:
    """Train in float16 with a scale that overflows on stage 0 alone."""
    pipeline = samo.Pipeline(layers(), loss_of, mesh, 2, schedule=schedule, timeout_s=TIMEOUT)
    masks = pipeline.masks(masks_of_layers())
    module = samo.compress_(pipeline.module, masks, dtype=torch.float16, kernels="reference")
    scaler = torch.amp.GradScaler("cpu")
    opt = optimizer_of(name, module)
    found: Steps = []
    for _ in range(6):
        loss = pipeline.step(X, target=3 * X, scaler=scaler)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        found.append((float(loss), scaler.get_scale(), copy.deepcopy(module.state_dict())))
    pipeline.close()
    return found


def scaled_in_one_process(name: str) -> Steps:
    model: nn.Module = nn.Sequential(*layers())
    samo.compress_(model, masks_of_layers(), dtype=torch.float16, kernels="reference")
    scaler = torch.amp.GradScaler("cpu")
    opt = optimizer_of(name, model)
    found: Steps = []
    for _ in range(6):
        total = torch.zeros(())
        for part in X.chunk(2):
            loss = loss_of(model(part), 3 * part) * 0.5
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        found.append((float(total), scaler.get_scale(), copy.deepcopy(model.state_dict())))
    return found


def clipped(mesh: Any, *, is_compressed: bool, norm_type: float) -> Any:
    """Return the norm, and gradients by name after clipping."""
    whole = tiny_gpt(is_tied=True)
    pipeline = samo.Pipeline(copy.deepcopy(whole), next_token_loss, mesh, 2, timeout_s=TIMEOUT)
    if is_compressed:
        compress(pipeline.module, whole)
    x, y = tokens()
    pipeline.step(x, target=y)
    norm = pipeline.clip_grad_norm_(0.01, norm_type)
    pipeline.close()
    return norm, {name: param.grad.clone() for name, param in pipeline.module.named_parameters()}


class Spoils(nn.Module):
    """Multiplies the gradient of its second use by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = factor
        self.uses = 0

    def forward(self, x: Tensor) -> Tensor:
        self.uses += 1
        return Larger.apply(self.linear(x), self.factor if self.uses == 2 else 1.0)


def spoilt(mesh: Any, bad: int) -> tuple[int, list[bool]]:
    """Return skipped steps, and whether each step of three changed weights; the second is not finite."""
    torch.manual_seed(0)
    # What comes back from a bad last stage is bad in the first one too; not the other way round.
    made = [Spoils(math.inf if stage == bad else 1.0) for stage in range(2)]
    pipeline = samo.Pipeline(
        [*made, nn.Tanh()], F.mse_loss, mesh, 1, cuts=[(0, 1), (1, 3)], timeout_s=TIMEOUT
    )
    module = pipeline.module
    if bad == 1:
        samo.compress_(module, pipeline.masks(samo.prune(nn.Sequential(*made), 0.5)))
    opt = samo.AdamW(module.parameters())
    changes = []
    for _ in range(3):
        before = copy.deepcopy(module.state_dict())
        pipeline.step(torch.ones(2, 4), target=torch.zeros(2, 4))
        grads = [param.grad for param in module.parameters()]
        assert len({bool(grad.isfinite().all()) for grad in grads}) == 1, "all of them or none"
        opt.step()
        opt.zero_grad()
        changes.append(any(not torch.equal(before[k], v) for k, v in module.state_dict().items()))
    pipeline.close()
    return opt.skipped_steps, changes


def written(mesh: Any, rank: int, *, is_clipped: bool) -> tuple[int, bool]:
    """Return skipped steps, and whether all gradients are NaN, after one on the last stage became inf."""
    pipeline = samo.Pipeline(
        [nn.Linear(4, 4), nn.Linear(4, 4)], F.mse_loss, mesh, 2, timeout_s=TIMEOUT
    )
    module = samo.compress_(pipeline.module, samo.prune(pipeline.module, 0.5))
    opt = samo.AdamW(module.parameters())
    pipeline.step(torch.ones(2, 4), target=torch.zeros(2, 4))
    params = list(module.parameters())
    if rank == 1:
        params[0].grad[0] = math.inf
    if is_clipped:
        assert pipeline.clip_grad_norm_(1.0) == math.inf
    is_nan = all(bool(param.grad.isnan().all()) for param in params)
    opt.step()
    pipeline.close()
    return opt.skipped_steps, is_nan


def looked_up(factor: float) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(6, 4, sparse=True), Layer(factor), Layer(1.0)]


def sparse(mesh: Any, factor: float) -> dict[str, Tensor]:
    """Return gradients, of which that of an embedding is sparse."""
    cuts = [(0, 1), (1, 3)]
    with samo.Pipeline(
        looked_up(factor), F.mse_loss, mesh, 1, cuts=cuts, timeout_s=TIMEOUT
    ) as pipeline:
        pipeline.step(torch.tensor([1, 1, 5]), target=torch.zeros(3, 4))
    found = {name: param.grad for name, param in pipeline.module.named_parameters()}
    assert all(grad.is_sparse == (name == "0.weight") for name, grad in found.items())
    return {name: grad.to_dense() for name, grad in found.items()}


def work(rank: int, num_ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("pipe",))
    results: dict[str, Any] = {
        f"{name} {schedule}": scaled(mesh, name, schedule)
        for name in ("samo", "torch")
        for schedule in ("message-driven", "1f1b")
    }
    results["sparse"] = [sparse(mesh, factor) for factor in (1.0, math.nan)]
    results["spoilt"] = [spoilt(mesh, bad) for bad in (0, 1)]
    results["written"] = [written(mesh, rank, is_clipped=flag) for flag in (False, True)]
    for is_compressed in (False, True):
        for norm_type in (2.0, math.inf):
            results[f"{is_compressed} {norm_type}"] = clipped(
                mesh, is_compressed=is_compressed, norm_type=norm_type
            )
    return results


@pytest.fixture(scope="module")
def stages() -> list[dict[str, Any]]:
    return run_ranks(2, work)


@pytest.mark.parametrize("schedule", ["message-driven", "1f1b"])
@pytest.mark.parametrize("name", ["samo", "torch"])
def test_gradient_scalers_of_all_stages_have_the_scale_of_one_process(
    stages: list[dict[str, Any]], name: str, schedule: str
) -> None:
    wanted = scaled_in_one_process(name)
    scales = [scale for _, scale, _ in wanted]
    assert scales[0] == 2.0**15  # it did overflow
    assert scales[-1] == scales[-2]  # and found its way
    got: list[dict[str, Tensor]] = [{} for _ in wanted]
    for results in stages:
        found = results[f"{name} {schedule}"]
        assert [scale for _, scale, _ in found] == scales
        assert [loss for loss, _, _ in found] == [loss for loss, _, _ in wanted]
        for step, (_, _, state) in enumerate(found):
            got[step] |= state
    for step, (_, _, state) in enumerate(wanted):
        assert got[step].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(got[step][key], value), f"{step} {key}"


def test_stages_skip_the_same_steps(stages: list[dict[str, Any]]) -> None:
    for results in stages:
        assert results["spoilt"] == [(1, [True, False, True])] * 2
    # What is written after the batch is seen by one stage, and by all once they clip together.
    assert [results["written"] for results in stages] == [
        [(0, False), (1, True)],
        [(1, False), (1, True)],
    ]


def test_a_sparse_gradient_is_that_of_one_process_or_spoilt_as_all_others(
    stages: list[dict[str, Any]],
) -> None:
    model = nn.Sequential(*looked_up(1.0))
    F.mse_loss(model(torch.tensor([1, 1, 5])), torch.zeros(3, 4)).backward()
    for results in stages:
        good, bad = results["sparse"]
        for name, grad in good.items():
            assert torch.equal(grad, model.get_parameter(name).grad.to_dense()), name
        assert all(grad.isnan().any() for grad in bad.values())


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_stages_clip_by_the_norm_of_the_whole_model(
    stages: list[dict[str, Any]], is_compressed: bool, norm_type: float
) -> None:
    model = tiny_gpt(is_tied=True)
    if is_compressed:
        compress(model, tiny_gpt(is_tied=True))
    x, y = tokens()
    next_token_loss(model(x), y).backward()
    named = dict(model.named_parameters())
    wanted = nn.utils.clip_grad_norm_(list(named.values()), 0.01, norm_type)
    for results in stages:
        norm, grads = results[f"{is_compressed} {norm_type}"]
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)
        for name, grad in grads.items():
            here = named["embed.weight" if name == "head.weight" else name].grad
            torch.testing.assert_close(grad, here, rtol=1e-3, atol=1e-7)


def test_a_norm_that_cannot_be_is_refused() -> None:
    pipeline = samo.Pipeline([nn.Linear(2, 2)], F.mse_loss, None, 1)
    pipeline.step(torch.ones(1, 2), target=torch.full((1, 2), math.inf))
    with pytest.raises(ValueError, match="norm_type must be over 0, got 0"):
        pipeline.clip_grad_norm_(1.0, 0)
    with pytest.raises(RuntimeError, match=r"the norm of the gradients is .*, so they cannot be"):
        pipeline.clip_grad_norm_(1.0, error_if_nonfinite=True)


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


def test_a_stage_that_does_not_come_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = samo.Pipeline([nn.Linear(2, 2)], F.mse_loss, None, 1)

    def broken(*args: object, **settings: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_reduce", broken)
    monkeypatch.setattr(pipeline, "_links", SimpleNamespace(group=None))
    with pytest.raises(samo.PeerError, match="another rank did not join"):
        pipeline.clip_grad_norm_(1.0)
    runner = object.__new__(TorchRunner)  # its own needs several ranks
    monkeypatch.setattr(pipeline, "_runner", runner)
    with pytest.raises(
        samo.PeerError, match=r"did not join a collective \(Connection closed by peer\)"
    ):
        pipeline.clip_grad_norm_(1.0)
    pipeline.close()
    with pytest.raises(samo.PeerError, match="the pipeline was closed"):
        pipeline.clip_grad_norm_(1.0)


def test_what_a_stage_finds_by_itself_is_not_the_fault_of_another() -> None:
    def refuse() -> None:
        raise samo.CompressionError("not reduced")

    def fill() -> None:
        raise torch.OutOfMemoryError("no memory left")

    pipeline = samo.Pipeline([nn.Linear(2, 2)], F.mse_loss, None, 1)
    for runner in (pipeline._runner, object.__new__(TorchRunner)):
        with pytest.raises(samo.CompressionError, match="not reduced"):
            runner.run_collective(refuse)
        with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
            runner.run_collective(fill)
