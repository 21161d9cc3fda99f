"""samo.AdamW as a torch optimizer, and torch's optimizers on the same leaves."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samo

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def compressed(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))
    samo.compress_(model, samo.prune(model, 0.5), dtype=dtype)
    if dtype == torch.float16:
        samo.LossScaler(model, init_scale=1.0)
    return model


def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor | None = None) -> None:
    x = torch.randn(5, 12) if x is None else x
    opt.zero_grad()
    model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
    opt.step()


def test_groups_have_their_own_settings() -> None:
    model = compressed()
    groups: list[dict[str, Any]] = [
        {"params": samo.parameters(model[0]), "lr": 0.0, "weight_decay": 0.0},
        {"params": samo.parameters(model[2]), "lr": 0.1},
    ]
    opt = samo.AdamW(groups, lr=1e-3)
    before = copy.deepcopy(dict(model.state_dict()))
    step(model, opt)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("0")


def test_param_groups_leave_norms_and_biases_undecayed() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    samo.compress_(model, samo.prune(model, 0.5))
    names = {id(leaf): name for name, leaf in samo.named_parameters(model)}
    decayed, exempt = samo.param_groups(model, weight_decay=0.1, no_decay=["0.*"])
    assert [names[id(leaf)] for leaf in decayed["params"]] == ["1.weight"]
    assert [names[id(leaf)] for leaf in exempt["params"]] == [
        "0.weight",
        "1.bias",
        "2.weight",
        "2.bias",
    ]
    with pytest.raises(ValueError, match="no_decay pattern 'embed' matches no parameter"):
        samo.param_groups(model, weight_decay=0.1, no_decay=["embed"])


def test_a_scheduler_drives_the_learning_rate() -> None:
    model = compressed()
    opt = samo.AdamW(samo.parameters(model), lr=0.1, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: float(epoch == 0))
    step(model, opt)
    scheduler.step()
    before = copy.deepcopy(dict(model.state_dict()))
    step(model, opt)
    assert opt.param_groups[0]["lr"] == 0.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_learning_rate_may_be_a_tensor() -> None:
    models = [compressed(), compressed()]
    for model, lr in zip(models, (0.125, torch.tensor(0.125))):
        step(model, samo.AdamW(samo.parameters(model), lr=lr), torch.ones(1, 12))
    assert torch.equal(models[0][0].weight, models[1][0].weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", ["model", "opt"])
def test_a_saved_and_loaded_run_goes_on_exactly(first: str, dtype: torch.dtype) -> None:
    model = compressed(dtype)
    opt = samo.AdamW(samo.parameters(model), lr=0.05)
    for _ in range(3):
        step(model, opt)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    twin = compressed(dtype)
    twin_opt = samo.AdamW(samo.parameters(twin), lr=1.0)
    parts: dict[str, Any] = {"model": twin, "opt": twin_opt}
    for part in sorted(parts, reverse=first == "opt"):
        parts[part].load_state_dict(saved[part])
    assert twin_opt.param_groups[0]["lr"] == 0.05
    for _ in range(5):
        x = torch.randn(5, 12)
        step(model, opt, x)
        step(twin, twin_opt, x)
    for name, value in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value)
    for (_, a), (_, b) in zip(samo.named_parameters(model), samo.named_parameters(twin)):
        for key, value in opt.state[a].items():
            assert torch.equal(twin_opt.state[b][key], value)


def test_state_of_other_masks_is_refused() -> None:
    model, other = compressed(seed=0), compressed(seed=1)
    opt = samo.AdamW(samo.parameters(model))
    step(model, opt)
    with pytest.raises(samo.MaskError, match=r"state of '0.weight' belongs to another mask"):
        samo.AdamW(samo.parameters(other)).load_state_dict(opt.state_dict())


def test_state_of_another_dtype_is_refused() -> None:
    model, other = compressed(), compressed(torch.bfloat16)
    opt = samo.AdamW(samo.parameters(model))
    step(model, opt)
    with pytest.raises(samo.MaskError, match=r"state of '0.weight' holds .*torch.bfloat16 need"):
        samo.AdamW(samo.parameters(other)).load_state_dict(opt.state_dict())


def test_state_with_other_groups_is_refused() -> None:
    model = compressed()
    opt = samo.AdamW(samo.param_groups(model, 0.1))
    with pytest.raises(ValueError, match="different number of parameter groups"):
        opt.load_state_dict(samo.AdamW(samo.parameters(model)).state_dict())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
def test_a_gradient_that_is_not_finite_skips_the_whole_step(
    bad: float, dtype: torch.dtype, name: str
) -> None:
    model = compressed(dtype)
    opt = samo.AdamW(samo.parameters(model), lr=0.1)
    step(model, opt)
    before = copy.deepcopy((dict(model.state_dict()), opt.state_dict()["state"]))
    opt.zero_grad()
    model(torch.randn(5, 12).to(dtype)).float().sum().backward()
    grad = dict(samo.named_parameters(model))[name].grad
    assert grad is not None
    grad[3] = bad
    opt.step()
    assert opt.skipped_steps == 1
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[0][key])
    for index, state in opt.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, before[1][index][key]), key
    step(model, opt)
    assert opt.skipped_steps == 1
    assert opt.state_dict()["skipped_steps"] == 1


def test_huge_but_finite_gradients_do_not_count_as_overflow() -> None:
    model = compressed()
    opt = samo.AdamW(samo.parameters(model), lr=0.1)
    model(torch.randn(5, 12)).sum().backward()
    for leaf in samo.parameters(model):
        leaf.grad = torch.full_like(leaf, 3e38)  # the sum, or the square, would overflow
    opt.step()
    assert opt.skipped_steps == 0


def test_a_torch_optimizer_skips_a_step_that_is_not_finite() -> None:
    model = compressed()
    opt = torch.optim.SGD(samo.parameters(model), lr=0.1, momentum=0.9)
    step(model, opt)
    before = copy.deepcopy(dict(model.state_dict()))
    momentum = [state["momentum_buffer"].clone() for state in opt.state.values()]
    model(torch.full((1, 12), float("nan"))).sum().backward()
    opt.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    after = [state["momentum_buffer"] for state in opt.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(momentum, after))
    step(model, opt)
    assert not torch.equal(model[0].weight, before["0.weight"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        lambda params: torch.optim.Adam(params, lr=0.01),
        lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
        lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
        lambda params: torch.optim.RMSprop(params, lr=0.01),
        lambda params: torch.optim.Adagrad(params, lr=0.1),
        lambda params: torch.optim.Adafactor(params, lr=0.1),
        lambda params: samo.AdamW(params, lr=0.01),
    ],
    ids=["SGD", "Adam", "fused", "foreach", "RMSprop", "Adagrad", "Adafactor", "samo"],
)
def test_any_optimizer_learns_and_keeps_the_mask(make: Any, dtype: torch.dtype) -> None:
    model = compressed(dtype)
    opt = make(samo.parameters(model))
    x = torch.randn(20, 12)
    losses = []
    for _ in range(50):
        step(model, opt, x)
        losses.append(float(model(x.to(dtype)).float().square().mean().detach()))
        assert int((model[0].weight == 0).sum()) == 96
    assert losses[-1] < 0.5 * losses[0]
    assert all(leaf.isnan().all() for leaf in samo.parameters(model))


def test_closures_see_the_weights_they_have_stepped_to() -> None:
    model = compressed()
    opt = torch.optim.LBFGS(samo.parameters(model), lr=0.5, max_iter=10)
    x = torch.randn(20, 12)
    losses: list[float] = []

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    opt.step(closure)
    assert len(losses) > 3
    assert losses[-1] < 0.2 * losses[0]
    assert int((model[0].weight == 0).sum()) == 96


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_torch_optimizer_takes_a_closure_with_any_dtype(dtype: torch.dtype) -> None:
    model = compressed(dtype)
    opt = torch.optim.SGD(samo.parameters(model), lr=0.1)
    x = torch.randn(20, 12).to(dtype)
    losses = []
    for _ in range(10):

        def closure() -> Tensor:
            opt.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            return loss

        losses.append(float(opt.step(closure).detach()))
    assert losses[-1] < losses[0]


def test_tensors_that_are_no_leaves_are_refused() -> None:
    model = compressed()
    with pytest.raises(
        samo.CompressionError, match=r"got torch.Size\(\[16, 12\]\), which is none of them"
    ):
        samo.AdamW(model.parameters())
    with pytest.raises(
        samo.CompressionError, match=r"got torch.Size\(\[3\]\), which is none of them"
    ):
        samo.AdamW([nn.Parameter(torch.zeros(3))])
    opt = samo.AdamW(samo.parameters(model))
    with pytest.raises(samo.CompressionError, match="which is none of them"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(opt.param_groups) == 1


def test_an_optimizer_without_its_model_says_so() -> None:
    model = compressed()
    opt = samo.AdamW(samo.parameters(model))
    del model
    with pytest.raises(samo.CompressionError, match="model of this optimizer no longer exists"):
        opt.state_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be 0 or more, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"eps": -1e-8}, "eps must be 0 or more"),
        ({"weight_decay": float("nan")}, "weight_decay must be 0 or more, got nan"),
    ],
    ids=["lr", "betas", "eps", "weight_decay"],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samo.AdamW(samo.parameters(compressed()), **settings)


def test_moments_of_another_precision_are_refused() -> None:
    """They would be read as what they are not: the loops get addresses."""
    model = compressed()
    opt = samo.AdamW(samo.parameters(model))
    step(model, opt)
    state = opt.state_dict()
    state["state"][0] = {key: value.bfloat16() for key, value in state["state"][0].items()}
    with pytest.raises(
        samo.MaskError, match=r"state of '0.weight' holds .*bfloat16.* need .*float32"
    ):
        opt.load_state_dict(state)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Adam(params, lr=0.01),
        lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
        lambda params: torch.optim.Adagrad(params, lr=0.1),
    ],
    ids=["SGD", "Adam", "fused", "Adagrad"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_torch_optimizer_keeps_fp32_state_and_resumes(make: Any, dtype: torch.dtype) -> None:
    model = compressed(dtype)
    opt = make(samo.parameters(model))
    step(model, opt)
    twin = copy.deepcopy(model)
    twin_opt = make(samo.parameters(twin))
    twin_opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    for _ in range(3):
        x = torch.randn(5, 12)
        step(model, opt, x)
        step(twin, twin_opt, x)
    for leaf, state in twin_opt.state.items():
        vectors = [value for value in state.values() if value.dim()]
        assert all(value.dtype == torch.float32 and value.shape == leaf.shape for value in vectors)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[None], x[None], x[None])[0][0]


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(12, 12) * 0.3) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weights[0]) @ self.weights[1]


@pytest.mark.parametrize("build", [Attention, Listed, compressed], ids=["mha", "list", "compiled"])
def test_closures_see_their_weights_where_no_module_is_called(build: Any) -> None:
    model = build()
    dense = copy.deepcopy(model)
    if build is compressed:
        run = torch.compile(model, backend="aot_eager")
        parameters = [samo.parameters(model), samo.parameters(dense)]
    else:
        run = samo.compress_(model, samo.Masks({}))
        parameters = [samo.parameters(model), dense.parameters()]
    x, target = torch.randn(20, 12), torch.randn(20, 12)
    losses = []
    for net, leaves in zip((run, dense), parameters):
        opt = torch.optim.LBFGS(leaves, lr=0.1, max_iter=8)

        def closure(net: Any = net, opt: Any = opt) -> Tensor:
            opt.zero_grad()
            loss = (net(x) - target).square().mean()
            loss.backward()
            return loss

        before = float(opt.step(closure).detach())
        losses.append((before, float((net(x) - target).square().mean().detach())))
    assert losses[0][1] < losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_step_that_raises_leaves_the_model_as_it_was() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for leaf in self.param_groups[0]["params"]:
                leaf.data.zero_()
            raise MemoryError

    model = compressed(torch.bfloat16)
    before = copy.deepcopy(dict(model.state_dict()))
    opt = Failing(samo.parameters(model), lr=0.1)
    with pytest.raises(MemoryError):
        step(model, opt)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    twin = copy.deepcopy(model)
    x = torch.randn(5, 12)
    step(model, samo.AdamW(samo.parameters(model), lr=0.1), x)
    step(twin, samo.AdamW(samo.parameters(twin), lr=0.1), x)
    after = copy.deepcopy(dict(model.state_dict()))
    assert all(torch.equal(value, after[key]) for key, value in twin.state_dict().items())
    step(model, torch.optim.SGD(samo.parameters(model), lr=0.0))
    assert all(torch.equal(value, after[key]) for key, value in model.state_dict().items())


def test_a_step_inside_of_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    opt = samo.AdamW(samo.parameters(samo.compress_(model, samo.prune(model, 0.5))))
    model(torch.ones(1, 8)).sum().backward()
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    with pytest.raises(samo.CompressionError, match="after each replay"):
        opt.step()


@pytest.mark.parametrize("state", ["exact", "lean"])
def test_pruned_weights_learn_faster_by_the_power_of_their_density(state: Any) -> None:
    """With gradients of ones the first step of Adam is the rate itself, if nothing decays."""
    model = nn.Sequential(nn.Linear(16, 16))
    samo.compress_(model, samo.prune(model, 0.75))
    opt = samo.AdamW(
        samo.parameters(model), lr=0.01, weight_decay=0.0, state=state, density_power=-0.5
    )
    before = {name: leaf.clone() for name, leaf in model.state_dict().items()}
    model[0].weight.sum().add(model[0].bias.sum()).backward()
    opt.step()
    after = model.state_dict()
    kept = before["0.weight"] != 0
    change = (before["0.weight"] - after["0.weight"])[kept]
    torch.testing.assert_close(change, torch.full_like(change, 0.02), rtol=1e-2, atol=0)
    change = before["0.bias"] - after["0.bias"]
    torch.testing.assert_close(change, torch.full_like(change, 0.01), rtol=1e-2, atol=0)
    assert not after["0.weight"][~kept].any()


def test_the_rate_follows_a_mask_that_changes() -> None:
    """Under gradients of ones every step of Adam is the rate itself, if nothing decays."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    samo.compress_(model, samo.prune(model, 0.5))
    opt = samo.AdamW(samo.parameters(model), lr=0.01, weight_decay=0.0, density_power=-1)
    for sparsity in (0.5, 0.75):
        samo.remap_(model, samo.prune(model, sparsity), opt)
        before = model[0].weight.detach().clone()
        model[0].weight.sum().backward()
        opt.step()
        opt.zero_grad()
        change = (before - model[0].weight.detach())[before != 0]
        rate = 0.01 / (1 - sparsity)
        torch.testing.assert_close(change, torch.full_like(change, rate), rtol=1e-4, atol=1e-6)


