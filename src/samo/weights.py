"""One parameter of a compressed model: its dense weight and everything stored compressed beside it.

    param      dense tensor the model computes with, pruned entries exactly 0
    mask       which entries are kept (None: all of them)
    leaf       1-D tensor the optimizer sees; its .grad is the compressed gradient
    rest       what rounding to the weight's type left over (see kernels.rounding), or None

The leaf holds no values of its own between steps: it is one NaN, repeated. Values exist twice
nowhere. An optimizer of torch gets them for the time of its step (`lend` and `take_back`), in fp32
for a 16-bit weight, so that any optimizer updates a master copy and none has to know.
"""

import copy
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samo import kernels as _kernels
from samo.errors import CompressionError
from samo.kernels.rounding import convert_rest, join, master_dtype, rest_dtype, split
from samo.mask import Mask
from samo.partners import Line, Replica, Scaler

__all__ = []

_TAG: Final = "_samo_weight"

Watcher = Callable[["Weight", Tensor, bool], None]
"""Looks at a weight's dense gradient before it is compressed; told whether it is the first of a sum."""


class Weight:
    """A parameter, its mask and its compressed state."""

    scaler: Scaler | None

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        mask: Mask | None,
        *,
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        path: _kernels.Path,
    ) -> None:
        self.name: Final = name
        self.param: Final = param
        self.mask = mask
        self.dtype: Final = dtype
        self.grad_dtype: Final = grad_dtype
        self.shape: Final = tuple(param.shape)
        self.device = param.device
        self.kernels = _kernels.choose(param.device, path)
        self.rest: Tensor | None = None
        self.scaler = None
        self.replica: Replica | None = None
        self.line: Line | None = None
        self.is_lent = False
        self.stepped_by: weakref.ref[Optimizer] | None = None
        self.was_skipped: Tensor | None = None
        self._watcher: weakref.ref[Watcher] | None = None
        self._mover: weakref.ref[object] | None = None
        self.path: Final = path
        self._buffer: Tensor | None = None
        self._set_dense()
        self.leaf: Final = self._new_leaf()
        self._tag()

    @property
    def kept(self) -> int:
        """Number of kept entries."""
        return self.param.numel() if self.mask is None else self.mask.kept

    @property
    def part(self) -> "Weight":
        """What an optimizer updates: the weight itself, or this rank's part of it."""
        return self if self.replica is None else self.replica.part or self

    @property
    def whole(self) -> "Weight":
        """The weight that this one is a rank's part of, or the weight itself."""
        return self if self.replica is None else self.replica.whole or self

    @property
    def lean_kernels(self) -> _kernels.LeanKernels:
        """What updates the weight with 8-bit state."""
        return _kernels.choose_lean(self.device, self.path)

    @property
    def aged_kernels(self) -> _kernels.AgedKernels:
        """What updates the weight with an age for each entry."""
        return _kernels.choose_aged(self.device, self.path)

    @property
    def gradient(self) -> Tensor | None:
        """The tensor that holds the compressed gradient, or will hold the next one."""
        held = self._buffer if self._home is None else self._home
        return held if self.leaf.grad is None else self.leaf.grad

    @property
    def watcher(self) -> Watcher | None:
        """Who looks at the dense gradients; held weakly, so that it ends with whoever set it."""
        return None if self._watcher is None else self._watcher()

    @watcher.setter
    def watcher(self, watcher: Watcher | None) -> None:
        self._watcher = None if watcher is None else weakref.ref(watcher)

    @property
    def mover(self) -> object | None:
        """Who moves the entries of the mask; held weakly, so that the place is free when it is gone."""
        return None if self._mover is None else self._mover()

    @mover.setter
    def mover(self, mover: object | None) -> None:
        self._mover = None if mover is None else weakref.ref(mover)

    @property
    def _home(self) -> Tensor | None:
        return None if self.replica is None else self.replica.home

    # From the model's side: hand out the weight, take in its gradients ---------------------------

    def tap(self) -> Tensor:
        """Return the weight for one use in a forward pass, with an autograd leaf of its own.

        A parameter's own hook runs after its last use: the gradient of a tied head would stay dense
        through the whole backward pass. A leaf for each use hands over each contribution at once.
        """
        use = self.param.detach().requires_grad_()
        hooks = self.param._backward_hooks
        if hooks:
            for hook in hooks.values():
                use.register_hook(hook)  # what people hang on a parameter goes along
        take: Callable[[Tensor], None] = self._take_gradient
        if self.replica is not None:
            take = self.replica.watch(take)
        # What register_post_accumulate_grad_hook ends in; its handle would cost more than the tap itself.
        use._post_accumulate_grad_hooks = OrderedDict(samo=take)
        return use

    def accumulate(self, grad: Tensor) -> None:
        """Add a dense gradient to the compressed one."""
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        if self._watcher is not None and (watcher := self._watcher()) is not None:
            watcher(self, grad, self._begins_sum())
        factor = None if self.scaler is None else self.scaler.inverse
        held = self.leaf.grad
        if held is not None and self.replica is not None:
            home = self.replica.home
            if home is not None and held.data_ptr() != home.data_ptr():
                held = self.leaf.grad = home.copy_(held)  # somebody set it; only this is reduced
        if held is not None:
            self.kernels.compress_(grad, self.mask, held, add=True, factor=factor)
            return
        held = torch.empty_like(self.leaf) if self.is_lent else self._free_buffer()
        self.kernels.compress_(grad, self.mask, held, factor=factor)
        self.leaf.grad = held

    def _begins_sum(self) -> bool:
        """Return whether the next gradient is the first: nothing is held, or it was set to 0."""
        return self.leaf.grad is None or not bool(self.leaf.grad.any())

    def check(self) -> None:
        """Follow what was done to the parameter since the last use, or refuse it.

        Raises:
            CompressionError: The parameter changed its type, shape or device.
        """
        param = self.param
        if param.dtype != self.dtype or param.shape != self.shape:
            raise CompressionError(
                f"'{self.name}' was compressed as {_of(self.shape, self.dtype)} and is now "
                f"{_of(tuple(param.shape), param.dtype)}; its compressed state cannot follow. Give "
                "samo.compress_ the type you want, or compress a new model"
            )
        if param.device != self.device:
            raise CompressionError(
                f"'{self.name}' is on {param.device} but its compressed state on {self.device}; "
                "move the whole model with model.to(device)"
            )
        if param._version != self._version or param.data_ptr() != self._address:
            self._adopt()

    def move(self) -> None:
        """Bring the compressed state to the device the parameter is on now."""
        self.device = self.param.device
        self.kernels = _kernels.choose(self.device, self.path)
        self.mask = None if self.mask is None else self.mask.to(self.device)
        self.rest = None if self.rest is None else self.rest.to(self.device)
        grad, self._buffer = self.leaf.grad, None
        self._empty_leaf()
        self.leaf.grad = None if grad is None else grad.to(self.device, self.grad_dtype)
        self._note_state()

    # From the optimizer's side: read and write the kept values -----------------------------------

    def values(self) -> Tensor:
        """Return the kept values, in the type of the weight; a new tensor."""
        values = torch.empty(self.kept, dtype=self.dtype, device=self.device)
        self.kernels.compress_(self.param, self.mask, values)
        return values

    def gather(self, dense: Tensor) -> Tensor:
        """Return what belongs to this weight of a tensor of the whole parameter's shape; a new tensor."""
        whole = self.whole
        values = torch.empty(whole.kept, dtype=dense.dtype, device=self.device)
        whole.kernels.compress_(dense, whole.mask, values)
        return values if self.replica is None else self.replica.cut(values)

    def ensure_rest(self, *, is_lean: bool | None = None) -> Tensor | None:
        """Return the rest, made now if the weight was frozen when it was compressed.

        With ``is_lean`` in the type that lean or exact state has it, which it keeps from then on.
        """
        if self.rest is None and rest_dtype(self.dtype) is not None:
            self.rest = split(join(self.values(), None), self.dtype)[1]
        if self.rest is not None and is_lean is not None:
            dtype = rest_dtype(self.dtype, is_lean=is_lean)
            assert dtype is not None
            if self.rest.dtype != dtype:
                self.rest = convert_rest(self.rest, dtype)
        return self.rest

    def lend(self) -> None:
        """Put the master values, and a gradient of their type, into the leaf for an optimizer."""
        self.check()
        grad = self.leaf.grad
        self._set_leaf(join(self.values(), self.ensure_rest()))
        self.leaf.grad = None if grad is None else grad.to(self.leaf.dtype)
        self.is_lent = True

    def take_back(self) -> None:
        """Write the leaf's values to the model and empty the leaf again."""
        if self.is_lent:
            self.write_lent()
            self.reclaim()

    def write_lent(self) -> None:
        """Let the model compute with what an optimizer has written to the leaf so far."""
        values, rest = split(self.leaf.detach(), self.dtype)
        self.kernels.expand_(values, self.mask, self.param)
        if self.rest is not None and rest is not None:
            self.rest.copy_(convert_rest(rest, self.rest.dtype))
        self.changed()

    def reclaim(self) -> None:
        """Empty a lent leaf without a look at its values, as after a step that raised."""
        if self.is_lent:
            grad = self.leaf.grad
            self._empty_leaf()
            if grad is not None:
                self.leaf.grad = self._free_buffer().copy_(grad)

    def drop_buffer(self) -> None:
        """Free the memory of the last gradient, which has another home now."""
        self.leaf.grad = self._buffer = None

    def changed(self) -> None:
        """Note that a kernel wrote to the parameter.

        Kernels write behind autograd's back, and a backward pass over older values must be refused.
        """
        note_changes([self])

    def masters(self) -> Tensor:
        """Return the kept values with what their rounding left over, as an update sees them.

        Values that somebody has written to the parameter are taken over first.
        """
        self.check()
        return join(self.values(), self.rest)

    def write(self, values: Tensor, mask: Mask | None) -> None:
        """Write kept values of a mask to the parameter, and 0 elsewhere."""
        self.kernels.expand_(values, mask, self.param)
        self.changed()

    def take_mask(self, mask: Mask | None, rest: Tensor | None, grad: Tensor | None) -> None:
        """Take another mask, with the vectors that belong to it; the leaf stays the same object."""
        self.mask, self.rest, self._buffer = mask, rest, grad
        self._empty_leaf()
        self.leaf.grad = grad

    def __deepcopy__(self, memo: dict[int, Any]) -> "Weight":
        if self.part is not self:
            raise CompressionError(
                f"'{self.name}' has its optimizer state on several ranks (shard='state'), and a copy "
                "would lack what the others hold; load model.state_dict() into a new model instead"
            )
        new = object.__new__(Weight)
        memo[id(self)] = new
        new.__dict__.update(vars(self))  # masks, kernels and the scaler are shared
        new.__dict__["param"] = copy.deepcopy(self.param, memo)
        new.__dict__["leaf"] = memo[id(self.leaf)] = new._new_leaf()
        new.rest = None if self.rest is None else self.rest.clone()
        new._buffer, new.is_lent, new.replica, new.line = None, False, None, None
        new._watcher = new._mover = None
        new.stepped_by, new.was_skipped = None, None
        if self.leaf.grad is not None:
            new.leaf.grad = self.leaf.grad.to(self.grad_dtype, copy=True)
        new._note_state()
        new._tag()
        return new

    def _adopt(self) -> None:
        """Take the parameter's present values, written by somebody else, as the new weights."""
        values = self.values()
        if self.mask is not None:
            written = int(self.param.count_nonzero()) - int(values.count_nonzero())
            if written:
                warnings.warn(
                    f"{written:,} values other than 0 were written to pruned entries of "
                    f"'{self.name}' and are set back to 0: the mask stays as it is. To train them, "
                    "give it another one with samo.remap_",
                    stacklevel=3,
                )
                self.mask.zero_(self.param)
        if self.rest is not None:
            if self.dtype == torch.bfloat16:
                self.rest.zero_()
            else:
                self.rest.copy_(values)
        self.reclaim()
        self.changed()
        if self.replica is not None:
            self.replica.adopted()

    def _set_dense(self) -> None:
        """Round the parameter to its type, set pruned entries to 0 and keep what is left over."""
        param, source = self.param, self.param.detach()
        kept = torch.empty(self.kept, dtype=source.dtype, device=source.device)
        self.kernels.compress_(source, self.mask, kept)
        values, rest = split(kept.to(master_dtype(self.dtype)), self.dtype)
        if source.dtype != self.dtype:
            param.data = torch.empty_like(source, dtype=self.dtype)
        self.kernels.expand_(values, self.mask, param)
        self.rest = rest if param.requires_grad else None
        param.grad = None
        self.changed()

    def _free_buffer(self) -> Tensor:
        """Return the buffer of the last gradient, or a new one if somebody still looks at that."""
        if self._home is not None:
            return self._home
        # Two references are ours: the attribute and getrefcount's own argument.
        if self._buffer is None or sys.getrefcount(self._buffer) > 2:
            self._buffer = torch.empty(self.kept, dtype=self.grad_dtype, device=self.device)
        return self._buffer

    def _new_leaf(self) -> nn.Parameter:
        leaf = nn.Parameter(self._placeholder(), requires_grad=self.param.requires_grad)
        leaf.grad_dtype = self.grad_dtype
        return leaf

    def _empty_leaf(self) -> None:
        self._set_leaf(self._placeholder())
        self.leaf.grad_dtype = self.grad_dtype
        self.is_lent = False

    def _set_leaf(self, values: Tensor) -> None:
        self.leaf.grad = None  # torch compares its type with the values'
        self.leaf.grad_dtype = values.dtype
        self.leaf.data = values

    def _placeholder(self) -> Tensor:
        """Return the leaf's values between steps: NaN, so that whoever reads them notices.

        In the master's type, since torch's optimizers cast a loaded state to that of the leaf.
        """
        dtype = master_dtype(self.dtype)
        return torch.full((1,), torch.nan, dtype=dtype, device=self.device).expand(self.kept)

    def _note_state(self) -> None:
        self._version, self._address = self.param._version, self.param.data_ptr()

    def _take_gradient(self, use: Tensor) -> None:
        if self.replica is not None:
            self.replica.expect()
        box = [use.grad]  # the one reference of ours, so that others can be counted
        use.grad = None
        if self.mask is None and use is not self.param and self._keep(box):
            return
        grad = box.pop()
        if grad is not None:
            self.accumulate(grad)
        if self.replica is not None:
            self.replica.arrived(is_last=use is self.param)

    def _keep(self, box: list[Tensor | None]) -> bool:
        """Keep an unpruned weight's first gradient as it is, if nobody else can reach its memory.

        Not where compiled code hands it over (the parameter's own hook): that may use it again.
        """
        if self.replica is not None or self.scaler is not None or self.is_lent:
            return False
        if self.leaf.grad is not None or not _is_own(box, self.grad_dtype):
            return False
        grad = box[0]
        assert grad is not None
        self._buffer = self.leaf.grad = grad if grad.dim() == 1 else grad.view(-1)
        return True

    def _tag(self) -> None:
        """Let `weight_of` find this object, without a cycle that would delay freeing memory."""
        me = _Link(self)
        setattr(self.leaf, _TAG, me)
        setattr(self.param, _TAG, me)
        is_trained = self.param.requires_grad
        self.param.requires_grad_()  # a frozen parameter takes no hook, and may be unfrozen later
        self.param.register_post_accumulate_grad_hook(_gradient_hook(me))
        self.param.requires_grad_(is_trained)


