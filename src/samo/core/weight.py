"""`Weight`: what belongs to one compressed parameter of a model.

The values are the parameter. The dense weight of a *streamed* one is made where it is used
(`samo.core.streamed`); that of a *resident* one is a copy of the values in the compute type, kept between
uses:

    values   1-D, fp32      in module._parameters, in the optimizer, in state_dict()
    dense    own shape      what module.weight shows; zeros where pruned

Both may be written: values by optimizers, ``load_state_dict`` or anybody else; the dense weight by who
writes to ``module.weight``. Whoever changed last is followed at the next read, told by torch's version
counters. Writes through ``.data`` of the *values* raise none: after a step of any optimizer the copies of
its parameters are made anew, whatever the counters say.
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
from samo.core.written import LOCK as _LOCK, Handed
from samo.errors import CompressionError
from samo.mask.mask import Mask

__all__ = []

# torch.compile takes the length of a parameter as fixed, and would compile equal blocks with unequal masks
# once for each. This is the name that it has for such values. All others stay fixed: it costs less.
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
"""Number of a node that runs as soon as its gradient is there, as torch's own of a parameter does."""


class Types(NamedTuple):
    """The types of one compressed parameter."""

    dtype: torch.dtype
    """That of the dense weight."""
    value_dtype: torch.dtype
    grad_dtype: torch.dtype


