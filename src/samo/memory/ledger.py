"""`ledger`: the bytes of the storages that a compressed model holds, beside those of `predict`.

Each parameter becomes a `TensorSpec` for `predict`. Each storage counts once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from samo.core.adamw import AdamW
from samo.core.modules import CompressedModule
from samo.core.shards import local_of
from samo.core.weight import weight_of
from samo.errors import CompressionError
from samo.memory.predict import KINDS, Kind, TensorSpec, predict, total
from samo.utils.formatting import percent

_LABELS: Final = {"dense": "dense weights", "ages": "ages of entries", "buckets": "DDP buckets"}
_STATE_KINDS: Final[tuple[Kind, ...]] = ("moments", "corrections", "ages")
_UNITS: Final = (("GB", 9), ("MB", 6), ("kB", 3))


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The bytes of the pruned or of the unpruned parameters."""

    num_params: int  # dense
    measured: dict[Kind, int]  # held now
    predicted: dict[Kind, int]  # held after the first step; once it exists if unknown before
    dense: int | None  # of dense training with the same optimizer, if that is known
    paper: int  # by the SAMO paper's formula

    @property
    def measured_bytes(self) -> int:
        """Bytes held now."""
        return sum(self.measured.values())

    @property
    def predicted_bytes(self) -> int:
        """Bytes predicted."""
        return sum(self.predicted.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Bytes by kind: measured, predicted, dense and by the paper's formula. `print` shows a table.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> model = samo.compress_(model, samo.prune(model, 0.9))
        >>> samo.ledger(model).pruned.num_params
        4096
    """

    pruned: Share  # parameters with a mask
    unpruned: Share  # parameters without: embeddings, norms, biases
    other_bytes: int  # step counts, padding
    buffer_bytes: int  # the model's own buffers
    unknown: tuple[str, ...] = ()  # optimizers that cannot be predicted before their first step

    @property
    def num_params(self) -> int:
        """Dense parameters of the model."""
        return self.pruned.num_params + self.unpruned.num_params

    @property
    def measured_bytes(self) -> int:
        """Bytes of model state held now."""
        return self.pruned.measured_bytes + self.unpruned.measured_bytes

    @property
    def predicted_bytes(self) -> int:
        """Bytes of model state predicted."""
        return self.pruned.predicted_bytes + self.unpruned.predicted_bytes

    @property
    def dense_bytes(self) -> int | None:
        """Bytes of the same model trained densely with the same optimizer, if that is known."""
        pruned, unpruned = self.pruned.dense, self.unpruned.dense
        return None if pruned is None or unpruned is None else pruned + unpruned

    @property
    def paper_bytes(self) -> int:
        """Bytes of the same model by the SAMO paper's formula."""
        return self.pruned.paper + self.unpruned.paper

    def __str__(self) -> str:
        largest = max(self.measured_bytes, self.predicted_bytes)
        unit, power = next((u for u in _UNITS if largest >= 10 ** u[1]), _UNITS[-1])

        def row(label: str, measured: int | None, predicted: int, count: int) -> str:
            held = predicted if measured is None else measured
            shown = "-" if measured is None else f"{measured / 10**power:,.2f}"
            return f"{label:<22}{shown:>12}{predicted / 10**power:>12,.2f}{held / count:>10.2f}"

        title = f"{unit} (10^{power} bytes)"
        lines = [f"{title:<22}{'measured':>12}{'predicted':>12}{'B/param':>10}"]
        for name, share in (("pruned", self.pruned), ("unpruned", self.unpruned)):
            if not (count := share.num_params):
                continue
            lines.append(f"{name}, {count:,} parameters")
            for kind in KINDS:
                measured, predicted = share.measured[kind], share.predicted[kind]
                if measured or predicted:
                    lines.append(row(f"  {_LABELS.get(kind, kind)}", measured, predicted, count))
            lines.append(row("  together", share.measured_bytes, share.predicted_bytes, count))
        dense, count = self.dense_bytes, self.num_params
        lines.append(row("all", self.measured_bytes, self.predicted_bytes, count))
        if dense is not None:
            lines.append(row("dense training", None, dense, count))
            lines.append(row("SAMO paper, 16-bit", None, self.paper_bytes, count))
        if self.unknown:
            lines.append(f"state of {', '.join(self.unknown)}: unknown until the first step")
        elif self.measured_bytes < self.predicted_bytes:
            lines.append("gradients exist from backward() on, moments from the first step")
        if dense is not None:
            saved = 1 - self.predicted_bytes / dense
            lines.append(f"saved against dense: {percent(saved)}; activations are not included")
        return "\n".join(lines)


@torch.no_grad()
def ledger(model: nn.Module, opt: Optimizer | Sequence[Optimizer] | None = None) -> Ledger:
    """Return the bytes of model state that a compressed model and its optimizers hold now.

    Gradients that do not exist yet, and moments before the first step, are predicted only.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False))
        >>> model = samo.compress_(model, samo.prune(model, 0.9), dtype=torch.bfloat16)
        >>> opt = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(1, 1024, dtype=torch.bfloat16)).float().sum().backward()
        >>> opt.step()
        >>> print(samo.ledger(model, opt))
        MB (10^6 bytes)           measured   predicted   B/param
        pruned, 1,048,576 parameters
          dense weights               2.10        2.10      2.00
          bitmap                      0.14        0.14      0.13
          values                      0.42        0.42      0.40
          gradients                   0.42        0.42      0.40
          moments                     0.84        0.84      0.80
          together                    3.91        3.91      3.73
        all                           3.91        3.91      3.73
        dense training                   -       20.97     20.00
        SAMO paper, 16-bit               -        4.61      4.40
        saved against dense: 81.4 %; activations are not included

    Each rank counts what it holds, DDP's buckets included; ``gradient_as_bucket_view=True`` avoids
    those. Pass all optimizers of the model: without them no moments are predicted.
    """
    if not any(isinstance(module, CompressedModule) for module in model.modules()):
        raise CompressionError("the model is not compressed; call samo.compress_(model, masks)")
    given = [opt] if isinstance(opt, Optimizer) else list(opt or ())
    # What ZeroRedundancyOptimizer shards, or Accelerate wraps.
    opts = [getattr(one, "optim", getattr(one, "optimizer", one)) for one in given]
    owners: dict[int, tuple[Optimizer, dict[str, Any]]] = {
        id(param): (one, group)
        for one in opts
        for group in one.param_groups
        for param in group["params"]
    }
    meter = _Meter()
    buffer_bytes = sum(meter.count(buffer) for buffer in model.buffers())
    has_buckets = isinstance(model, DistributedDataParallel) and not model.gradient_as_bucket_view
    rows = [
        _account(param, owners.get(id(param)), meter, has_buckets=has_buckets)
        for param in model.parameters()
        if param.is_floating_point()
    ]
    state = tree_leaves([dict(one.state) for one in opts])
    other = sum(meter.count(leaf) for leaf in state if isinstance(leaf, Tensor))
    is_known = bool(opts) and all(row.is_known for row in rows)
    return Ledger(
        pruned=_share([row for row in rows if row.spec.is_pruned], is_known=is_known),
        unpruned=_share([row for row in rows if not row.spec.is_pruned], is_known=is_known),
        other_bytes=meter.shared_bytes + other,
        buffer_bytes=buffer_bytes,
        unknown=tuple(dict.fromkeys(row.unknown for row in rows if row.unknown)),
    )


class _Meter:
    """Counts each storage once, however many tensors refer to it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.shared_bytes = 0  # of storages for several parameters, what no view covers

    def count(self, tensor: Tensor | None) -> int:
        """Return the bytes of a tensor's storage, or 0 if it is counted already."""
        if tensor is None or tensor.is_meta:
            return 0
        if tensor.is_sparse:  # the gradient of an embedding
            return self.count(tensor._indices()) + self.count(tensor._values())
        storage = local_of(tensor).untyped_storage()
        if storage.data_ptr() in self._seen:
            return 0
        self._seen.add(storage.data_ptr())
        return storage.nbytes()

    def count_view(self, tensor: Tensor | None) -> int:
        """Return the bytes of a view of a storage that several may share, as DDP's buckets."""
        if tensor is not None and tensor.is_sparse:
            return self.count(tensor)
        nbytes = 0 if tensor is None or tensor.is_meta else local_of(tensor).nbytes
        self.shared_bytes += self.count(tensor) - nbytes
        return nbytes


class _Row(NamedTuple):
    """The account of one parameter."""

    spec: TensorSpec
    measured: dict[Kind, int]
    predicted: dict[Kind, int]
    is_known: bool  # whether its optimizer can be predicted
    unknown: str  # name of an optimizer that has no state yet and cannot be predicted


def _account(
    param: nn.Parameter,
    owner: tuple[Optimizer, dict[str, Any]] | None,
    meter: _Meter,
    *,
    has_buckets: bool,
) -> _Row:
    weight = weight_of(param)
    mask = None if weight is None else weight.mask
    is_sharded = isinstance(param, DTensor)
    # FSDP2 reduces the gradients of shards to the type of the parameter.
    own_grad = None if weight is None or is_sharded else weight.layout.grad_dtype
    spec = TensorSpec(
        numel=param.numel() if weight is None else weight.shape.numel(),
        kept=None if mask is None else mask.kept,
        dtype=_name(param.dtype if weight is None else weight.dtype),
        value_dtype=_name(param.dtype),
        grad_dtype=_name(own_grad or param.dtype),
        held=local_of(param).numel() if is_sharded else None,
        is_resident=weight is None or weight.is_resident,
        is_trained=param.requires_grad,
        moments=0,
        has_buckets=has_buckets,
    )
    measured: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    # FSDP2 pads shards to the same length.
    measured["values"] = meter.count_view(param) if is_sharded else meter.count(param)
    measured["gradients"] = meter.count_view(param.grad)
    if weight is not None:
        measured["dense"] = meter.count(weight.dense)
    if mask is not None:
        measured["bitmap"] = meter.count(mask.words) + meter.count(mask.offsets)
    is_known, unknown = True, ""
    held: dict[Kind, int] = dict.fromkeys(_STATE_KINDS, 0)
    if owner is not None:
        opt, group = owner
        state = opt.state.get(param, {})
        for key, value in state.items():
            is_vector = isinstance(value, Tensor) and key not in _SCALARS
            if is_vector and (value.dim() > 0 or param.dim() == 0):
                held[_KEYS.get(key, "moments")] += meter.count(value)
        known = _with_state(spec, opt, group)
        is_known, spec = known is not None, known or spec
        if not is_known and not state and param.requires_grad:
            unknown = type(opt).__name__
    predicted = predict(spec)
    if not is_known or not param.requires_grad:  # what was learnt before it was frozen stays
        predicted |= held
    # DDP's reducer allocates its buckets when it is built, out of reach of Python.
    measured |= {**held, "buckets": predicted["buckets"]}
    return _Row(spec, measured, predicted, is_known, unknown)


# State that is not a moment, and state that is one number whatever the shape of the parameter.
_KEYS: dict[str, Kind] = {"age": "ages", "remainder": "corrections", "correction": "corrections"}
_SCALARS: Final = ("step", "mu_product", "eta", "mu")

_MOMENTS: Final = {
    **dict.fromkeys(("Adam", "AdamW", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop"), 2),
    **dict.fromkeys(("Adagrad", "ASGD", "RMSprop"), 1),
    "SGD": 0,
}
"""Moments that torch's optimizers keep, and one more for each of these settings of a group."""
_MORE_MOMENTS: Final = ("amsgrad", "centered", "momentum")


def _with_state(spec: TensorSpec, opt: Optimizer, group: dict[str, Any]) -> TensorSpec | None:
    """Return a spec with the state that an optimizer will keep; None if that is not known."""
    if isinstance(opt, AdamW):
        is_lean = group["lean"] and spec.is_trained
        return replace(spec, moments=2, is_lean=is_lean, has_ages=group["entry_steps"])
    kind = type(opt)
    if kind.__name__ not in _MOMENTS or not kind.__module__.startswith("torch.optim."):
        return None
    more = sum(bool(group.get(setting)) for setting in _MORE_MOMENTS)
    return replace(spec, moments=_MOMENTS[kind.__name__] + more, optimizer="torch")


def _share(rows: list[_Row], *, is_known: bool) -> Share:
    specs = [row.spec for row in rows]
    adam16 = [replace(spec, dtype="bfloat16", moments=2) for spec in specs]  # the paper's setting
    return Share(
        num_params=sum(spec.numel for spec in specs),
        measured={kind: sum(row.measured[kind] for row in rows) for kind in KINDS},
        predicted={kind: sum(row.predicted[kind] for row in rows) for kind in KINDS},
        dense=sum(total(specs, "dense").values()) if is_known else None,
        paper=sum(total(adam16, "paper").values()),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