class _Link(weakref.ref[Weight]):
    """The way from a tensor to its `Weight`."""

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        raise CompressionError(
            "a compressed model cannot be pickled; save it with samo.save(path, model, opt), and "
            "fill a new one with samo.load"
        )


def weight_of(tensor: Tensor) -> Weight | None:
    """Return the `Weight` that a dense parameter or a leaf belongs to, if any."""
    reference = getattr(tensor, _TAG, None)
    return None if reference is None else reference()


def note_changes(weights: list[Weight]) -> None:
    """Note, as `Weight.changed` does, that a kernel wrote to the parameters of these weights."""
    torch.autograd.graph.increment_version([weight.param for weight in weights])
    for weight in weights:
        weight._note_state()


def is_orphaned(tensor: Tensor) -> bool:
    """Return whether a tensor was a leaf of a compressed weight that no longer exists."""
    reference = getattr(tensor, _TAG, None)
    return reference is not None and reference() is None


def _gradient_hook(reference: _Link) -> Callable[[Tensor], None]:
    def take(param: Tensor) -> None:
        weight = reference()
        if weight is not None:
            weight._take_gradient(param)

    return take


def _is_own(box: list[Tensor | None], dtype: torch.dtype) -> bool:
    """Return whether a gradient, of this type and contiguous, has its memory to itself.

    autograd copies a gradient that anybody else holds before it hands it over, but not one that a
    hook, say, has a view of.
    """
    grad = box[0]
    if type(grad) is not Tensor or grad.dtype != dtype or grad.layout != torch.strided:
        return False
    if grad.requires_grad or not grad.is_contiguous():
        return False
    storage = grad.untyped_storage()
    is_whole = storage.nbytes() == grad.nbytes
    del grad
    # One more in each count: getrefcount's own argument, and the storage asked for here.
    return (
        is_whole
        and sys.getrefcount(box[0]) <= 2
        and torch._C._storage_Use_Count(storage._cdata) <= 2
    )


def _of(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
