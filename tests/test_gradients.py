"""Gradients: compressed as they appear, accumulated, and never dense for longer than one tensor."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samo
from samo.owners import owned_weights
from samo.weights import Weight
from tests.meters import DenseGradients, ignores_dynamo, small_gpt, tokens


def compressed_gpt(**changes: Any) -> nn.Module:
    model = small_gpt(**changes)
    return samo.compress_(model, samo.prune(model, sparsity=0.9))


def largest_bytes(model: nn.Module) -> int:
    return max(param.nbytes for param in model.parameters())


def peak_of(model: nn.Module, backward: Callable[[], None]) -> int:
    leaves = samo.parameters(model) if owned_weights(model) else ()
    with DenseGradients(model.parameters(), leaves) as meter:
        backward()
    return meter.peak_bytes


def train(model: nn.Module, steps: int = 1) -> Callable[[], None]:
    batch = tokens()

    def run() -> None:
        for _ in range(steps):
            model(batch, batch).backward()

    return run


def test_the_meter_sees_all_gradients_of_dense_training_at_once() -> None:
    model = small_gpt()
    matrices = sum(param.nbytes for param in model.parameters() if param.dim() > 1)
    assert peak_of(model, train(model)) >= matrices


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("steps", [1, 4])
def test_at_most_the_largest_dense_gradient_is_alive(
    is_tied: bool, is_checkpointed: bool, steps: int
) -> None:
    model = compressed_gpt(is_tied=is_tied, is_checkpointed=is_checkpointed)
    assert 0 < peak_of(model, train(model, steps)) <= largest_bytes(model)


def test_at_most_the_largest_dense_gradient_is_alive_under_reentrant_checkpointing() -> None:
    model = small_gpt(is_tied=True)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=True)
    samo.compress_(model, samo.prune(model, sparsity=0.9))
    assert 0 < peak_of(model, train(model, steps=4)) <= largest_bytes(model)


def test_a_tied_head_used_as_a_function_frees_its_gradient_at_once() -> None:
    class FunctionalHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(331, 48)
            self.layers = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))

        def forward(self, ids: Tensor) -> Tensor:
            return self.layers(self.embed(ids)) @ self.embed.weight.T

    model = FunctionalHead()
    samo.compress_(model, samo.prune(model, sparsity=0.9))
    ids = tokens()
    assert peak_of(model, lambda: model(ids).square().mean().backward()) <= 331 * 48 * 4


def dense_gradients(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    model(batch, batch).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@ignores_dynamo
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("style", ["plain", "checkpointed", "reentrant", "compiled"])
def test_compressed_gradients_are_the_dense_ones_at_the_kept_places(
    is_tied: bool, style: str
) -> None:
    model = small_gpt(is_tied=is_tied, is_checkpointed=style == "checkpointed")
    masks = samo.prune(model, sparsity=0.9)
    masks.apply_(model)
    batch = tokens()
    expected = dense_gradients(model, batch)
    model.zero_grad()
    if style == "reentrant":
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=True)
    samo.compress_(model, masks)
    if style == "compiled":
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    model(batch, batch).backward()
    for name, leaf in samo.named_parameters(model):
        dense = expected[name]
        kept = dense[masks[name].to_bool()] if name in masks else dense.view(-1)
        if is_tied and name == "embed.weight":  # two contributions, added in another order
            torch.testing.assert_close(leaf.grad, kept)
        else:
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, kept), name
    assert all(param.grad is None for param in model.parameters())


@ignores_dynamo
def test_a_compiled_block_holds_only_its_own_dense_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = compressed_gpt()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    alive: dict[str, weakref.ref[Tensor]] = {}
    together: set[frozenset[str]] = set()
    accumulate = Weight.accumulate

    def watch(self: Weight, grad: Tensor) -> None:
        if "blocks" in self.name:
            alive[self.name] = weakref.ref(grad)
        blocks = {name.split(".")[1] for name, ref in alive.items() if ref() is not None}
        together.add(frozenset(blocks))
        accumulate(self, grad)

    monkeypatch.setattr(Weight, "accumulate", watch)
    train(model)()
    assert together - {frozenset()} == {frozenset("0"), frozenset("1"), frozenset("2")}


@ignores_dynamo
def test_compiled_blocks_share_one_compilation() -> None:
    """Eight blocks compiled one by one would pass torch's limit and run uncompiled from there on."""
    torch._dynamo.reset()
    model = compressed_gpt(num_layers=3)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    train(model)()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_gradients_add_up_over_backward_passes() -> None:
    model = compressed_gpt()
    batches = [tokens() for _ in range(4)]
    total: dict[str, Tensor] = {}
    for batch in batches:
        model.zero_grad()
        model(batch, batch).backward()
        for name, leaf in samo.named_parameters(model):
            assert leaf.grad is not None
            total[name] = total.get(name, 0) + leaf.grad.clone()
    model.zero_grad()
    for batch in batches:
        model(batch, batch).backward()
    for name, leaf in samo.named_parameters(model):
        torch.testing.assert_close(leaf.grad, total[name])


