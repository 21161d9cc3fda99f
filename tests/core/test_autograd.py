"""The dense weight in the graph: hooks, derivatives, transforms, checkpoints, autocast, memory."""

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samo
from samo.core.compress import masks as masks_of
from samo.core.modules import named_weights
from tests.core.twins import X, assert_equal, batches, compressed, loss_of, mlp, step, twins, worst
from tests.meters import (
    DenseGradients,
    LiveBytes,
    ignores_dynamo,
    saved_for_backward,
    small_gpt,
    tokens,
)

# Hooks ------------------------------------------------------------------------------------------


def test_a_hook_on_the_weight_sees_the_whole_dense_gradient_once() -> None:
    """A weight that is used three times: its hook is called once, with the sum."""
    start = nn.Sequential(nn.Linear(8, 8, bias=False))
    model, dense = twins(start, samo.prune(start, 0.5))
    x = torch.randn(4, 8)
    seen: dict[nn.Module, list[Tensor]] = {model: [], dense: []}
    for net in (model, dense):
        net[0].weight.register_hook(lambda grad, net=net: seen[net].append(grad.clone()))
        net[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        net(net(net(x))).square().sum().backward()
    assert len(seen[model]) == len(seen[dense]) == 1
    assert seen[model][0].shape == (8, 8)
    keep = masks_of(model)["0.weight"].to_bool()
    torch.testing.assert_close(seen[model][0][keep], seen[dense][0][keep])
    torch.testing.assert_close(model[0].weight.grad, dense[0].weight.grad)
    assert model.get_parameter("0.weight").grad.abs().max() <= 0.01


@ignores_dynamo
@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.init.zeros_(model[0].weight),
        lambda model: model.to(torch.float64).to(torch.float32),
        lambda model: samo.remap_(model, samo.prune(model, 0.7)),
        lambda model: model.compile(backend="aot_eager"),
    ],
    ids=["written", "cast", "remapped", "compiled"],
)
def test_a_hook_stays_on_the_weight_until_it_is_removed(change: Any) -> None:
    model = compressed()
    seen: list[torch.Size] = []
    model(X).sum().backward()
    handle = model[0].weight.register_hook(lambda grad: seen.append(grad.shape))
    change(model)
    for _ in range(2):
        model(X).sum().backward()
        assert seen == [(32, 12)]
        handle.remove()


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_an_optimizer_may_step_in_the_hook_of_each_parameter(weights: Any) -> None:
    """Gradients are freed as they appear, as in torch's tutorial."""
    model, dense = twins(mlp(), kernels="reference", weights=weights)
    theirs = torch.optim.SGD(dense.parameters(), lr=0.1)
    opts = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def apply(param: Tensor) -> None:
        opts[param].step()
        opts[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(apply)
    for x in batches(5):
        loss_of(model, x).backward()
        step(dense, theirs, x)
    assert_equal(model, dense)


@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_weight_that_was_read_without_gradients_gets_one(mode: Any, weights: Any) -> None:
    nets = twins(mlp(), weights=weights)
    for net in nets:
        with mode():
            weight = net[0].weight
        F.linear(X, weight).square().sum().backward()
    assert torch.equal(nets[0][0].weight.grad, nets[1][0].weight.grad)


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_no_dense_gradient_is_computed_that_nobody_asked_for(weights: Any) -> None:
    found: list[Tensor] = []
    model, x = compressed(weights=weights), X.clone().requires_grad_()
    for _, weight in named_weights(model):
        weight.watch(found.append)
    torch.autograd.grad(model(x).sum(), x)
    model(X).sum().backward(inputs=[model[2].bias])
    assert not found
    model(X).sum().backward()
    assert len(found) == 2


# torch.func -------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_transforms_of_torch_func_give_the_gradients_of_backward(weights: Any) -> None:
    model = compressed(torch.float64, weights=weights)
    x = X.double()
    values = {name: param.detach() for name, param in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (x,)).square().sum()

    grads = torch.func.grad(loss)(values, x)
    model(x).square().sum().backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(grads[name], param.grad)
    per_row = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, x[:, None])
    torch.testing.assert_close(per_row["0.weight"].sum(0), grads["0.weight"])
    jacobian = torch.func.jacrev(loss)(values, x)
    torch.testing.assert_close(jacobian["0.weight"], grads["0.weight"])
    with warnings.catch_warnings(action="ignore"):  # torch scripts its own formulas
        forward = torch.func.jacfwd(loss)(values, x)
    torch.testing.assert_close(forward["0.weight"], grads["0.weight"])
    torch.testing.assert_close(torch.func.vmap(model)(x), model(x))
    with torch.autograd.forward_ad.dual_level(), warnings.catch_warnings(action="ignore"):
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent.clone()
    expected = torch.func.jvp(samo.decompress_(model, dtype=x.dtype), (x,), (torch.ones_like(x),))[
        1
    ]
    torch.testing.assert_close(tangent, expected)


