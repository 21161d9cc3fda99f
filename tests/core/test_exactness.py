"""Compressed training against masked dense training, over many steps and models."""

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import samo
from tests.core.twins import (
    Cast,
    Make,
    assert_equal,
    batches,
    loss_of,
    mask_,
    mlp,
    pruned_entries,
    random_masks,
    step,
    twins,
    worst,
)

STEPS = 200

SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": 0.1}
OURS = partial(samo.AdamW, **SETTINGS, kernels="reference")
OPTIMIZERS: dict[str, Make] = {
    "AdamW": partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "samo.AdamW": OURS,
    "samo.AdamW with ages": partial(OURS, entry_steps=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fp32_steps_and_prunings_equal_masked_dense_training_bit_for_bit(name: str) -> None:
    start = mlp()
    masks = samo.prune(start, 0.5)
    model, dense = twins(start, masks, kernels="reference")
    first = model[0].weight.detach().clone()
    ours, theirs = (OPTIMIZERS[name](net.parameters()) for net in (model, dense))
    if name.startswith("samo"):
        theirs = torch.optim.AdamW(dense.parameters(), **SETTINGS, foreach=False)
    for index, x in enumerate(batches(STEPS)):
        if index in (70, 140):
            masks = samo.prune(model, 0.7 if index == 70 else 0.9) & masks
            samo.remap_(model, masks, ours)
            mask_(dense, masks)
        assert step(model, ours, x) == step(dense, theirs, x)
        masks.apply_(dense)  # moments of pruned entries move them
    assert_equal(model, dense)
    assert torch.equal(model[0].weight, dense[0].weight)
    assert not torch.equal(model[0].weight, first)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_bf16_steps_equal_an_fp32_master_bit_for_bit(grad_dtype: torch.dtype) -> None:
    options = {"dtype": torch.bfloat16, "grad_dtype": grad_dtype, "kernels": "reference"}
    model, master = twins(mlp(), **options)
    ours = samo.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, kernels="reference")
    theirs = torch.optim.AdamW(master.parameters(), lr=3e-3, weight_decay=0.1, foreach=False)
    for x in batches(100, dtype=torch.bfloat16):
        assert step(model, ours, x) == step(Cast(master, torch.bfloat16), theirs, x)
    assert_equal(model, master)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def test_clipping_of_accumulated_gradients_equals_that_of_the_masked_gradient() -> None:
    """Norms add up in another order, so within rounding of fp64."""
    norms: list[float] = []
    model, dense = twins(mlp().double())
    opts = [adamw(net.parameters()) for net in (model, dense)]
    for x in batches(50, dtype=torch.float64):
        for net, opt in zip((model, dense), opts):
            for part in x.split(3):  # 3, 3 and 2 rows
                (100 * loss_of(net, part)).backward()
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
            opt.step()
            opt.zero_grad()
    assert min(norms) > 0.5
    assert norms[::2] == pytest.approx(norms[1::2], rel=1e-12)
    assert worst(model, dense) < 1e-9


@pytest.mark.parametrize("own", [False, True], ids=["torch", "samo"])
def test_schedulers_drive_the_rate(own: bool) -> None:
    model, dense = twins(mlp().double())
    ours = samo.AdamW(model.parameters(), lr=0.01) if own else adamw(model.parameters())
    theirs = adamw(dense.parameters())
    # It drives betas too.
    schedulers = [OneCycleLR(opt, max_lr=0.02, total_steps=50) for opt in (ours, theirs)]
    for x in batches(50, dtype=torch.float64):
        step(model, ours, x)
        step(dense, theirs, x)
        for scheduler in schedulers:
            scheduler.step()
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert worst(model, dense) < 1e-9


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averaged_models_average_the_weights(kind: str) -> None:
    average = get_ema_multi_avg_fn(0.9) if kind == "ema" else None
    model, dense = (nn.Sequential(net, nn.BatchNorm1d(6).double()) for net in twins(mlp().double()))
    averages = []
    for net in (model, dense):
        opt = adamw(net.parameters())
        averages.append(AveragedModel(net, multi_avg_fn=average, use_buffers=kind == "ema"))
        for x in batches(50, dtype=torch.float64):
            step(net, opt, x)
            averages[-1].update_parameters(net)
        update_bn(batches(5, dtype=torch.float64, seed=2), averages[-1])
    x = next(batches(1, dtype=torch.float64, seed=3))
    ours, theirs = (net.eval()(x) for net in averages)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    assert worst(averages[0], averages[1]) < 1e-9


def test_grad_scaler_skips_the_steps_that_masked_dense_training_skips() -> None:
    model, master = twins(mlp(), dtype=torch.float16)
    nets = [model, Cast(master, torch.float16)]
    opts = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=10) for _ in nets]
    scales: list[list[float]] = [[], []]
    for index, x in enumerate(batches(60, dtype=torch.float16)):
        if index % 20 == 7:
            x[0, 0] = float("inf")
        for net, opt, scaler, seen in zip(nets, opts, scalers, scales):
            opt.zero_grad()
            scaler.scale(loss_of(net, x)).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
            seen.append(scaler.get_scale())
    assert scales[0] == scales[1]
    skipped = sum(after < before for before, after in zip(scales[0], scales[0][1:]))
    assert skipped >= 3
    # fp32 weights that differ by the order of a norm may round to the next fp16 number.
    assert worst(model, master) < 2e-3


def test_bf16_training_under_autocast_follows_masked_dense_training() -> None:
    model, dense = twins(mlp())
    opts = [adamw(net.parameters()) for net in (model, dense)]
    for x in batches(50):
        for net, opt in zip((model, dense), opts):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(net, x)
            loss.backward()
            opt.step()
    assert worst(model, dense) == 0


# Other models -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("decade", range(3))
def test_ten_random_models_train_as_masked_dense(decade: int) -> None:
    """In 16 bits the twin is fp32 weights that are cast before every pass."""
    for seed in range(10 * decade, 10 * decade + 10):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        model, width, dtype = random_model(rng)
        model = model.double() if dtype == torch.float64 else model
        masks = random_masks(model, rng.choice([0.02, 0.1, 0.5, 0.97]))
        model, dense = twins(model, masks, dtype=dtype, kernels="reference")
        opts = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in (model, dense)]
        for _ in range(6):
            x = torch.randn(3, width).to(dtype)
            for net, opt in zip((model, Cast(dense, dtype)), opts):
                opt.zero_grad()
                net(x).to(torch.float64).square().sum().backward()
                opt.step()
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
