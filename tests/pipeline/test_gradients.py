"""What ranks do alike after a batch: skip steps, scale losses, clip and average gradients."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import samo
from samo.pipeline.gradients import average_gradients
from tests.pipeline.cases import compress, next_token_loss, pipeline_of, tiny_gpt, tokens
from tests.ranks import run_ranks

TIMEOUT = 20


class Layer(nn.Module):
    """A layer whose gradients are scaled, in all uses or in one of them."""

    def __init__(self, factor: float = 1.0, use: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor, self.use, self.uses = factor, use, 0

    def forward(self, x: Tensor) -> Tensor:
        self.uses += 1
        y = self.linear(x)
        if self.use in (None, self.uses):
            y.register_hook(lambda grad: grad * self.factor)
        return y


def layers() -> list[nn.Module]:
    """Return layers of which the first overflows before the second."""
    torch.manual_seed(0)
    return [Layer(64.0), Layer()]


X = torch.linspace(-1, 1, 16).view(4, 4).half()
Steps = list[tuple[float, float, dict[str, Tensor]]]
"""Loss, scale afterwards and weights, of each step."""


def loss_of(output: Tensor, wanted: Tensor) -> Tensor:
    return F.mse_loss(output.float(), wanted.float())


def scaled(module: nn.Module, name: str, step: Callable[[Any], Tensor]) -> Steps:
    """Train in float16 with a scale that overflows at first, on stage 0 alone."""
    compress(module, nn.Sequential(*layers()), 0.5, dtype=torch.float16)
    make: Any = samo.AdamW if name == "samo" else torch.optim.AdamW
    opt = make(module.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    found: Steps = []
    for _ in range(6):
        loss = step(scaler)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        found.append((float(loss), scaler.get_scale(), copy.deepcopy(module.state_dict())))
    return found


def scaled_stages(mesh: Any, name: str) -> Steps:
    with samo.Pipeline(layers(), loss_of, mesh, 2, timeout_s=TIMEOUT) as pipeline:
        step = lambda scaler: pipeline.step(X, target=3 * X, scaler=scaler)  # noqa: E731
        return scaled(pipeline.module, name, step)


def tied_pipeline(mesh: Any, is_compressed: bool) -> samo.Pipeline:
    return pipeline_of(tiny_gpt(is_tied=True), mesh, 2, is_compressed=is_compressed)


def grads_of(pipeline: samo.Pipeline) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in pipeline.module.named_parameters()}


def clipped(mesh: Any, is_compressed: bool, norm_type: float) -> Any:
    """Return the norm, and gradients by name after clipping."""
    with tied_pipeline(mesh, is_compressed) as pipeline:
        x, y = tokens()
        pipeline.step(x, target=y)
        return pipeline.clip_grad_norm_(0.01, norm_type), grads_of(pipeline)


def cleared(mesh: Any, is_compressed: bool, to_none: bool) -> dict[str, Tensor]:
    """Compute three batches, clear gradients before the last one, and return what it leaves."""
    with tied_pipeline(mesh, is_compressed) as pipeline:
        for seed, is_last in ((0, True), (1, False), (2, True)):
            if seed == 2:
                pipeline.module.zero_grad(set_to_none=to_none)
            x, y = tokens(8, seed)
            pipeline.step(x, target=y, is_last=is_last)
        return grads_of(pipeline)


def not_finite(mesh: Any, bad: int) -> tuple[int, list[bool]]:
    """Return skipped steps, and whether each of three changed weights; the second is not finite."""
    torch.manual_seed(0)
    # An infinite gradient of the last stage reaches the first one too; not the other way round.
    made = [Layer(math.inf if stage == bad else 1.0, use=2) for stage in range(2)]
    cuts = [(0, 1), (1, 3)]
    pipeline = samo.Pipeline([*made, nn.Tanh()], F.mse_loss, mesh, 1, cuts=cuts, timeout_s=TIMEOUT)
    module = pipeline.module
    if bad == 1:
        samo.compress_(module, pipeline.masks(samo.prune(nn.Sequential(*made), 0.5)))
    opt = samo.AdamW(module.parameters())
    changes = []
    for _ in range(3):
        before = copy.deepcopy(module.state_dict())
        pipeline.step(torch.ones(2, 4), target=torch.zeros(2, 4))
        assert len({bool(param.grad.isfinite().all()) for param in module.parameters()}) == 1
        opt.step()
        opt.zero_grad()
        changes.append(any(not torch.equal(before[k], v) for k, v in module.state_dict().items()))
    pipeline.close()
    return opt.skipped_steps, changes


def written(mesh: Any, rank: int) -> tuple[int, bool]:
    """Set one gradient to inf and clip; return skipped steps, and whether all are NaN."""
    with samo.Pipeline([Layer(), Layer()], F.mse_loss, mesh, 2, timeout_s=TIMEOUT) as pipeline:
        opt = samo.AdamW(pipeline.module.parameters())
        pipeline.step(torch.ones(2, 4), target=torch.zeros(2, 4))
        params = list(pipeline.module.parameters())
        if rank == 1:
            params[0].grad[0] = math.inf
        assert pipeline.clip_grad_norm_(1.0) == math.inf
        opt.step()
    return opt.skipped_steps, all(bool(param.grad.isnan().all()) for param in params)


def with_embedding(factor: float) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(6, 4, sparse=True), Layer(factor), Layer()]


def sparse(mesh: Any, factor: float) -> dict[str, Tensor]:
    """Return gradients, of which that of the embedding is sparse."""
    cuts = [(0, 1), (1, 3)]
    with samo.Pipeline(
        with_embedding(factor), F.mse_loss, mesh, 1, cuts=cuts, timeout_s=TIMEOUT
    ) as pipeline:
        pipeline.step(torch.tensor([1, 1, 5]), target=torch.zeros(3, 4))
    found = {name: param.grad for name, param in pipeline.module.named_parameters()}
    assert all(grad.is_sparse == (name == "0.weight") for name, grad in found.items())
    return {name: grad.to_dense() for name, grad in found.items()}


class Sometimes(nn.Module):
    """Uses ``odd`` if the input is odd, ``never`` never; the gradient of ``rows`` is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4, sparse=True)
        self.even, self.odd, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.rows(x)
        return self.odd(h) if int(x[0]) % 2 else self.even(h)


