"""`remap_`: give a compressed model other masks, in place and without dense copies of its state.

Values, gradient, moments and ages of a pruned weight are vectors with an entry for each kept one.
All of them move alike:

    old mask   1 1 0 1 0      old vector  a b d
    new mask   1 0 1 1 0      new vector  a 0 d        dropped: b

Dropped entries are kept until the last weight is done. If one fails (out of memory), they undo the
weights before it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from samo.core.compress import check_not_sharded, masks_by_parameter
from samo.core.modules import named_weights
from samo.core.rank_checks import invalidate_replicas
from samo.core.step_hooks import STEPPED
from samo.core.weight import Weight, mark_ragged
from samo.errors import CompressionError, MaskError
from samo.mask import bitmap
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.utils.validation import optimizers_of

_INITIAL: Final = (
    (torch.optim.Rprop, "step_size", "lr"),
    (torch.optim.Adagrad, "sum", "initial_accumulator_value"),
)
"""State of torch's optimizers that does not start at 0, and the setting it starts at."""

_Vectors = dict[str, Tensor]
"""Vectors of a weight's kept entries, by name."""

_SCALES: Final = ("exp_avg_scale", "exp_avg_sq_scale")
"""Lean state of samo.AdamW that belongs to blocks of the dense tensor, and stays."""


@torch.inference_mode(False)
@torch.no_grad()
def remap_(
    model: nn.Module,
    masks: Masks,
    opt: Optimizer | Iterable[Optimizer] | None = None,
) -> nn.Module:
    """Give a compressed model new masks in place, and keep training.

    Entries kept by both masks keep their values, gradients and optimizer state bit for bit. Newly
    kept entries start at 0, with initial optimizer state. Dropped entries become exactly 0.
    Parameters stay the same objects, with new lengths.

    All checks run first, and a failure midway is rolled back: the model has either all of the new
    masks or all of the old ones.

    Pass every optimizer of the model, since its state must follow. remap_ raises an error if one
    that has made a step is missing. Other copies of the values, such as those of
    ``torch.optim.swa_utils.AveragedModel``, need a remap of their own.

    All ranks need the same masks. If the length of a parameter changes, rebuild
    DistributedDataParallel as ``DistributedDataParallel(ddp.module)``; its next forward pass raises
    an error otherwise.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> model = samo.compress_(model, samo.prune(model, sparsity=0.5))
        >>> opt = torch.optim.AdamW(model.parameters())
        >>> model(torch.randn(4, 64)).square().mean().backward()
        >>> opt.step()
        >>> opt.zero_grad()
        >>> model = samo.remap_(model, samo.prune(model, sparsity=0.9), opt)
        >>> [param.numel() for param in model.parameters()]
        [410, 64]

    Args:
        model: A compressed model.
        masks: A mask for each pruned parameter; `samo.Mask.ones` keeps all of one.
        opt: The optimizers of the model: `samo.AdamW`, one of torch, or several.
    """
    check_not_sharded(model, "its masks can no longer change", "change them before fully_shard")
    passed = [] if opt is None else optimizers_of(opt)
    for one in [*passed]:
        if getattr(one, "parameters_as_bucket_view", False):
            raise CompressionError(
                f"{type(one).__name__} keeps the parameters in its own buffers; build it with "
                "parameters_as_bucket_view=False"
            )
        inner = getattr(one, "optim", None)  # of ZeroRedundancyOptimizer, which has the state
        if isinstance(inner, Optimizer):
            passed.append(inner)
    plans = _plan(model, masks, passed)
    done: list[tuple[_Plan, Mask, _Vectors]] = []
    try:
        with record_function("samo.remap_"):
            for plan in plans:
                _exchange(plan, plan.mask, plan.added, done)
    except BaseException as error:
        for plan, mask, dropped in reversed(done):
            _put_back(plan, mask, dropped, error)
        raise
    resized = [plan.weight for plan, mask, _ in done if mask.kept != plan.mask.kept]
    if resized:
        mark_ragged([weight for _, weight in named_weights(model)], were_remapped=True)
    invalidate_replicas([weight.values for weight in resized])
    return model


