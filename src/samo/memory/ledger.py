"""The measured side of the ledger: bytes of the storages a compressed model actually holds."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    "bitmap": "bitmap",
    "values": "values",
    "gradients": "gradients",
    "moments": "moments",
    "corrections": "corrections",
    "ages": "ages of entries",
    "buckets": "buckets of DDP",
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
    """Bytes held once a step has been taken, by kind; state of unknown optimizers once it is there."""
    dense: int | None
    """Bytes of dense training with the same optimizer, or with Adam if none is given; None where it is
    not known what the optimizer would keep."""
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
    """Step counts, paddings, tables: a few bytes a parameter."""
    buffer_bytes: int
    """The model's own buffers."""
    optimizers: tuple[str, ...] = ()
    """Names of the optimizers' classes."""
    unknown: tuple[str, ...] = ()
    """Those of whose state nothing can be said before their first step."""

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
                "optimizers": self.optimizers,
                "unknown": self.unknown,
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
        dense = self.dense_bytes
        if dense is not None:
            lines.append(_row("dense training", None, dense, count, power))
        lines.append(_row("SAMO paper, 16-bit", None, self.paper_bytes, count, power))
        if self.unknown:
            lines.append(f"state of {', '.join(self.unknown)}: unknown until the first step")
        elif self.measured_bytes < self.predicted_bytes:
            lines.append(
                "gradients are held from backward() to zero_grad(), moments from the first step"
            )
        if dense is not None and self.optimizers and not self.unknown:
            saved = 1 - self.predicted_bytes / dense
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


@torch.no_grad()
def ledger(model: nn.Module, opt: Optimizer | Sequence[Optimizer] | None = None) -> Ledger:
    """Account for every byte of model state a compressed model and its optimizers hold right now.

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
        saved against dense: 81.4%; activations are not in this account

    On many ranks it is the account of this rank, which of parameters in shards has its own. Given as wrapped by DistributedDataParallel, the model's
    account has torch's buckets too, a copy of all gradients that ``gradient_as_bucket_view=True`` avoids.

    Args:
        model: A compressed model.
        opt: Its optimizer, ours or any other, or several. Without one no moments are predicted.

    Raises:
        CompressionError: The model is not compressed.
    """
    if not any(isinstance(module, CompressedModule) for module in model.modules()):
        raise CompressionError(
            "the model is not compressed; call samo.compress_(model, masks) first"
        )
    given = [opt] if isinstance(opt, Optimizer) else list(opt or ())
    opts = [getattr(one, "optim", one) for one in given]  # what ZeroRedundancyOptimizer shards
    owners: dict[int, list[tuple[Optimizer, dict[str, Any]]]] = {}
    for one in opts:
        for group in one.param_groups:
            for param in group["params"]:
                owners.setdefault(id(param), []).append((one, group))
    meter = _Meter()
    buffer_bytes = sum(meter.count(buffer) for buffer in model.buffers())
    has_buckets = isinstance(model, DistributedDataParallel) and not model.gradient_as_bucket_view
    rows = [
        _Row(param, owners.get(id(param), []), meter, has_opt=bool(opts), has_buckets=has_buckets)
        for param in model.parameters()
        if param.is_floating_point()
    ]
    other = meter.shared_bytes + _tables(opts, meter)
    other += sum(meter.count(tensor) for one in opts for tensor in _tensors(dict(one.state)))
    return Ledger(
        pruned=_share(row for row in rows if row.spec.is_pruned),
        unpruned=_share(row for row in rows if not row.spec.is_pruned),
        other_bytes=other,
        buffer_bytes=buffer_bytes,
        optimizers=tuple(type(one).__name__ for one in given),
        unknown=tuple(dict.fromkeys(name for row in rows for name in row.unknown)),
    )


class _Meter:
    """Counts each storage once, whoever refers to it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.shared_bytes = 0  # of buffers for several parameters, what no view covers

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
        """Count a parameter's part of a storage that several may share, as gradients do in buckets."""
        if tensor is None:
            return 0
        nbytes = local_of(tensor).nbytes
        self.shared_bytes += self.count(tensor) - nbytes
        return nbytes