def inputs(rank: int, is_odd: bool) -> Tensor:
    return torch.tensor([rank if is_odd else 2 * rank, 3])


def tied(mesh: Any, *, is_frozen: bool) -> float:
    """Train with an embedding tied to the head, frozen or with sparse gradients."""
    torch.manual_seed(0)
    rows, head = nn.Embedding(10, 8, sparse=not is_frozen), nn.Linear(8, 10, bias=False)
    head.weight = rows.weight
    rows.weight.requires_grad_(not is_frozen)
    before, x = rows.weight.detach().clone(), torch.arange(6)
    layers = [rows, nn.Linear(8, 8), nn.Tanh(), head]
    with samo.Pipeline(layers, F.cross_entropy, mesh, 2, timeout_s=TIMEOUT) as pipeline:
        opt = torch.optim.AdamW(pipeline.module.parameters(), lr=0.1, weight_decay=0.5)
        pipeline.step(x, target=x)
        opt.step()
        changes = [p - before for p in pipeline.module.parameters() if p.shape == before.shape]
    return float(changes[0].detach().abs().max())


def uneven(mesh: Any, rank: int, is_odd: bool) -> dict[str, Tensor | None]:
    """Return the gradients of replicas of which one may not use all layers."""
    torch.manual_seed(0)
    with samo.Pipeline([Sometimes()], F.mse_loss, mesh, 1, timeout_s=TIMEOUT) as pipeline:
        pipeline.step(inputs(rank, is_odd), target=torch.zeros(2, 4))
    return {
        name: param.grad for name, param in pipeline.module.get_submodule("0").named_parameters()
    }