def test_fp32_accumulation_loses_nothing_where_16_bits_do() -> None:
    grads = {}
    for grad_dtype in (torch.bfloat16, torch.float32):
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16, grad_dtype=grad_dtype)
        x = torch.ones(1, 4, dtype=torch.bfloat16)
        for _ in range(600):
            model(x).sum().backward()
        (leaf,) = samo.parameters(model)
        assert leaf.grad is not None
        assert leaf.grad.dtype == grad_dtype
        grads[grad_dtype] = leaf.grad
    assert (grads[torch.float32] == 600).all()
    assert (grads[torch.bfloat16] == 256).all()  # 256 + 1 rounds back to 256


def test_a_layer_used_twice_adds_both_gradients() -> None:
    layer = nn.Linear(6, 6, bias=False)
    masks = samo.prune(nn.Sequential(layer), 0.5)
    x = torch.randn(3, 6)
    masks.apply_(nn.Sequential(layer))
    layer(torch.tanh(layer(x))).sum().backward()
    assert layer.weight.grad is not None
    expected = layer.weight.grad[masks["0.weight"].to_bool()]
    model = samo.compress_(nn.Sequential(layer), masks)
    model(torch.tanh(model(x))).sum().backward()
    (leaf,) = samo.parameters(model)
    torch.testing.assert_close(leaf.grad, expected)


def test_frozen_and_unused_parameters_get_no_gradient_and_stay_as_they_are() -> None:
    model = nn.ModuleDict(
        {"used": nn.Linear(6, 6), "frozen": nn.Linear(6, 6), "unused": nn.Linear(6, 6)}
    )
    model["frozen"].requires_grad_(False)
    samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    opt = samo.AdamW(samo.parameters(model), lr=0.1)
    x = torch.randn(2, 6, dtype=torch.bfloat16)
    model["frozen"](model["used"](x)).float().sum().backward()
    opt.step()
    for name, leaf in samo.named_parameters(model):
        assert (leaf.grad is not None) == name.startswith("used")
        assert leaf.requires_grad == (not name.startswith("frozen"))
        unchanged = torch.equal(before[name], model.state_dict()[name])
        assert unchanged == (not name.startswith("used"))


def test_a_parameter_unfrozen_later_is_trained() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].requires_grad_(False)
    samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
    opt = samo.AdamW(samo.parameters(model), lr=0.1)
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    model(torch.randn(2, 6, dtype=torch.bfloat16)).float().sum().backward()
    opt.step()
    assert not torch.equal(before, model[0].weight)


