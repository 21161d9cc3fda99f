"""Meters, marks and small models that several test files share."""

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samo.models.gpt import GPT, GPTConfig

# Dynamo itself looks at the .grad of a compiled block's input, imports deprecated parts of torch,
# and makes objects of autograd functions.
ignores_dynamo = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:`torch.jit:DeprecationWarning",
    "ignore:.*should not be instantiated:DeprecationWarning",
)


def small_gpt(**changes: Any) -> GPT:
    """A GPT whose largest tensor is its embedding and whose widths equal no batch or length."""
    shape = {"num_layers": 3, "width": 48, "num_heads": 4, "context": 20, "vocab_size": 331}
    return GPT(GPTConfig(**(shape | changes)))


def tokens(batch: int = 5, length: int = 19, vocab_size: int = 331) -> Tensor:
    return torch.randint(0, vocab_size, (batch, length))


class Meter(TorchDispatchMode):
    """Shows `see` each tensor that an operation returns, and tracks storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak_bytes = 0

    def see(self, tensor: Tensor) -> None:
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.given = {
            tensor.untyped_storage().data_ptr()
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.see(tensor)
        return out

    def track(self, storage: torch.UntypedStorage) -> bool:
        """Add a storage until it is freed; return whether it is new."""
        key = storage.data_ptr()
        if key in self.live:
            return False
        self.live[key] = storage.nbytes()
        weakref.finalize(storage, self.live.pop, key, None)
        return True


class DenseGradients(Meter):
    """Counts the bytes of new tensors in the shape of a weight that are alive at the same time.

    Not those that ``params`` hold by then: the gradient of an unpruned weight may be kept as it is.
    """

    def __init__(self, weights: Iterable[Tensor], params: Iterable[Tensor] = ()) -> None:
        super().__init__()
        weights = list(weights)
        self.params = list(params)
        shapes = {tuple(weight.shape) for weight in weights if weight.dim() > 1}
        self.shapes = shapes | {shape[::-1] for shape in shapes}
        self.known = {weight.untyped_storage().data_ptr() for weight in weights}

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tuple(tensor.shape) not in self.shapes or storage.data_ptr() in self.known:
            return
        if self.track(storage):
            grads = [param.grad for param in self.params if param.grad is not None]
            held = {grad.untyped_storage().data_ptr() for grad in grads}
            passing = sum(nbytes for address, nbytes in self.live.items() if address not in held)
            self.peak_bytes = max(self.peak_bytes, passing)


class LargestTensor(Meter):
    """Notes the entries of the largest tensor that is made, views of older ones left out."""

    numel = 0

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.given:
            self.numel = max(self.numel, storage.nbytes() // tensor.element_size())


class LiveBytes(Meter):
    """Counts the bytes of all storages that are made under it and alive at the same time."""

    def see(self, tensor: Tensor) -> None:
        if tensor.numel() and self.track(tensor.untyped_storage()):
            self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))


@contextmanager
def saved_for_backward() -> Iterator[list[Tensor]]:
    """Collect the tensors that autograd saves."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def live_storages() -> dict[int, int]:
    """Return address and bytes of every storage that a live tensor of this process refers to."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # Not isinstance(), which asks some lazy modules for their class, and those then warn.
        if type(thing) not in (Tensor, nn.Parameter):
            continue
        try:
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.layout == torch.strided:
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
        except RuntimeError:  # a wrapper without memory, which torch's tracers leave behind
            continue
    return found


class NewBytes(LiveBytes):
    """Counts what is made under it, and not what an operation looks at or writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.known = {*live_storages()}

    def see(self, tensor: Tensor) -> None:
        if tensor.untyped_storage().data_ptr() not in self.known:
            super().see(tensor)


class Experts(nn.Module):
    """Stacked experts, top-1 routed."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = StackedExperts(experts, width)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best, choice = scores.max(-1)
        return x + best[:, None] * self.experts(x, choice)


class StackedExperts(nn.Module):
    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.1)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.up.shape[0]):
            mine = choice == expert
            out[mine] = torch.relu(x[mine] @ self.up[expert]) @ self.down[expert]
        return out


class SmallResNet(nn.Module):
    """Convolutions, batch norms, a skip connection and a head called fc, as torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)) + x)
        return self.fc(x.mean((2, 3)))


assert_same: Final = partial(torch.testing.assert_close, rtol=0, atol=0)
"""Compare tensors, and containers of them, bit for bit."""


def assert_ulps(ours: Tensor, theirs: Tensor, before: Tensor, *, at_most: int) -> None:
    """Compare one step's weights in units of the last place of the largest term of their sum.

    A weight may come out near 0, where its own unit would be far below what was added up.
    """
    largest = torch.stack([theirs, before, theirs - before]).abs().amax(0)
    ulp = torch.nextafter(largest, torch.full_like(largest, float("inf"))) - largest
    worst = ((ours - theirs).abs() / ulp).max() if ours.numel() else torch.zeros(())
    assert worst <= at_most, f"{worst} ulp apart"
