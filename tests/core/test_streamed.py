"""Streamed weights against resident ones: bit for bit, and no dense weight saved for backward."""

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import samo
from samo.core.compress import masks as masks_of
from samo.core.modules import named_weights
from samo.core.streamed import LOCK
from tests.core.twins import WAYS, hugging_face, masked_twin, mlp, random_masks, twins, worst
from tests.meters import (
    Experts,
    LargestTensor,
    Meter,
    SmallResNet,
    StackedExperts,
    assert_same,
    ignores_dynamo,
    saved_for_backward,
    small_gpt,
    tokens,
)

X = torch.linspace(-1, 1, 96).view(8, 12)
Run = Callable[..., Any]


def save_products() -> Any:
    """Selective checkpointing: recompute all but the outputs of products."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    """Return a model with resident weights and its twin with streamed ones."""
    torch.manual_seed(0)
    model = make()
    masks = random_masks(model)
    twin = copy.deepcopy(model)
    samo.compress_(model, masks, **options)
    samo.compress_(twin, masks, weights="streamed", **options)
    return model, twin


def streamed(make: Callable[[], nn.Module] = mlp, **options: Any) -> Any:
    return pair(make, **options)[1]


def grads(net: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def pass_of(net: Any, run: Run, x: Tensor | None = None) -> list[Any]:
    """Return the result of a pass, the gradient of its input, and those of all parameters."""
    torch.manual_seed(1)
    if x is None:
        out = run(net)
        out.float().square().mean().backward()
        return [out.detach(), *grads(net)]
    x = x.clone().requires_grad_()
    out = run(net, x)
    out.float().square().mean().backward()
    return [out.detach(), x.grad, *grads(net)]


def assert_equal_passes(
    make: Callable[[], nn.Module], run: Run, x: Tensor | None = None, **options: Any
) -> None:
    """Run both; then once more after a step, with what both made of it."""
    nets = pair(make, **options)
    make_opt = samo.AdamW if options.get("grad_dtype") else torch.optim.AdamW
    opts = [make_opt(net.parameters(), lr=0.01) for net in nets]
    for _ in range(2):
        assert_same(*(pass_of(net, run, x) for net in nets))
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert all(weight.mask is None or weight.dense is None for _, weight in named_weights(nets[1]))


# Module kinds -----------------------------------------------------------------------------------


class Signs(torch.autograd.Function):
    """A straight-through estimator: torch gives it the weight itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return torch.sign(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def linear(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.weight, m.bias)


class ByColumn(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.weight = nn.Parameter(self.weight.detach().t().contiguous().t())


LINEAR: dict[str, tuple[Run, Tensor]] = {
    "2-D": (linear, X),
    "1-D": (linear, X[0]),
    "3-D": (linear, X.view(2, 4, 12)),
    "4-D": (linear, X.view(2, 2, 2, 12)),
    "without bias": (lambda m, x: F.linear(x, m.weight), X.view(2, 4, 12)),
    "transposed batch": (lambda m, x: linear(m, x.transpose(0, 1)), X.view(2, 4, 12)),
    "column-major": (lambda m, x: linear(m, x.t()), X.view(12, 8)),
    "column-major 3-D": (lambda m, x: linear(m, x.permute(1, 2, 0)), X.view(12, 2, 4)),
    "column-major (1, n, m)": (lambda m, x: F.linear(x.mT, m.weight), X.view(1, 12, 8)),
    "with gaps": (lambda m, x: linear(m, x[::2, ::2]), X.view(4, 24)),
    "expanded": (lambda m, x: linear(m, x.expand(3, 8, 12)), X),
    "empty": (linear, X[:0]),
    "by name": (lambda m, x: F.linear(input=x, weight=m.weight, bias=m.bias), X),
    "bias of one row": (lambda m, x: F.linear(x, m.weight, m.bias[None]), X),
    "matmul": (lambda m, x: x @ m.weight.t(), X.view(2, 4, 12)),
    "matmul by name": (lambda m, x: torch.matmul(input=x, other=m.weight.T), X),
    "mm": (lambda m, x: torch.mm(x, mat2=m.weight.mT), X),
    "addmm": (lambda m, x: torch.addmm(m.bias, x, m.weight.transpose(0, 1)), X),
    "addmm by name": (lambda m, x: torch.addmm(input=m.bias, mat1=x, mat2=m.weight.t()), X),
    "scaled addmm": (lambda m, x: torch.addmm(m.bias, x, m.weight.t(), beta=0.5), X),
    "transposed by name": (lambda m, x: x @ m.weight.transpose(dim0=-1, dim1=0), X),
    "weight first": (lambda m, x: m.weight @ x.t(), X),
    "weight as input": (lambda m, x: F.linear(m.weight, x), X),
    "weight by weight": (lambda m, x: x @ (m.weight.t() @ m.weight), X),
    "einsum": (lambda m, x: torch.einsum("bi,oi->bo", x, m.weight), X),
    "rows": (lambda m, x: F.linear(x, m.weight[3:9]), X),
    "a parameter as input": (lambda m, x: linear(m, nn.Parameter(x.detach())) + x.sum(), X),
    "output written to": (lambda m, x: linear(m, x).relu_().square(), X.view(2, 4, 12)),
    "signs": (lambda m, x: F.linear(x, Signs.apply(m.weight)) + x @ m.weight.t(), X),
    "signs of the transpose": (lambda m, x: x @ Signs.apply(m.weight.t()), X),
    "reentrant": (lambda m, x: checkpoint(F.linear, x, m.weight, use_reentrant=True), X),
}


IMAGE = torch.linspace(-1, 1, 2 * 6 * 9 * 9).view(2, 6, 9, 9)
LAST = torch.channels_last
CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "1-D": (lambda: nn.Conv1d(6, 8, 5, stride=2, padding=3, dilation=2), IMAGE[:, :, 0]),
    "1-D even same": (lambda: nn.Conv1d(6, 8, 4, padding="same"), IMAGE[:, :, 0]),
    "2-D": (lambda: nn.Conv2d(6, 8, 3, stride=(2, 1), padding=(1, 2)), IMAGE),
    "same": (lambda: nn.Conv2d(6, 8, 3, padding="same", dilation=(2, 1), bias=False), IMAGE),
    "valid": (lambda: nn.Conv2d(6, 8, 3, padding="valid", stride=2), IMAGE),
    "reflect": (lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="reflect"), IMAGE),
    "groups": (lambda: nn.Conv2d(6, 8, 3, groups=2), IMAGE),
    "depthwise": (lambda: nn.Conv2d(6, 12, 3, groups=6), IMAGE),
    "unbatched": (lambda: nn.Conv2d(6, 8, 3), IMAGE[0]),
    "channels last": (
        lambda: nn.Conv2d(6, 8, 3).to(memory_format=LAST),
        IMAGE.to(memory_format=LAST),
    ),
    "weight alone last": (lambda: nn.Conv2d(6, 8, 3).to(memory_format=LAST), IMAGE),
    "input alone last": (lambda: nn.Conv2d(6, 8, 3), IMAGE.to(memory_format=LAST)),
    "3-D": (lambda: nn.Conv3d(2, 8, (1, 2, 3), padding=(0, 1, 1)), IMAGE.view(2, 2, 3, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 8, 3, stride=2, output_padding=1), IMAGE),
}


