"""What cannot be calibrated is refused, and the model stays as it was."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samo
from samo.pruning.prune import prune
from tests.pruning.language_models import Stack, in_order


def repeated(layers: Any, x: Tensor) -> Tensor:
    return in_order([layers[0], *layers], x)


def skipping(layers: Any, x: Tensor) -> Tensor:
    return layers[0](x)


class Elementwise(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum(0)


class Half(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.nn.functional.linear(x, self.weight[:8]).repeat(1, 2)


def of(kind: type[nn.Linear]) -> Stack:
    model = Stack(1, 16, in_order)
    model.layers = nn.ModuleList([kind(16, 16)])
    return model


def outside() -> Stack:
    model = Stack(2, 16, lambda layers, x: in_order(layers, model.first(x)))
    model.first = nn.Linear(16, 16)
    return model


def shared() -> Stack:
    model = Stack(1, 16, in_order)
    model.layers = nn.ModuleList([model.layers[0]] * 3)
    return model


def compressed() -> nn.Module:
    model = Stack(2, 16, in_order)
    return samo.compress_(model, prune(model, 0.5))


X = [torch.ones(4, 16)]


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (None, {"method": "wanda"}, r"method='wanda' looks at the inputs .* calibration=batches"),
        (None, {"scope": "owl"}, r"scope='owl' looks at the inputs"),
        (None, {"calibration": X}, r"method='magnitude' reads no calibration data"),
        (None, {"method": "wanda", "calibration": []}, r"calibration has no batches"),
        (
            None,
            {"method": "sparsegpt", "scope": "global", "calibration": X},
            r"compares weights within a layer.*choose scope='tensor', 'erk' or 'owl'",
        ),
        (compressed, {"method": "wanda", "calibration": X}, r"call samo.decompress_\(model\)"),
        (
            lambda: nn.Sequential(nn.Linear(16, 16)),
            {"method": "wanda", "calibration": X},
            r"a Sequential has no nn.ModuleList of blocks .* use method='magnitude'",
        ),
        (
            lambda: Stack(3, 16, repeated),
            {"method": "wanda", "calibration": X},
            r"does not call its 3 blocks 'layers' once each, in their order, but \[0, 0\] to reach",
        ),
        (shared, {"method": "wanda", "calibration": X}, r"once each, in their order, but \[2\] to"),
        (
            lambda: Stack(2, 16, skipping),
            {"method": "wanda", "calibration": X},
            r"but \[0\] to reach block 1",
        ),
        (
            lambda: of(Elementwise),
            {"method": "wanda", "calibration": X},
            r"the inputs of 'layers.0.weight' were not seen.*set_experts_implementation",
        ),
        (
            lambda: of(Half),
            {"method": "wanda", "calibration": X},
            r"'layers.0.weight' of shape \(16, 16\) is multiplied as \(16, 8\), not as a whole",
        ),
        (
            outside,
            {"method": "sparsegpt", "calibration": X},
            r"'first.weight' belongs to none of the blocks 'layers'.* skip=\['first.weight'\]",
        ),
        (
            None,
            {"method": "wanda", "calibration": [torch.full((4, 16), torch.inf)]},
            r"inputs of 'layers.0.weight' are NaN or infinite",
        ),
        (
            None,
            {"method": "sparsegpt", "sparsity": 0.999, "calibration": X},
            r"sparsity 0.999 would keep none of the weights of 'layers.0.weight'",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_refused(make: Any, settings: Any, message: str) -> None:
    model = (make or (lambda: Stack(2, 16, in_order)))()
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=message):
        prune(model, **{"sparsity": 0.5, **settings})
    assert all(map(torch.equal, model.parameters(), before))


def test_calibration_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"calibration must be batches, .* got list"):
        prune(Stack(1, 16, in_order), 0.5, method="wanda", calibration=[[1, 2]])  # type: ignore[list-item]


def test_inputs_that_no_damping_helps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = torch.ones((), dtype=torch.int32)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda h, **_: (h, failed))
    with pytest.raises(ValueError, match=r"'layers.0.weight' are too nearly dependent"):
        prune(Stack(1, 16, in_order), 0.5, method="sparsegpt", calibration=X)


def test_owl_outside_of_prune_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"scope='owl' counts outliers .* calibration=batches"):
        samo.EarlyBird(Stack(1, 16, in_order), sparsity=0.5, scope="owl").observe()