class Weight:
    """The values of one parameter, where they lie, and the dense weight that is computed with.

    Args:
        name: Name of the parameter, for messages.
        param: The dense parameter that it was.
        mask: Which entries are kept; None for an unpruned parameter that is computed with in a
            narrower type.
        types: Types of the dense weight, the values and their gradient.
        path: Which kernels are used.
        is_resident: Whether the dense weight is kept between uses.
    """

    values: nn.Parameter
    dense: Tensor | None
    """The copy of a resident weight."""
    traced: Traced | None
    """All that compiled code reads; None of a ragged weight."""
    ragged: Traced | None
    """The same of a ragged one, whose number of values compiled code must not take for a constant."""
    _streamed: StreamedWeight | None
    """What is handed out of a streamed weight."""
    handed: list[Handed]
    """Its expansions that are in somebody's hands, and may be written to."""
    _plain: DenseWeight | None
    """The copy as it is handed out without gradients, and with them."""
    _tracked: DenseWeight | None
    _version: int
    _dense_version: int
    _address: int
    _taken: nn.Parameter | None = None
    """What `take_over` took over last: it comes and goes in every pass."""
    mesh: DeviceMesh | None = None
    """The ranks that have shards of the values, if they were ever sharded."""

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
        """Which entries are kept; None if all are."""
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
        """Where values and dense weight are."""
        return self.values.device

    # What module.weight gives -------------------------------------------------------------------

    def read(self, values: Any) -> Any:
        """Return the dense weight for what stands in ``module._parameters``: its values, or others."""
        if torch.compiler.is_compiling():
            if self.is_vector:  # torch fuses the cast with what reads it
                return values.to(self.dtype)
            from samo.core.traced import read  # registers operators, which takes time

            traced = self.ragged if self.traced is None else self.traced
            # In this order: the name that the compiler sees first is the one it takes.
            return read(self, traced) if traced.values is values else self._read_others(values)  # type: ignore[union-attr]
        if values is not self.values:
            return self._read_others(values)
        if not self.is_resident:
            return self._read_streamed()
        if (  # `sync` asks the same; here each call counts, in every forward pass
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
            # The engine takes nodes made last first, and this one serves for many passes: left alone,
            # it would wait for the end of each, and all dense gradients with it.
            tracked.grad_fn._set_sequence_nr(_FIRST)
            self._tracked = as_dense_weight(tracked, self)
        return self._tracked

    def _read_streamed(self) -> Tensor:
        """Return the weight as a tensor without memory; whole parameters as they are, if of the right type.

        Shards are what wrappers read here for themselves.
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
        """Put together what compiled code reads: few objects, for each costs time in each call."""
        shape, strides, mask, _, _, watchers = self.layout
        sizes = "" if watchers else f"{' '.join(map(str, shape))}/{' '.join(map(str, strides))}"
        bitmap = None if mask is None else mask.packed
        traced = Traced(self.values, self.dense, bitmap, sizes, self.dtype)
        self.traced, self.ragged = (None, traced) if self.is_ragged else (traced, None)

    def _read_others(self, values: Any) -> Any:
        """Expand values that are not the weight's own, as `torch.func.functional_call` brings."""
        if not isinstance(values, Tensor) or hasattr(values, "__tensor_flatten__"):
            return values  # None, or shards that a wrapper reads here for itself
        if values.shape == self.shape and self.mask is not None:
            return values  # a dense weight
        if values.shape[-1:] != self.values.shape[-1:]:
            raise CompressionError(
                f"'{self.name}' keeps {self.kept:,} values, or {tuple(self.shape)} as a dense weight, and "
                f"was given {tuple(values.shape)}; take its shape from dict(model.named_parameters())"
            )
        return expand_by_index(values, self.layout, self.dtype)

    def watch(self, watcher: Callable[[Tensor], None]) -> Callable[[], None]:
        """Call ``watcher`` with each dense gradient from now on; what is returned ends that."""
        watchers = self.layout.watchers
        watchers.append(watcher)
        self.prepare_traced()

        def end() -> None:
            self.layout.watchers.remove(watcher)
            self.prepare_traced()

        return end

    # Values and dense weight follow each other --------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def sync(self) -> None:
        """Let the side that was not written follow the one that was.

        Raises:
            CompressionError: Both were.
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

    def sync_written(self) -> None:
        """Let the values follow a write to ``module.weight`` before they are looked at."""
        for handed in tuple(self.handed):
            handed.follow()
        if self._is_written():
            self.sync()

    def _is_written(self) -> bool:
        return self.dense is not None and self.dense._version != self._dense_version

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Make a resident dense weight anew, whatever the version counters say."""
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
        """Note that values and dense weight agree."""
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
        """Follow a write to the dense weight; entries that it left alone keep all their digits."""
        assert self.dense is not None
        self._take(self.dense)
        self._tracked = None  # an operation in place gave it another history
        self._refresh()

    def _take(self, dense: Tensor) -> None:
        self.check_pruned(dense)
        new = self.layout.compress(dense, self.values.dtype)
        old = self.values.to(dense.dtype).to(self.values.dtype)
        self.values.copy_(torch.where(new == old, self.values, new))

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_written(self, dense: Tensor) -> None:
        """Take up what was written to an expansion of a streamed weight."""
        with _LOCK:
            self._take(dense)

    def check_pruned(self, dense: Tensor) -> None:
        """Warn if a dense tensor has entries other than 0 where nothing is kept."""
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
        """Take ``values`` as the parameter, and make its dense weight anew.

        At once: compiled code cannot make it, and would expand in every pass.
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
            self._streamed = None  # with shards it waits for the whole values to come back
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
        """Compute with the parameter that somebody else puts in the place of ours, as FSDP2 does.

        Its owner writes to it unseen, so a resident copy would go stale: the weight is streamed from
        now on. The owner also says which type to compute in, and which type gradients have.
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
        """Bring the mask to the device of the values."""
        if device.type != "meta":
            mask = None if self.mask is None else self.mask.to(device)
            kernels = _kernels.choose(device, self.path)
            self.layout = self.layout._replace(mask=mask, kernels=kernels)

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_mask(self, mask: Mask, values: Tensor, grad: Tensor | None) -> None:
        """Take another mask, with the values and the gradient that belong to it.

        A backward pass over what was computed before is refused: its gradients are of the old mask.
        """
        param = self.values
        with _LOCK:
            param.grad = None  # torch compares its length with that of the values
            if values.shape != param.shape:
                # A loss that is still held keeps the node alive that takes up gradients, and that
                # insists on the old length; values of another type make torch forget it.
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
        """Note that nothing computes with the values any more, so that no optimizer goes on with them."""
        _RETIRED[self.values] = self.name

    def release(self) -> None:
        """Let go of the values until `follow`: torch swaps only tensors that nothing refers to."""
        self.sync_written()
        _WEIGHTS.pop(self.values, None)
        self.dense = self._plain = self._tracked = self._streamed = self._taken = None

    def follow(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow what ``Module._apply`` has done to the values: another device, another compute type."""
        dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        self.dtype = dtype if dtype.is_floating_point else self.dtype
        self._place(self.device)
        self.bind(self.values)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle and deepcopy take along: the rest is made anew."""
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
        self.values.__dict__.update(self.attributes)  # which a deep copy of a parameter lacks
        self.bind(self.values)


def mark_ragged(weights: list[Weight], *, were_remapped: bool = False) -> None:
    """Tell the weights of a model if equal layers may keep different numbers of values."""
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
    """Refuses the gradients of a mask that a weight no longer has."""

    def __init__(self, name: str) -> None:
        self.name: Final = name

    def __call__(self, grad: Tensor) -> None:
        raise CompressionError(
            f"a backward pass brings '{self.name}' a gradient for the mask that it had in the forward "
            "pass, and its mask has changed since; call samo.remap_, or step() of what moves masks, after "
            "backward() and before the next forward pass"
        )


WRITTEN: Final[ContextVar[dict[str, int] | None]] = ContextVar("written", default=None)
"""What was written to pruned entries, by name, while a state dict is loaded."""


def warn_of_pruned(name: str, written: int, stacklevel: int) -> None:
    """Say that entries other than 0 were written where nothing is kept."""
    warnings.warn(
        f"{written:,} values other than 0 were written to pruned entries of {name} and are set back to "
        "0: the mask stays as it is. To train them, give it another one with samo.remap_",
        stacklevel=stacklevel + 1,
    )


# From a tensor to its weight -------------------------------------------------------------------------

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
                        "more; build it anew on model.parameters()"
                    )
                weight = weight_from(param)
                if weight is not None:
                    raise CompressionError(
                        f"this {type(opt).__name__} was built before compress_ and holds the dense "
                        f"parameter that '{weight.name}' was, which nothing computes with any more; "
                        "build it anew on model.parameters()"
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
    """Make dense weights anew: not every optimizer raises versions (ZeroRedundancyOptimizer)."""
    if not hasattr(opt, "refreshes_dense_weights"):
        for weight in weights_among(opt):
            weight.refresh()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