TOKENS = torch.arange(28).view(4, 7) % 20
SEQUENCE = torch.linspace(-1, 1, 4 * 5 * 16).view(4, 5, 16)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x))))


class Reader(nn.Module):
    """A parent that reads the weight of its child in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(F.linear(x, self.inner.weight)) @ self.inner.weight + self.inner(x)
        return x * self.inner.weight.norm()


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(12, 12) * 0.4) for _ in range(2)])
        self.named = nn.ParameterDict({"last": nn.Parameter(torch.randn(12, 3) * 0.4)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.rows[0]) @ self.rows[1] @ self.named["last"]


OTHERS: dict[str, tuple[Callable[[], nn.Module], Run]] = {
    "embedding": (lambda: nn.Embedding(20, 16, padding_idx=3), lambda m: m(TOKENS)),
    "sparse embedding": (lambda: nn.Embedding(20, 16, sparse=True), lambda m: m(TOKENS)),
    "embedding bag": (lambda: nn.EmbeddingBag(20, 16), lambda m: m(TOKENS)),
    "attention": (
        lambda: nn.MultiheadAttention(16, 4, batch_first=True),
        lambda m: m(SEQUENCE, SEQUENCE, SEQUENCE)[0],
    ),
    "attention, other widths": (
        lambda: nn.MultiheadAttention(16, 4, kdim=8, vdim=6, bias=False, batch_first=True),
        lambda m: m(SEQUENCE, SEQUENCE[..., :8], SEQUENCE[..., :6], need_weights=False)[0],
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        lambda m: m(SEQUENCE),
    ),
    "lstm": (lambda: nn.LSTM(16, 8, 2, bidirectional=True), lambda m: m(SEQUENCE)[0]),
    "projected lstm": (lambda: nn.LSTM(16, 8, proj_size=4), lambda m: m(SEQUENCE)[0]),
    "gru": (lambda: nn.GRU(16, 8), lambda m: m(SEQUENCE)[0]),
    "bilinear": (lambda: nn.Bilinear(12, 4, 5), lambda m: m(X, X[:, :4])),
    "tied": (Tied, lambda m: m(TOKENS)),
    "read by the parent": (Reader, lambda m: m(X)),
    "parameter lists": (Lists, lambda m: m(X)),
    "experts of whole blocks": (lambda: Experts(4, 32), lambda m: m(SEQUENCE.view(-1, 32))),
    "other experts": (lambda: Experts(4, 16), lambda m: m(SEQUENCE.view(-1, 16))),
    "signs of an expert": (
        lambda: StackedExperts(2, 64),
        lambda m: SEQUENCE.view(5, 64) @ Signs.apply(m.up[1]) + SEQUENCE.view(5, 64) @ m.up[1],
    ),
    "resnet": (SmallResNet, lambda m: m(IMAGE[:, :3])),
    "reentrant": (mlp, lambda m: checkpoint(m, X.clone().requires_grad_(), use_reentrant=True)),
    "checkpointed": (mlp, lambda m: checkpoint(m, X, use_reentrant=False)),
    "products saved": (
        mlp,
        lambda m: checkpoint(m, X, use_reentrant=False, context_fn=save_products),
    ),
    "checkpointed dropout": (
        lambda: nn.Sequential(nn.Linear(12, 32), nn.Dropout(), nn.Linear(32, 6)),
        lambda m: checkpoint(m, X, use_reentrant=False, preserve_rng_state=True),
    ),
}


Layer = tuple[Callable[[], nn.Module], Run, Tensor | None]
LAYERS: dict[str, Layer] = {
    **{name: (make, run, None) for name, (make, run) in OTHERS.items()},
    **{name: (make, lambda m, x: m(x), x) for name, (make, x) in CONVOLUTIONS.items()},
    **{f"linear, {name}": (lambda: nn.Linear(12, 32), *case) for name, case in LINEAR.items()},
    "linear, by column": (lambda: ByColumn(12, 32), linear, X),
    "turned": (lambda: nn.Conv2d(6, 8, 3), lambda m, x: F.conv2d(x, m.weight.mT), IMAGE),
    "turned 1-D": (
        lambda: nn.Conv1d(3, 8, 3),
        lambda m, x: F.conv1d(x, weight=m.weight.transpose(1, 2)),
        IMAGE[:, :3, 0],
    ),
}


@pytest.mark.filterwarnings("ignore:.*padding='same' with even|.*not supported with oneDNN")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_resident_one_bit_for_bit_and_trains_as_masked_dense(name: str) -> None:
    make, run, x = LAYERS[name]
    torch.manual_seed(0)
    start = make()
    nets = [*pair(make), masked_twin(start, random_masks(start))]
    for module in nets[2].modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False  # a compressed weight's gradient is never sparse
    opts = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    inputs = () if x is None else (x,)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():  # where attention and encoders take another path
            resident, ours, dense = (run(net.eval(), *inputs) for net in nets)
        torch.testing.assert_close(resident, dense)
        torch.testing.assert_close(ours, dense)
        passes = [pass_of(net.train(), run, x) for net in nets]
        assert_same(passes[0], passes[1])
        for opt in opts:
            opt.step()
            opt.zero_grad()
    # Gradients of a weight with several uses add up in another order.
    assert worst(nets[0], nets[2]) <= 1e-6
    are_streamed = not isinstance(nets[1], nn.RNNBase)
    for _, weight in named_weights(nets[1]):
        assert weight.mask is None or (weight.dense is None) == are_streamed


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16], ids=["fp64", "bf16", "fp16"]
)
@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16], ids=["wide", "bf16 gradients"])
def test_types_equal_resident_ones(dtype: torch.dtype, grad_dtype: Any) -> None:
    x = X.to(dtype)
    assert_equal_passes(mlp, lambda m, x: m(x), x, dtype=dtype, grad_dtype=grad_dtype)
    image = IMAGE.to(dtype)[:, :3]
    assert_equal_passes(  # batch norms stay in fp32
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3)),
        lambda m, x: m(x),
        image,
        dtype=dtype,
        grad_dtype=grad_dtype,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["tied", "resnet", "attention", "checkpointed", "reentrant"])
def test_autocast_over_fp32_equals_resident_autocast(name: str, dtype: torch.dtype) -> None:
    make, run = OTHERS[name]
    assert_equal_passes(make, torch.autocast("cpu", dtype=dtype)(run))


# Hugging Face -----------------------------------------------------------------------------------

IDS = torch.arange(18).view(2, 9) * 7 % 64


def mixtral(experts: str, **sizes: int) -> Any:
    return hugging_face("mixtral", experts_implementation=experts, **sizes)


def causal(model: Any) -> Tensor:
    return model(input_ids=IDS, labels=IDS).loss


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("width", [32, 24], ids=["whole blocks", "parts of blocks"])
def test_hugging_face_experts_equal_resident_ones(experts: str, width: int) -> None:
    make = partial(mixtral, experts, hidden_size=width, intermediate_size=2 * width)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads add up what several tokens have of an expert in any order
    try:
        assert_equal_passes(make, causal)
        if experts != "batched_mm":
            run = torch.autocast("cpu", dtype=torch.bfloat16)(causal)
            assert_equal_passes(make, run)
    finally:
        torch.set_num_threads(threads)


# Gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.SGD, samo.AdamW])
def test_a_graph_that_is_kept_serves_again_until_a_step(make: Any) -> None:
    for model in pair(mlp):
        opt = make(model.parameters(), lr=0.1)
        loss = model(X).square().sum()
        loss.backward(retain_graph=True)
        first = grads(model)
        loss.backward(retain_graph=True)
        assert_same(grads(model), [2 * grad for grad in first if grad is not None])
        opt.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


PENALISED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (mlp, X),
    **{name: CONVOLUTIONS[name] for name in ("1-D", "groups", "channels last", "3-D")},
}


@pytest.mark.parametrize("name", PENALISED)
def test_a_gradient_penalty_is_that_of_masked_dense(name: str) -> None:
    """In another order of the sums: the two gradients of a convolution are computed apart."""
    make, x = PENALISED[name]
    torch.manual_seed(0)
    start = make().double()
    found = []
    for net in (masked_twin(start, random_masks(start)), *pair(lambda: make().double())):
        own = x.double().requires_grad_()
        loss = net(own).square().sum()
        first = torch.autograd.grad(loss, [*net.parameters(), own], create_graph=True)
        sum(grad.square().sum() for grad in first).backward()
        layers = [layer for layer in net.modules() if hasattr(layer, "weight")]
        found.append([own.grad, *(part.grad for m in layers for part in (m.weight, m.bias))])
    for ours in found[1:]:
        torch.testing.assert_close(ours, found[0], rtol=1e-9, atol=1e-10)


def test_frozen_weights_pass_gradients_on() -> None:
    """As under LoRA; and their inputs are not held, so that they may be written to."""
    found = []
    for net in pair(mlp):
        net[0].weight.requires_grad_(False)
        found.append(pass_of(net, lambda m, x: m(x), X))
        assert net.get_parameter("0.weight").grad is None
        net[0].bias.requires_grad_(False)
        net.zero_grad()
        x = X.clone().requires_grad_()
        hidden = x * 1
        out = net[0](hidden)
        hidden.add_(1)
        out.sum().backward()
        found[-1].append(x.grad)
    assert_same(*found)


# Training ---------------------------------------------------------------------------------------


def train(net: Any, opt: Any, steps: int = 3) -> list[Tensor]:
    dtype = net[0].weight.dtype
    for _ in range(steps):
        opt.zero_grad()
        net(X.to(dtype)).float().square().mean().backward()
        opt.step()
    return [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize("kind", WAYS)
def test_models_train_over_a_remap_as_resident_ones(kind: str) -> None:
    options, make = WAYS[kind]
    found = []
    for net in pair(mlp, **options):
        opt = make(net.parameters())
        train(net, opt)
        loss = net(X.to(net[0].weight.dtype)).sum()
        samo.remap_(net, random_masks(net, 0.3, seed=5), opt)
        with pytest.raises(
            RuntimeError, match=r"mask of .* changed between|modified by an inplace"
        ):
            loss.backward()
        found.append(train(net, opt))
    assert_same(*found)


@pytest.mark.parametrize("name", ["read by the parent", "tied", "experts of whole blocks"])
def test_growth_sees_the_sum_of_all_uses_of_a_weight(name: str) -> None:
    make, run = OTHERS[name]
    found = []
    for net in pair(make):
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        moving = samo.DynamicSparse(net, opt, grow="gradient", stop=9, every=1, candidates=None)
        for _ in range(2):
            opt.zero_grad()
            run(net).square().mean().backward()
            opt.step()
            moving.step()
        masks = masks_of(net)
        found.append([masks[name].to_bool() for name in masks])
    assert_same(*found)


# Writes -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:nonzero values were written")
@pytest.mark.parametrize("width", [32, 16], ids=["whole blocks", "parts of blocks"])
def test_writes_to_one_of_stacked_weights_reach_the_values(width: int) -> None:
    x = SEQUENCE.view(-1, width)
    found = []
    for net in pair(lambda: Experts(4, width)):
        torch.manual_seed(2)
        with torch.no_grad():
            for expert in range(4):
                nn.init.normal_(net.experts.up[expert])
            net.experts.down[-1].t().mul_(2)
        found.append(net(x).detach())
        assert net.experts.up[0].requires_grad
        net.experts.up.requires_grad_(False)
        assert not net.experts.up[0].requires_grad
    assert_same(*found)


def held_over_a_pass(net: Any) -> list[Tensor]:
    first, last = net[0].weight.data[:9], net[0].weight.data[9:]
    first.mul_(2)
    before = net(X).detach()
    last.mul_(3)
    return [before, net(X).detach(), net.state_dict()["0.weight"]]


def held_over_a_step(net: Any) -> list[Tensor]:
    data = net[0].weight.data
    data.mul_(2)
    found = train(net, torch.optim.SGD(net.parameters(), lr=0.1))
    del data
    return [*found, net(X).detach()]


def held_over_a_copy(net: Any) -> list[Tensor]:
    data = net[0].weight.data
    data.mul_(2)
    found = [copy.deepcopy(net)(X).detach(), samo.dense_state_dict(net)["0.weight"]]
    del data
    return found


@pytest.mark.parametrize("run", [held_over_a_pass, held_over_a_step, held_over_a_copy])
def test_what_is_written_to_a_held_expansion_is_seen_at_the_next_look(run: Run) -> None:
    assert_same(*(run(net) for net in pair(mlp)))


@pytest.mark.parametrize("fused", [False, True])
def test_an_expansion_from_before_a_step_cannot_be_written_to(fused: bool) -> None:
    model = streamed()
    data = model[0].weight.data
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused))
    expected = model(X).detach()
    data.mul_(2)
    with pytest.raises(samo.CompressionError, match=r"'0.weight' was written in two ways"):
        model(X)
    assert torch.equal(model(X), expected)
    data.mul_(2)
    with pytest.warns(UserWarning, match="the write to the tensor is lost"):
        del data
    assert torch.equal(model(X), expected)


def test_an_expansion_of_values_that_were_replaced_is_not_returned_again() -> None:
    model = streamed()
    held = model[0].weight.detach()
    values = model.get_parameter("0.weight")
    values.data = values.data * 2
    assert torch.equal(model[0].weight.detach(), 2 * held)


# What the weight looks like ---------------------------------------------------------------------


def test_the_weight_looks_like_a_parameter() -> None:
    for net in pair(mlp):
        weight = net[0].weight
        assert isinstance(weight, nn.Parameter)
        assert weight is net[0].weight
        assert (weight.shape, weight.dtype, len(weight)) == ((32, 12), torch.float32, 32)
        assert (weight.stride(), weight.device.type) == ((12, 1), "cpu")
        assert not isinstance(weight.t(), nn.Parameter)
        with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
            torch.optim.SGD([weight], lr=0.1)
        with pytest.raises(ValueError, match="Cannot assign non-leaf Tensor"):
            nn.Linear(12, 32).weight = weight
    ours, theirs = pair(mlp)
    for look in (
        lambda w: w.tolist(),
        lambda w: torch.zeros_like(w),
        lambda w: copy.deepcopy(w).detach(),
        lambda w: pickle.loads(pickle.dumps(w)).detach(),
        lambda w: torch.cat([w, w]).detach(),
    ):
        assert_same(look(ours[0].weight), look(theirs[0].weight))


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of another class in torch 2.11
def test_hooks_on_the_weight_and_torch_jit_trace_are_refused() -> None:
    model = streamed()
    with pytest.raises(samo.CompressionError, match=r"'0.weight' is streamed: its dense gradient"):
        model[0].weight.register_hook(print)
    with pytest.raises(samo.CompressionError, match=r"use torch.export"):
        torch.jit.trace(model, (X,))


# Memory and threads -----------------------------------------------------------------------------


def sizes_of(saved: list[Tensor], net: nn.Module) -> set[int]:
    """Return the bytes of the storages that are saved for backward, but the parameters' own."""
    own = {param.untyped_storage().data_ptr() for param in net.parameters()}
    storages = [tensor.untyped_storage() for tensor in saved if not tensor.is_meta]
    return {storage.nbytes() for storage in storages if storage.data_ptr() not in own}


