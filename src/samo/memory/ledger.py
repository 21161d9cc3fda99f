"""The measured side of the ledger: bytes of the storages a compressed model actually holds."""

import json
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from samo.errors import CompressionError
from samo.memory.predict import KINDS, Kind, TensorSpec, dense_bytes, paper_bytes, total
from samo.optim import AdamW
from samo.owners import owned_weights
from samo.weights import Weight

__all__ = ["Ledger", "ledger"]

_LABELS: dict[Kind, str] = {
    "weights": "weights, dense",
    "bitmap": "bitmap",
    "gradients": "gradients",
    "rest": "remainder or master",
    "moments": "moments",
    "ages": "ages of entries",
}
_UNITS: Final = (("GB", 9), ("MB", 6), ("kB", 3))
"""Units of a table, and the powers of ten of bytes that they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The account of the pruned or of the unpruned tensors."""

    num_params: int
    """Dense parameters."""
    measured: dict[Kind, int]
    """Bytes held now, by kind."""
    predicted: dict[Kind, int]
    """Bytes held once a step has been taken, by kind."""
    dense: int
    """Bytes of dense training with the same optimizer, or with Adam if none is given."""
    paper: int
    """Bytes by the SAMO paper's formula."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Bytes by kind: measured, predicted, dense and by the paper's formula. Printing it shows a table.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.LayerNorm(1024))
        >>> model = samo.compress_(model, samo.prune(model, 0.9), dtype=torch.bfloat16)
        >>> opt = samo.AdamW(samo.parameters(model))
        >>> model(torch.ones(1, 1024, dtype=torch.bfloat16)).float().sum().backward()
        >>> opt.step()
        >>> account = samo.ledger(model, opt)
        >>> account.measured_bytes == account.predicted_bytes
        True
        >>> round(sum(account.pruned.measured.values()) / account.pruned.num_params, 2)
        3.33
    """

    pruned: Share
    """Tensors with a mask."""
    unpruned: Share
    """Tensors without: embeddings, norms, biases."""
    other_bytes: int
    """Step counts and placeholders: a few bytes a tensor."""
    buffer_bytes: int
    """The model's own buffers."""

    @property
    def num_params(self) -> int:
        """Dense parameters of the model."""
        return self.pruned.num_params + self.unpruned.num_params

    @property
    def measured_bytes(self) -> int:
        """Bytes of model state held now, pruned and unpruned."""
        return sum(self.pruned.measured.values()) + sum(self.unpruned.measured.values())

    @property
    def predicted_bytes(self) -> int:
        """Bytes of model state predicted, pruned and unpruned."""
        return sum(self.pruned.predicted.values()) + sum(self.unpruned.predicted.values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the same model trained densely with the same optimizer, or with Adam."""
        return self.pruned.dense + self.unpruned.dense

    @property
    def paper_bytes(self) -> int:
        """Bytes of the same model by the SAMO paper's formula."""
        return self.pruned.paper + self.unpruned.paper

    def to_json(self) -> str:
        """Return the account as JSON.

        Example:
            >>> import json, torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.prune(model, 0.9))
            >>> json.loads(samo.ledger(model).to_json())["pruned"]["num_params"]
            4096
        """
        return json.dumps(
            {
                "num_params": self.num_params,
                "measured_bytes": self.measured_bytes,
                "predicted_bytes": self.predicted_bytes,
                "dense_bytes": self.dense_bytes,
                "paper_bytes": self.paper_bytes,
                "other_bytes": self.other_bytes,
                "buffer_bytes": self.buffer_bytes,
                "pruned": _as_dict(self.pruned),
                "unpruned": _as_dict(self.unpruned),
            }
        )

    def __str__(self) -> str:
        name, power = self._unit()
        title = f"{name} (10^{power} bytes)"
        lines = [f"{title:<22}{'measured':>12}{'predicted':>12}{'B/param':>10}"]
        for title, share in (("pruned", self.pruned), ("unpruned", self.unpruned)):
            if not share.num_params:
                continue
            lines.append(f"{title}, {share.num_params:,} parameters")
            for kind in KINDS:
                if share.measured[kind] or share.predicted[kind]:
                    lines.append(
                        _row(
                            f"  {_LABELS[kind]}",
                            share.measured[kind],
                            share.predicted[kind],
                            share.num_params,
                            power,
                        )
                    )
            lines.append(
                _row(
                    "  together",
                    sum(share.measured.values()),
                    sum(share.predicted.values()),
                    share.num_params,
                    power,
                )
            )
        count = self.num_params
        lines.append(_row("all", self.measured_bytes, self.predicted_bytes, count, power))
        lines.append(_row("dense training", None, self.dense_bytes, count, power))
        lines.append(_row("SAMO paper, 16-bit", None, self.paper_bytes, count, power))
        if self.measured_bytes < self.predicted_bytes:
            lines.append("gradients and moments appear with the first steps")
        elif self.pruned.predicted["moments"] or self.unpruned.predicted["moments"]:
            saved = 1 - self.measured_bytes / self.dense_bytes
            lines.append(f"saved against dense: {saved:.1%}; activations are not in this account")
        return "\n".join(lines)

    def _unit(self) -> tuple[str, int]:
        """Return the unit of the table: the largest that shows the sum, or the next if a row needs it."""
        whole = max(self.measured_bytes, self.predicted_bytes)
        fits = [place for place, (_, power) in enumerate(_UNITS) if whole >= 10**power]
        place = min(fits, default=len(_UNITS) - 1)
        rows = [
            size
            for share in (self.pruned, self.unpruned)
            for column in (share.measured, share.predicted)
            for size in column.values()
            if size
        ]
        if min(rows, default=whole) < 0.005 * 10 ** _UNITS[place][1]:  # it would be 0.00
            place = min(place + 1, len(_UNITS) - 1)
        return _UNITS[place]


def ledger(model: nn.Module, opt: Optimizer | None = None) -> Ledger:
    """Account for every byte of model state a compressed model and its optimizer hold right now.

    Gradients and moments exist from the first backward pass and the first step on; before that they
    are predicted but not measured.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False))
        >>> model = samo.compress_(model, samo.prune(model, 0.9), dtype=torch.bfloat16)
        >>> opt = samo.AdamW(samo.parameters(model))
        >>> model(torch.ones(1, 1024, dtype=torch.bfloat16)).float().sum().backward()
        >>> opt.step()
        >>> print(samo.ledger(model, opt))
        MB (10^6 bytes)           measured   predicted   B/param
        pruned, 1,048,576 parameters
          weights, dense              2.10        2.10      2.00
          bitmap                      0.14        0.14      0.13
          gradients                   0.21        0.21      0.20
          remainder or master         0.21        0.21      0.20
          moments                     0.84        0.84      0.80
          together                    3.49        3.49      3.33
        all                           3.49        3.49      3.33
        dense training                   -       20.97     20.00
        SAMO paper, 16-bit               -        4.61      4.40
        saved against dense: 83.4%; activations are not in this account

    On many ranks (`samo.replicate`) it is the account of this rank.

    Args:
        model: A compressed model.
        opt: Its optimizer, ours or torch's. Without one no moments are predicted.

    Raises:
        CompressionError: The model is not compressed.
    """
    weights = list(owned_weights(model).values())
    if not weights:
        raise CompressionError(
            "the model is not compressed; call samo.compress_(model, masks) first"
        )
    meter = _Meter()
    buffer_bytes = sum(meter.count(buffer) for buffer in model.buffers())
    shares = []
    for is_pruned in (True, False):
        members = [weight for weight in weights if (weight.mask is not None) == is_pruned]
        shares.append(_share(members, opt, meter))
    other = sum(meter.count(weight.leaf, weight.part.leaf) for weight in weights)
    other += meter.shared_bytes
    if opt is not None:
        other += meter.count(*(t for t in tree_leaves(dict(opt.state)) if isinstance(t, Tensor)))
    return Ledger(
        pruned=shares[0], unpruned=shares[1], other_bytes=other, buffer_bytes=buffer_bytes
    )


class _Meter:
    """Counts each storage once, whoever refers to it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.shared_bytes = 0  # of buffers for several weights, what no weight's view covers

    def count_view(self, tensor: Tensor | None) -> int:
        """Count a weight's part of a buffer that several weights share."""
        if tensor is None:
            return 0
        self.shared_bytes += self.count(tensor) - tensor.nbytes
        return tensor.nbytes

    def count(self, *tensors: Tensor | None) -> int:
        size = 0
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                size += storage.nbytes()
        return size


def _share(weights: list[Weight], opt: Optimizer | None, meter: _Meter) -> Share:
    is_lean = isinstance(opt, AdamW) and opt.is_lean
    has_ages = isinstance(opt, AdamW) and opt.entry_steps
    specs = [_spec(weight, is_lean=is_lean, has_ages=has_ages) for weight in weights]
    vectors = [_vectors(weight, opt) for weight in weights]
    measured: dict[Kind, int] = {
        "weights": sum(meter.count(weight.param) for weight in weights),
        "bitmap": sum(
            meter.count(weight.mask.words, weight.mask.offsets)
            for weight in weights
            if weight.mask is not None
        ),
        "gradients": sum(_gradient_bytes(weight, meter) for weight in weights),
        "rest": sum(_rest_bytes(weight, meter) for weight in weights),
        "moments": sum(meter.count(*tensors) for tensors in vectors),
        "ages": sum(meter.count(_age(weight, opt)) for weight in weights),
    }
    moments = 0
    if opt is not None:
        # AdamW's two before the first step; afterwards as many as the optimizer really keeps.
        moments = max(map(len, vectors), default=0) if opt.state and not is_lean else 2
    return Share(
        num_params=sum(spec.numel for spec in specs),
        measured=measured,
        predicted=total(specs, moments=moments),
        dense=sum(dense_bytes(spec, moments=2 if opt is None else moments) for spec in specs),
        paper=sum(map(paper_bytes, specs)),
    )


def _spec(weight: Weight, *, is_lean: bool, has_ages: bool) -> TensorSpec:
    return TensorSpec(
        numel=weight.param.numel(),
        kept=None if weight.mask is None else weight.mask.kept,
        dtype=str(weight.dtype).removeprefix("torch."),
        grad_dtype=str(weight.grad_dtype).removeprefix("torch."),
        is_trained=weight.param.requires_grad,
        is_lean=is_lean and weight.dtype != torch.float64,  # a frozen one
        has_ages=has_ages,
        owned=None if weight.part is weight else weight.part.kept,
    )


def _gradient_bytes(weight: Weight, meter: _Meter) -> int:
    if weight.replica is None or weight.replica.home is None:
        return meter.count(weight.gradient, weight.leaf.grad)
    size = meter.count_view(weight.replica.home)
    return size + meter.count(
        weight.leaf.grad, weight.part.leaf.grad
    )  # views, unless somebody set it


def _rest_bytes(weight: Weight, meter: _Meter) -> int:
    """Return the bytes of what completes the weight, or this rank's part of it and its values."""
    part = weight.part
    if part is weight:
        return meter.count(weight.rest)
    return meter.count(weight.rest, part.rest) + meter.count_view(part.param.detach())


def _vectors(weight: Weight, opt: Optimizer | None) -> list[Tensor]:
    """Return what the optimizer keeps for each kept entry of a weight, but for its age."""
    state: dict[str, Any] = {} if opt is None else opt.state.get(weight.part.leaf, {})
    others = (weight.part.rest, _age(weight, opt))
    return [
        value
        for value in state.values()
        if isinstance(value, Tensor)
        and value.dim() > 0
        and all(value is not other for other in others)
    ]


def _age(weight: Weight, opt: Optimizer | None) -> Tensor | None:
    """Return the ages of a weight's entries, if they are counted."""
    return opt.state.get(weight.leaf, {}).get("age") if isinstance(opt, AdamW) else None


def _row(label: str, measured: int | None, predicted: int, count: int, power: int) -> str:
    held = predicted if measured is None else measured
    shown = "-" if measured is None else f"{measured / 10**power:,.2f}"
    return f"{label:<22}{shown:>12}{predicted / 10**power:>12,.2f}{held / count:>10.2f}"


def _as_dict(share: Share) -> dict[str, Any]:
    return {name: getattr(share, name) for name in Share.__slots__}