class _Plan(NamedTuple):
    """What happens to one weight."""

    weight: Weight
    mask: Mask
    added: _Vectors
    """Nonzero initial values of newly kept entries."""
    states: list[dict[str, Any]]
    """What optimizers keep for the weight."""


def _exchange(
    plan: _Plan, mask: Mask, added: _Vectors, done: list[tuple[_Plan, Mask, _Vectors]]
) -> None:
    """Give a weight another mask, and record in ``done`` how to undo it."""
    weight, old = plan.weight, plan.weight.mask
    assert old is not None
    values, grad = weight.values.data, weight.values.grad
    vectors: _Vectors = {"values": values}
    if grad is not None:
        vectors["grad"] = grad
    for index, state in enumerate(plan.states):
        vectors |= {f"{index}/{key}": vector for key, vector in _vectors_of(state).items()}
    moved, dropped = move(vectors, old, mask, added)
    kept = [dict(state) for state in plan.states]
    try:
        weight.set_mask(mask, moved["values"], moved.get("grad"))
        for index, state in enumerate(plan.states):
            state.update({key: moved[f"{index}/{key}"] for key in _vectors_of(state)})
        done.append((plan, old, dropped))
    except BaseException:
        for state, former in zip(plan.states, kept):
            state.update(former)
        weight.set_mask(old, values, grad)
        raise


def _put_back(plan: _Plan, mask: Mask, dropped: _Vectors, error: BaseException) -> None:
    try:
        _exchange(plan, mask, dropped, [])
    except (MemoryError, RuntimeError):  # torch has both
        error.add_note(
            f"'{plan.weight.name}' could not be rolled back, out of memory, and has its new mask; "
            "load a checkpoint before you continue"
        )


