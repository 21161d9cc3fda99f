"""The measured side of the ledger: bytes of the storages that a compressed model holds.

Each parameter becomes a `TensorSpec`, from which `predict` gives its bytes by kind; beside them
stand the bytes of the storages that are there. Each storage counts once.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from samo.core.modules import CompressedModule
from samo.core.optim import AdamW
from samo.core.shards import local_of
from samo.core.weight import weight_of
from samo.errors import CompressionError
from samo.kernels.reference import bias_corrections
from samo.memory.predict import (
    KINDS,
    STATE_KINDS,
    Kind,
    TensorSpec,
    dense_bytes,
    paper_bytes,
    predict,
)

__all__ = ["Ledger", "ledger"]

_LABELS: dict[Kind, str] = {
    "dense": "dense weights",
    "ages": "ages of entries",
    "buckets": "buckets of DDP",
}
"""Of kinds that are not called by their name."""
_UNITS: Final = (("GB", 9), ("MB", 6), ("kB", 3))


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The bytes of the pruned or of the unpruned parameters."""

    num_params: int
    """Dense parameters."""
    measured: dict[Kind, int]
    """Bytes held now, by kind."""
    predicted: dict[Kind, int]
    """Bytes held after the first step, by kind; state of unknown optimizers once it exists."""
    dense: int | None
    """Bytes of dense training with the same optimizer, or with Adam by default; None if unknown."""
    paper: int
    """Bytes by the SAMO paper's formula."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Bytes by kind: measured, predicted, dense and by the paper's formula. Printing it shows a table.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.LayerNorm(1024))
        >>> masks = samo.prune(model, 0.9)
        >>> model = samo.compress_(model, masks, dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
        >>> opt = samo.AdamW(model.parameters())
        >>> model(torch.ones(1, 1024, dtype=torch.bfloat16)).float().sum().backward()
        >>> opt.step()
        >>> account = samo.ledger(model, opt)
        >>> account.measured_bytes == account.predicted_bytes
        True
        >>> round(sum(account.pruned.measured.values()) / account.pruned.num_params, 2)
        3.53
    """

    pruned: Share
    """Parameters with a mask."""
    unpruned: Share
    """Parameters without: embeddings, norms, biases."""
    other_bytes: int
    """Step counts, padding, tables: a few bytes a parameter."""
    buffer_bytes: int
    """The model's own buffers."""
    optimizers: tuple[str, ...] = ()
    """Class names of the optimizers."""
    unknown: tuple[str, ...] = ()
    """Optimizers whose state cannot be predicted before their first step."""

    @property
    def num_params(self) -> int:
        """Dense parameters of the model."""
        return self.pruned.num_params + self.unpruned.num_params

    @property
    def measured_bytes(self) -> int:
        """Bytes of model state held now."""
        return sum(self.pruned.measured.values()) + sum(self.unpruned.measured.values())

    @property
    def predicted_bytes(self) -> int:
        """Bytes of model state predicted."""
        return sum(self.pruned.predicted.values()) + sum(self.unpruned.predicted.values())

    @property
    def dense_bytes(self) -> int | None:
        """Bytes of the same model trained densely with the same optimizer, or with Adam, if known."""
        if self.pruned.dense is None or self.unpruned.dense is None:
            return None
        return self.pruned.dense + self.unpruned.dense

    @property
    def paper_bytes(self) -> int:
        """Bytes of the same model by the SAMO paper's formula."""
        return self.pruned.paper + self.unpruned.paper

    def to_json(self) -> str:
        """Return all fields and sums as JSON.

        Example:
            >>> import json, torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.prune(model, 0.9))
            >>> json.loads(samo.ledger(model).to_json())["pruned"]["num_params"]
            4096
        """
        names = ("num_params", "measured_bytes", "predicted_bytes", "dense_bytes", "paper_bytes")
        sums = {name: getattr(self, name) for name in names}
        return json.dumps({**sums, **dataclasses.asdict(self)})

    def __str__(self) -> str:
        unit, power = self._unit()

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
            measured, predicted = sum(share.measured.values()), sum(share.predicted.values())
            for kind in KINDS:
                if share.measured[kind] or share.predicted[kind]:
                    label = f"  {_LABELS.get(kind, kind)}"
                    lines.append(row(label, share.measured[kind], share.predicted[kind], count))
            lines.append(row("  together", measured, predicted, count))
        dense, count = self.dense_bytes, self.num_params
        lines.append(row("all", self.measured_bytes, self.predicted_bytes, count))
        if dense is not None:
            lines.append(row("dense training", None, dense, count))
        lines.append(row("SAMO paper, 16-bit", None, self.paper_bytes, count))
        if self.unknown:
            lines.append(f"state of {', '.join(self.unknown)}: unknown until the first step")
        elif self.measured_bytes < self.predicted_bytes:
            lines.append(
                "gradients are held from backward() to zero_grad(), moments from the first step"
            )
        if dense is not None and self.optimizers and not self.unknown:
            saved = 1 - self.predicted_bytes / dense
            lines.append(f"saved against dense: {saved:.1%}; activations are not included")
        return "\n".join(lines)

    def _unit(self) -> tuple[str, int]:
        """Return the largest unit that fits the sum, or the next if a row would be 0.00."""
        whole = max(self.measured_bytes, self.predicted_bytes)
        place = next((n for n, (_, power) in enumerate(_UNITS) if whole >= 10**power), 2)
        columns = [
            column
            for share in (self.pruned, self.unpruned)
            for column in (share.measured, share.predicted)
        ]
        smallest = min((size for column in columns for size in column.values() if size), default=0)
        if 0 < smallest < 0.005 * 10 ** _UNITS[place][1]:
            place = min(place + 1, 2)
        return _UNITS[place]