def wide_mlp() -> nn.Sequential:
    """A model whose weights are larger than all it computes with 8 rows."""
    return nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 6))


def convolutions() -> nn.Sequential:
    """One with padding on both sides, and one that is padded more on the right."""
    same = nn.Conv2d(64, 96, 3, padding="same"), nn.Conv2d(96, 64, (2, 4), padding="same")
    return nn.Sequential(nn.Conv2d(6, 64, 3), nn.Tanh(), *same, nn.Conv2d(64, 2, 3))


PRODUCTS: dict[str, tuple[Callable[[], nn.Module], Run]] = {
    "linear": (wide_mlp, lambda m: m(X)),
    "frozen": (lambda: wide_mlp().requires_grad_(False), lambda m: m(X.clone().requires_grad_())),
    "convolutions": (convolutions, lambda m: m(IMAGE[:1])),
    "grouped experts": (lambda: mixtral("grouped_mm"), causal),
    "experts in a loop": (lambda: Experts(4, 64), lambda m: m(SEQUENCE.view(-1, 64))),
    "gpt2": (lambda: hugging_face("gpt2"), lambda m: m.transformer.h[0].mlp(torch.randn(1, 2, 32))),
}


@pytest.mark.filterwarnings("ignore:.*padding='same' with even")
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("is_cast", [False, True], ids=["fp32", "autocast"])
def test_no_dense_weight_is_saved_for_backward(name: str, is_cast: bool) -> None:
    """In modules whose product is ours; of the resident model the meter sees them."""
    make, run = PRODUCTS[name]
    if is_cast and name == "experts in a loop":
        pytest.skip("it does not take what autocast gives")
    if is_cast and name != "grouped experts":  # which torch does not cast
        run = torch.autocast("cpu", dtype=torch.bfloat16)(run)
    found = []
    for net in pair(make):
        with saved_for_backward() as saved:
            run(net)
        found.append(sizes_of(saved, net) & dense_sizes(net, 2 if is_cast else 4))
    assert found[0]
    assert not found[1]


