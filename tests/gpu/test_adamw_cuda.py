"""samo.AdamW in a CUDA graph: a captured training step does at each replay what it does outside."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samo
from tests.core import test_adamw as on_cpu
from tests.core.twins import KINDS as CPU_KINDS
from tests.meters import assert_same

pytestmark = pytest.mark.gpu

# By the reference, but for the dense weights.
FP64 = {"dtype": torch.float64}
KINDS = {**CPU_KINDS, "fp64": (FP64, {}), "fp64 ages": (FP64, {"entry_steps": True})}
WARM = 3
REPLAYS = 20
BAD = 7


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions add up in one order: what is compared is bits."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def build(kind: str, *, channels_last: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 40), nn.Tanh()
    ).cuda()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    return samo.compress_(model, samo.prune(model, 0.8), **KINDS[kind][0])


def batches(dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, 6, 6, generator=draw).to("cuda", dtype) for _ in range(40)]


def backward(model: nn.Module, x: Tensor) -> None:
    out = model(x)
    wide = out if out.dtype == torch.float64 else out.float()
    (wide - 0.3).square().mean().backward()


def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> None:
    opt.zero_grad()
    backward(model, x)
    opt.step()


@contextmanager
def on_a_side_stream() -> Iterator[None]:
    """Warm up as torch asks for before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def train_others(count: int = 24) -> None:
    """Let other optimizers make more tables than are cached, and reuse the memory of old ones."""
    for number in range(count):
        model = nn.Sequential(nn.Linear(5 + number, 7)).cuda()
        samo.compress_(model, samo.prune(model, 0.5))
        betas = (0.5 + number / 100, 0.9)  # the tables of ages go by them
        opt = samo.AdamW(model.parameters(), betas=betas, entry_steps=number % 2 == 0)
        model(torch.ones(2, 5 + number, device="cuda")).sum().backward()
        opt.step()
    torch.cuda.synchronize()
    for power in range(16):
        torch.full((2**power,), -1, dtype=torch.int64, device="cuda")
        torch.full((2**power,), -1, dtype=torch.int64).pin_memory()


def tensors_of(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    dense = {f"dense/{index}": model[index].weight for index in (0, 3)}
    return on_cpu.tensors_of(model, opt) | dense


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_tensor", [False, True], ids=["lr", "tensor lr"])
def test_a_captured_training_step_trains_as_without_a_graph(kind: str, is_tensor: bool) -> None:
    eager = build(kind, channels_last=kind == "fp32")
    graphed = copy.deepcopy(eager)
    rates: list[Any] = [torch.tensor(1e-2, device="cuda") if is_tensor else 1e-2 for _ in range(2)]
    opts = [
        samo.AdamW(
            samo.param_groups(model, lr=rate, weight_decay=0.1), capturable=True, **KINDS[kind][1]
        )
        for model, rate in zip((eager, graphed), rates)
    ]
    dtype = KINDS[kind][0]["dtype"]
    first, *later = batches(dtype)
    for _ in range(WARM):
        step(eager, opts[0], first)
    held = first.clone()
    with on_a_side_stream():
        for _ in range(WARM):
            step(graphed, opts[1], held)
    opts[1].zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward(graphed, held)
        opts[1].step()
    assert_same(tensors_of(graphed, opts[1]), tensors_of(eager, opts[0]))  # nothing has changed
    for number, x in zip(range(REPLAYS), later):
        if is_tensor:
            for rate in rates:
                rate.fill_(1e-2 / (1 + number))
        if number == BAD:
            x = x.clone()
            x[0, 0, 0, 0] = float("nan")
        if number in (3, BAD + 1):
            train_others()
        if number == 12:  # one step of both outside of the graph
            step(eager, opts[0], first)
            step(graphed, opts[1], first)
        held.copy_(x)
        graph.replay()
        step(eager, opts[0], x)
        assert_same(tensors_of(graphed, opts[1]), tensors_of(eager, opts[0]))
    assert [opt.skipped_steps for opt in opts] == [1, 1]
    assert float(opts[1].state_dict()["state"][0]["step"]) == WARM + REPLAYS


def test_two_graphs_of_one_optimizer_take_turns() -> None:
    eager = build("bf16")
    graphed = copy.deepcopy(eager)
    opts = [samo.AdamW(model.parameters(), lr=1e-2) for model in (eager, graphed)]
    first, *later = batches(torch.bfloat16)
    step(eager, opts[0], first)
    held = first.clone()
    with on_a_side_stream():
        step(graphed, opts[1], held)
    graphs = []
    for _ in range(2):
        opts[1].zero_grad()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            backward(graphed, held)
            opts[1].step()
    for number, x in zip(range(6), later):
        held.copy_(x)
        graphs[number % 2].replay()
        step(eager, opts[0], x)
    assert_same(tensors_of(graphed, opts[1]), tensors_of(eager, opts[0]))


def test_a_first_step_is_not_captured() -> None:
    model = build("bf16")
    opt = samo.AdamW(model.parameters())
    x = batches(torch.bfloat16)[0]
    with on_a_side_stream():
        backward(model, x)
        opt.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward(model, x)
        with pytest.raises(samo.CompressionError, match=r"call step\(\) once before the capture"):
            opt.step()
    assert not any(opt.state.values())
    step(model, opt, x)
    assert opt.skipped_steps == 0


@pytest.mark.parametrize("first", ["cuda", "cpu"])
def test_parameters_on_two_devices_skip_a_step_together(first: str) -> None:
    devices = [first, "cpu" if first == "cuda" else "cuda"]
    params = [nn.Parameter(torch.ones(5, device=device)) for device in devices]
    opt = samo.AdamW(params, lr=0.1, kernels="reference")
    for bad in (1.0, float("nan")):
        for param in params:
            param.grad = torch.ones_like(param)
        params[1].grad[2] = bad
        before = [param.detach().clone() for param in params]
        opt.step()
        moved = [not torch.equal(old, param) for old, param in zip(before, params)]
        assert moved == [bad == 1.0] * 2
    params[0].grad = None  # leaves the count of skipped steps to the other device
    opt.step()
    assert opt.skipped_steps == 2
    assert all(torch.equal(old, param) for old, param in zip(before, params))
