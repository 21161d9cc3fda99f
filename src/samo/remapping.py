"""`remap_`: give a compressed model other masks, in place, without ever building a dense state.

Everything compressed beside a weight is a vector with an entry for each kept one: values, remainders,
gradients, moments, ages. All of them move alike:

    old mask   1 1 0 1 0      old vector  a b d
    new mask   1 0 1 1 0      new vector  a 0 d        dropped: b

Here everything that could be wrong is looked for; ``exchange.py`` does it, weight by weight.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samo.arguments import optimizers_of
from samo.errors import CompressionError, MaskError, nearest
from samo.exchange import Change, Plan, Vectors, prepare
from samo.kernels.rounding import convert_rest, master_dtype, split
from samo.mask import Mask
from samo.masks import Masks
from samo.optim import AdamW
from samo.owners import owned_weights, put_back_taps
from samo.weights import Weight, weight_of

__all__ = ["remap_"]

_INITIAL: Final = (
    (torch.optim.Rprop, "step_size", "lr"),
    (torch.optim.Adagrad, "sum", "initial_accumulator_value"),
)
"""State of torch's optimizers that does not begin at 0, and the setting that it begins at."""


@torch.no_grad()
def remap_(
    model: nn.Module,
    masks: Masks,
    opt: Optimizer | Iterable[Optimizer] | None = None,
    *,
    fill: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """Give a compressed model other masks, in place, and let training go on.

    Entries kept by the old and the new mask keep their values, remainders, gradients and optimizer
    state bit for bit. Entries kept anew start at 0, with the optimizer state of a first step (0, but for
    the step sizes of Rprop and the sums of Adagrad). Dropped entries become exactly 0. The leaves stay
    the objects they were, with another length.

    Everything that could be wrong is looked for first, and a failure in the middle is undone, so that
    the model has either all of the new masks or all of the old ones.

    A model that `samo.replicate` has spread over ranks needs the same masks on all of them, and
    ``rebuild()`` of its replicas afterwards; the next gradient is refused without it.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> model = samo.compress_(model, samo.prune(model, sparsity=0.5))
        >>> opt = samo.AdamW(samo.parameters(model))
        >>> model(torch.randn(4, 64)).square().mean().backward()
        >>> opt.step()
        >>> opt.zero_grad()
        >>> model = samo.remap_(model, samo.prune(model, sparsity=0.9), opt)
        >>> [leaf.numel() for leaf in samo.parameters(model)]
        [410, 64]

    Args:
        model: A compressed model.
        masks: A mask for each pruned parameter; to keep all of one, give a mask that keeps everything.
            A parameter without a mask so far may get one.
        opt: The optimizer of the model, `samo.AdamW` or one of torch, or several of them.
        fill: Values for the entries kept anew, by name: a vector in the order of the flat tensor.

    Returns:
        The same model.

    Raises:
        CompressionError: The model is not compressed, its state is sharded over ranks, or its
            optimizer was left out or keeps state that cannot be moved.
        MaskError: The masks do not fit the model.
        TypeError: An argument is of another kind.
        ValueError: ``fill`` does not fit the entries kept anew.
    """
    plans = _plan(model, masks, [] if opt is None else optimizers_of(opt), _fill(fill))
    begun: list[Change] = []
    try:
        for plan in plans:
            change = prepare(plan, plan.mask, plan.added)
            begun.append(change)  # before anything changes: an interrupt may come at any line
            change.do()
    except BaseException as error:
        for change in reversed(begun):
            change.undo(error)
        raise
    return model


def _fill(fill: object) -> dict[str, Tensor]:
    if fill is None:
        return {}
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
    return dict(fill)


def _plan(
    model: nn.Module, masks: Masks, optimizers: list[Optimizer], fill: dict[str, Tensor]
) -> list[Plan]:
    """Find everything that could be wrong, before anything is changed."""
    if not owned_weights(model):
        raise CompressionError(
            "the model is not compressed; call samo.compress_(model, masks) first"
        )
    put_back_taps(model)
    mask_of = _masks_by_weight(model, masks, fill)
    plans = []
    for name, (weight, mask) in mask_of.items():
        _check_mask(name, weight, mask)
        _check_whole(name, weight)
        weight.check()
        weight.reclaim()
        _check_optimizer(name, weight, optimizers)
        states = []
        for opt in optimizers:
            if opt.state.get(weight.leaf):
                if isinstance(opt, AdamW):
                    opt._state_of(weight)  # takes up a rest loaded before it
                _check_state(name, weight, opt)
                states.append((opt, opt.state[weight.leaf]))
        mask = mask.to(weight.device)
        values = fill.get(name)
        if weight.mask != mask:
            added = _added(name, weight, mask, values)
            added.update(_initial_state(weight, mask, states))
            plans.append(Plan(weight, mask, added, states))
        elif values is not None and values.numel():
            raise ValueError(
                f"fill has {values.numel():,} values for '{name}', but its mask stays as it is and "
                "keeps nothing anew; leave its name out of fill"
            )
    return plans


def _masks_by_weight(
    model: nn.Module, masks: Masks, fill: dict[str, Tensor]
) -> dict[str, tuple[Weight, Mask]]:
    if not isinstance(masks, Masks):
        raise TypeError(
            f"masks must be samo.Masks, got {type(masks).__name__}; build them with "
            "samo.prune(model, sparsity), or from samo.Mask objects with samo.Masks({name: mask})"
        )
    found: dict[str, tuple[Weight, Mask]] = {}
    seen: dict[int, str] = {}
    for name, param in masks.parameters_of(model).items():
        weight = weight_of(param)
        if weight is None:
            raise CompressionError(
                f"parameter '{name}' is not compressed (it was added to the model after compress_, or "
                "is no floating-point tensor); leave its name out of the masks"
            )
        other = seen.setdefault(id(weight), name)
        if masks[other] != masks[name]:
            raise MaskError(
                f"'{other}' and '{name}' are one tied parameter but have different masks; "
                "give a mask to one of the names"
            )
        if other == name:
            found[name] = (weight, masks[name])
    for name, weight in owned_weights(model).items():
        if weight.mask is not None and id(weight) not in seen:
            raise MaskError(
                f"the masks leave out '{name}', which is pruned; give its mask too, the old one or, to "
                "keep all of its weights, one that keeps everything"
            )
    for name in fill:
        if name not in found:
            raise ValueError(
                f"fill has values for '{name}'{nearest(name, found)}, which has no new mask; fill takes "
                "the names of the masks"
            )
    return found


def _check_mask(name: str, weight: Weight, mask: Mask) -> None:
    if mask.kept == 0:
        raise MaskError(
            f"the mask of '{name}' keeps none of its {mask.numel:,} weights, so it could never be "
            "trained; keep one at least"
        )


def _check_whole(name: str, weight: Weight) -> None:
    if weight.part is not weight:
        raise CompressionError(
            f"the state of '{name}' is sharded over ranks by its old mask (shard='state'), and a rank "
            "cannot move what others hold; call release() of what samo.replicate returned first, and "
            "afterwards rebuild() and a new optimizer"
        )


def _check_optimizer(name: str, weight: Weight, optimizers: list[Optimizer]) -> None:
    stepped_by = None if weight.stepped_by is None else weight.stepped_by()
    if stepped_by is None or not stepped_by.state.get(weight.leaf):
        return
    if not any(opt is stepped_by for opt in optimizers):
        raise CompressionError(
            f"'{name}' was last updated by an optimizer ({type(stepped_by).__name__}) whose state "
            "belongs to the old mask; pass that optimizer: samo.remap_(model, masks, opt)"
        )


def _check_state(name: str, weight: Weight, opt: Optimizer) -> None:
    """Refuse state that has no entry for each kept one, nor one for all."""
    if isinstance(opt, AdamW):
        if opt.is_lean and weight.mask is None:
            raise CompressionError(
                f"'{name}' has no mask so far, and lean state has other groups for pruned weights; give "
                "it a mask that keeps everything when the model is compressed, or use state='exact'"
            )
        return
    for key, value in opt.state[weight.leaf].items():
        is_known = value is None or isinstance(value, int | float | str)
        if isinstance(value, Tensor):
            is_known = value.dim() == 0 or value.shape == (weight.kept,)
        if not is_known:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.40}"
            raise CompressionError(
                f"{type(opt).__name__} keeps '{key}' of {what} for '{name}', which has no entry for each "
                f"of its {weight.kept:,} kept weights and cannot be moved; build a new optimizer and "
                "pass no opt"
            )