def dense_sizes(net: nn.Module, *itemsizes: int) -> set[int]:
    """Return the bytes of the dense weights that are used in products."""
    weights = [weight for path, weight in named_weights(net) if "embed" not in path]
    large = {weight.shape.numel() for weight in weights if weight.shape.numel() > 3000}
    return {size * numel for numel in large for size in (4, *itemsizes)}


class Copies(Meter):
    """Counts the storages of one size that are alive at the same time."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.peak = nbytes, 0

    def see(self, tensor: Tensor) -> None:
        if tensor.untyped_storage().nbytes() == self.nbytes:
            self.track(tensor.untyped_storage())
            self.peak = max(self.peak, len(self.live))


@pytest.mark.parametrize("style", ["plain", "checkpointed", "reentrant", "autocast"])
def test_one_dense_weight_and_one_dense_gradient_are_alive_at_most(style: str) -> None:
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))
    samo.compress_(model, random_masks(model), weights="streamed")
    x = torch.randn(2, 96, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        for layer in model:
            if style in ("checkpointed", "reentrant"):
                x = checkpoint(layer, x, use_reentrant=style == "reentrant")
            else:
                x = layer(x)
        return x

    if style == "autocast":
        run = torch.autocast("cpu", dtype=torch.bfloat16)(run)
    with Copies(96 * 96 * (2 if style == "autocast" else 4)) as meter:
        run(x).float().sum().backward()
    assert 1 <= meter.peak <= 2
    assert not meter.live


@pytest.mark.parametrize("is_training", [False, True])
def test_a_product_without_rows_expands_nothing(is_training: bool) -> None:
    model = streamed(wide_mlp)
    with LargestTensor() as meter, torch.set_grad_enabled(is_training):
        assert model(X[:0]).shape == (0, 6)
    assert meter.numel < 300


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_memory_is_freed_without_the_garbage_collector(weights: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        model: Any = Tied()
        samo.compress_(model, random_masks(model), weights=weights)
        opt = samo.AdamW(model.parameters())
        model(TOKENS).sum().backward()
        opt.step()
        model.embed.weight.data.mul_(2)
        with torch.no_grad():
            model(TOKENS)
            model.inner.weight.mul_(2)
        watched = [weakref.ref(weight) for _, weight in named_weights(model)]
        watched += [weakref.ref(param) for param in model.parameters()]
        watched += [weakref.ref(model.inner.weight)]
        assert all(weight.expansions == [] for _, weight in named_weights(model))
        del model, opt
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


def test_a_written_expansion_may_be_let_go_where_the_lock_is_held() -> None:
    """The garbage collector runs anywhere: here it would wait for its own thread."""
    model = streamed()
    cycle: list[Any] = [model[0].weight.data]
    cycle.append(cycle)
    cycle[0].mul_(2)
    expected = 2 * model.get_parameter("0.weight").detach()
    del cycle
    done = threading.Event()

    def collect() -> None:
        with LOCK:
            gc.collect()
        done.set()

    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(10)
    assert torch.equal(model.get_parameter("0.weight"), expected)


# Budgets ----------------------------------------------------------------------------------------


def resident_bytes(model: nn.Module) -> int:
    weights = [weight for _, weight in named_weights(model)]
    return sum(weight.dense.nbytes for weight in weights if weight.dense is not None)


def test_a_budget_is_filled_and_kept() -> None:
    def make(weights: Any) -> nn.Module:
        torch.manual_seed(0)
        model = small_gpt(num_layers=8)
        return samo.compress_(model, samo.prune(model, 0.9), weights=weights)

    whole, none = resident_bytes(make("resident")), resident_bytes(make("streamed"))
    assert none == 0
    assert resident_bytes(make(0)) == none
    assert resident_bytes(make(whole)) == whole
    assert resident_bytes(make(10 * whole)) == whole
    half = make(whole // 2)
    assert resident_bytes(half) <= whole // 2
    assert resident_bytes(half) == pytest.approx(whole / 2, rel=0.02)
    batch = tokens()
    assert_same(*(pass_of(net, lambda m: m(batch, batch)) for net in (half, make("resident"))))


# Compiled code ----------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Two residual blocks: what Inductor compiles fast."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(48, 96) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(96, 48) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs):
            x = x + down(torch.relu(up(x)))
        return x.square().mean()


def compiled_grads(net: Any, backend: str, batch: Tensor) -> tuple[set[int], list[Any]]:
    """Return the sizes that a compiled model saves, and its gradients."""
    torch._dynamo.reset()
    run = torch.compile(net, backend=backend, fullgraph=True)
    with saved_for_backward() as saved:
        loss = run(batch)
    loss.backward()
    return sizes_of(saved, net), [loss.detach(), *grads(net)]


@ignores_dynamo
@pytest.mark.parametrize("backend", ["autocast", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_compiled_model_saves_no_dense_weight(backend: str) -> None:
    is_cast = backend == "autocast"
    batch, nets = torch.randn(3, 48), pair(Blocks)
    if is_cast:
        for net in nets:
            net.forward = torch.autocast("cpu", dtype=torch.bfloat16)(net.forward)
    sizes = dense_sizes(nets[1], *([2] if is_cast else []))
    of_resident, expected = compiled_grads(nets[0], "aot_eager", batch)
    found, ours = compiled_grads(nets[1], "aot_eager" if is_cast else backend, batch)
    assert of_resident & sizes
    assert not found & sizes
    for one, other in zip(ours, expected):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-2 if is_cast else 1e-5)


class Arithmetic(nn.Module):
    """Reads its weight in ways that need the whole of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        assert weight.dim() == 2
        assert weight.size(0) == weight.shape[1] == 12
        found = x @ weight.t() @ weight + F.linear(x, weight[:1]) * weight.norm()
        return found + (2 * weight - weight / 3).sum() + (weight**2 + abs(-weight)).mean()