def test_a_sparse_embedding_gradient_is_taken() -> None:
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 4))
    samo.compress_(model, samo.prune(model, 0.5))
    model(torch.tensor([[1, 1, 7]])).sum().backward()
    leaf = dict(samo.named_parameters(model))["0.weight"]
    assert leaf.grad is not None
    assert leaf.grad.view(50, 4).abs().sum(1).nonzero().flatten().tolist() == [1, 7]


def test_a_forward_pass_that_raises_leaves_the_parameters_in_place() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    samo.compress_(model, samo.prune(model, 0.5))
    weight = model[0].weight
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.randn(2, 5))
    assert model[0].weight is weight
    assert isinstance(model[0].weight, nn.Parameter)


def test_backward_over_weights_that_a_step_has_changed_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    samo.compress_(model, samo.prune(model, 0.5))
    opt = samo.AdamW(samo.parameters(model), lr=0.1)
    loss = model(torch.randn(2, 6)).sum()
    loss.backward(retain_graph=True)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Pair(nn.Module):
    """Two unpruned parameters whose gradients are one tensor and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(16))

    def forward(self) -> Tensor:
        return (self.matrix.view(-1) + self.vector).square().sum()


def compressed_pair() -> tuple[Pair, dict[str, nn.Parameter]]:
    model = Pair()
    samo.compress_(model, samo.Masks({}))
    return model, dict(samo.named_parameters(model))


def test_the_gradient_of_an_unpruned_weight_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    accumulate = Weight.accumulate

    def watch(self: Weight, grad: Tensor) -> None:
        copied.append(self.name)
        accumulate(self, grad)

    monkeypatch.setattr(Weight, "accumulate", watch)
    model = compressed_gpt()
    train(model)()
    masked = {name for name, weight in owned_weights(model).items() if weight.mask is not None}
    assert set(copied) == masked
    train(model)()  # a second contribution is added
    assert set(copied) == {name for name, _ in model.named_parameters()}


def test_a_kept_gradient_shares_its_memory_with_nobody() -> None:
    model, leaves = compressed_pair()
    for _ in range(3):
        model().backward(retain_graph=True)
    storages = {leaf.grad.untyped_storage().data_ptr() for leaf in leaves.values()}
    assert len(storages) == 2
    assert all(torch.equal(leaf.grad, torch.full((16,), 12.0)) for leaf in leaves.values())


@pytest.mark.parametrize(
    "look", [lambda g: g, lambda g: g.detach(), lambda g: g[1:]], ids=["itself", "detached", "part"]
)
def test_what_a_hook_saw_stays_as_it_was(look: Callable[[Tensor], Tensor]) -> None:
    model, leaves = compressed_pair()
    seen: list[Tensor] = []
    model.vector.register_hook(lambda grad: seen.append(look(grad)))
    for _ in range(2):
        model().backward()
    assert all((grad == 4).all() for grad in seen)
    assert (leaves["vector"].grad == 8).all()


def test_a_gradient_with_a_graph_is_copied() -> None:
    model, leaves = compressed_pair()
    with warnings.catch_warnings(action="ignore"):  # torch warns of the circle it makes
        model().backward(create_graph=True)
    assert not leaves["vector"].grad.requires_grad
    assert (leaves["vector"].grad == 4).all()


def test_a_hook_that_forward_hangs_on_its_weight_runs_until_it_is_removed() -> None:
    class Hanging(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.weight.requires_grad:
                handles.append(self.weight.register_post_accumulate_grad_hook(seen.append))
            return super().forward(x)

    seen: list[Tensor] = []
    handles: list[Any] = []
    model = nn.Sequential(Hanging(8, 8))
    samo.compress_(model, samo.prune(model, 0.5))
    first, second = model(torch.ones(1, 8)).sum(), model(torch.ones(1, 8)).sum()
    handles[1].remove()
    first.backward()
    second.backward()
    assert len(seen) == 1
    assert seen[0].shape == (8, 8)
    (weight, _) = samo.parameters(model)
    assert (weight.grad == 2).all()
