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
WANDA: dict[str, Any] = {"sparsity": 0.5, "method": "wanda", "calibration": X}


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (None, {"calibration": None}, r"method='wanda' looks at the inputs .* calibration=batches"),
        (None, {"method": "magnitude", "scope": "owl", "calibration": None}, r"scope='owl' looks"),
        (None, {"method": "magnitude"}, r"method='magnitude' reads no calibration data"),
        (None, {"calibration": []}, r"calibration has no batches"),
        (None, {"calibration": [[1, 2]]}, r"calibration must be batches, .* got list"),
        (None, {"scope": "global"}, r"within a layer.*choose scope='tensor', 'erk' or 'owl'"),
        (None, {"calibration": [X[0] * torch.inf]}, r"inputs of 'layers.0.weight' are NaN or inf"),
        (None, {"method": "sparsegpt", "sparsity": 0.999}, r"keep none of the weights of 'lay"),
        (compressed, {}, r"call samo.decompress_\(model\)"),
        (lambda: nn.Sequential(nn.Linear(16, 16)), {}, r"a Sequential has no nn.ModuleList of blo"),
        (lambda: Stack(3, 16, repeated), {}, r"3 blocks 'layers' once each, .* but \[0, 0\]"),
        (shared, {}, r"once each, in their order, but \[2\] to reach block 0"),
        (lambda: Stack(2, 16, skipping), {}, r"but \[0\] to reach block 1"),
        (lambda: of(Elementwise), {}, r"'layers.0.weight' were not seen.*set_experts_i"),
        (lambda: of(Half), {}, r"'layers.0.weight' .* multiplied as \(16, 8\), not a"),
        (outside, {"method": "sparsegpt"}, r"'first.weight' belongs to none of the blocks"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(make: Any, changes: Any, message: str) -> None:
    model = (make or (lambda: Stack(2, 16, in_order)))()
    before = [param.clone() for param in model.parameters()]
    with pytest.raises((TypeError, ValueError), match=message):
        prune(model, **{**WANDA, **changes})
    assert all(map(torch.equal, model.parameters(), before))


def test_inputs_that_no_damping_helps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = torch.ones((), dtype=torch.int32)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda h, **_: (h, failed))
    with pytest.raises(ValueError, match=r"'layers.0.weight' are too nearly dependent"):
        prune(Stack(1, 16, in_order), 0.5, method="sparsegpt", calibration=X)


def test_owl_outside_of_prune_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"scope='owl' counts outliers .* calibration=batches"):
        samo.EarlyBird(Stack(1, 16, in_order), sparsity=0.5, scope="owl").observe()
