"""What a step costs the host, in calls of Python functions: on a GPU a small model waits for them."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import samo
from tests.meters import small_gpt, tokens

pytest.importorskip("triton", reason="needs triton")
triton_kernels: Any = pytest.importorskip("samo.kernels.triton_kernels", reason="needs triton")

SOURCES = str(Path(samo.__file__).parent)
MODELS = str(Path(SOURCES) / "models.py")


class NoKernel:
    """Takes the place of a kernel and computes nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in vars(triton_kernels).copy():
        if name.endswith("_kernel"):
            monkeypatch.setattr(triton_kernels, name, NoKernel())


def compressed(num_layers: int) -> nn.Module:
    model = small_gpt(num_layers=num_layers)
    masks = samo.prune(model, 0.9)
    return samo.compress_(model, masks, dtype=torch.bfloat16, kernels="triton")


def calls_of(action: Callable[[], object]) -> int:
    """Return how many functions of samo an action calls, those of its models apart."""
    count = 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        path = frame.f_code.co_filename
        count += event == "call" and path.startswith(SOURCES) and path != MODELS

    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def calls_of_a_step(num_layers: int) -> dict[str, int]:
    model = compressed(num_layers)
    opt = samo.AdamW(samo.parameters(model))
    losses: list[torch.Tensor] = []
    inputs = tokens()

    def forward() -> None:
        losses.append(model(inputs).float().sum())

    parts: dict[str, Callable[[], object]] = {
        "forward": forward,
        "backward": lambda: losses.pop().backward(),
        "parameters": lambda: list(samo.parameters(model)),
        "step": opt.step,
    }
    for _ in range(2):  # the first step makes state, and tables of it
        calls = {name: calls_of(action) for name, action in parts.items()}
        opt.zero_grad()
    return calls


def test_a_weight_costs_a_step_few_calls() -> None:
    few, many = calls_of_a_step(1), calls_of_a_step(5)
    num_weights = 4 * 12  # four layers more: 4 pruned matrices and 8 vectors in each
    each = {name: (many[name] - few[name]) / num_weights for name in few}
    # One tap and one check; half of the hooks of a layer with two parameters, before and after.
    assert each["forward"] <= 4
    # One hook; for an unpruned weight 2 functions more, for a pruned one 7.
    assert each["backward"] <= 5
    assert each["parameters"] <= 4
    assert each["step"] <= 24


def test_leaves_are_found_in_one_walk_over_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compressed(1)
    walks = []
    walk = nn.Module.named_modules

    def count(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is model:
            walks.append(self)
        return walk(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", count)
    assert len(list(samo.parameters(model))) == len(list(model.parameters()))
    walks.clear()
    list(samo.parameters(model))
    assert len(walks) == 1


def test_a_device_is_made_current_only_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from samo.kernels.tables import device_of

    class OnGPU:
        is_cuda = True

        def get_device(self) -> int:
            return 1

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: ("made current", tensor))
    tensor: Any = OnGPU()
    with device_of(tensor), device_of(torch.ones(1)):
        pass
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    made: Any = device_of(tensor)
    assert made == ("made current", tensor)