def other_masks(mesh: Any, rank: int) -> list[str]:
    """Return the errors of replicas with other masks, from the start or later."""
    x, said = torch.ones(2, 8), []
    for is_late in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False))
        pipeline = samo.Pipeline(model, F.mse_loss, mesh, 1, timeout_s=TIMEOUT)
        masks = [samo.prune(model, 0.5, method="random", seed=seed) for seed in range(2)]
        samo.compress_(pipeline.module, masks[0] if is_late else masks[rank])
        if is_late:
            pipeline.step(x, target=x)  # the same on both
            samo.remap_(pipeline.module, masks[rank])
        with pytest.raises(samo.MaskError) as caught:
            pipeline.step(x, target=x)
        said.append(str(caught.value))
        pipeline.close()
    return said


SCALED = ["samo", "torch"]
CLEARED = [(False, False), (True, True)]
CLIPPED = [(False, math.inf), (True, 2.0)]


def work(rank: int, num_ranks: int) -> dict[Any, Any]:
    mesh = samo.mesh(pipe=num_ranks)
    return {
        **{case: scaled_stages(mesh, case) for case in SCALED},
        "cleared": [cleared(mesh, *case) for case in CLEARED],
        **{case: clipped(mesh, *case) for case in CLIPPED},
        "sparse": [sparse(mesh, factor) for factor in (1.0, math.nan)],
        "not finite": [not_finite(mesh, bad) for bad in (0, 1)],
        "written": written(mesh, rank),
        "tied": [tied(mesh, is_frozen=is_frozen) for is_frozen in (True, False)],
        "uneven": [uneven(samo.mesh(data=2), rank, is_odd) for is_odd in (True, False)],
        "masks": other_masks(samo.mesh(data=2), rank),
    }


@pytest.fixture(scope="module")
def stages() -> list[dict[Any, Any]]:
    return run_ranks(2, work)


@pytest.mark.parametrize("case", SCALED)
def test_gradient_scalers_of_all_stages_have_the_scale_of_one_process(stages, case) -> None:
    model = nn.Sequential(*layers())

    def step(scaler: torch.amp.GradScaler) -> Tensor:
        losses = [loss_of(model(part), 3 * part) * 0.5 for part in X.chunk(2)]
        for loss in losses:
            scaler.scale(loss).backward()
        return losses[0].detach() + losses[1].detach()

    wanted = scaled(model, case, step)
    scales = [scale for _, scale, _ in wanted]
    assert scales[0] == 2.0**15  # it did overflow
    assert scales[-1] == scales[-2]  # and recovered
    for number, (loss, scale, state) in enumerate(wanted):
        got = [results[case][number] for results in stages]
        assert [(mine, its) for mine, its, _ in got] == [(loss, scale)] * 2
        weights = got[0][2] | got[1][2]
        assert weights.keys() == state.keys()
        assert all(torch.equal(weights[key], value) for key, value in state.items()), number


def test_stages_skip_the_same_steps(stages) -> None:
    for results in stages:
        assert results["not finite"] == [(1, [True, False, True])] * 2
        assert results["written"] == (1, True)  # what is written later is seen by all who clip


def test_a_sparse_gradient_is_that_of_one_process_or_not_finite_as_all_others(stages) -> None:
    model = nn.Sequential(*with_embedding(1.0))
    F.mse_loss(model(torch.tensor([1, 1, 5])), torch.zeros(3, 4)).backward()
    for results in stages:
        good, bad = results["sparse"]
        for name, grad in good.items():
            assert torch.equal(grad, model.get_parameter(name).grad.to_dense()), name
        assert all(grad.isnan().any() for grad in bad.values())


def test_a_tied_weight_may_be_frozen_or_have_sparse_gradients(stages) -> None:
    for results in stages:
        frozen, trained = results["tied"]
        assert frozen == 0 < trained


def one_process(is_compressed: bool, seed: int) -> nn.Module:
    """Return a model with the gradients of one batch."""
    model = tiny_gpt(is_tied=True)
    if is_compressed:
        compress(model, tiny_gpt(is_tied=True))
    x, y = tokens(8, seed)
    next_token_loss(model(x), y).backward()
    return model


@pytest.mark.parametrize("number", range(len(CLEARED)))
def test_gradients_cleared_between_batches_are_cleared_for_tied_weights_too(stages, number) -> None:
    model = one_process(CLEARED[number][0], seed=2)
    for results in stages:
        for name, grad in results["cleared"][number].items():
            expected = model.get_parameter(name).grad
            torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", CLIPPED)
