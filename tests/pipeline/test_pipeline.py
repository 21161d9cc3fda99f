"""Pipelines on real gloo processes: equal to one process bit for bit, and never a hang."""

import copy
import functools
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import samo
from samo.integrations.causal_lm import checkpoint_blocks
from samo.utils.collectives import all_gather_json, backend_of
from tests.pipeline.cases import (
    accumulate,
    compress,
    next_token_loss,
    optimizer,
    pipeline_of,
    reference,
    tiny_gpt,
    tiny_hf,
    tokens,
)
from tests.pipeline.test_engine import check_possible
from tests.ranks import run_ranks

MICRO_BATCHES = 4
Case = tuple[int, str, bool, int]
"""Stages per rank, optimizer, whether compressed, rows of a batch."""
CASES: list[Case] = [
    (1, "sgd", False, 8),
    (1, "adamw", True, 7),
    (1, "sgd", False, 5),
    (2, "adamw", False, 8),
    (2, "sgd", True, 7),
]


def train(pipeline: samo.Pipeline, opt: torch.optim.Optimizer, rows: int) -> list[Tensor]:
    losses = []
    for seed in range(2):
        x, y = tokens(rows, seed)
        opt.zero_grad()
        losses.append(pipeline.step(x, target=y))
        opt.step()
    x, y = tokens(rows, 9)
    losses.append(pipeline.eval(x, target=y))
    return losses


