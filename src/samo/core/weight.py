"""`Weight`: the state of one compressed parameter.

The parameter is the values. A *streamed* dense weight is expanded where it is used
(`samo.core.streamed`); a *resident* one is a copy of the values in the compute dtype, kept between
uses:

    values   1-D, fp32      in module._parameters, the optimizer and state_dict()
    dense    full shape     what module.weight returns; zeros where pruned

Both can be written: the values by optimizers or ``load_state_dict``, the dense weight through
``module.weight``. The next read syncs them by torch's version counters. Writes through ``.data`` of
the values do not bump a counter, so every optimizer step refreshes the dense weights of its
parameters.
"""

import warnings
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from samo import kernels as _kernels
from samo.core.dense import (
    DenseWeight,
    Expand,
    Layout,
    Traced,
    as_dense_weight,
    expand_by_index,
)
from samo.core.streamed import StreamedWeight
from samo.core.writes import LOCK as _LOCK, Handed
from samo.errors import CompressionError
from samo.mask.mask import Mask

__all__ = []

# torch.compile specializes on the length of a parameter and would recompile equal blocks whose
# masks keep different counts. This pattern marks those lengths dynamic. The rest stay static, which
# is faster.
torch.compiler.config.dynamic_sources = ",".join(
    filter(
        None,
        [
            torch.compiler.config.dynamic_sources,
            r".*'_samo_weights'.*\.ragged\.values",
        ],
    )
)

_FIRST: Final = 2**63 - 1
"""Sequence number of a node that runs as soon as its gradient is ready, like AccumulateGrad."""


class Types(NamedTuple):
    """The types of one compressed parameter."""

    dtype: torch.dtype
    """That of the dense weight."""
    value_dtype: torch.dtype
    grad_dtype: torch.dtype