# Inference and threads --------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_threads_that_read_a_stale_weight_all_get_the_new_one(weights: Any) -> None:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    samo.compress_(model, samo.prune(model, 0.9), weights=weights)
    x = torch.randn(2, 128)
    for _ in range(5):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.01)
        expected = samo.decompress_(copy.deepcopy(model))(x).detach()
        ready = threading.Barrier(8)

        def run(_: int, ready: threading.Barrier = ready) -> Tensor:
            ready.wait()
            with torch.no_grad():
                return model(x)

        with ThreadPoolExecutor(8) as pool:
            assert all(torch.equal(result, expected) for result in pool.map(run, range(8)))


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_threads_train_on_their_own_batches_together(weights: Any) -> None:
    """DataParallel on a CPU: backward passes in threads add up in one gradient."""
    model = compressed(torch.float64, weights=weights)
    parts = [x.double() for x in batches(4)]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda x: loss_of(model, x).backward(), parts))
    found = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    for x in parts:
        loss_of(model, x).backward()
    for grad, param in zip(found, model.parameters()):
        torch.testing.assert_close(grad, param.grad)


# Memory -----------------------------------------------------------------------------------------


def test_micro_batches_under_autocast_leave_no_copies_behind() -> None:
    dense = nn.Sequential(nn.Linear(256, 256, bias=False))
    model = copy.deepcopy(dense)
    samo.compress_(model, samo.prune(model, 0.9))
    peaks, x = [], torch.randn(2, 256)
    for net in (model, dense):
        net(x).sum().backward()  # makes dense weights and gradients
        with LiveBytes() as meter, torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(20):
                net(x).float().square().mean().backward()
        peaks.append(meter.peak_bytes)
    assert peaks[0] - peaks[1] <= 2 * 256 * 256 * 2


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("style", ["plain", "checkpointed", "reentrant"])
def test_dense_gradients_die_as_they_are_compressed(is_tied: bool, style: str) -> None:
    """At most the largest is alive, in every pass: autograd does not put off what compresses them.

    That of a tied weight is alive from its last use to its first, as in dense training.
    """
    model = small_gpt(is_tied=is_tied, is_checkpointed=style == "checkpointed")
    if style == "reentrant":
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, _, forward=forward: checkpoint(forward, x, use_reentrant=True)
    samo.compress_(model, samo.prune(model, sparsity=0.9, skip=()))
    batch = tokens()
    sizes = sorted(weight.shape.numel() * 4 for _, weight in named_weights(model))
    for _ in range(3):
        model(batch, batch).backward()  # the first pass makes the dense weights
        model.zero_grad()
        known = [weight.dense for _, weight in named_weights(model)]
        with DenseGradients(known, model.parameters()) as meter:
            model(batch, batch).backward()
        # Both shares of the tied weight while they are added up, and their sum.
        assert 0 < meter.peak_bytes <= (3 * sizes[-1] if is_tied else sizes[-1])


# Checkpoints and compiled code ------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_another_stream_gets_nodes_of_its_own(weights: Any) -> None:
    """A node of the default stream, held since an earlier pass, would break a CUDA graph."""
    model, stream = compressed(weights=weights), 0
    dict(named_weights(model))["0.weight"]._stream_now = lambda: stream

    def accumulator() -> Any:
        dense = model[0].weight + 0
        return dense.grad_fn.next_functions[0][0].next_functions[0][0]

    accumulator().metadata["is_old"] = True
    assert accumulator().metadata
    stream = 1
    assert not accumulator().metadata


@ignores_dynamo
@pytest.mark.parametrize(("scope", "weights"), [("tensor", "resident"), ("global", "streamed")])
def test_equal_blocks_with_unequal_masks_are_compiled_once(scope: Any, weights: Any) -> None:
    """And once more when masks change, which may give blocks with equal masks unequal ones."""
    torch._dynamo.reset()
    model = small_gpt(num_layers=3)
    samo.compress_(model, samo.prune(model, sparsity=0.5, scope=scope), weights=weights)
    batch = tokens()
    model(batch, batch).backward()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    stats = torch._dynamo.utils.counters["stats"]
    stats.clear()
    model(batch, batch).backward()
    assert stats["unique_graphs"] == 1
    for sparsity in (0.6, 0.7):
        samo.remap_(model, samo.prune(model, sparsity, scope="global"))
        model(batch, batch).backward()
    assert stats["unique_graphs"] <= 2