@torch.no_grad()
def ledger(model: nn.Module, opt: Optimizer | Sequence[Optimizer] | None = None) -> Ledger:
    """Account for every byte of model state that a compressed model and its optimizers hold now.

    Dense weights exist from the first forward pass on, gradients from the first backward pass, and
    moments from the first step; before that they are predicted but not measured.

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
        saved against dense: 81.4%; activations are not included

    On several ranks this is the account of one rank, with its own shards of parameters. For a model
    wrapped by DistributedDataParallel it has torch's buckets, a copy of all gradients that
    ``gradient_as_bucket_view=True`` avoids.

    Args:
        model: A compressed model, wrapped or not.
        opt: Its optimizer, of samo or any other, or several. Without one no moments are predicted.

    Raises:
        CompressionError: The model is not compressed.
    """
    if not any(isinstance(module, CompressedModule) for module in model.modules()):
        raise CompressionError(
            "the model is not compressed; call samo.compress_(model, masks) first"
        )
    given = [opt] if isinstance(opt, Optimizer) else list(opt or ())
    opts = [getattr(one, "optim", one) for one in given]  # what ZeroRedundancyOptimizer shards
    owners: dict[int, list[_Owner]] = {}
    for one in opts:
        for group in one.param_groups:
            for param in group["params"]:
                owners.setdefault(id(param), []).append((one, group))
    meter = _Meter()
    buffer_bytes = sum(meter.count(buffer) for buffer in model.buffers())
    has_buckets = isinstance(model, DistributedDataParallel) and not model.gradient_as_bucket_view
    rows = []
    for param in model.parameters():
        if param.is_floating_point():
            row = _Row.of(param, meter, has_buckets=has_buckets)
            for owner in owners.get(id(param), ()):
                row.add_state(param, *owner, meter)
            if not opts:  # compare with dense training by Adam
                row.spec = replace(row.spec, moments=2)
            rows.append(row)
    other = meter.shared_bytes + sum(meter.count(table) for table in _tables(opts))
    state = tree_leaves([dict(one.state) for one in opts])
    other += sum(meter.count(leaf) for leaf in state if isinstance(leaf, Tensor))
    return Ledger(
        pruned=_share(row for row in rows if row.spec.is_pruned),
        unpruned=_share(row for row in rows if not row.spec.is_pruned),
        other_bytes=other,
        buffer_bytes=buffer_bytes,
        optimizers=tuple(type(one).__name__ for one in given),
        unknown=tuple(dict.fromkeys(name for row in rows for name in row.unknown)),
    )


class _Meter:
    """Counts each storage once, however many tensors refer to it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.shared_bytes = 0  # of storages for several parameters, what no view covers

    def count(self, tensor: Tensor | None) -> int:
        """Count all of a tensor's storage."""
        if tensor is None:
            return 0
        storage = local_of(tensor).untyped_storage()
        if storage.data_ptr() in self._seen:
            return 0
        self._seen.add(storage.data_ptr())
        return storage.nbytes()

    def count_view(self, tensor: Tensor | None) -> int:
        """Count a view of a storage that several may share, as gradients do in buckets."""
        if tensor is None:
            return 0
        nbytes = local_of(tensor).nbytes
        self.shared_bytes += self.count(tensor) - nbytes
        return nbytes


_Owner = tuple[Optimizer, dict[str, Any]]
"""An optimizer and one of its parameter groups."""


