"""Channel tickets against the published code retold, and masked networks against ones without channels."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn

import samo
from samo.early_bird.channel_graph import find_channels
from samo.early_bird.channels import Channels, batch_norms, channel_masks, weight_masks
from samo.mask import Mask
from samo.model_masks import Masks


class SmallVGG(nn.Module):
    """Convolutions, BatchNorm, pooling and a linear layer, flattened as in the published network."""

    def __init__(self, widths: tuple[int, ...] = (8, 12, 10), *, bias: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        size = 3
        for width in widths:
            layers += [nn.Conv2d(size, width, 3, padding=1, bias=bias), nn.BatchNorm2d(width)]
            layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
            size = width
        self.feature = nn.Sequential(*layers)
        self.classifier = nn.Linear(size * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.feature(x)
        return self.classifier(y.view(y.size(0), -1))


class Block(nn.Module):
    """The block of a residual network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.block = Block(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.block(x), 1), 1))


def random_scales_(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            with torch.no_grad():
                module.weight.copy_(torch.randn(module.num_features, generator=generator))
                module.bias.copy_(torch.randn(module.num_features, generator=generator))
                module.running_mean.normal_(generator=generator)
                module.running_var.uniform_(0.5, 2, generator=generator)


def published_mask(model: nn.Module, percent: float) -> Tensor:
    """Retell the published pruning: all scales in a vector, sorted, and those over the threshold."""
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
    return torch.cat([mask.to_bool() for mask in masks.values()])


# Scores


@given(st.floats(0, 0.99), st.integers(0, 10**6), st.booleans())
def test_channel_masks_are_the_published_ones(sparsity: float, seed: int, has_ties: bool) -> None:
    model = SmallVGG()
    random_scales_(model, seed)
    if has_ties:
        with torch.no_grad():
            for norm in batch_norms(model).values():
                norm.weight.mul_(2).round_()
    masks = channel_masks(batch_norms(model), sparsity)
    assert list(masks) == ["feature.1.weight", "feature.5.weight", "feature.9.weight"]
    assert torch.equal(flat(masks), published_mask(model, sparsity))


@pytest.mark.parametrize("distance", ["hamming", "kept"])
def test_a_channel_ticket_is_drawn_as_published(distance: Any) -> None:
    torch.manual_seed(0)
    model = SmallVGG()
    random_scales_(model)
    bird = samo.EarlyBird(model, 0.5, score="batchnorm", distance=distance)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    held: list[Tensor] = []
    ticket = None
    for step in range(60):
        held = [*held[-4:], published_mask(model, 0.5)]
        ticket = bird.observe()
        n = held[-1].numel()
        dists = [1 - float((held[-1] == other).sum()) / n for other in held[:-1]]
        if distance == "hamming":
            assert bird.distances[-1] == pytest.approx(dists, abs=1e-12)
        else:
            both = [int((held[-1] & other).sum()) for other in held[:-1]]
            most = [max(int(held[-1].sum()), int(other.sum())) for other in held[:-1]]
            dists = [1 - b / m for b, m in zip(both, most)]
            assert bird.distances[-1] == pytest.approx(dists, abs=1e-12)
        has_settled = len(held) == 5 and max(dists) <= 0.1
        assert (ticket is not None) == has_settled
        if ticket is not None:
            break
        opt.zero_grad()
        x = torch.randn(16, 3, 16, 16)
        F.cross_entropy(model(x), x.mean((1, 2, 3)).gt(0).long()).backward()
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        bird.add_l1_(0.1 / (1 + step))
        for name, parameter in model.named_parameters():
            is_scale = name.startswith("feature") and parameter.dim() == 1 and "weight" in name
            extra = 0.1 / (1 + step) * parameter.detach().sign() if is_scale else 0
            assert torch.allclose(parameter.grad, before[name] + extra, atol=1e-7)
        opt.step()
        with torch.no_grad():  # as a large learning rate would
            for layer in batch_norms(model).values():
                layer.weight.add_(2 * torch.randn(layer.num_features) / (1 + step))
    assert ticket is not None
    assert len(bird.steps) > 6, "masks settled before the rule was put to the test"
    for place, mask in zip((1, 5, 9), held[-1].split([8, 12, 10])):
        assert torch.equal(ticket[f"feature.{place}.weight"].to_bool(), mask)


# Which weights


def without_channels(model: SmallVGG, masks: Masks, bias: bool) -> SmallVGG:
    """Build the network that has only the kept channels."""
    keep = [masks[f"feature.{place}.weight"].to_bool() for place in (1, 5, 9)]
    small = SmallVGG(tuple(int(k.sum()) for k in keep), bias=bias)
    before = torch.ones(3, dtype=torch.bool)
    for place, kept in zip((0, 4, 8), keep):
        small.feature[place].weight.data = model.feature[place].weight.data[kept][:, before]
        if bias:
            small.feature[place].bias.data = model.feature[place].bias.data[kept]
        for name in ("weight", "bias", "running_mean", "running_var"):
            source = getattr(model.feature[place + 1], name).data
            getattr(small.feature[place + 1], name).data = source[kept]
        before = kept
    small.classifier.weight.data = model.classifier.weight.data[:, before.repeat_interleave(4)]
    small.classifier.bias.data = model.classifier.bias.data
    return small


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
def test_the_masked_network_computes_what_it_computes_without_the_channels(
    bias: bool, is_training: bool
) -> None:
    torch.manual_seed(0)
    model = SmallVGG(bias=bias).double()
    random_scales_(model, 3)
    masks = samo.EarlyBird(model, 0.5, score="batchnorm").draw_now()
    small = without_channels(model, masks, bias).double().train(is_training)
    masks.apply_(model)
    model.train(is_training)
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(model(x), small(x), rtol=1e-10, atol=1e-10)
    # Nothing is kept that a smaller network would not have.
    names = {name for name, _ in model.named_parameters() if name != "classifier.bias"}
    assert set(masks) == names
    assert masks.kept == sum(p.numel() for p in small.parameters()) - 5


def test_a_channel_ticket_trains_compressed() -> None:
    torch.manual_seed(0)
    model = SmallVGG()
    random_scales_(model, 3)
    masks = samo.EarlyBird(model, 0.5, score="batchnorm").draw_now()
    samo.compress_(model, masks)
    opt = samo.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.randn(4, 3, 16, 16)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    dense = samo.dense_state_dict(model)
    for name, mask in masks.items():
        assert not dense[name][~mask.to_bool()].any()


def test_in_a_residual_network_the_search_ends_at_the_sum() -> None:
    found = find_channels(SmallResNet(), ["bn", "block.bn1", "block.bn2"])
    assert found == [
        Channels("bn", "conv", ("block.conv1",)),  # the sum reads its channels too, and keeps them
        Channels("block.bn1", "block.conv1", ("block.conv2",)),
        Channels("block.bn2", "block.conv2", ()),
    ]


class Forward(nn.Module):
    """A network whose forward is given as a function of its layers."""

    def __init__(self, forward: Any, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def net(forward: Any, end: nn.Module | None = None, **layers: nn.Module) -> Forward:
    base = {"conv": nn.Conv2d(3, 6, 3), "bn": nn.BatchNorm2d(6), "end": end or nn.Conv2d(6, 4, 1)}
    return Forward(forward, **{**base, **layers})


def norm(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.conv(x))


READ = {
    "directly": net(lambda m, x: m.end(norm(m, x))),
    "method": net(lambda m, x: m.end(norm(m, x).relu())),
    "functions": net(lambda m, x: m.end(F.avg_pool2d(F.dropout(F.silu(norm(m, x)), 0.1), 2))),
    "max pool": net(lambda m, x: m.end(F.max_pool2d(norm(m, x), 2))),
    "transposed": net(lambda m, x: m.end(norm(m, x)), nn.ConvTranspose2d(6, 4, 2)),
    "flatten": net(lambda m, x: m.end(norm(m, x).flatten(1)), nn.Linear(24, 4)),
    "flatten, named": net(lambda m, x: m.end(norm(m, x).flatten(start_dim=1)), nn.Linear(24, 4)),
    "flatten module": net(lambda m, x: m.end(m.f(norm(m, x))), nn.Linear(24, 4), f=nn.Flatten()),
    "view of shape": net(
        lambda m, x: (lambda y: m.end(y.reshape(y.shape[0], -1)))(norm(m, x)), nn.Linear(24, 4)
    ),
    "mean": net(lambda m, x: m.end(norm(m, x).mean((2, 3))), nn.Linear(6, 4)),
    "mean of -1, -2": net(lambda m, x: m.end(torch.mean(norm(m, x), dim=[-1, -2])), nn.Linear(6, 4)),
    "linear layers": net(
        lambda m, x: m.end(norm(m, x)), nn.Linear(6, 4), conv=nn.Linear(3, 6), bn=nn.BatchNorm1d(6)
    ),
    "identity between": net(lambda m, x: m.end(m.bn(m.i(m.conv(x)))), i=nn.Identity()),
}  # fmt: skip

UNREAD = {
    "sigmoid": net(lambda m, x: m.end(norm(m, x).sigmoid())),
    "sum": net(lambda m, x: (lambda y: m.end(y + y.flip(1)))(norm(m, x))),
    "cat": net(lambda m, x: m.end(torch.cat([norm(m, x), x], 1)), nn.Conv2d(9, 4, 1)),
    "groups": net(lambda m, x: m.end(norm(m, x)), nn.Conv2d(6, 6, 1, groups=2)),
    "used twice": net(lambda m, x: m.end(norm(m, x)) + m.end(x), nn.Conv2d(6, 4, 1)),
    "last dimension": net(lambda m, x: m.end(norm(m, x)), nn.Linear(6, 4)),
    "flatten of all": net(lambda m, x: m.end(norm(m, x).flatten()), nn.Linear(24, 4)),
    "view of numbers": net(lambda m, x: m.end(norm(m, x).view(4, -1)), nn.Linear(36, 4)),
    "view of another's size": net(
        lambda m, x: m.end(norm(m, x).view(x.size(1), -1)), nn.Linear(36, 4)
    ),
    "mean of channels": net(lambda m, x: m.end(norm(m, x).mean((1, 2))), nn.Linear(6, 4)),
    "mean, kept": net(lambda m, x: m.end(norm(m, x).mean((2, 3), keepdim=True)), nn.Linear(6, 4)),
}  # fmt: skip


@pytest.mark.parametrize("how", READ)
def test_the_layer_that_reads_the_channels_is_found(how: str) -> None:
    assert find_channels(READ[how], ["bn"]) == [Channels("bn", "conv", ("end",))]


@pytest.mark.parametrize("how", UNREAD)
def test_where_the_graph_is_not_clear_inputs_are_kept(how: str) -> None:
    assert find_channels(UNREAD[how], ["bn"]) == [Channels("bn", "conv", ())]


def test_a_shared_weight_keeps_its_inputs() -> None:
    model = net(lambda m, x: m.end(norm(m, x)), other=nn.Conv2d(6, 4, 1))
    model.other.weight = model.end.weight
    assert find_channels(model, ["bn"]) == [Channels("bn", "conv", ())]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (net(lambda m, x: m.bn(x)), "BatchNorm 'bn' follows 'x', which is no convolution or linear"),
        (net(lambda m, x: m.bn(m.conv(x).relu())), "BatchNorm 'bn' follows 'relu', which is no conv"),
        (net(lambda m, x: m.conv(x)), "BatchNorm 'bn' is used 0 times in a forward pass"),
        (net(lambda m, x: m.bn(m.bn(m.conv(x)))), r"'bn' is used 2 times .* skip=\['bn\.weight'\]"),
        (
            net(lambda m, x: (lambda y: m.bn(y) + y)(m.conv(x))),
            "'conv', the layer before BatchNorm 'bn', is used elsewhere too",
        ),
        (
            net(lambda m, x: norm(m, x), conv=nn.ConvTranspose2d(4, 6, 2, groups=2)),
            r"'conv' \(ConvTranspose2d\) cannot be the layer before BatchNorm 'bn' of 6 channels",
        ),
        (
            net(lambda m, x: norm(m, x) if x.sum() > 0 else x),
            r"forward of Forward cannot be traced .*TraceError.*pairs=\{'name of the BatchNorm'",
        ),
    ],
)  # fmt: skip
def test_pairs_that_cannot_be_found_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samo.EarlyBird(model, 0.5, score="batchnorm")