@ignores_dynamo
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_a_compiled_block_recomputes_in_its_own_graph(weights: Any) -> None:
    """It holds its input and its weights alone, and backward computes all else again."""
    torch._dynamo.reset()
    model, plain = (small_gpt(is_checkpointed=True) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    masks = samo.prune(model, sparsity=0.5)
    for net in (model, plain):
        samo.compress_(net, masks, weights=weights)
    for block in model.blocks:
        block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    batch = tokens()
    for net in (plain, model):
        net.zero_grad()
        x = net.embed(batch).detach().requires_grad_()
        with saved_for_backward() as held:
            net.blocks[0](x, True).square().sum().backward()
    own = [weight.traced for _, weight in named_weights(model.blocks[0])]
    known = [x, *model.parameters(), *(part for each in own for part in each[:3])]
    addresses = {part.data_ptr() for part in known if part is not None}
    others = [tensor for tensor in held if tensor.data_ptr() not in addresses]
    # Of square(); and the state of random numbers, since attention could draw some.
    assert [tensor.shape for tensor in others if tensor.dtype != torch.uint8] == [x.shape]
    for one, other in zip(model.parameters(), plain.parameters()):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@ignores_dynamo
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_a_weight_of_a_compiled_block_is_one_node(weights: Any) -> None:
    torch._dynamo.reset()
    model, found = small_gpt(is_checkpointed=True), list[str]()
    samo.compress_(model, samo.prune(model, sparsity=0.5), weights=weights)

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        nodes = [node for part in parts for node in part.graph.nodes]
        found.extend(getattr(node.target, "__name__", "") for node in nodes)
        return graph

    block = model.blocks[0]
    block.compile(backend=count, fullgraph=True)
    block(model.embed(tokens()).detach(), True).sum().backward()
    node = {"resident": "_track", "streamed": "product"}[weights]
    assert found.count(node) == sum(1 for _ in named_weights(block))
    assert "autograd_function_apply" not in found


@ignores_dynamo
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_compiled_code_may_transform_a_model_by_torch_func(weights: Any) -> None:
    torch._dynamo.reset()
    model = samo.compress_(mlp(), samo.prune(mlp(), sparsity=0.5), weights=weights)

    params = {name: param.detach() for name, param in model.named_parameters()}
    x = torch.randn(4, model[0].in_features)

    def loss(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).square().sum()

    slopes = torch.func.grad(loss, argnums=(0, 1))
    ours = torch.compile(slopes, backend="aot_eager", fullgraph=True)(params, x)
    model(x.requires_grad_()).square().sum().backward()
    assert torch.equal(ours[1], x.grad)
    for name, param in model.named_parameters():
        assert torch.equal(ours[0][name], param.grad)


@ignores_dynamo
def test_a_compiled_model_and_optimizer_train_as_masked_dense() -> None:
    """The steps of both are compiled: torch's compiled and eager AdamW are 4e-7 apart."""
    torch._dynamo.reset()
    model, dense = twins(mlp().double())
    nets = (torch.compile(model, backend="aot_eager", fullgraph=True), dense)
    opts = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, dense)]
    steps = [torch.compile(opt.step, backend="aot_eager") for opt in opts]
    for x in batches(10, dtype=torch.float64):
        for net, opt, run in zip(nets, opts, steps):
            opt.zero_grad()
            loss_of(net, x).backward()
            run()
    assert worst(model, dense) < 1e-9