def test_stages_clip_by_the_norm_of_the_whole_model(stages, case) -> None:
    model = one_process(case[0], seed=5)
    wanted = nn.utils.clip_grad_norm_(model.parameters(), 0.01, case[1])
    for results in stages:
        norm, grads = results[case]
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)
        for name, grad in grads.items():
            here = model.get_parameter(name).grad
            torch.testing.assert_close(grad, here, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("is_odd", [True, False])
def test_replicas_may_lack_gradients(stages, is_odd) -> None:
    """A gradient that one replica lacks is zero there; one that all lack stays None."""
    torch.manual_seed(0)
    model = Sometimes()
    for rank in range(2):
        (F.mse_loss(model(inputs(rank, is_odd)), torch.zeros(2, 4)) / 2).backward()
    assert (model.odd.weight.grad is None) == (not is_odd)
    for name, param in model.named_parameters():
        for results in stages:
            found = results["uneven"][not is_odd][name]
            if param.grad is None:
                assert found is None, name
            else:
                torch.testing.assert_close(found, param.grad.to_dense(), msg=name)


@pytest.mark.usefixtures("one_rank")
def test_small_gradients_of_a_type_are_reduced_together_and_large_ones_alone() -> None:
    types = [torch.float32] * 40 + [torch.bfloat16] * 3 + [torch.complex64]
    shapes = [(2**18 + 1,) if number == 7 else (number, 3) for number in range(len(types))]
    params = [nn.Parameter(torch.zeros(shape, dtype=d)) for shape, d in zip(shapes, types)]
    for param in params:
        param.grad = torch.randn(param.shape, dtype=param.dtype)
    wanted, waits = [param.grad.clone() for param in params], []

    def wait(work: dist.Work) -> None:
        waits.append(work.wait())

    average_gradients(params, dist.group.WORLD, wait)
    # Who has which; float32 before, at and after the large one; the other two types.
    assert len(waits) == 1 + 3 + 2
    assert all(torch.equal(param.grad, one) for param, one in zip(params, wanted))


def test_replicas_with_other_masks_are_refused(stages) -> None:
    start = "the mask of '0.weight' is not the same on"
    assert all(text.startswith(start) for results in stages for text in results["masks"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_micro_batch_without_targets_counts_for_nothing(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).to(dtype)
    x, y = torch.randn(6, 4, dtype=dtype), torch.tensor([0, 2, -100, -100, 1, -100])
    pipeline = samo.Pipeline(copy.deepcopy(model), F.cross_entropy, None, 3)
    loss = pipeline.step(x, target=y)
    wanted = F.cross_entropy(model(x), y)
    wanted.backward()
    grad = pipeline.module.get_parameter("0.weight").grad
    off = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(loss, wanted.detach(), rtol=off, atol=off)
    torch.testing.assert_close(grad, model[0].weight.grad, rtol=off, atol=off)
    assert pipeline.eval(x, target=torch.full((6,), -100)).isnan()  # as torch's mean over nothing


def test_targets_of_bytes_have_no_label_to_ignore() -> None:
    model, x = nn.Sequential(nn.Linear(4, 200)), torch.randn(4, 4, requires_grad=True)
    y = torch.tensor([156, 156, 3, 4], dtype=torch.uint8)  # -100 as a byte is 156
    pipeline = samo.Pipeline(copy.deepcopy(model), F.cross_entropy, None, 2)
    torch.testing.assert_close(pipeline.step(x, target=y), F.cross_entropy(model(x), y).detach())
    assert x.grad is not None  # and no warning of the parts of it


@pytest.mark.parametrize("error", [samo.CompressionError(), torch.OutOfMemoryError()])
def test_an_error_of_this_stage_stays_what_it_is(error: Exception) -> None:
    pipeline = samo.Pipeline([nn.Linear(2, 2)], F.mse_loss, None, 1)
    with pytest.raises(type(error)) as caught, pipeline._peers.collective():
        raise error
    assert caught.value is error