def test_pairs_may_be_given_for_what_cannot_be_traced() -> None:
    model = net(lambda m, x: m.end(norm(m, x)) if x.sum() > 0 else x)
    random_scales_(model)
    bird = samo.EarlyBird(model, 0.5, score="batchnorm", pairs={"bn": "conv"})
    assert list(bird.draw_now()) == ["conv.weight", "conv.bias", "bn.weight", "bn.bias"]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({}, r"pairs names no layer for BatchNorm 'bn' \(1 of 1\); name one"),
        ({"bn": "conf"}, r"'conf', which is no module of the model \(did you mean 'conv'\?\)"),
        (
            {"bn": "end"},
            r"'end' \(Conv2d\) cannot be the layer before BatchNorm 'bn' of 6 channels",
        ),
        ({"bn": "bn"}, r"'bn' \(BatchNorm2d\) cannot be the layer before BatchNorm"),
    ],
)
def test_wrong_pairs_are_refused(pairs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samo.EarlyBird(READ["directly"], 0.5, score="batchnorm", pairs=pairs)


@pytest.mark.parametrize("pairs", [None, {"bn": "conv"}, {"all.1": "all.0"}], ids=str)
def test_a_module_with_two_names_is_known_by_its_first(pairs: Any) -> None:
    model = net(lambda m, x: m.all(x))
    model.all = nn.Sequential(model.conv, model.bn)
    random_scales_(model)
    bird = samo.EarlyBird(model, 0.5, score="batchnorm", pairs=pairs)
    assert list(bird.draw_now()) == ["conv.weight", "conv.bias", "bn.weight", "bn.bias"]


def test_a_shared_scale_is_refused() -> None:
    model = net(
        lambda m, x: m.other(m.end(norm(m, x))), nn.Conv2d(6, 6, 1), other=nn.BatchNorm2d(6)
    )
    model.other.weight = model.bn.weight
    with pytest.raises(ValueError, match="'bn' shares its scale with another module"):
        samo.EarlyBird(model, 0.5, score="batchnorm")


def test_a_subclass_of_a_layer_is_one_layer() -> None:
    class MyNorm(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    model = net(lambda m, x: m.end(norm(m, x)), bn=MyNorm(6))
    assert find_channels(model, ["bn"]) == [Channels("bn", "conv", ("end",))]


# Skip and other settings


def test_skip_leaves_channels_or_weights_whole() -> None:
    model = SmallVGG()
    random_scales_(model)
    bird = samo.EarlyBird(model, 0.5, score="batchnorm", skip=["feature.1.weight", "classifier.*"])
    masks = bird.draw_now()
    assert "feature.0.weight" not in masks
    assert "classifier.weight" not in masks
    assert "feature.4.weight" in masks
    together = torch.cat([model.feature[i].weight.detach().abs() for i in (5, 9)])
    assert torch.equal(
        flat(Masks({n: masks[n] for n in ("feature.5.weight", "feature.9.weight")})),
        together > together.sort().values[11],
    )


def test_a_layer_that_would_lose_all_channels_is_refused() -> None:
    model = SmallVGG()
    random_scales_(model)
    with torch.no_grad():
        model.feature[5].weight.fill_(1e-6)
    with pytest.raises(samo.MaskError, match=r"'feature\.5' would lose all of its 12 channels"):
        samo.EarlyBird(model, 0.6, score="batchnorm").draw_now()


@pytest.mark.parametrize("sparsity", [0.5, 0.1, 0.01])
def test_scales_that_are_all_equal_are_to_be_trained_first(sparsity: float) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    bird = samo.EarlyBird(model, sparsity, score="batchnorm")
    model(torch.randn(4, 8))
    with pytest.raises(
        samo.MaskError, match=r"of all 16 channels are equal \(1\), .*; train the model first"
    ):
        bird.draw_now()
    random_scales_(model)
    assert bird.draw_now()["1.weight"].kept == 15 - int(16 * sparsity)


def test_scales_that_are_not_finite_are_refused() -> None:
    model = SmallVGG()
    with torch.no_grad():
        model.feature[1].weight[3] = float("inf")
    with pytest.raises(
        ValueError, match=r"1 of the 8 scales of 'feature\.1\.weight' are NaN or inf"
    ):
        samo.EarlyBird(model, 0.5, score="batchnorm").observe()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"scope": "global", "rules": {"x": 0.1}}, "and scope, rules would have no effect; leave it out"),
        ({"pattern": "2:4"}, "and pattern would have no effect"),
        ({"sparsity": 1.0}, "sparsity is 1.0, but it is the fraction of channels to prune"),
        ({"sparsity": None}, "sparsity is None, but it is the fraction of channels"),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_for_channels_are_refused(how: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samo.EarlyBird(SmallVGG(), **{"sparsity": 0.5, "score": "batchnorm", **how})


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(8, 8)), nn.BatchNorm2d(4, affine=False)])
def test_a_model_without_scales_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"and the model has none .*use score='magnitude'"):
        samo.EarlyBird(model, 0.5, score="batchnorm")