class _Row:
    """The account of one parameter."""

    def __init__(
        self,
        param: nn.Parameter,
        owners: list[tuple[Optimizer, dict[str, Any]]],
        meter: _Meter,
        *,
        has_opt: bool,
        has_buckets: bool,
    ) -> None:
        weight = weight_of(param)
        mask = None if weight is None else weight.mask
        is_sharded = isinstance(param, DTensor)
        # Of shards FSDP2 reduces gradients to the type of the parameter.
        own_grad = None if weight is None or is_sharded else weight.layout.grad_dtype
        self.spec = TensorSpec(
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
        self.measured: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        # FSDP2 pads shards to the same length.
        self.measured["values"] = meter.count_view(param) if is_sharded else meter.count(param)
        self.measured["gradients"] = meter.count_view(param.grad)
        if weight is not None:
            self.measured["dense"] = meter.count(weight.dense)
        if mask is not None:
            self.measured["bitmap"] = meter.count(mask.words) + meter.count(mask.offsets)
        self.predicted = predict(self.spec, has_buckets=has_buckets)
        # Reducer and buckets are there from the start, but out of reach of Python.
        self.measured["buckets"] = self.predicted["buckets"]
        self.unknown: list[str] = []
        self.is_known = True
        for opt, group in owners:
            self._add_state(param, opt, group, meter)
        if not has_opt:  # for the comparison with dense training alone
            self.spec = replace(self.spec, moments=2)

    def _add_state(
        self, param: nn.Parameter, opt: Optimizer, group: dict[str, Any], meter: _Meter
    ) -> None:
        state = opt.state.get(param, {})
        held: dict[Kind, int] = dict.fromkeys(STATE_KINDS, 0)
        for key, value in state.items():
            is_vector = isinstance(value, Tensor) and key not in _SCALARS
            if is_vector and (value.dim() > 0 or param.dim() == 0):
                held[_KEYS.get(key, "moments")] += meter.count(value)
        for kind, size in held.items():
            self.measured[kind] += size
        spec = _with_state(self.spec, opt, group)
        self.is_known &= spec is not None
        if spec is not None and param.requires_grad:
            expected = predict(spec)
            self.spec = replace(self.spec, moments=self.spec.moments + spec.moments)
        else:  # frozen after it was trained, or of an optimizer that we do not know
            expected = held
            if not state and param.requires_grad:
                self.unknown.append(type(opt).__name__)
        for kind in STATE_KINDS:
            self.predicted[kind] += expected[kind]


_KEYS: Final[dict[str, Kind]] = {
    "age": "ages",
    "remainder": "corrections",
    "correction": "corrections",
}
"""State that is no moment."""

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
"""Vectors that optimizers of torch keep with the settings of a group."""


def _with_state(spec: TensorSpec, opt: Optimizer, group: dict[str, Any]) -> TensorSpec | None:
    """Return a parameter with what an optimizer will keep for it; None if that is not known."""
    if isinstance(opt, AdamW):
        return replace(
            spec,
            moments=2,
            is_lean=group["lean"] and spec.is_trained,
            has_ages=group["entry_steps"],
        )
    count = _TORCH.get(type(opt))
    return None if count is None else replace(spec, moments=count(group), optimizer="torch")


def _share(rows: Iterable[_Row]) -> Share:
    rows = list(rows)
    return Share(
        num_params=sum(row.spec.numel for row in rows),
        measured={kind: sum(row.measured[kind] for row in rows) for kind in KINDS},
        predicted={kind: sum(row.predicted[kind] for row in rows) for kind in KINDS},
        dense=sum(dense_bytes(row.spec) for row in rows)
        if all(row.is_known for row in rows)
        else None,
        paper=sum(paper_bytes(row.spec) for row in rows),
    )


def _tables(opts: list[Any], meter: _Meter) -> int:
    """Count the tables of bias corrections by age, which the kernels keep for all parameters."""
    found = {
        (*group["betas"], param.device)
        for opt in opts
        if isinstance(opt, AdamW)
        for group in opt.param_groups
        for param in group["params"]
        if "age" in opt.state.get(param, {})
    }
    return sum(meter.count(table) for key in found for table in bias_corrections(*key))


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _row(label: str, measured: int | None, predicted: int, count: int, power: int) -> str:
    held = predicted if measured is None else measured
    shown = "-" if measured is None else f"{measured / 10**power:,.2f}"
    return f"{label:<22}{shown:>12}{predicted / 10**power:>12,.2f}{held / count:>10.2f}"


def _as_dict(share: Share) -> dict[str, Any]:
    return {name: getattr(share, name) for name in Share.__slots__}