@dataclass
class _Row:
    """The account of one parameter."""

    spec: TensorSpec
    measured: dict[Kind, int]
    predicted: dict[Kind, int]
    unknown: list[str]
    """Optimizers that have no state yet and cannot be predicted."""
    is_known: bool = True
    """Whether all its optimizers can be predicted."""

    @classmethod
    def of(cls, param: nn.Parameter, meter: _Meter, *, has_buckets: bool) -> "_Row":
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
        )
        predicted = predict(spec, has_buckets=has_buckets)
        measured: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        # FSDP2 pads shards to the same length.
        measured["values"] = meter.count_view(param) if is_sharded else meter.count(param)
        measured["gradients"] = meter.count_view(param.grad)
        if weight is not None:
            measured["dense"] = meter.count(weight.dense)
        if mask is not None:
            measured["bitmap"] = meter.count(mask.words) + meter.count(mask.offsets)
        # DDP's reducer allocates its buckets when it is built, out of reach of Python.
        measured["buckets"] = predicted["buckets"]
        return cls(spec, measured, predicted, [])

    def add_state(
        self, param: nn.Parameter, opt: Optimizer, group: dict[str, Any], meter: _Meter
    ) -> None:
        state = opt.state.get(param, {})
        held: dict[Kind, int] = dict.fromkeys(STATE_KINDS, 0)
        for key, value in state.items():
            is_vector = isinstance(value, Tensor) and key not in _SCALARS
            if is_vector and (value.dim() > 0 or param.dim() == 0):
                held[_KEYS.get(key, "moments")] += meter.count(value)
        spec = _with_state(self.spec, opt, group)
        self.is_known &= spec is not None
        expected = held  # of a parameter frozen after training, or of an unknown optimizer
        if spec is not None and param.requires_grad:
            expected = predict(spec)
            self.spec = replace(self.spec, moments=self.spec.moments + spec.moments)
        elif not state and param.requires_grad:
            self.unknown.append(type(opt).__name__)
        for kind in STATE_KINDS:
            self.measured[kind] += held[kind]
            self.predicted[kind] += expected[kind]


_KEYS: Final[dict[str, Kind]] = {
    "age": "ages",
    "remainder": "corrections",
    "correction": "corrections",
}
"""State that is not a moment."""

_SCALARS: Final = ("step", "mu_product", "eta", "mu")
"""State that is one number, whatever the shape of the parameter."""

_TORCH: Final[dict[type[Optimizer], Callable[[dict[str, Any]], int]]] = {
    torch.optim.Adam: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.AdamW: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.Adadelta: lambda group: 2,
    torch.optim.Adagrad: lambda group: 1,
    torch.optim.Adamax: lambda group: 2,
    torch.optim.ASGD: lambda group: 1,
    torch.optim.NAdam: lambda group: 2,
    torch.optim.RAdam: lambda group: 2,
    torch.optim.RMSprop: lambda group: 1 + bool(group["momentum"]) + bool(group["centered"]),
    torch.optim.Rprop: lambda group: 2,
    torch.optim.SGD: lambda group: int(bool(group["momentum"])),
}
"""Number of moments that torch's optimizers keep, from the settings of a group."""


def _with_state(spec: TensorSpec, opt: Optimizer, group: dict[str, Any]) -> TensorSpec | None:
    """Return a spec with the state that an optimizer will keep; None if that is not known."""
    if isinstance(opt, AdamW):
        is_lean = group["lean"] and spec.is_trained
        return replace(spec, moments=2, is_lean=is_lean, has_ages=group["entry_steps"])
    count = _TORCH.get(type(opt))
    return None if count is None else replace(spec, moments=count(group), optimizer="torch")


def _share(rows: Iterable[_Row]) -> Share:
    rows = list(rows)
    is_known = all(row.is_known for row in rows)
    return Share(
        num_params=sum(row.spec.numel for row in rows),
        measured={kind: sum(row.measured[kind] for row in rows) for kind in KINDS},
        predicted={kind: sum(row.predicted[kind] for row in rows) for kind in KINDS},
        dense=sum(dense_bytes(row.spec) for row in rows) if is_known else None,
        paper=sum(paper_bytes(row.spec) for row in rows),
    )


def _tables(opts: list[Any]) -> list[Tensor]:
    """Return the tables of bias corrections by age, which kernels share among parameters."""
    found = {
        (*group["betas"], param.device)
        for opt in opts
        if isinstance(opt, AdamW)
        for group in opt.param_groups
        for param in group["params"]
        if "age" in opt.state.get(param, {})
    }
    return [table for key in found for table in bias_corrections(*key)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