class Turned(nn.Linear):
    """Returns a tensor that is not contiguous, and whose strides decide how the next layer sums."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


def turned_gradients(mesh: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(Turned(48, 48), nn.GELU(), nn.Linear(33, 33), nn.LayerNorm(33))
    x = torch.randn(8, 33, 48)
    pipeline = samo.Pipeline(
        layers, F.mse_loss, mesh, 3, cuts=None if mesh is None else [(0, 1), (1, 2), (2, 4)]
    )
    pipeline.step(x, target=x.transpose(1, 2))
    pipeline.close()
    params = pipeline.module.named_parameters()
    return {name: param.grad for name, param in params if param.grad is not None}


def train_cases(mesh: Any) -> list[Any]:
    results = []
    for per_rank, name, is_compressed, rows in CASES:
        whole = tiny_gpt(num_layers=6, is_checkpointed=rows == 5)
        settings = {"is_compressed": is_compressed, "stages_per_rank": per_rank}
        pipeline = pipeline_of(whole, mesh, MICRO_BATCHES, **settings)
        opt = optimizer(name, pipeline.module, is_compressed=is_compressed)
        losses = train(pipeline, opt, rows)
        results.append((losses, {k: v.clone() for k, v in pipeline.module.state_dict().items()}))
        pipeline.close()
    return results


@functools.cache
def in_one_process(
    name: str, is_compressed: bool, rows: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = tiny_gpt(num_layers=6)
    if is_compressed:
        compress(model, tiny_gpt(num_layers=6))
    opt = optimizer(name, model, is_compressed=is_compressed)
    losses = reference(model, [tokens(rows, seed) for seed in range(2)], MICRO_BATCHES, opt)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    return [*losses, accumulate(model, *tokens(rows, 9), MICRO_BATCHES)], state


def check_equal(everyone: Sequence[list[Any]]) -> None:
    for place, case in enumerate(CASES):
        losses, state = in_one_process(*case[1:])
        got: dict[str, Tensor] = {}
        for results in everyone:
            assert all(map(torch.equal, results[place][0], losses)), case
            # A loss that the caller keeps does not keep the gradients with which it came.
            assert all(loss.untyped_storage().nbytes() == 4 for loss in results[place][0])
            got |= results[place][1]
        assert got.keys() == state.keys()
        assert all(torch.equal(got[k], state[k]) for k in state), case


def work(rank: int, num_ranks: int) -> dict[str, Any]:
    mesh = samo.mesh(pipe=num_ranks)
    results: dict[str, Any] = {"cases": train_cases(mesh), "turned": turned_gradients(mesh)}
    for is_compressed in (False, True):
        whole = tiny_gpt(is_tied=True)
        pipeline = pipeline_of(whole, mesh, MICRO_BATCHES, is_compressed=is_compressed)
        opt = optimizer("sgd", pipeline.module, is_compressed=is_compressed)
        for seed in range(4):
            a, b = tokens(8, seed)
            pipeline.step(a, target=b)
            if seed % 2:  # gradients of two batches add up
                opt.step()
                opt.zero_grad()
        state = {k: v.clone() for k, v in pipeline.module.state_dict().items()}
        results[f"tied {is_compressed}"] = state
        pipeline.close()
    results["timeline"] = timeline(mesh)
    results["one"] = one_micro_batch(mesh)
    results["refusal"] = refusals(mesh, rank)
    results["narrow"] = narrow(mesh)
    results["dropout"] = [dropout(mesh, *how) for how in ((1, 0.0), (1, 0.01), (2, 0.0))]
    results["masks"] = different_masks(mesh, rank)
    return results


def timeline(mesh: Any) -> Any:
    layers = [nn.Linear(2, 2) for _ in range(6)]
    with samo.Pipeline(
        layers, F.mse_loss, mesh, 4, in_flight=2, stages_per_rank=2, timeout_s=20
    ) as pipeline:
        pipeline.step(torch.ones(4, 2), target=torch.ones(4, 2))
        return pipeline.timeline()


def dropout(mesh: Any, stages_per_rank: int = 1, delay: float = 0.0) -> list[Any]:
    """Return losses and gradients of a model with dropout and checkpointing."""
    model = tiny_hf("gpt2", dropout=0.3)
    checkpoint_blocks(model)
    model.transformer.h[3].register_forward_hook(lambda *_: time.sleep(delay))
    settings = {"stages_per_rank": stages_per_rank, "timeout_s": 20}
    with samo.Pipeline(model, next_token_loss, mesh, 4, **settings) as pipeline:
        torch.manual_seed(7 if pipeline.stage == 0 else 8)
        losses = [pipeline.step(*tokens(8, seed)[:1], target=tokens(8, seed)[1]) for seed in (0, 1)]
        params = dict(pipeline.module.named_parameters())
        return [losses, {name: param.grad.clone() for name, param in params.items()}]


def different_masks(mesh: Any, rank: int) -> list[str]:
    """Return the errors of three pipelines; the stage in the middle lacks the tied weight."""
    x, said = torch.ones(1, 8), []
    for fault in ("one is dense", "different", "remapped later"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        model[2].weight = model[0].weight
        masks = [samo.prune(model, 0.5, method="random", seed=seed) for seed in range(3)]
        pipeline = samo.Pipeline(model, F.mse_loss, mesh, 1, timeout_s=20)
        if fault != "one is dense" or rank != 0:
            seed = rank if fault == "different" else 0
            samo.compress_(pipeline.module, pipeline.masks(masks[seed]))
        if fault == "remapped later":
            pipeline.step(x, target=x)  # the same on both
            samo.remap_(pipeline.module, pipeline.masks(masks[rank]))
        with pytest.raises(samo.MaskError) as caught:
            pipeline.step(x, target=x)
        said.append(str(caught.value).partition(";")[0])
        pipeline.close()
    return said


def narrow(mesh: Any) -> tuple[list[Tensor], list[int]]:
    """Return losses and bytes sent with and without 16 bits on the wire."""
    losses, sizes = [], []
    for dtype in (None, torch.bfloat16):
        with samo.Pipeline(
            tiny_gpt(), next_token_loss, mesh, 4, wire_dtype=dtype, timeout_s=20
        ) as pipeline:
            x, y = tokens(8, 3)
            losses.append(pipeline.step(x, target=y))
            sizes.append(pipeline.sent_bytes)
    return losses, sizes


def one_micro_batch(mesh: Any) -> tuple[Tensor, Tensor]:
    """One micro-batch, targets on the last stage alone, inputs on the first, a sum for a loss."""
    torch.manual_seed(3)
    layers, ones = [nn.Linear(2, 2) for _ in range(4)], torch.ones(3, 2)
    loss_fn = nn.MSELoss(reduction="sum")
    with samo.Pipeline(
        copy.deepcopy(layers), loss_fn, mesh, 1, in_flight=1, loss_reduction="sum", timeout_s=20
    ) as pipeline:
        is_first, is_last = pipeline.stage == 0, pipeline.stage == pipeline.num_stages - 1
        loss = pipeline.step(ones if is_first else None, target=ones if is_last else None)
    return loss, loss_fn(nn.Sequential(*layers)(ones), ones).detach()


def refusals(mesh: Any, rank: int) -> str:
    """Return what a rank says of a batch that the first stage cannot cut."""
    layers = [nn.Linear(2, 2) for _ in range(3)]
    with (
        samo.Pipeline(layers, F.mse_loss, mesh, 4, timeout_s=20) as pipeline,
        pytest.raises((ValueError, samo.PeerError)) as caught,
    ):
        pipeline.step(torch.ones(3, 2) if rank == 0 else None, target=torch.ones(8, 2))
    return str(caught.value)


def test_three_ranks_equal_one_process_and_refuse_the_same() -> None:
    everyone = run_ranks(3, work)
    check_equal([results["cases"] for results in everyone])
    check_tied(everyone)
    turned = {name: grad for results in everyone for name, grad in results["turned"].items()}
    torch.testing.assert_close(turned, turned_gradients(None), rtol=0, atol=0)
    text = "tied weight '0.weight' has different masks on stages (0, 2)"
    drawn = dropout(None)
    assert not torch.equal(*drawn[0])
    for results in everyone:
        assert results["masks"] == [text] * 3
        for losses, grads in results["dropout"]:
            assert torch.equal(torch.stack(losses), torch.stack(drawn[0]))
            assert all(torch.equal(grad, drawn[1][name]) for name, grad in grads.items())
        check_possible(results["timeline"], 3)
        assert all(results["timeline"].peak_in_flight(stage) <= 2 for stage in range(6))
        assert torch.equal(*results["one"])
        torch.testing.assert_close(*results["narrow"][0], rtol=0.02, atol=0.02)
        assert not torch.equal(*results["narrow"][0])
        whole, half = results["narrow"][1]
        assert (whole - 4) == 2 * (half - 4) or whole == 2 * half  # but for a loss
        assert "x has [3] rows for 4 micro-batches" in results["refusal"]
    assert "rank 0 (stage 0" in everyone[1]["refusal"]


def check_tied(everyone: list[dict[str, Any]]) -> None:
    """Compare with one process where embedding and head add up apart, and are then one."""
    for is_compressed in (False, True):
        first, last = everyone[0][f"tied {is_compressed}"], everyone[-1][f"tied {is_compressed}"]
        assert torch.equal(first["embed.weight"], last["head.weight"])
    model = tiny_gpt(is_tied=True)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    both = (model.embed.weight, model.head.weight)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        for seed in (2 * step, 2 * step + 1):
            both[1].grad = None
            accumulate(model, *tokens(8, seed), MICRO_BATCHES)
            both[0].grad += both[1].grad
        both[1].grad = both[0].grad.clone()
        opt.step()
        opt.zero_grad()
    state = model.state_dict()
    got = {k: v for results in everyone for k, v in results["tied False"].items()}
    assert all(torch.equal(got[name], state[name]) for name in state)


# Settings


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"micro_batches": 0}, "micro_batches must be a whole number of 1 or more, got 0"),
        ({"stages_per_rank": 0}, "stages_per_rank must be a whole number of 1 or more, got 0"),
        ({"loss_reduction": "max"}, "loss_reduction must be 'mean' or 'sum', got 'max'"),
        ({"timeout_s": 0}, "timeout_s must be more than 0 seconds, got 0"),
        ({"cuts": [(0, 1)]}, "cuts must be 1 consecutive ranges from layer 0 to 2"),
        ({"cuts": [(0, 1), (1, 2)]}, "cuts must be 1 consecutive ranges"),
        ({"mesh": SimpleNamespace(mesh_dim_names=("data",))}, r"has dimensions \('data',\), none"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], text: str) -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(ValueError, match=text):
        samo.Pipeline(layers, F.mse_loss, **{"mesh": None, "micro_batches": 2} | settings)


def test_one_stage_needs_no_mesh_and_equals_the_model() -> None:
    model = tiny_gpt(num_layers=6)
    pipeline = samo.Pipeline(model, next_token_loss, None, MICRO_BATCHES, stages_per_rank=2)
    losses = train(pipeline, optimizer("sgd", pipeline.module, is_compressed=False), 8)
    expected, state = in_one_process("sgd", False, 8)
    assert all(map(torch.equal, losses, expected))
    assert all(torch.equal(found, state[name]) for name, found in model.state_dict().items())


def test_a_step_takes_one_number_of_torchs_generator_whatever_layers_draw() -> None:
    layers, drawn = [nn.Dropout(), nn.Dropout()], []
    for layer in layers:
        layer.register_forward_hook(lambda module, args, output: drawn.append(output == 0))
    pipeline = samo.Pipeline([nn.Linear(64, 64), *layers], F.mse_loss, None, 2)
    torch.manual_seed(0)
    pipeline.step(torch.ones(4, 64), target=torch.ones(4, 64))
    assert not torch.equal(drawn[0], drawn[2])  # of the same layer, in two micro-batches
    found = torch.rand(3)
    torch.manual_seed(0)
    torch.randint(2**47, ())
    assert torch.equal(torch.rand(3), found)


def test_a_closed_pipeline_says_so_at_once_and_one_process_goes_on_after_a_bad_batch() -> None:
    with samo.Pipeline([nn.Linear(2, 2)], F.mse_loss, None, 2) as pipeline:
        assert not pipeline.eval(torch.ones(2, 2), target=torch.ones(2, 2)).requires_grad
        assert all(param.grad is None for param in pipeline.module.parameters())
        with pytest.raises(ValueError, match=r"x has \[1\] rows for 2 micro-batches"):
            pipeline.step(torch.ones(1, 2), target=torch.ones(1, 2))
        pipeline.step(torch.ones(2, 2), target=torch.ones(2, 2))
        with pytest.raises(ValueError, match="norm_type must be over 0, got 0"):
            pipeline.clip_grad_norm_(1.0, 0)
    for do in (pipeline.step, pipeline.eval, lambda: pipeline.clip_grad_norm_(1.0)):
        with pytest.raises(samo.PeerError, match="the pipeline was closed"):
            do()


@pytest.mark.usefixtures("one_rank")
def test_a_mesh_whose_backend_torch_has_chosen() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pipe", "data"))
    group = mesh["pipe"].get_group()
    assert dist.get_backend(group) == "undefined"
    assert (backend_of(group, "cpu"), backend_of(group, "cuda")) == ("gloo", "")
    assert all_gather_json({"a": 1}, group) == [{"a": 1}]
    model, ones = nn.Sequential(nn.Linear(2, 2)), torch.ones(2, 2)
    with samo.Pipeline(model, F.mse_loss, mesh, 2) as pipeline:
        assert torch.equal(pipeline.eval(ones, target=ones), F.mse_loss(model(ones), ones))
        with pytest.raises(TypeError, match="layer '0' is wrapped in DistributedDataParallel"):
            samo.Pipeline([DistributedDataParallel(model)], F.mse_loss, mesh, 2)
        fully_shard(pipeline.module, mesh=mesh["data"])
        with pytest.raises(TypeError, match="cannot be sharded with FSDP2"):
            pipeline.step(ones, target=ones)


@pytest.mark.parametrize(
    ("loss_fn", "got"),
    [
        (lambda y, target: (y.sum(), y), "tuple"),
        (lambda y, target: y, r"\(2, 2\)"),
        (lambda y, target: 1.0, "float"),
    ],
)
def test_a_loss_function_that_returns_no_scalar_is_named(loss_fn: Any, got: str) -> None:
    ones = torch.ones(2, 2)
    with (
        samo.Pipeline(nn.Sequential(nn.Linear(2, 2)), loss_fn, None, 1) as pipeline,
        pytest.raises(TypeError, match=f"loss_fn must return a scalar tensor, got {got}"),
    ):
        pipeline.step(ones, target=ones)