@ignores_dynamo
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_what_cannot_be_compiled_while_gradients_are_held_runs_as_eager_code(weights: Any) -> None:
    """Dynamo traces no parameter with a gradient of another dtype; ``fullgraph=True`` says so."""
    torch._dynamo.reset()
    model = compressed(weights=weights, dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
    model.compile(backend="aot_eager")
    loss_of(model, X.bfloat16()).backward()
    with torch.no_grad():  # another graph: validation before zero_grad
        assert torch.equal(model(X.bfloat16()), model._call_impl(X.bfloat16()))
    longer = torch.cat([X, X]).bfloat16()
    before = [param.grad.clone() for param in model.parameters()]
    loss_of(model, longer).backward()
    added = [param.grad - old for param, old in zip(model.parameters(), before)]
    assert all(change.count_nonzero() for change in added)


@ignores_dynamo
def test_a_step_of_samo_adamw_is_left_out_of_compiled_code() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = []
    for wrap in (lambda step: step, lambda step: torch.compile(step, backend="aot_eager")):
        torch.manual_seed(0)
        model = compressed()
        opt = samo.AdamW(model.parameters(), lr=0.01)
        run = wrap(opt.step)
        for x in batches(3):
            opt.zero_grad()
            loss_of(model, x).backward()
            run()
        found.append([param.detach() for param in model.parameters()])
    assert all(map(torch.equal, *found))
    assert not torch._dynamo.utils.counters["stats"].get("unique_graphs")


@ignores_dynamo
def test_a_hook_on_a_vector_runs_in_compiled_code_too() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(12, 6), nn.LayerNorm(6))
    samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
    x, seen = X.bfloat16(), list[Tensor]()
    run = torch.compile(model, backend="aot_eager")
    loss_of(run, x).backward()
    model[1].weight.register_hook(seen.append)
    loss_of(run, x).backward()
    assert [grad.shape for grad in seen] == [(6,)]
    with torch.no_grad():  # gradients are not wanted, and nothing breaks the graph
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        for is_strict in (True, False):
            program = torch.export.export(model, (x,), strict=is_strict).module()
            torch.testing.assert_close(program(x), model(x))


@ignores_dynamo
def test_hooks_that_are_removed_cost_compiled_code_nothing() -> None:
    torch._dynamo.reset()
    model = compressed(dtype=torch.bfloat16)
    seen: list[Tensor] = []
    handles = [param.register_hook(seen.append) for param in (model[0].weight, model[0].bias)]
    for handle in handles:
        handle.remove()
    x = X.bfloat16()
    loss_of(torch.compile(model, backend="aot_eager", fullgraph=True), x).backward()
    assert not seen
    model[0].weight.register_hook(seen.append)
    loss_of(torch.compile(model, backend="aot_eager"), x).backward()
    assert [grad.shape for grad in seen] == [model[0].weight.shape]


class Through(nn.Linear):
    """Gives its weight to a function of the caller."""

    def __init__(self, function: Any) -> None:
        super().__init__(12, 12, bias=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


@ignores_dynamo
@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("is_inside", [True, False], ids=["compiled function", "eager function"])
def test_weights_pass_between_eager_and_compiled_code(weights: Any, is_inside: bool) -> None:
    torch._dynamo.reset()

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    wrap = partial(torch.compile, backend="aot_eager") if is_inside else torch.compiler.disable
    model, dense = twins(nn.Sequential(Through(function)), weights=weights)
    model[0].function = wrap(function)
    run = model if is_inside else torch.compile(model, backend="aot_eager")
    for rows in (3, 5):  # the second one with gradients of the first
        for net in (run, dense):
            net(X[:rows]).square().sum().backward()
        with torch.no_grad():
            assert torch.equal(run(X[:rows]), dense(X[:rows]))
        assert torch.equal(model[0].weight.grad, dense[0].weight.grad)


class Viewed(nn.Linear):
    is_broken = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t()
        if self.is_broken:
            torch._dynamo.graph_break()
        return x @ weight


@ignores_dynamo
@pytest.mark.parametrize("is_broken", [False, True], ids=["one graph", "two graphs"])
def test_a_view_of_a_resident_weight_gets_its_gradient_within_one_graph(is_broken: bool) -> None:
    """See docs/limits.md."""
    torch._dynamo.reset()
    start = Viewed(12, 12)
    start.is_broken = is_broken
    model, dense = twins(nn.Sequential(start))
    for net in (torch.compile(model, backend="aot_eager"), dense):
        net(X).square().sum().backward()
    if is_broken:
        assert model[0].weight.grad is None
    else:
        assert torch.equal(model[0].weight.grad, dense[0].weight.grad)


@ignores_dynamo
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_compiled_code_sees_what_lbfgs_has_moved_inside_of_its_step(weights: Any) -> None:
    torch._dynamo.reset()
    model, dense = twins(mlp().double(), weights=weights)
    for net, run in ((model, torch.compile(model, backend="aot_eager")), (dense, dense)):
        opt = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=5)

        def closure(run: Any = run, opt: Any = opt) -> Tensor:
            opt.zero_grad()
            loss = loss_of(run, X.double())
            loss.backward()
            return loss

        opt.step(closure)
        opt.step(closure=closure)
    assert worst(model, dense) < 1e-9
