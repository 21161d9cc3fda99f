"""Compressed training against masked dense training, over many steps."""

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import samo
from samo.kernels.rounding import join, split
from tests.meters import assert_ulps

STEPS = 1000


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 9)
    )


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def batches(steps: int, dtype: torch.dtype = torch.float32) -> Iterable[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(16, 40, generator=generator).to(dtype)


def masked_dense_step(
    model: nn.Module, masks: samo.Masks, optimizer: torch.optim.Optimizer, x: Tensor
) -> None:
    optimizer.zero_grad()
    loss_of(model, x).backward()
    for name, param in model.named_parameters():
        if name in masks and param.grad is not None:
            masks[name].zero_(param.grad)
    optimizer.step()
    masks.apply_(model)


def assert_pruned_are_zero(model: nn.Module, masks: samo.Masks) -> None:
    for name, mask in masks.items():
        assert not model.get_parameter(name)[~mask.to_bool()].any()


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], ...]] = {
    "AdamW": (
        lambda params: samo.AdamW(params, lr=3e-3, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1, foreach=False),
    ),
    "SGD": (
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
        lambda params: torch.optim.SGD(
            params, lr=0.1, momentum=0.9, weight_decay=1e-3, foreach=False
        ),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_thousand_fp32_steps_equal_masked_dense_training_bit_for_bit(name: str) -> None:
    make_ours, make_theirs = OPTIMIZERS[name]
    model = build()
    masks = samo.prune(model, sparsity=0.9)
    dense = copy.deepcopy(model)
    masks.apply_(dense)
    samo.compress_(model, masks, kernels="reference")
    ours, theirs = make_ours(samo.parameters(model)), make_theirs(dense.parameters())
    first = model.state_dict()["2.weight"].clone()
    for x in batches(STEPS):
        ours.zero_grad()
        loss_of(model, x).backward()
        ours.step()
        masked_dense_step(dense, masks, theirs, x)
        for name, param in dense.named_parameters():
            assert torch.equal(model.get_parameter(name), param)
        assert_pruned_are_zero(model, masks)
    assert not torch.equal(first, model.state_dict()["2.weight"])


def test_the_fast_path_stays_within_two_ulp_a_step() -> None:
    model = build()
    masks = samo.prune(model, sparsity=0.9)
    dense = copy.deepcopy(model)
    masks.apply_(dense)
    samo.compress_(model, masks)
    ours = samo.AdamW(samo.parameters(model), lr=3e-3, weight_decay=0.1)
    theirs = torch.optim.AdamW(dense.parameters(), lr=3e-3, weight_decay=0.1, foreach=False)
    for x in batches(STEPS):
        # Both start each step from the same weights, so that it is the step that is compared.
        dense.load_state_dict(model.state_dict())
        ours.zero_grad()
        loss_of(model, x).backward()
        for name, leaf in samo.named_parameters(model):
            state = theirs.state[dense.get_parameter(name)]
            for key in state.keys() & {"exp_avg", "exp_avg_sq"}:
                copy_moment(state[key], ours.state[leaf][key], masks.get(name))
        before = {name: param.clone() for name, param in model.state_dict().items()}
        ours.step()
        masked_dense_step(dense, masks, theirs, x)
        after = dense.state_dict()
        for name, param in model.state_dict().items():
            assert_ulps(param, after[name], before[name], at_most=2)
        assert_pruned_are_zero(model, masks)


def copy_moment(dense: Tensor, compressed: Tensor, mask: samo.Mask | None) -> None:
    if mask is None:
        dense.view(-1).copy_(compressed)
    else:
        dense[mask.to_bool()] = compressed


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_a_thousand_bf16_steps_equal_an_fp32_master_bit_for_bit(grad_dtype: torch.dtype) -> None:
    model = build()
    masks = samo.prune(model, sparsity=0.9)
    masters = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, mask in masks.items():
        mask.zero_(masters[name])
    dense = copy.deepcopy(model).to(torch.bfloat16)
    samo.compress_(model, masks, dtype=torch.bfloat16, grad_dtype=grad_dtype, kernels="reference")
    ours = samo.AdamW(samo.parameters(model), lr=3e-3, weight_decay=0.1)
    leaves = {name: nn.Parameter(master) for name, master in masters.items()}
    theirs = torch.optim.AdamW(leaves.values(), lr=3e-3, weight_decay=0.1, foreach=False)

    def write_weights() -> None:
        for name, param in dense.named_parameters():
            param.data.copy_(split(leaves[name].detach(), torch.bfloat16)[0])

    write_weights()
    for x in batches(STEPS, torch.bfloat16):
        ours.zero_grad()
        loss_of(model, x).backward()
        ours.step()
        dense.zero_grad()
        loss_of(dense, x).backward()
        for name, param in dense.named_parameters():
            assert param.grad is not None
            leaves[name].grad = param.grad.float()
            if name in masks:
                masks[name].zero_(leaves[name].grad)  # type: ignore[arg-type]
        theirs.step()
        write_weights()
        for name, param in dense.named_parameters():
            assert torch.equal(model.get_parameter(name), param)
    for (name, leaf), weights in zip(samo.named_parameters(model), model.parameters()):
        keep = (
            masks[name].to_bool() if name in masks else torch.ones_like(weights, dtype=torch.bool)
        )
        master = join(weights.detach()[keep], ours.state[leaf]["remainder"])
        assert torch.equal(master, leaves[name].detach()[keep])


def test_fp64_compressed_training_follows_masked_dense_training() -> None:
    model = build().double()
    masks = samo.prune(model, sparsity=0.9)
    dense = copy.deepcopy(model)
    masks.apply_(dense)
    samo.compress_(model, masks)
    ours = samo.AdamW(samo.parameters(model), lr=3e-3)
    theirs = torch.optim.AdamW(dense.parameters(), lr=3e-3)
    for x in batches(200, torch.float64):
        ours.zero_grad()
        loss_of(model, x).backward()
        ours.step()
        masked_dense_step(dense, masks, theirs, x)
    for name, param in dense.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), param, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_torch_optimizer_updates_16_bit_weights_through_an_fp32_master(
    dtype: torch.dtype,
) -> None:
    """Steps too small for the weight's type add up, as they would in an fp32 master."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    masks = samo.prune(model, sparsity=0.5, method="random")
    samo.compress_(model, masks, dtype=dtype, grad_dtype=torch.float32)
    opt = torch.optim.SGD(samo.parameters(model), lr=1e-5)
    for _ in range(1000):
        for leaf in samo.parameters(model):
            leaf.grad = torch.ones(32)
        opt.step()
    kept = model[0].weight[masks["0.weight"].to_bool()]
    torch.testing.assert_close(kept.float(), torch.full((32,), 0.99), rtol=0, atol=0.004)
    assert (kept != 1).all()


def test_clipping_equals_clipping_the_masked_gradient() -> None:
    model = build()
    masks = samo.prune(model, sparsity=0.9)
    dense = copy.deepcopy(model)
    masks.apply_(dense)
    samo.compress_(model, masks)
    x = next(iter(batches(1))) * 100
    loss_of(model, x).backward()
    loss_of(dense, x).backward()
    for name, mask in masks.items():
        grad = dense.get_parameter(name).grad
        assert grad is not None
        mask.zero_(grad)
    ours = nn.utils.clip_grad_norm_(samo.parameters(model), 0.1)
    theirs = nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    for name, leaf in samo.named_parameters(model):
        grad = dense.get_parameter(name).grad
        assert grad is not None
        assert leaf.grad is not None
        kept = grad[masks[name].to_bool()] if name in masks else grad.view(-1)
        torch.testing.assert_close(leaf.grad, kept, rtol=1e-5, atol=0)