class Weight:
    """The values of one parameter, their mask, and the dense weight used in computation.

    Args:
        name: Name of the parameter, for messages.
        param: The dense parameter that it was.
        mask: Kept entries; None for an unpruned parameter that computes in a narrower dtype.
        types: Dtypes of the dense weight, the values and the gradient.
        path: Which kernels to use.
        is_resident: Whether to keep the dense weight between uses.
    """

    values: nn.Parameter
    dense: Tensor | None
    """The copy of a resident weight."""
    traced: Traced | None
    """Everything compiled code reads; None if the weight is ragged."""
    ragged: Traced | None
    """The same for a ragged weight, whose length must stay dynamic in compiled code."""
    _streamed: StreamedWeight | None
    """What `read` returns for a streamed weight."""
    handed: list[Handed]
    """Live expansions returned to callers, who may write to them."""
    _plain: DenseWeight | None
    """The resident copy, as returned without and with gradients."""
    _tracked: DenseWeight | None
    _version: int
    _dense_version: int
    _address: int
    _taken: nn.Parameter | None = None
    """The last parameter passed to `take_over`; FSDP2 swaps it in and out in every pass."""
    mesh: DeviceMesh | None = None
    """Mesh over which the values are sharded, if they ever were."""

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        mask: Mask | None,
        types: Types,
        path: _kernels.Path,
        *,
        is_resident: bool = True,
    ) -> None:
        self.name: Final = name
        self.path: Final = path
        self.is_resident = is_resident
        self.is_ragged = False
        self.dtype = types.dtype
        self.dense_dtype = param.dtype  # what decompress_ gives back
        self.attributes: Final = dict(param.__dict__)  # what people hung on the parameter
        strides = torch.empty_like(param, device="meta").stride()
        device = torch.device("cpu") if param.is_meta else param.device
        kernels = _kernels.choose(device, path)
        self.layout = Layout(param.shape, strides, mask, types.grad_dtype, kernels, [])
        self.is_vector = mask is None and param.dim() < 2
        if mask is None:
            values = param.detach().to(types.value_dtype, copy=True)
        elif param.is_meta:
            values = torch.empty(mask.kept, dtype=types.value_dtype, device="meta")
        else:
            values = self.layout.compress(param.detach(), types.value_dtype)
        self.bind(nn.Parameter(values, requires_grad=param.requires_grad))
        self.values.__dict__.update(self.attributes)
        _ORIGINS[param] = weakref.ref(self)

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
    def device(self) -> torch.device:
        """Device of the values and the dense weight."""
        return self.values.device

    # What module.weight gives -------------------------------------------------------------------

    def read(self, values: Any) -> Any:
        """Return the dense weight for the tensor in ``module._parameters``: usually the values."""
        if torch.compiler.is_compiling():
            if self.is_vector:  # torch fuses the cast with what reads it
                return values.to(self.dtype)
            from samo.core.traced import read  # registers operators, which takes time

            traced = self.ragged if self.traced is None else self.traced
            # Read `traced` first: the compiler names a tensor by where it first sees it.
            return read(self, traced) if traced.values is values else self._read_others(values)  # type: ignore[union-attr]
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
        if not values.requires_grad or not torch.is_grad_enabled():
            return self._plain
        if self._tracked is None:
            assert self.dense is not None
            tracked = Expand.apply(values, self.dense, self.layout, self.dtype)  # type: ignore[no-untyped-call]
            # Autograd runs the most recent nodes first. This node is older than the pass it serves
            # and would run last, keeping every dense gradient alive until then.
            tracked.grad_fn._set_sequence_nr(_FIRST)
            self._tracked = as_dense_weight(tracked, self)
        return self._tracked

    def _read_streamed(self) -> Tensor:
        """Return the weight as a tensor without storage.

        Sharded values are returned as they are, for wrappers such as FSDP2 that read the attribute.
        """
        if isinstance(self.values, DTensor) or (
            self.mask is None and self.values.dtype == self.dtype
        ):
            return self.values
        if self._streamed is None or self._streamed._param is not self.values:
            self._streamed = StreamedWeight(
                self.values, self.layout, self.dtype, False, weakref.ref(self)
            )
            self._streamed.__dict__.update(self.attributes)
        return self._streamed

    def prepare_traced(self) -> None:
        """Collect what compiled code reads. Every object costs guard time in every call."""
        shape, strides, mask, _, _, watchers = self.layout
        sizes = "" if watchers else f"{' '.join(map(str, shape))}/{' '.join(map(str, strides))}"
        bitmap = None if mask is None else mask.packed
        traced = Traced(self.values, self.dense, bitmap, sizes, self.dtype)
        self.traced, self.ragged = (None, traced) if self.is_ragged else (traced, None)

    def _read_others(self, values: Any) -> Any:
        """Expand other values in place of the weight's own, as `torch.func.functional_call` passes."""
        if not isinstance(values, Tensor) or hasattr(values, "__tensor_flatten__"):
            return values  # None, or shards read by a wrapper
        if values.shape == self.shape and self.mask is not None:
            return values  # a dense weight
        if values.shape[-1:] != self.values.shape[-1:]:
            raise CompressionError(
                f"'{self.name}' keeps {self.kept:,} values, or {tuple(self.shape)} as a dense weight, and "
                f"was given {tuple(values.shape)}; take its shape from dict(model.named_parameters())"
            )
        return expand_by_index(values, self.layout, self.dtype)

    def watch(self, watcher: Callable[[Tensor], None]) -> Callable[[], None]:
        """Call ``watcher`` with every dense gradient; return a function that removes it."""
        watchers = self.layout.watchers
        watchers.append(watcher)
        self.prepare_traced()

        def end() -> None:
            self.layout.watchers.remove(watcher)
            self.prepare_traced()

        return end

    # Keeping values and dense weight in sync ----------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def sync(self) -> None:
        """Update whichever of values and dense weight is stale.

        Raises:
            CompressionError: Both were written.
        """
        with _LOCK:
            is_moved = (
                self.values._version != self._version or self.values.data_ptr() != self._address
            )
            if self._is_written():
                if is_moved:
                    raise CompressionError(
                        f"'{self.name}' was written in two ways since it was last used: through "
                        "module.weight and through its values in model.parameters(); read "
                        "module.weight between the two, or keep to one of them"
                    )
                self._adopt()
            elif is_moved or self.dense is None:
                self._refresh()

    def may_be_written(self) -> bool:
        """Return whether `sync_written` has anything to do, at little cost."""
        dense = self.dense  # `_is_written` inlined: optimizers ask for every weight in every step
        if dense is None:
            return bool(self.handed)
        return dense._version != self._dense_version or bool(self.handed)

    def sync_written(self) -> None:
        """Apply writes to ``module.weight`` to the values, before the values are used."""
        for handed in tuple(self.handed):
            handed.follow()
        if self._is_written():
            self.sync()

    def _is_written(self) -> bool:
        return self.dense is not None and self.dense._version != self._dense_version

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute a resident dense weight, regardless of version counters."""
        if self.dense is not None:
            with _LOCK:
                self._refresh()

    @torch.inference_mode(False)
    @torch.no_grad()
    def write(self, dense: Tensor) -> None:
        """Take the kept entries of a dense tensor as the new values.

        Raises:
            CompressionError: It has another shape.
        """
        if dense.shape != self.shape:
            raise CompressionError(
                f"'{self.name}' is {tuple(self.shape)} and cannot be given {tuple(dense.shape)}; to "
                "change a shape, call samo.decompress_(model) first and compress_ afterwards"
            )
        with _LOCK:
            dense = dense.to(self.device)
            self.check_pruned(dense)
            self.values.copy_(self.layout.compress(dense, self.values.dtype))
            if self.is_resident:
                self._refresh()

    def note(self) -> None:
        """Record that values and dense weight agree."""
        assert self.dense is not None
        self._version, self._address = self.values._version, self.values.data_ptr()
        self._dense_version = self.dense._version

    def _refresh(self) -> None:
        if self.dense is None:
            self.dense = self.layout.new_dense(self.dtype, self.device)
            self._plain = as_dense_weight(self.dense.detach(), self)
            self._tracked = None
        if not self.dense.is_meta:
            self.layout.kernels.expand_(self.values.detach(), self.mask, self.dense)
        torch.autograd.graph.increment_version(self.dense)
        self.note()

    def _adopt(self) -> None:
        """Apply a write to the dense weight; entries it did not change keep their full precision."""
        assert self.dense is not None
        self._take(self.dense)
        self._tracked = None  # the in-place write changed its history
        self._refresh()

    def _take(self, dense: Tensor) -> None:
        self.check_pruned(dense)
        new = self.layout.compress(dense, self.values.dtype)
        old = self.values.to(dense.dtype).to(self.values.dtype)
        self.values.copy_(torch.where(new == old, self.values, new))

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_written(self, dense: Tensor) -> None:
        """Apply a write to an expansion of a streamed weight."""
        with _LOCK:
            self._take(dense)

    def check_pruned(self, dense: Tensor) -> None:
        """Warn if a dense tensor has nonzero entries where the weight is pruned."""
        if self.mask is None:
            return
        kept = self.layout.compress(dense, dense.dtype)
        written = int(dense.count_nonzero()) - int(kept.count_nonzero())
        gathered = WRITTEN.get()
        if written and gathered is not None:
            gathered[self.name] = written
        elif written:
            warn_of_pruned(f"'{self.name}'", written, 5)

    # Identity -----------------------------------------------------------------------------------

    def bind(self, values: nn.Parameter) -> None:
        """Make ``values`` the parameter and build its dense weight.

        Eagerly, because compiled code cannot build it and would expand in every pass.
        """
        if isinstance(values, DTensor):
            if self.mesh is None:
                self.retire()
            self.is_resident, self.mesh = False, values.device_mesh
        else:
            if self.mask is not None and self.mask.words.device != values.device:
                self._place(values.device)
            if values.grad_dtype != self.layout.grad_dtype:
                values.grad_dtype = self.layout.grad_dtype
            self._streamed = None  # sharded values keep it until the full values return
        self.values = values
        self.dense = self._plain = self._tracked = None
        self.handed = []
        self._version = self._dense_version = -1
        self._address = 0
        _WEIGHTS[values] = weakref.ref(self)
        if self.is_resident:
            self.sync()
        if not isinstance(values, DTensor):
            self.prepare_traced()

    def take_over(self, values: nn.Parameter) -> None:
        """Compute with a parameter that replaces ours, such as FSDP2's unsharded one.

        FSDP2 writes to it without bumping versions, so a resident copy would go stale: the weight
        becomes streamed. The new parameter also sets the compute and gradient dtype.
        """
        if values is self._taken:
            self.values = values
        if values is self.values:
            return
        self.is_resident, self._taken = False, values
        if values.dtype != self.values.dtype:
            self.dtype = values.dtype
        self.layout = self.layout._replace(grad_dtype=values.dtype)
        self._place(values.device)
        self.bind(values)

    def _place(self, device: torch.device) -> None:
        """Move the mask to a device."""
        if device.type != "meta":
            mask = None if self.mask is None else self.mask.to(device)
            kernels = _kernels.choose(device, self.path)
            self.layout = self.layout._replace(mask=mask, kernels=kernels)

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_mask(self, mask: Mask, values: Tensor, grad: Tensor | None) -> None:
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
            self.layout.watchers[:] = [_OldMask(self.name)]
            self.layout = self.layout._replace(mask=mask, watchers=watchers)
            param.grad_dtype = self.layout.grad_dtype
            param.grad = grad
            self._tracked = self._streamed = None
            if self.is_resident:
                self._refresh()
            self.prepare_traced()

    def retire(self) -> None:
        """Mark the values as unused, so that optimizers over them raise an error."""
        _RETIRED[self.values] = self.name

    def release(self) -> None:
        """Drop references until `follow`: torch only swaps tensors without other references."""
        self.sync_written()
        _WEIGHTS.pop(self.values, None)
        self.dense = self._plain = self._tracked = self._streamed = self._taken = None

    def follow(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Adopt the device and compute dtype that ``Module._apply`` gave the values."""
        dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        self.dtype = dtype if dtype.is_floating_point else self.dtype
        self._place(self.device)
        self.bind(self.values)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy; the rest is rebuilt."""
        self.sync_written()
        kept = (
            "name",
            "path",
            "is_resident",
            "is_ragged",
            "is_vector",
            "dtype",
            "dense_dtype",
            "attributes",
            "values",
        )
        state = {key: vars(self)[key] for key in kept}
        shape, strides, mask, grad_dtype, *_ = self.layout
        return {**state, "layout": (tuple(shape), strides, mask, grad_dtype)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        shape, strides, mask, grad_dtype = state.pop("layout")
        vars(self).update(state)
        kernels = _kernels.choose(self.values.device, self.path)
        self.layout = Layout(torch.Size(shape), strides, mask, grad_dtype, kernels, [])
        self.values.__dict__.update(self.attributes)  # deepcopy drops them
        self.bind(self.values)


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


class _OldMask:
    """Raises an error for gradients of a replaced mask."""

    def __init__(self, name: str) -> None:
        self.name: Final = name

    def __call__(self, grad: Tensor) -> None:
        raise CompressionError(
            f"a backward pass brings '{self.name}' a gradient for the mask that it had in the forward "
            "pass, and its mask has changed since; call samo.remap_, or step() of what moves masks, after "
            "backward() and before the next forward pass"
        )


WRITTEN: Final[ContextVar[dict[str, int] | None]] = ContextVar("written", default=None)
"""Counts of nonzero pruned entries by name, collected while a state dict is loaded."""


def warn_of_pruned(name: str, written: int, stacklevel: int) -> None:
    """Say that entries other than 0 were written where nothing is kept."""
    warnings.warn(
        f"{written:,} values other than 0 were written to pruned entries of {name} and are set back to "
        "0: the mask stays as it is. To train them, give it another one with samo.remap_",
        stacklevel=stacklevel + 1,
    )


# From a tensor to its weight
# -------------------------------------------------------------------------

_WEIGHTS: Final = WeakTensorKeyDictionary()
"""From values to their weight."""

_ORIGINS: Final = WeakTensorKeyDictionary()
"""From the dense parameter that a weight was, which an optimizer may still hold, to the weight."""

_RETIRED: Final = WeakTensorKeyDictionary()
"""From values that `decompress_` or FSDP2 has replaced to the name of their weight."""


def weight_of(param: Tensor) -> Weight | None:
    """Return the weight whose values ``param`` is, if it is such a parameter."""
    found = _WEIGHTS.get(param)
    weight = None if found is None else found()
    return weight if weight is not None and weight.values is param else None


def weight_from(param: Tensor) -> Weight | None:
    """Return the weight that a dense parameter became."""
    found = _ORIGINS.get(param)
    return None if found is None else found()


def weights_among(opt: Optimizer) -> list[Weight]:
    """Return the weights whose values an optimizer has."""
    if not _WEIGHTS:
        return []
    found = (weight_of(param) for group in opt.param_groups for param in group["params"])
    return [weight for weight in found if weight is not None]


STEPPED: Final[weakref.WeakSet[Optimizer]] = weakref.WeakSet()
"""Optimizers that have made a step: their state has to follow when masks change."""


@torch.compiler.disable
def _before_step(opt: Optimizer, args: object, kwargs: object) -> None:
    """Refuse an optimizer whose parameters or state are not those of its weights any more."""
    if _ORIGINS or _RETIRED:
        for group in opt.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    continue
                if param in _RETIRED:
                    raise CompressionError(
                        f"this {type(opt).__name__} was built before decompress_ or fully_shard and "
                        f"holds the values that '{_RETIRED[param]}' had, which nothing computes with any "
                        "more; rebuild it on model.parameters()"
                    )
                weight = weight_from(param)
                if weight is not None:
                    raise CompressionError(
                        f"this {type(opt).__name__} was built before compress_ and holds the dense "
                        f"parameter that '{weight.name}' was, which nothing computes with any more; "
                        "rebuild it on model.parameters()"
                    )
    if opt not in STEPPED:
        _check_lengths(opt)
        STEPPED.add(opt)
    if not hasattr(opt, "refreshes_dense_weights"):
        for weight in weights_among(opt):
            weight.sync_written()


def _check_lengths(opt: Optimizer) -> None:
    """Refuse state that was loaded before `samo.remap_` and did not follow: torch writes past its end."""
    for weight in weights_among(opt):
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum"):
            found = (opt.state.get(weight.values) or {}).get(key)
            if isinstance(found, Tensor) and found.shape != weight.values.shape:
                raise CompressionError(
                    f"{type(opt).__name__} keeps '{key}' of {tuple(found.shape)} for '{weight.name}', which "
                    f"has {tuple(weight.values.shape)} values: it belongs to another mask; pass the optimizer "
                    "to samo.remap_(model, masks, opt), or load a state of this mask"
                )


@torch.compiler.disable
def _after_step(opt: Optimizer, args: object, kwargs: object) -> None:
    """Refresh dense weights: not every optimizer bumps versions (ZeroRedundancyOptimizer does not)."""
    if not hasattr(opt, "refreshes_dense_weights"):
        for weight in weights_among(opt):
            weight.refresh()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
