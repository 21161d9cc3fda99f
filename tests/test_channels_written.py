"""Channels that something writes to or reads on the side: kept or refused, never silently wrong."""

import copy
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samo
from samo.early_bird.channel_graph import find_channels
from samo.early_bird.channels import batch_norms, channel_masks, weight_masks
from tests.test_channels import SmallVGG, net, norm, random_scales_


def then(write: Callable[[Any, Tensor, Tensor], object], **layers: nn.Module) -> nn.Module:
    """Return a network that does something to its channels before the next layer reads them."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = norm(m, x)
        write(m, y, x)
        return m.end(y)

    return net(forward, conv=nn.Conv2d(3, 6, 3, padding=1), side=nn.Conv2d(3, 6, 1), **layers)


WRITTEN = {
    "method": then(lambda m, y, x: y.add_(m.side(x))),
    "function": then(lambda m, y, x: torch.sigmoid_(y)),
    "operator": then(lambda m, y, x: operator.iadd(y, m.side(x))),
    "data": then(lambda m, y, x: y.data.add_(1.0)),
    "out": then(lambda m, y, x: torch.add(m.side(x), 1, out=y)),
    "view": then(lambda m, y, x: y[:, :4].add_(1.0)),
    "flat view": then(lambda m, y, x: y.flatten(1).add_(1.0)),
    "module": then(lambda m, y, x: m.act(y), act=nn.Threshold(0.5, 1.0, inplace=True)),
    "clamp": then(lambda m, y, x: m.act(y), act=nn.Hardtanh(0.5, 2.0, inplace=True)),
    "functional": then(lambda m, y, x: F.threshold(y, 0.5, 1.0, inplace=True)),
    "after an activation": then(lambda m, y, x: F.relu_(y).add_(1.0)),
    "clamp over 0": net(lambda m, x: m.end(m.act(norm(m, x))), act=nn.Hardtanh(0.5, 2.0)),
    "clamp under 0": net(lambda m, x: m.end(m.act(norm(m, x))), act=nn.Hardtanh(-2.0, -0.5)),
}
UNTOUCHED = {
    "clamp around 0": net(lambda m, x: m.end(m.act(norm(m, x))), act=nn.Hardtanh(-1.0, 2.0)),
    "relu6": net(lambda m, x: m.end(m.act(norm(m, x))), act=nn.ReLU6(inplace=True)),
    "relu_": then(lambda m, y, x: F.relu_(y)),
    "copy": then(lambda m, y, x: y.clone().add_(1.0)),
    "sum": then(lambda m, y, x: (y + m.side(x)).add_(1.0)),
    "added to another": then(lambda m, y, x: m.side(x).add_(y)),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_channels_that_are_written_to_keep_their_readers(how: str) -> None:
    (found,) = find_channels(WRITTEN[how], ["bn"])
    assert found.consumers == ()


@pytest.mark.parametrize("how", UNTOUCHED)
def test_writes_that_leave_channels_at_zero_do_no_harm(how: str) -> None:
    (found,) = find_channels(UNTOUCHED[how], ["bn"])
    assert found.consumers == ("end",)


@pytest.mark.parametrize("how", [*WRITTEN, *UNTOUCHED])
def test_a_ticket_computes_what_pruned_channels_alone_compute(how: str) -> None:
    torch.manual_seed(0)
    model = copy.deepcopy({**WRITTEN, **UNTOUCHED}[how]).eval()
    random_scales_(model)
    ticket = samo.EarlyBird(model, 0.5, score="batchnorm").draw_now()
    whole, alone = copy.deepcopy(model), copy.deepcopy(model)
    ticket.apply_(whole)
    samo.Masks({name: ticket[name] for name in ("bn.weight", "bn.bias")}).apply_(alone)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.allclose(whole(x), alone(x), atol=1e-6)


READ_TWICE = [
    (lambda m, x: m.end(norm(m, x)).sum() + F.conv2d(x, m.conv.weight).sum(), "'conv', the layer before"),
    (lambda m, x: m.end(norm(m, x)) * m.bn.weight.sum(), "scale or shift of BatchNorm 'bn' is used"),
]  # fmt: skip


@pytest.mark.parametrize(("forward", "message"), READ_TWICE)
def test_parameters_that_are_read_as_plain_tensors_are_refused(forward: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samo.EarlyBird(net(forward), 0.5, score="batchnorm")


def test_a_reader_whose_weight_is_read_elsewhere_keeps_its_inputs() -> None:
    model = net(lambda m, x: m.end(norm(m, x)) + m.end.weight.sum())
    (found,) = find_channels(model, ["bn"])
    assert found.consumers == ()


# Linear layers


def perceptron(features: int = 8) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, features), nn.BatchNorm1d(features), nn.Linear(features, 3))
    random_scales_(model)
    return model


def test_a_batch_norm_after_a_linear_layer_must_have_seen_its_inputs() -> None:
    model = perceptron()
    bird = samo.EarlyBird(model, 0.5, score="batchnorm")
    with pytest.raises(ValueError, match=r"'1' follows a linear layer, .* run the model once"):
        bird.draw_now()
    model(torch.randn(4, 5))
    assert "2.weight" in bird.draw_now()
    assert not model[1]._forward_pre_hooks


def test_a_batch_norm_over_another_dimension_is_refused() -> None:
    model = perceptron()
    bird = samo.EarlyBird(model, 0.5, score="batchnorm")
    model(torch.randn(4, 8, 5))
    with pytest.raises(
        ValueError, match=r"'1' normalises dimension 1 of inputs of 3 dimensions, and"
    ):
        bird.draw_now()
    del bird
    assert not model[1]._forward_pre_hooks


def test_given_pairs_are_taken_at_their_word() -> None:
    bird = samo.EarlyBird(perceptron(), 0.5, score="batchnorm", pairs={"1": "0"})
    assert list(bird.draw_now()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_the_masks_of_weights_are_built_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[weakref.ref[Tensor]] = []
    from_bool = samo.Mask.from_bool

    def build(keep: Tensor) -> samo.Mask:
        assert all(other() is None for other in built)  # a byte for each weight of one tensor alone
        built.append(weakref.ref(keep))
        return from_bool(keep)

    model = SmallVGG()
    random_scales_(model)
    drawn = channel_masks(batch_norms(model), 0.5)
    channels = find_channels(model, list(batch_norms(model)))
    monkeypatch.setattr(samo.Mask, "from_bool", build)
    assert len(weight_masks(model, channels, drawn)) == len(built) == 10
