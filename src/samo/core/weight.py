"""`Weight`: the state of one compressed parameter.

The parameter is the values. A *streamed* dense weight is expanded where it is used
(`samo.core.streamed`). A *resident* one is a copy of the values in the compute dtype, kept between
uses:

    values   kept entries   in module._parameters, the optimizer and state_dict()
    dense    full shape     what module.weight returns; zeros where pruned

Both can be written: the values by optimizers or ``load_state_dict``, the dense weight through
``module.weight``. The next read syncs them by torch's version counters. Writes through ``.data`` of
the values do not bump a counter, so every optimizer step refreshes the dense weights of its
parameters (`samo.core.step_hooks`).
"""

import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from samo import kernels as _kernels
from samo.core import products  # noqa: F401  (registers handlers)
from samo.core.dense import (
    DenseWeight,
    Expand,
    Layout,
    Traced,
    as_dense_weight,
    expand_by_index,
    run_first,
    stream_on,
)
from samo.core.streamed import (
    LOCK as _LOCK,
    LiveExpansion,
    StreamedWeight,
    streamed_weight,
    written_twice,
)
from samo.errors import CompressionError
from samo.mask.mask import Mask

# torch.compile specializes on the length of a parameter and would recompile equal blocks whose
# masks keep different counts. This pattern marks those lengths dynamic. The rest stay static, which
# is faster.
torch.compiler.config.dynamic_sources = ",".join(
    filter(None, [torch.compiler.config.dynamic_sources, r".*_samo_weights.*\.ragged\[0\]"])
)

_F = TypeVar("_F", bound=Callable[..., Any])


def _untracked(function: _F) -> _F:
    """Run a function without autograd; tensors that it creates have version counters."""
    return torch.inference_mode(False)(torch.no_grad()(function))