class Turned(StackedExperts):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.bmm(x, self.up.mT) + torch.bmm(x, self.up.transpose(1, 2))


COMPILED: dict[str, tuple[Callable[[], nn.Module], Run]] = {
    "turned": (lambda: Turned(2, 16), lambda m: m(SEQUENCE.view(2, 5, 32))),
    "arithmetic": (Arithmetic, lambda m: m(X)),
    **{name: OTHERS[name] for name in ("lstm", "tied", "resnet")},
    **{
        name: (partial(hugging_face, name), lambda m: m(input_ids=IDS, use_cache=False).logits)
        for name in ("gpt2", "llama")
    },
}
LONG = ("resnet", "gpt2", "llama")


@ignores_dynamo
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in COMPILED]
)
def test_compiled_models_compute_what_eager_ones_do(name: str) -> None:
    make, run = COMPILED[name]
    for eager in pair(make):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = copy.deepcopy(eager)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=name != "lstm")
        with torch.no_grad():
            torch.testing.assert_close(run(compiled), run(eager))
        for net, call in ((eager, eager), (model, compiled)):
            run(call).float().square().mean().backward()
            torch.optim.SGD(net.parameters(), lr=0.1).step()
        torch.testing.assert_close(run(compiled), run(eager))
        torch.testing.assert_close(grads(model), grads(eager))
        # One for inference, one for training.
        assert name == "lstm" or torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@ignores_dynamo
