"""Random models and those of Hugging Face against masked dense training."""

import itertools
import random

import pytest
import torch
from torch import nn

import samo
from tests.core.twins import Cast, pruned_entries, twins, worst


def masks_of_all(model: nn.Module, density: float = 0.5) -> samo.Masks:
    """Prune every tensor with two dimensions or more; the rest has nothing to compress."""
    masks = {}
    for name, param in model.named_parameters():
        if param.dim() >= 2 and param.numel():
            keep = torch.rand(param.shape) < density
            keep.view(-1)[0] = True
            masks[name] = samo.Mask.from_bool(keep)
    return samo.Masks(masks)


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
        masks = masks_of_all(model, density=rng.choice([0.02, 0.1, 0.5, 0.97]))
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
