"""Channel tickets against the published code, and masked networks against smaller ones."""

import pytest
import torch
from benchmarks.quality.tickets import Channels, ChannelTickets, find_channels
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import samo
from samo.mask.masks import Masks

NORMS = ("1", "5", "9")
"""Of `small_vgg`: each after its convolution, and before an activation and a pool."""


def small_vgg(widths: tuple[int, ...] = (8, 12, 10), *, bias: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    size = 3
    for width in widths:
        layers += [nn.Conv2d(size, width, 3, padding=1, bias=bias), nn.BatchNorm2d(width)]
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        size = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(size * 4, 5))


def random_scales_(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                module.weight.copy_(torch.randn(module.num_features, generator=generator))
                module.bias.copy_(torch.randn(module.num_features, generator=generator))
                module.running_mean.normal_(generator=generator)
                module.running_var.uniform_(0.5, 2, generator=generator)


def published_mask(model: nn.Module, percent: float) -> Tensor:
    """Prune as published: all scales in a vector, sorted, and those over the threshold."""
    total = sum(m.weight.shape[0] for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    bn = torch.zeros(total)
    index = 0
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            size = m.weight.shape[0]
            bn[index : index + size] = m.weight.detach().abs().clone()
            index += size
    y, _ = torch.sort(bn)
    return bn.gt(y[int(total * percent)])


def flat(masks: Masks) -> Tensor:
    return torch.cat([masks[f"{norm}.weight"].to_bool() for norm in NORMS])


# Scores and the draw


@settings(max_examples=10)
@given(st.floats(0, 0.99), st.integers(0, 10**6), st.booleans())
def test_channel_masks_are_the_published_ones(sparsity: float, seed: int, has_ties: bool) -> None:
    model = small_vgg()
    random_scales_(model, seed)
    if has_ties:
        with torch.no_grad():
            for norm in NORMS:
                model.get_parameter(f"{norm}.weight").mul_(2).round_()
    masks = ChannelTickets(model, sparsity).channel_masks()
    assert list(masks) == ["1.weight", "5.weight", "9.weight"]
    assert torch.equal(flat(masks), published_mask(model, sparsity))


# Which weights


def without_channels(model: nn.Sequential, masks: Masks, bias: bool) -> nn.Sequential:
    """Build the network that has only the kept channels."""
    keep = [masks[f"{norm}.weight"].to_bool() for norm in NORMS]
    small = small_vgg(tuple(int(k.sum()) for k in keep), bias=bias)
    before = torch.ones(3, dtype=torch.bool)
    for place, kept in zip((0, 4, 8), keep):
        small[place].weight.data = model[place].weight.data[kept][:, before]
        if bias:
            small[place].bias.data = model[place].bias.data[kept]
        for name in ("weight", "bias", "running_mean", "running_var"):
            getattr(small[place + 1], name).data = getattr(model[place + 1], name).data[kept]
        before = kept
    small[-1].weight.data = model[-1].weight.data[:, before.repeat_interleave(4)]
    small[-1].bias.data = model[-1].bias.data
    return small


@pytest.mark.parametrize(("bias", "is_training"), [(False, True), (True, False)])
def test_the_masked_network_computes_what_it_computes_without_the_channels(
    bias: bool, is_training: bool
) -> None:
    torch.manual_seed(0)
    model = small_vgg(bias=bias).double()
    random_scales_(model, 3)
    masks = ChannelTickets(model, 0.5).draw_now()
    assert find_channels(model)[0] == Channels("1", "0", "4")
    small = without_channels(model, masks, bias).double().train(is_training)
    masks.apply_(model)
    model.train(is_training)
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(model(x), small(x), rtol=1e-10, atol=1e-10)
    # Nothing is kept that a smaller network would not have.
    assert set(masks) == {name for name, _ in model.named_parameters()} - {"13.bias"}
    assert masks.kept == sum(p.numel() for p in small.parameters()) - 5


def test_layers_without_channels_and_scales_that_are_not_finite_are_refused() -> None:
    model = small_vgg()
    random_scales_(model)
    nn.init.constant_(model[5].weight, 1e-6)
    with pytest.raises(samo.MaskError, match=r"'5' would lose all of its 12 channels"):
        ChannelTickets(model, 0.6).draw_now()
    chain = [nn.Conv2d(4, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)]
    with pytest.raises(ValueError, match="'2' follows '1', which is no convolution"):
        find_channels(nn.Sequential(*chain))
    with torch.no_grad():
        model[1].weight[3] = float("inf")
    with pytest.raises(ValueError, match=r"1 of the 8 scales of '1\.weight' are NaN or infinite"):
        ChannelTickets(model, 0.5).observe()