def _vectors_of(state: dict[str, Any]) -> _Vectors:
    """Return what an optimizer keeps for each kept entry."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() == 1 and key not in _SCALES
    }


# Checks -----------------------------------------------------------------------------------------


def _plan(model: nn.Module, masks: Masks, optimizers: list[Optimizer]) -> list[_Plan]:
    """Check everything before anything changes."""
    plans = []
    for name, (weight, mask) in _masks_by_weight(model, masks).items():
        weight.sync_written()
        mask = mask.to(weight.device)
        if weight.mask is None or weight.mask == mask:
            continue
        _check_passed(name, weight, optimizers)
        holding = [opt for opt in optimizers if _state_of(opt, weight)]
        for opt in holding:
            _check_state(name, weight, opt)
        added = _initial_state(weight, mask.kept - mask.common(weight.mask), holding)
        plans.append(_Plan(weight, mask, added, [opt.state[weight.values] for opt in holding]))
    return plans


def _masks_by_weight(model: nn.Module, masks: Masks) -> dict[str, tuple[Weight, Mask]]:
    weights = dict(named_weights(model, remove_duplicate=False))
    if isinstance(masks, Masks) and not weights:
        raise CompressionError(
            "the model is not compressed; call samo.compress_(model, masks) first"
        )
    found: dict[str, tuple[Weight, Mask]] = {}
    for name, mask in masks_by_parameter(model, masks).values():
        weight = weights.get(name)
        if weight is None or weight.mask is None:
            raise MaskError(
                f"'{name}' has no mask to change; leave it out, or pass "
                f"samo.Mask.ones({mask.shape}) for it to compress_"
            )
        found[name] = (weight, mask)
    given = [weight for weight, _ in found.values()]
    for name, weight in weights.items():
        if weight.mask is not None and weight not in given:
            raise MaskError(f"the masks leave out '{name}', which is pruned; pass its mask too")
    return found


def _state_of(opt: Optimizer, weight: Weight) -> dict[str, Any]:
    """Return what an optimizer keeps for a weight; LBFGS keeps that of all with the first."""
    holder: Tensor = weight.values
    if isinstance(opt, torch.optim.LBFGS):
        params = opt.param_groups[0]["params"]  # it takes one group
        holder = params[0] if any(param is holder for param in params) else holder
    found: dict[str, Any] = opt.state.get(holder) or {}
    return found


def _check_passed(name: str, weight: Weight, optimizers: list[Optimizer]) -> None:
    for opt in STEPPED:
        if _state_of(opt, weight) and not any(opt.state is one.state for one in optimizers):
            raise CompressionError(
                f"an optimizer ({type(opt).__name__}) that was not passed has state for '{name}'; "
                "pass it to samo.remap_(model, masks, opt), or call its state.clear()"
            )


def _check_state(name: str, weight: Weight, opt: Optimizer) -> None:
    """Check that state has an entry for each kept one, or one for all."""
    for key, value in _state_of(opt, weight).items():
        is_known = value is None or isinstance(value, int | float | str)
        if isinstance(value, Tensor):
            is_known = value.dim() == 0 or value.shape == (weight.kept,) or key in _SCALES
        if not is_known:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.40}"
            raise CompressionError(
                f"{type(opt).__name__} keeps '{key}' of {what} for '{name}', which cannot be moved "
                "to another mask; build a new optimizer, and call state.clear() of this one"
            )


def _initial_state(weight: Weight, count: int, holding: list[Optimizer]) -> _Vectors:
    """Return the initial optimizer state of newly kept entries, where it is not 0."""
    found: _Vectors = {}
    for index, opt in enumerate(holding):
        for kind, key, setting in _INITIAL:
            vector = opt.state[weight.values].get(key)
            if not isinstance(opt, kind) or not isinstance(vector, Tensor):
                continue
            (group,) = (g for g in opt.param_groups if any(p is weight.values for p in g["params"]))
            value = float(group.get(setting, opt.defaults[setting]))
            found[f"{index}/{key}"] = vector.new_full((count,), value)
    return found


# Vectors of kept entries ------------------------------------------------------------------------
#
# In pieces of 2**20 entries. The host knows where each piece starts from the masks' running counts,
# so nothing waits for a device.


def move(
    vectors: Mapping[str, Tensor], old: Mask, new: Mask, added: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return vectors of ``old``'s kept entries as those of ``new``'s, and the dropped entries.

    ``added`` has values for entries that only ``new`` keeps, in flat order; by default 0.
    """
    common = old & new
    moved = {name: vector.new_zeros(new.kept) for name, vector in vectors.items()}
    dropped = {name: vector.new_empty(old.kept - common.kept) for name, vector in vectors.items()}
    gone = fresh = 0
    for (_, old_bits, olds), (_, new_bits, news), (_, both, commons) in zip(
        old.pieces(), new.pieces(), common.pieces()
    ):
        old_place = old_bits.cumsum(0).add_(olds.start - 1)
        new_place = new_bits.cumsum(0).add_(news.start - 1)
        num_common = _length(commons)
        stays = _places(both, num_common)
        source, target = old_place[stays], new_place[stays]
        leaves = old_place[_places(old_bits & ~both, _length(olds) - num_common)]
        comes = new_place[_places(new_bits & ~both, _length(news) - num_common)]
        leaving = slice(gone, gone + leaves.numel())
        coming = slice(fresh, fresh + comes.numel())
        gone, fresh = leaving.stop, coming.stop
        for name, vector in vectors.items():
            moved[name][target] = vector[source]
            dropped[name][leaving] = vector[leaves]
            if name in added:
                moved[name][comes] = added[name][coming]
    return moved, dropped


def narrow(mask: Mask, words: Tensor) -> Mask:
    """Return a mask with those kept entries of ``mask`` whose bits are set in ``words``."""
    made = torch.empty_like(mask.words)
    for piece, bits, kept in mask.pieces():
        first = kept.start // bitmap.WORD_BITS * bitmap.WORD_BITS
        stay = bitmap.unpack(words, first, kept.stop)[kept.start - first :]
        bits[_places(bits, _length(kept))] = stay
        bitmap.pack(bits, made, piece.start)
    return Mask(mask.shape, made)


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def _places(bits: Tensor, count: int) -> Tensor:
    """Return where the ``count`` set bits are, without asking a device for their number."""
    return torch.nonzero_static(bits, size=count).view(-1)
