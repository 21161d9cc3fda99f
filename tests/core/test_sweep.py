"""Every kind of layer, every setting of the optimizers, and random models against masked dense training."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samo
from tests.core.twins import pruned_entries, twins, worst
from tests.meters import Experts

Build = Callable[[], tuple[nn.Module, Callable[[], Any]]]


class Through(nn.Module):
    """Calls a layer as its kind wants to be called, and gives back one tensor."""

    def __init__(self, inner: nn.Module, call: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Any) -> Tensor:
        return self.call(self.inner, x)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(6, 6) * 0.4) for _ in range(2)])
        self.named = nn.ParameterDict({"last": nn.Parameter(torch.randn(6, 3) * 0.4)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.rows[0]) @ self.rows[1] @ self.named["last"]


class Parent(nn.Module):
    """Reads the weight of its child, and uses the child three times."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.child(x))
        return x @ self.child.weight.T


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


def rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, dtype=torch.float64)


def ids(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 11, shape)


def first(layer: Any, x: Any) -> Tensor:
    return layer(x)[0]


def attend(layer: Any, x: Tensor) -> Tensor:
    return layer(x, x, x)[0]


def attend_others(layer: Any, x: Tensor) -> Tensor:
    return layer(x, x[..., :5], x[..., :4])[0]


def hf_conv() -> nn.Module:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    return nn.Sequential(pytorch_utils.Conv1D(6, 6), nn.Tanh(), pytorch_utils.Conv1D(3, 6))


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "Linear": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), rows(4, 6)),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 3), rows(2, 3, 8)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3, bias=False), rows(2, 3, 6, 6)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), rows(2, 2, 4, 4, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), rows(2, 3, 4, 4)),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2), rows(2, 4, 6, 6)),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.ReLU()),
        rows(2, 4, 6, 6),
    ),
    "channels_last": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).to(
            memory_format=torch.channels_last
        ),
        lambda: torch.randn(2, 3, 7, 7).double().to(memory_format=torch.channels_last),
    ),
    "Embedding": (lambda: nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 3)), ids(4)),
    "sparse Embedding": (
        lambda: nn.Sequential(nn.Embedding(11, 6, sparse=True), nn.Linear(6, 3)),
        ids(4),
    ),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(11, 6, mode="mean"), ids(4, 3)),
    "sparse EmbeddingBag": (lambda: nn.EmbeddingBag(11, 6, mode="sum", sparse=True), ids(4, 3)),
    "attention": (
        lambda: Through(nn.MultiheadAttention(6, 2, batch_first=True), attend),
        rows(2, 5, 6),
    ),
    "attention kdim": (
        lambda: Through(
            nn.MultiheadAttention(6, 2, kdim=5, vdim=4, add_bias_kv=True, batch_first=True),
            attend_others,
        ),
        rows(2, 5, 6),
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
        rows(2, 5, 6),
    ),
    "LSTM": (lambda: Through(nn.LSTM(6, 8, proj_size=4, num_layers=2), first), rows(5, 2, 6)),
    "GRU": (lambda: Through(nn.GRU(6, 5, bidirectional=True), first), rows(5, 2, 6)),
    "RNN": (lambda: Through(nn.RNN(6, 5), first), rows(5, 2, 6)),
    "LSTMCell": (lambda: Through(nn.LSTMCell(6, 5), first), rows(3, 6)),
    "Bilinear": (
        lambda: Through(nn.Bilinear(6, 6, 4), lambda layer, x: layer(x, x.flip(0))),
        rows(4, 6),
    ),
    "parameter lists": (Lists, rows(4, 6)),
    "experts": (lambda: Experts(3, 6), rows(8, 6)),
    "Hugging Face Conv1D": (hf_conv, rows(4, 6)),
    "weight read by a parent": (Parent, rows(4, 6)),
    "tied": (Tied, ids(3, 4)),
}


def masks_of_all(model: nn.Module, density: float = 0.5) -> samo.Masks:
    """Prune every tensor with two dimensions or more; the rest has nothing to compress."""
    masks = {}
    for name, param in model.named_parameters():
        if param.dim() >= 2 and param.numel():
            keep = torch.rand(param.shape) < density
            keep.view(-1)[0] = True
            masks[name] = samo.Mask.from_bool(keep)
    return samo.Masks(masks)


