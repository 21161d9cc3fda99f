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
    samo.compress_(model, samo.prune(model, 0.5), dtype=dtype, grad_dtype=torch.float32)
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
def test_a_saved_and_loaded_run_goes_on_exactly(dtype: torch.dtype) -> None:
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
    twin.load_state_dict(saved["model"])
    twin_opt.load_state_dict(saved["opt"])
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
    with pytest.raises(samo.MaskError, match=r"'0.weight' is not one of torch.bfloat16 weights"):
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
    with pytest.raises(samo.CompressionError, match=r"a tensor of shape \(16, 12\) that is none"):
        samo.AdamW(model.parameters())
    with pytest.raises(samo.CompressionError, match=r"a tensor of shape \(3,\) that is none"):
        samo.AdamW([nn.Parameter(torch.zeros(3))])


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
        ({"betas": (0.9, 1.0)}, r"betas must lie in \[0, 1\), got \(0.9, 1.0\)"),
        ({"eps": -1e-8}, "eps must be 0 or more"),
        ({"weight_decay": float("nan")}, "weight_decay must be 0 or more, got nan"),
    ],
    ids=["lr", "betas", "eps", "weight_decay"],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samo.AdamW(samo.parameters(compressed()), **settings)