def test_l1_needs_scales_and_gradients() -> None:
    with pytest.raises(
        ValueError, match="add_l1_ makes BatchNorm scales small, and score='magnitude'"
    ):
        samo.EarlyBird(SmallVGG(), 0.5).add_l1_()
    model = SmallVGG()
    bird = samo.EarlyBird(model, 0.5, score="batchnorm")
    message = (
        r"'feature\.1\.weight' has no gradient to add to \(3 of 3 scales\); call add_l1_ after"
    )
    with pytest.raises(RuntimeError, match=message):
        bird.add_l1_()
    for norm in batch_norms(model).values():
        norm.weight.requires_grad_(False)
    bird.add_l1_()  # what is not trained needs no gradient


def test_a_channel_ticket_goes_on_after_a_resume(tmp_path: Path) -> None:
    model = SmallVGG()
    random_scales_(model)
    birds = [samo.EarlyBird(model, 0.5, score="batchnorm", queue=3) for _ in range(2)]
    birds[0].observe()
    birds[0].observe()
    samo.save(tmp_path / "last", model, extra=birds[0].state_dict())
    birds[1].load_state_dict(samo.load(tmp_path / "last", model))
    assert birds[0].observe() == birds[1].observe() == birds[1].masks
    assert birds[0].distances == birds[1].distances == [[], [0], [0, 0]]


def test_masks_of_a_consumer_with_two_kinds_of_channels_meet() -> None:
    layers = OrderedDict(a=nn.Conv2d(3, 4, 1), n=nn.BatchNorm2d(4), b=nn.Conv2d(4, 6, 1))
    model = nn.Sequential(OrderedDict(**layers, m=nn.BatchNorm2d(6)))
    drawn = {"n.weight": [True, False, True, True], "m.weight": [True] * 5 + [False]}
    masks = weight_masks(
        model,
        find_channels(model, ["n", "m"]),
        Masks({name: Mask.from_bool(torch.tensor(keep)) for name, keep in drawn.items()}),
    )
    keep = masks["b.weight"].to_bool()[:, :, 0, 0]
    expected = torch.tensor(drawn["m.weight"])[:, None] & torch.tensor(drawn["n.weight"])[None]
    assert torch.equal(keep, expected)