def dense_gradients(model: nn.Module) -> None:
    """AdamW takes no sparse gradients; a compressed weight's is never one."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False


def run(model: nn.Module, opt: torch.optim.Optimizer, x: Any) -> None:
    opt.zero_grad()
    out = model(x)
    (out - 0.1).square().mean().backward()
    opt.step()


@pytest.mark.parametrize("name", LAYERS)
def test_thirty_steps_of_a_layer_equal_masked_dense_training(name: str) -> None:
    build, batch = LAYERS[name]
    model = build().double()
    model, dense = twins(model, masks_of_all(model))
    dense_gradients(dense)
    opts = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, dense)]
    for _ in range(30):
        x = batch()
        for net, opt in zip((model, dense), opts):
            run(net, opt, x)
    assert worst(model, dense) <= 1e-9
    assert not pruned_entries(model).any()
    model.eval()
    dense.eval()
    for grad in (False, True):  # without gradients attention and encoders take another path
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(x), dense(x), rtol=1e-9, atol=1e-9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, maximize=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, foreach=False),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "centered": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "Adagrad decay": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}

SETTINGS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.5},
    {"weight_decay": 100.0, "lr": 1e-4},
    {"betas": (0.0, 0.999)},
    {"betas": (0.9, 0.0)},
    {"betas": (0.9, 0.999999)},
    {"lr": 1.0},
    {"lr": 1e-12},
    {"lr": torch.tensor(0.01)},
    {"eps": 1e-3},
]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def compare(ours: Any, theirs: Any, *, steps: int = 30) -> float:
    model = small()
    model, dense = twins(model, masks_of_all(model))
    opts = [ours(model.parameters()), theirs(dense.parameters())]
    for _ in range(steps):
        x = torch.randn(4, 6, dtype=torch.float64)
        for net, opt in zip((model, dense), opts):
            run(net, opt, x)
    assert not pruned_entries(model).any()
    return worst(model, dense)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_of_torch_optimizers_train_as_masked_dense(name: str) -> None:
    assert compare(OPTIMIZERS[name], OPTIMIZERS[name]) <= 1e-9


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_settings_of_our_adamw_train_as_masked_dense(
    settings: dict[str, Any], kernels: Any
) -> None:
    settings = {"lr": 0.01} | settings
    difference = compare(
        lambda p: samo.AdamW(p, **settings, kernels=kernels),
        lambda p: torch.optim.AdamW(p, **settings, foreach=False),
    )
    assert difference <= 1e-9


def random_model(rng: random.Random) -> tuple[nn.Module, int, torch.dtype]:
    """A chain of Linear layers: odd shapes, strides, types, with and without bias."""
    widths = [rng.randint(1, 40) for _ in range(rng.randint(2, 4))]
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layer = nn.Linear(wide, narrow, bias=rng.random() < 0.5)
        if rng.random() < 0.3:  # not contiguous
            layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
        layers += [layer, nn.Tanh()]
    dtype = rng.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16])
    return nn.Sequential(*layers), widths[0], dtype


@pytest.mark.parametrize("decade", range(10))
def test_ten_random_models_train_as_masked_dense(decade: int) -> None:
    """In 16 bits the twin is fp32 weights that are cast before every pass."""
    for seed in range(10 * decade, 10 * decade + 10):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        model, width, dtype = random_model(rng)
        model = model.double() if dtype == torch.float64 else model
        masks = masks_of_all(model, density=rng.choice([0.02, 0.1, 0.5, 0.97]))
        model, dense = twins(model, masks, dtype=dtype, kernels="reference")
        opts = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in (model, dense)]
        for _ in range(6):
            x = torch.randn(3, width).to(dtype)
            opts[0].zero_grad()
            model(x).to(torch.float64).square().sum().backward()
            opts[0].step()
            opts[1].zero_grad()
            cast = {name: param.to(dtype) for name, param in dense.named_parameters()}
            out = torch.func.functional_call(dense, cast, (x,))
            out.to(torch.float64).square().sum().backward()
            opts[1].step()
        assert worst(model, dense) == 0, f"seed {seed}, {dtype}"
        assert not pruned_entries(model).any()


@pytest.mark.parametrize("name", ["Qwen2", "Gemma2", "Qwen3Moe", "T5 tied", "BERT"])
def test_models_of_hugging_face_train_as_masked_dense(name: str) -> None:
    """All twenty: python -m benchmarks.sweep_hf."""
    pytest.importorskip("transformers")
    from benchmarks.sweep_hf import difference

    apart, moved, pruned = difference(name, steps=3)
    assert apart <= 1e-9
    assert moved > 1e-3
    assert pruned >= 8