def _added(name: str, weight: Weight, mask: Mask, values: Tensor | None) -> Vectors:
    """Return the vectors of the entries kept anew, in the types the weight stores them in."""
    if values is None:
        return {}
    count = _num_added(weight, mask)
    if values.shape != (count,) or not values.is_floating_point():
        raise ValueError(
            f"fill has {values.dtype} of shape {tuple(values.shape)} for '{name}', whose new mask keeps "
            f"{count:,} entries anew; give one floating-point number for each, in flat order"
        )
    master = values.detach().to(weight.device, master_dtype(weight.dtype))
    split_values, rest = split(master, weight.dtype)
    if not bool(split_values.isfinite().all()):
        raise ValueError(
            f"fill has values for '{name}' that are NaN, infinite or too large for {weight.dtype}; give "
            "finite ones"
        )
    added = {"values": split_values}
    if rest is not None and weight.rest is not None:
        added["rest"] = convert_rest(rest, weight.rest.dtype)
    return added


def _num_added(weight: Weight, mask: Mask) -> int:
    return 0 if weight.mask is None else mask.kept - (mask & weight.mask).kept


def _initial_state(
    weight: Weight, mask: Mask, states: list[tuple[Optimizer, dict[str, Any]]]
) -> Vectors:
    """Return what optimizers begin with for the entries kept anew, where that is not 0."""
    found: Vectors = {}
    for index, (opt, state) in enumerate(states):
        for kind, key, setting in _INITIAL:
            if not isinstance(opt, kind) or not isinstance(state.get(key), Tensor):
                continue
            (group,) = (g for g in opt.param_groups if any(p is weight.leaf for p in g["params"]))
            value = float(group.get(setting, opt.defaults[setting]))
            found[f"{index}/{key}"] = state[key].new_full((_num_added(weight, mask),), value)
    return found