def test_compiled_code_refuses_to_lose_a_write_to_a_streamed_weight() -> None:
    model, _ = twins(nn.Sequential(Clamped(12, 6)), weights="streamed")
    with pytest.raises(Exception, match="compiled code would lose what clamp_ writes"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(X)


class Routed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        return torch.zeros_like(x).index_add(0, rows, super().forward(x[rows]))


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_rows_that_depend_on_the_data_are_exported(weights: Any) -> None:
    model, _ = twins(nn.Sequential(Routed(12, 12)), weights=weights)
    program = torch.export.export(model, (X,), strict=True)
    torch.testing.assert_close(program.module()(-X), model(-X))


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_an_exported_model_is_saved_without_warnings(weights: Any) -> None:
    """As torch gives for a mask whose words are a part of a larger tensor."""
    model, _ = twins(nn.Sequential(nn.Linear(12, 12)), weights=weights)
    program, file = torch.export.export(model, (X,)), io.BytesIO()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
    assert not [each for each in seen if "complete tensor" in str(each.message)]
    torch.testing.assert_close(loaded(X), model(X))


class Signed(nn.Linear):
    is_cloned = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.clone() if self.is_cloned else self.weight
        return F.linear(x, Signs.apply(weight), self.bias)


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Multiplied(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Multiply.apply(x, self.weight)  # type: ignore[no-any-return,no-untyped-call]


@ignores_dynamo
def test_compiled_code_gives_an_autograd_function_clones_of_streamed_weights() -> None:
    """See docs/limits.md."""
    torch._dynamo.reset()
    silent = Multiplied(12, 12)
    samo.compress_(silent, samo.prune(silent, 0.5), weights="streamed")
    torch.compile(silent, backend="aot_eager")(X).sum().backward()
    assert silent.weight.grad is None
    model, dense = twins(nn.Sequential(Signed(12, 6)), weights="streamed")
    run = torch.compile(model, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError):
        run(X)
    model[0].is_cloned = True
    for net in (run, dense):
        net(X).square().sum().backward()
    assert torch.equal(model[0].weight.grad, dense[0].weight.grad)


@ignores_dynamo
def test_a_compiled_function_takes_the_weight_of_an_eager_model() -> None:
    """As the compiler does with parts of a model that it has recompiled too often."""
    torch._dynamo.reset()
    resident, model = pair(Tied)
    run = torch.compile(F.embedding, backend="aot_eager")
    found = pass_of(model, lambda m: run(TOKENS, m.embed.weight))
    assert_same(found, pass_of(resident, lambda m: m.embed(TOKENS)))


@ignores_dynamo
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:A model attribute .*_source` requires gradient",  # it is not used in the program
)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("index", [0, 1], ids=["resident", "streamed"])
def test_an_exported_program_computes_with_the_values_it_is_given(strict: bool, index: int) -> None:
    model = pair(mlp)[index]
    program = torch.export.export(model, (X,), strict=strict)
    run = program.module()
    assert torch.equal(run(X), model(X))
    twice = {name: 2 * value for name, value in run.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    run.load_state_dict(twice)
    assert torch.equal(run(X), model(X))


@pytest.mark.long
@ignores_dynamo
@pytest.mark.filterwarnings("ignore")  # of Inductor and its packages
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_an_aotinductor_package_computes_as_the_model(strict: bool, tmp_path: Path) -> None:
    model = pair(mlp)[1]
    with torch.no_grad():
        program = torch.export.export(model, (X,), strict=strict)
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(X), model(X))


def test_products_without_gradients_equal_dense_ones_bit_for_bit() -> None:
    """torch folds the dimensions of an input by whether the weight requires a gradient."""
    dense = nn.Linear(64, 64)
    model = nn.Sequential(copy.deepcopy(dense))
    masks = samo.prune(model, 0.5)
    samo.compress_(model, masks, weights="streamed")
    dense.load_state_dict(samo.dense_state_dict(model[0]))
    x = torch.randn(2, 3, 64).transpose(0, 1)
    with torch.no_grad():
        assert torch.equal(model(x), dense(x))