def test_a_density_power_has_bounds_and_old_states_have_none() -> None:
    model = compressed()
    for wrong in (float("nan"), -4, "much"):
        with pytest.raises(
            ValueError,
            match=f"density_power must be a number from -3 to 3, got {wrong!r}; -1 makes",
        ):
            samo.AdamW(samo.parameters(model), density_power=wrong)  # type: ignore[arg-type]
    opt = samo.AdamW(samo.parameters(model), density_power=-1.0)
    saved = opt.state_dict()
    del saved["param_groups"][0]["density_power"]
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["density_power"] == 0


def test_a_copied_optimizer_says_that_it_has_no_model() -> None:
    model = compressed()
    opt = copy.deepcopy(samo.AdamW(samo.parameters(model)))
    for leaf in opt.param_groups[0]["params"]:
        leaf.grad = torch.zeros_like(leaf)
    with pytest.raises(samo.CompressionError, match="the optimizer was copied without it"):
        opt.step()


def test_moments_go_on_over_a_prune_as_if_the_state_had_stayed_dense() -> None:
    """Five dense steps, a prune, five more: bit for bit what the masked dense optimizer does."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))

    def gradients(net: nn.Module, step: int) -> None:
        torch.manual_seed(step)
        net(torch.randn(8, 12)).square().mean().backward()

    nets = [model(), model()]
    opts = [torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False) for net in nets]
    for step in range(5):
        for net, opt in zip(nets, opts):
            gradients(net, step)
            opt.step()
            opt.zero_grad()
    masked, compressed = nets
    masks = samo.prune(masked, 0.7)
    masks.apply_(masked)
    samo.compress_(compressed, masks, kernels="reference")
    compressed_opt = samo.AdamW(samo.parameters(compressed), lr=0.01)
    compressed_opt.carry_over(opts[1])
    for step in range(5, 10):
        gradients(masked, step)
        for name, param in masks.parameters_of(masked).items():
            masks[name].zero_(param.grad)
        opts[0].step()
        opts[0].zero_grad()
        masks.apply_(masked)
        gradients(compressed, step)
        compressed_opt.step()
        compressed_opt.zero_grad()
    for name, tensor in masked.state_dict().items():
        assert torch.equal(compressed.state_dict()[name], tensor), name
    assert all(float(state["step"]) == 10 for state in compressed_opt.state.values())


def test_moments_of_another_kind_of_optimizer_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 8)).sum().backward()
    sgd.step()
    samo.compress_(model, samo.prune(model, 0.5))
    opt = samo.AdamW(samo.parameters(model))
    with pytest.raises(ValueError, match=r"for '0.weight' SGD keeps momentum_buffer; leave it out"):
        opt.carry_over(sgd)
    assert not opt.state


def test_weights_that_had_no_gradient_yet_start_with_no_moments() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    dense = torch.optim.Adam(model.parameters())
    samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
    opt = samo.AdamW(samo.parameters(model))
    opt.carry_over(dense)
    assert not opt.state
