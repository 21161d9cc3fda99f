"""`remap_`: give a compressed model other masks, in place, without ever building a dense state.

Everything that belongs to a pruned weight is a vector with an entry for each kept one: values,
gradient, moments, ages. All of them move alike:

    old mask   1 1 0 1 0      old vector  a b d
    new mask   1 0 1 1 0      new vector  a 0 d        dropped: b

Weights are taken one after the other, and a weight in pieces of 2**20 entries. What is dropped is
held until the last weight is done: if one fails (memory runs out), the same exchange with the masks
the other way round puts back those that came before it.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samo.core.checks import masks_by_parameter
from samo.core.compress import check_whole
from samo.core.modules import named_weights
from samo.core.rank_checks import outdate_replicas
from samo.core.transfer import move
from samo.core.weight import STEPPED, Weight, mark_ragged
from samo.errors import CompressionError, MaskError, nearest
from samo.kernels.rounding import convert_remainder, master_dtype, split
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.utils.validation import optimizers_of

__all__ = ["remap_"]

_INITIAL: Final = (
    (torch.optim.Rprop, "step_size", "lr"),
    (torch.optim.Adagrad, "sum", "initial_accumulator_value"),
)
"""State of torch's optimizers that does not begin at 0, and the setting that it begins at."""

_Vectors = dict[str, Tensor]
"""What belongs to the kept entries of a weight, by name."""

_RESTS: Final = {"remainder": torch.int16, "correction": torch.int8}
"""What samo.AdamW keeps of the digits that a bfloat16 value has no room for."""

_SCALES: Final = ("exp_avg_scale", "exp_avg_sq_scale")
"""Lean state of samo.AdamW that belongs to places in the dense tensor, and stays."""