class Weight:
    """The values of one parameter, their mask, and the dense weight used in computation."""

    values: nn.Parameter
    dense: Tensor | None  # the copy of a resident weight
    traced: Traced | None  # what compiled code reads; None for a ragged weight, or a vector
    ragged: Traced | None  # the same for a ragged weight, whose length stays dynamic
    expansions: list[LiveExpansion]  # live expansions returned to callers, who may write to them
    mesh: DeviceMesh | None = None  # over which the values are sharded, if they ever were
    hooks: dict[int, Any] | None = None  # those of `_tracked`, for the tensor that replaces it
    _plain: DenseWeight | None  # the resident copy, as returned without gradients
    _tracked: DenseWeight | None  # and with gradients
    _streamed: StreamedWeight | None  # what `read` returns for a streamed weight
    _stream: int  # of the nodes of `_tracked` and `_streamed`
    _stream_now: Callable[[], int]
    _version: int
    _dense_version: int
    _address: int
    _synced: Tensor | None  # shares the values' memory, so that no other can have its address
    _taken: nn.Parameter | None = None  # by `take`: FSDP2 swaps it in and out in every pass

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        mask: Mask | None,
        dtype: torch.dtype,
        value_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        path: _kernels.Path,
    ) -> None:
        self.name: Final = name
        self.path: Final = path
        self.is_resident = False  # until `samo.core.compress.keep_resident` decides
        self.is_ragged = False
        self.dtype = dtype
        self.dense_dtype = param.dtype  # what decompress_ restores
        self.attributes: Final = dict(param.__dict__)  # custom attributes of the parameter
        strides = torch.empty_like(param, device="meta").stride()
        mask = mask if mask is None or param.is_meta else mask.to(param.device)
        kernels = _kernels.choose(param.device, path)
        self.layout = Layout(param.shape, strides, mask, grad_dtype, kernels, [])
        self.is_vector = mask is None and param.dim() < 2
        if mask is None:
            values = param.detach().to(value_dtype, copy=True)
        elif param.is_meta:
            values = torch.empty(mask.kept, dtype=value_dtype, device="meta")
        else:
            values = self.layout.compress(param.detach(), value_dtype)
        self.bind(nn.Parameter(values, requires_grad=param.requires_grad))
        self.values.__dict__.update(self.attributes)
        ORIGINS[param] = weakref.ref(self)
        param.grad = None  # an old optimizer would go on with it

    @property
    def mask(self) -> Mask | None:
        """Kept entries; None if nothing is pruned."""
        return self.layout.mask

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense weight."""
        return self.layout.shape

    @property
    def kept(self) -> int:
        """Number of kept entries."""
        return self.shape.numel() if self.mask is None else self.mask.kept

    @property
    def dense_bytes(self) -> int:
        """Size of the dense weight."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        """Device of the values and the dense weight."""
        return self.values.device

    # What module.weight returns -----------------------------------------------------------------

    def read(self, values: Any) -> Any:
        """Return the dense weight for the tensor in ``module._parameters``: usually the values."""
        if is_compiling():
            from samo.core.traced import read  # registers operators, which takes time

            traced = self.ragged if self.traced is None else self.traced
            # Read `traced` first: the compiler names a tensor by where it first sees it.
            if traced is not None and traced[0] is values:
                return read(self, traced)
            # torch fuses the cast with what reads it.
            return values.to(self.dtype) if self.is_vector else self._read_others(values)
        if values is not self.values:
            return self._read_others(values)
        if not self.is_resident:
            return self._read_streamed()
        if (  # inlined from `sync`: this runs in every forward pass
            values._version != self._version
            or values.data_ptr() != self._address
            or self.dense is None
            or self.dense._version != self._dense_version
        ):
            self.sync()
        if not values.requires_grad:
            return self._plain
        tracked = self._tracked
        if tracked is None or self._stream != self._stream_now():
            if torch._C._functorch.peek_interpreter_stack() is not None:  # vmap, jacrev, ...
                return expand_by_index(values, self.layout, self.dtype)
            self._tracked = tracked = None  # the old node goes first: see `stream_on`
            self._stream = self._stream_now()
            args = (values, self.dense, self.layout, self.dtype)
            with torch.inference_mode(False), torch.enable_grad():
                made = Expand.apply(*args)  # type: ignore[no-untyped-call]
            run_first(made)
            if self.hooks:
                made._backward_hooks = self.hooks
                made.grad_fn._register_hook_dict(made)
            self._tracked = tracked = as_dense_weight(made, self)
        return tracked

    def _read_streamed(self) -> Tensor:
        """Return a tensor without storage; sharded values as they are, for wrappers like FSDP2."""
        if isinstance(self.values, DTensor) or (
            self.mask is None and self.values.dtype == self.dtype
        ):
            return self.values
        values, streamed = self.values, self._streamed
        if (
            streamed is None
            or streamed._param is not values
            or streamed._is_tracked != values.requires_grad
            or self._stream != self._stream_now()
        ):
            self._streamed = streamed = None  # the old node goes first: see `stream_on`
            self._stream = self._stream_now()
            with torch.inference_mode(False), torch.enable_grad():
                own = weakref.ref(self)
                self._streamed = streamed = streamed_weight(values, self.layout, self.dtype, own)
            streamed.__dict__.update(self.attributes)
        return streamed

    def _read_others(self, values: Any) -> Any:
        """Expand other values than the weight's own, as `torch.func.functional_call` passes."""
        if not isinstance(values, Tensor) or hasattr(values, "__tensor_flatten__"):
            return values  # None, or shards read by a wrapper
        if values.shape == self.shape and self.mask is not None:
            return values  # a dense weight
        if values.shape[-1:] != self.values.shape[-1:]:
            raise CompressionError(
                f"'{self.name}' takes {self.kept:,} values or a dense weight of "
                f"{tuple(self.shape)}, got {tuple(values.shape)}"
            )
        return expand_by_index(values, self.layout, self.dtype)

    def prepare_traced(self) -> None:
        """Collect what compiled code reads."""
        shape, strides, mask, _, _, watchers = self.layout
        is_watched = bool(watchers or self.hooks)
        self.traced = self.ragged = None
        if self.is_vector and not is_watched:
            return  # compiled code casts the parameter itself
        sizes = " ".join(map(str, shape)), " ".join(map(str, strides))
        words = (*sizes, str(self.dtype).removeprefix("torch."), "watched" if is_watched else "")
        bitmap = None if mask is None else mask.packed
        traced = (self.values, self.dense, bitmap, "/".join(words))
        if self.is_ragged:
            self.ragged = traced
        else:
            self.traced = traced

    def watch(self, watcher: Callable[[Tensor], None]) -> Callable[[], None]:
        """Call ``watcher`` with every dense gradient; return a function that removes it."""
        self.layout.watchers.append(watcher)
        self.prepare_traced()

        def end() -> None:
            self.layout.watchers.remove(watcher)
            self.prepare_traced()

        return end

    # Keeping values and dense weight in sync ----------------------------------------------------

    @_untracked
    def sync(self) -> None:
        """Update whichever of values and dense weight is stale; raise an error if both are."""
        with _LOCK:
            is_moved = (
                self.values._version != self._version or self.values.data_ptr() != self._address
            )
            if self.dense is None or (is_moved and not self._is_written()):
                self._refresh()
            elif self._is_written():
                if is_moved:
                    raise written_twice(self.name)
                self.take_dense(self.dense)
                self._tracked = None  # the in-place write changed its history
                self._refresh()

    def sync_written(self) -> None:
        """Apply writes to ``module.weight`` to the values, before the values are used."""
        self._apply_expansions()
        if self._is_written():
            self.sync()

    def _apply_expansions(self) -> None:
        for expansion in tuple(self.expansions):
            expansion.apply_writes()

    def _is_written(self) -> bool:
        return self.dense is not None and self.dense._version != self._dense_version

    @_untracked
    def refresh(self) -> None:
        """Recompute a resident dense weight, regardless of version counters."""
        if self.dense is not None:
            with _LOCK:
                self._refresh()

    @_untracked
    def write(self, dense: Tensor) -> None:
        """Take the kept entries of a dense tensor as the new values."""
        if dense.shape != self.shape:
            raise CompressionError(
                f"'{self.name}' is {tuple(self.shape)} and cannot be assigned "
                f"{tuple(dense.shape)}; call samo.decompress_(model) before you change shapes"
            )
        with _LOCK:
            self._apply_expansions()  # `weight.data += delta` assigns the one it just wrote to
            dense = dense.to(self.device)
            self.check_pruned(dense)
            self.values.copy_(self.layout.compress(dense, self.values.dtype))
            if self.is_resident:
                self._refresh()

    def mark_synced(self) -> None:
        """Record that values and dense weight agree."""
        if self.values.data_ptr() != self._address:
            self._address, self._synced = self.values.data_ptr(), self.values.detach()
        self._version = self.values._version
        self._dense_version = self.dense._version  # type: ignore[union-attr]

    def _refresh(self) -> None:
        if self.dense is None:
            self.dense = self.layout.new_dense(self.dtype, self.device)
            self._plain = as_dense_weight(self.dense.detach(), self)
            self._tracked = None
        if not self.dense.is_meta:
            self.layout.kernels.expand_(self.values.detach(), self.mask, self.dense)
        torch.autograd.graph.increment_version(self.dense)
        self.mark_synced()

    def take_dense(self, dense: Tensor) -> None:
        """Apply a write to the dense weight; entries it did not change keep their precision."""
        self.check_pruned(dense)
        new = self.layout.compress(dense, self.values.dtype)
        old = self.values.to(dense.dtype).to(self.values.dtype)
        self.values.copy_(torch.where(new == old, self.values, new))

    def check_pruned(self, dense: Tensor) -> None:
        """Warn if a dense tensor has nonzero entries where the weight is pruned."""
        if self.mask is not None:
            kept = self.layout.compress(dense, dense.dtype)
            if dense.count_nonzero() != kept.count_nonzero():
                # One text for all weights, so that Python shows it once for a state dict.
                warnings.warn(
                    "nonzero values were written to pruned entries, which stay 0; to keep them, as "
                    "when adapters are merged, call samo.decompress_ first; to train them, give "
                    "the model other masks with samo.remap_",
                    stacklevel=_level_of_caller(),
                )

    # Identity -----------------------------------------------------------------------------------

    def bind(self, values: nn.Parameter) -> None:
        """Make ``values`` the parameter, move the mask to them, and build the dense weight.

        Eagerly, because compiled code cannot build it and would expand in every pass.
        """
        if isinstance(values, DTensor):
            if self.mesh is None:
                self.retire()
            self.is_resident, self.mesh = False, values.device_mesh
        else:
            if not values.is_meta:
                mask = None if self.mask is None else self.mask.to(values.device)
                kernels = _kernels.choose(values.device, self.path)
                self.layout = self.layout._replace(mask=mask, kernels=kernels)
            if values.grad_dtype != self.layout.grad_dtype:
                values.grad_dtype = self.layout.grad_dtype
            self._streamed = None  # sharded values keep it until the full values return
            self._stream_now = stream_on(values.device)
        self.values = values
        self.dense = self._plain = self._tracked = self._synced = None
        self.expansions = []
        self._version = self._dense_version = -1
        self._address = 0
        _WEIGHTS[_key(values)] = self
        if self.is_resident:
            if values.is_inference():
                raise CompressionError(
                    f"'{self.name}' cannot get a tensor made in inference mode, which counts no "
                    "writes; copy or load the model outside, or under torch.no_grad()"
                )
            self.sync()
        if isinstance(values, DTensor):  # until the whole values return
            self.traced = self.ragged = None
        else:
            self.prepare_traced()

    def take(self, values: nn.Parameter) -> None:
        """Compute with a parameter that replaces ours: a user's, or FSDP2's unsharded one.

        FSDP2 writes to it without bumping versions, so a resident copy would go stale: the weight
        becomes streamed. A new dtype is that of computation and gradients, too.
        """
        if values is self._taken:
            self.values = values
        if values is self.values:
            return
        if self.mesh is not None:
            self.is_resident, self._taken = False, values
        if self.mesh is not None or values.dtype != self.values.dtype:
            self.layout = self.layout._replace(grad_dtype=values.dtype)
        if values.dtype != self.values.dtype:
            self.dtype = values.dtype
        self.bind(values)

    @_untracked
    def set_mask(self, mask: Mask, values: Tensor, grad: Tensor | None) -> None:
        """Switch to another mask, with matching values and gradient.

        Later backward passes through graphs built with the old mask raise an error.
        """
        param = self.values
        with _LOCK:
            param.grad = None  # torch checks its length against the values
            if values.shape != param.shape:
                # A loss that is still alive keeps the AccumulateGrad node, which checks the old
                # length. Changing the dtype makes torch drop that node.
                other = torch.float32 if values.dtype == torch.float64 else torch.float64
                param.data = values.new_empty(0, dtype=other)
            param.data = values
            watchers = [*self.layout.watchers]
            self.layout.watchers[:] = [partial(_reject_gradient, self.name)]
            self.layout = self.layout._replace(mask=mask, watchers=watchers)
            param.grad_dtype = self.layout.grad_dtype
            param.grad = grad
            self._tracked = self._streamed = None
            if self.is_resident:
                self._refresh()
            self.prepare_traced()

    def retire(self) -> None:
        """Mark the values as unused, so that optimizers over them raise an error."""
        RETIRED[self.values] = self.name
        self.values.grad = None

    def before_apply(self) -> None:
        """Drop references until `after_apply`: torch swaps only tensors without other ones."""
        self.sync_written()
        _WEIGHTS.pop(_key(self.values), None)
        self.dense = self._plain = self._tracked = self._synced = None
        self._streamed = self._taken = None

    def after_apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Adopt the device and compute dtype that ``Module._apply`` gave the values."""
        dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        self.dtype = dtype if dtype.is_floating_point else self.dtype
        self.bind(self.values)

    def with_values(self, values: nn.Parameter) -> "Weight":
        """Return a weight like this one for other values."""
        made = Weight.__new__(Weight)
        made.__setstate__({**self.__getstate__(), "values": values})
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy; the rest is rebuilt."""
        self.sync_written()
        shape, strides, mask, grad_dtype, *_ = self.layout
        kept = ("name", "path", "is_resident", "is_ragged", "is_vector", "dtype", "dense_dtype")
        state = {key: vars(self)[key] for key in (*kept, "attributes", "values")}
        return {**state, "layout": (tuple(shape), strides, mask, grad_dtype)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        shape, strides, mask, grad_dtype = state.pop("layout")
        vars(self).update(state)
        kernels = _kernels.choose(self.values.device, self.path)
        self.layout = Layout(torch.Size(shape), strides, mask, grad_dtype, kernels, [])
        self.values.__dict__.update(self.attributes)  # deepcopy drops them
        self.bind(self.values)


def _reject_gradient(name: str, grad: Tensor) -> None:
    raise CompressionError(
        f"the mask of '{name}' changed between a forward pass and its backward pass; change masks "
        "after backward() and before the next forward pass"
    )


def _level_of_caller() -> int:
    """Return the stacklevel of a warning for the code that called samo or torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("samo", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def mark_ragged(weights: list[Weight], *, were_remapped: bool = False) -> None:
    """Mark a model's weights as ragged if layers of equal shape may keep different counts."""
    counts: dict[torch.Size, set[int]] = {}
    for weight in weights:
        if weight.mask is not None:
            counts.setdefault(weight.shape, set()).add(weight.kept)
    if were_remapped or any(len(found) > 1 for found in counts.values()):
        for weight in weights:
            if weight.mask is not None and not weight.is_ragged:
                weight.is_ragged = True
                weight.prepare_traced()


# From a tensor to its weight --------------------------------------------------------------------

_key: Final[Callable[[Tensor], int]] = object.__hash__
"""From the address, like ``id``, but no event for audit hooks: filelock has one, in Python, and
Inductor imports filelock."""

_WEIGHTS: Final[weakref.WeakValueDictionary[int, Weight]] = weakref.WeakValueDictionary()
"""From the keys of values to their weight. A key may be reused: `weight_of` looks at both."""

# The dict in it, of weak references: ``get`` of a WeakValueDictionary is a function of Python, and
# called for each parameter in each step.
_REFERENCES: Final[dict[int, weakref.ref[Weight]]] = _WEIGHTS.data  # type: ignore[attr-defined]

ORIGINS: Final = WeakTensorKeyDictionary()
"""From the dense parameter that a weight was, which an optimizer may still hold, to the weight."""

RETIRED: Final = WeakTensorKeyDictionary()
"""From values that `decompress_` or FSDP2 has replaced to the name of their weight."""


def weight_of(param: Tensor) -> Weight | None:
    """Return the weight whose values ``param`` is, if any."""
    found = _REFERENCES.get(_key(param))
    weight = None if found is None else found()
    return weight if weight is not None and weight.values is param else None


def weight_replacing(param: Tensor) -> Weight | None:
    """Return the weight that a dense parameter became."""
    found = ORIGINS.get(param)
    return None if found is None else found()