@torch.inference_mode(False)
@torch.no_grad()
def remap_(
    model: nn.Module,
    masks: Masks,
    opt: Optimizer | Iterable[Optimizer] | None = None,
    *,
    fill: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """Give a compressed model new masks in place, and keep training.

    Entries kept by both masks keep their values, gradients and optimizer state bit for bit. Newly
    kept entries start at 0, with initial optimizer state (0, except for Rprop's step sizes and
    Adagrad's sums). Dropped entries become exactly 0. Parameters stay the same objects, with new
    lengths.

    All checks run first, and a failure midway is rolled back: the model has either all of the new
    masks or all of the old ones.

    Pass every optimizer of the model: state that does not follow belongs to other entries from then
    on. One that has made a step is missed here, and one that only loaded its state at its first
    step, unless the weights keep as many entries as before. Copies of the values elsewhere, such as
    the average of ``torch.optim.swa_utils.AveragedModel``, are not known, and need a remap of their
    own.

    On several ranks all need the same masks. DistributedDataParallel is built for the lengths of
    the
    parameters: if these change, rebuild it as ``DistributedDataParallel(ddp.module)``; otherwise
    its next forward pass raises an error. If the counts stay the same, it keeps working.

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
        masks: A mask for each pruned parameter; to keep all of one, give a mask that keeps
            everything.
        opt: The optimizer of the model, `samo.AdamW` or one of torch, or several of them.
        fill: Values for newly kept entries, by name: a vector in row-major order.

    Returns:
        The same model.

    Raises:
        CompressionError: The model is not compressed, or an optimizer was left out or keeps state
            that cannot be moved.
        MaskError: The masks do not fit the model.
        TypeError: An argument is of another kind.
        ValueError: ``fill`` does not fit the newly kept entries.
    """
    check_whole(
        model,
        "other masks would change the lengths of what each rank holds",
        "give it its masks before fully_shard: samo.compress_(model, masks) or samo.remap_",
    )
    passed = [] if opt is None else optimizers_of(opt)
    for one in [*passed]:
        if getattr(one, "parameters_as_bucket_view", False):
            raise CompressionError(
                f"{type(one).__name__} holds the parameters in buffers of its own, which new values would "
                "leave; build it with parameters_as_bucket_view=False"
            )
        inner = getattr(one, "optim", None)  # where ZeroRedundancyOptimizer keeps the state
        if isinstance(inner, Optimizer):
            passed.append(inner)
    plans = _plan(model, masks, passed, fill)
    done: list[tuple[_Plan, Mask, _Vectors]] = []
    try:
        for plan in plans:
            _exchange(plan, plan.mask, plan.added, done)
    except BaseException as error:
        for plan, mask, dropped in reversed(done):
            _put_back(plan, mask, dropped, error)
        raise
    resized = [plan.weight for plan, mask, _ in done if mask.kept != plan.mask.kept]
    if resized:
        mark_ragged([weight for _, weight in named_weights(model)], were_remapped=True)
    outdate_replicas([weight.values for weight in resized])
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
    """Give a weight another mask, and add how to undo that to what is done."""
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
        weight.take_mask(mask, moved["values"], moved.get("grad"))
        for index, state in enumerate(plan.states):
            state.update({key: moved[f"{index}/{key}"] for key in _vectors_of(state)})
        done.append((plan, old, dropped))
    except BaseException:
        for state, former in zip(plan.states, kept):
            state.update(former)
        weight.take_mask(old, values, grad)
        raise


def _put_back(plan: _Plan, mask: Mask, dropped: _Vectors, error: BaseException) -> None:
    try:
        _exchange(plan, mask, dropped, [])
    except (MemoryError, RuntimeError):  # torch has both
        error.add_note(
            f"'{plan.weight.name}' could not be put back for want of memory and has its new mask; load "
            "a checkpoint before you continue"
        )


def _vectors_of(state: dict[str, Any]) -> _Vectors:
    """Return what an optimizer keeps for each kept entry."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() == 1 and key not in _SCALES
    }


# What can be refused
# ---------------------------------------------------------------------------------


def _plan(
    model: nn.Module,
    masks: Masks,
    optimizers: list[Optimizer],
    fill: Mapping[str, Tensor] | None,
) -> list[_Plan]:
    """Find everything that could be wrong, before anything is changed."""
    found = _masks_by_weight(model, masks)
    fill = {} if fill is None else fill
    _check_fill(fill, found)
    plans = []
    for name, (weight, mask) in found.items():
        weight.sync_written()
        mask, values = mask.to(weight.device), fill.get(name)
        if weight.mask == mask:
            if values is not None and values.numel():
                raise ValueError(
                    f"fill has {values.numel():,} values for '{name}', but its mask stays as it is and "
                    "adds no entries; leave its name out of fill"
                )
            continue
        _check_passed(name, weight, optimizers)
        holding = [opt for opt in optimizers if opt.state.get(weight.values)]
        for opt in holding:
            _check_state(name, weight, opt)
        states = [opt.state[weight.values] for opt in holding]
        assert weight.mask is not None
        count = mask.kept - mask.common(weight.mask)
        added = {} if values is None else _added(name, weight, count, values, states)
        added.update(_initial_state(weight, count, holding))
        plans.append(_Plan(weight, mask, added, states))
    return plans


def _masks_by_weight(model: nn.Module, masks: Masks) -> dict[str, tuple[Weight, Mask]]:
    weights = dict(named_weights(model, remove_duplicate=False))
    if isinstance(masks, Masks) and not weights:
        raise CompressionError(
            "the model is not compressed; call samo.compress_(model, masks) first"
        )
    held = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, tuple[Weight, Mask]] = {}
    for name, mask in masks_by_parameter(model, masks).values():
        weight = weights.get(name)
        if weight is None or weight.mask is None:
            raise MaskError(
                f"'{name}' has no mask so far, and remap_ exchanges masks; leave its name out, or give it "
                f"one that keeps everything in compress_: samo.Mask.ones({mask.shape})"
            )
        if held[name] is not weight.values:
            raise CompressionError(
                f"'{name}' is sharded over ranks by its old mask, and a rank cannot move what others "
                "hold; change masks before the model is sharded"
            )
        found[name] = (weight, mask)
    given = [weight for weight, _ in found.values()]
    for name, weight in weights.items():
        if weight.mask is not None and weight not in given:
            raise MaskError(
                f"the masks leave out '{name}', which is pruned; give its mask too, the old one or, to "
                "keep all of its weights, one that keeps everything"
            )
    return found


def _check_passed(name: str, weight: Weight, optimizers: list[Optimizer]) -> None:
    for opt in STEPPED:
        if opt.state.get(weight.values) and not any(opt.state is one.state for one in optimizers):
            raise CompressionError(
                f"an optimizer ({type(opt).__name__}) that was not passed keeps state for '{name}', which "
                "belongs to the old mask; pass it as well, samo.remap_(model, masks, opt), or, if it is "
                "not used any more, call its state.clear()"
            )


def _check_state(name: str, weight: Weight, opt: Optimizer) -> None:
    """Refuse state that has no entry for each kept one, nor one for all."""
    for key, value in opt.state[weight.values].items():
        is_known = value is None or isinstance(value, int | float | str)
        if isinstance(value, Tensor):
            is_known = value.dim() == 0 or value.shape == (weight.kept,) or key in _SCALES
        if not is_known:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.40}"
            raise CompressionError(
                f"{type(opt).__name__} keeps '{key}' of {what} for '{name}', which has no entry for each "
                f"of its {weight.kept:,} kept weights and cannot be moved; build a new optimizer, and call "
                "state.clear() of this one"
            )


def _check_fill(fill: object, found: Collection[str]) -> None:
    if not isinstance(fill, Mapping):
        raise TypeError(
            f"fill must map names to vectors of values, got {type(fill).__name__}; give "
            "fill={name: tensor}"
        )
    for name, values in fill.items():
        if not isinstance(values, Tensor):
            raise TypeError(
                f"fill has a {type(values).__name__} for '{name}'; give a 1-D tensor, as "
                "torch.tensor(values)"
            )
        if name not in found:
            raise ValueError(
                f"fill has values for '{name}'{nearest(name, found)}, which has no new mask; fill takes "
                "the names of the masks"
            )


def _added(
    name: str, weight: Weight, count: int, values: Tensor, states: list[dict[str, Any]]
) -> _Vectors:
    """Return the vectors of newly kept entries, in the dtypes they are stored in."""
    if values.shape != (count,) or not values.is_floating_point():
        raise ValueError(
            f"fill has {values.dtype} of shape {tuple(values.shape)} for '{name}', whose new mask keeps "
            f"{count:,} new entries; give one floating-point number for each, in row-major order"
        )
    dtype = weight.values.dtype
    rounded, remainder = split(values.detach().to(weight.device, master_dtype(dtype)), dtype)
    if not bool(rounded.isfinite().all() and rounded.to(weight.dtype).isfinite().all()):
        raise ValueError(
            f"fill has values for '{name}' that are NaN, infinite or too large for {weight.dtype}; give "
            "finite ones"
        )
    added = {"values": rounded}
    for index, state in enumerate(states):
        for key in _RESTS.keys() & state.keys():
            assert remainder is not None  # only values that are rounded leave one
            added[f"{index}/{key}"] = convert_remainder(remainder, _RESTS[key])
    return added


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
