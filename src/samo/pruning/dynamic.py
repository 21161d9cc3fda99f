"""`DynamicSparse`: masks that move while a model trains, each tensor with as many entries as before."""

import weakref
from collections.abc import Iterable
from typing import Any, Final, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from samo.core.ranks import group_of
from samo.core.remap import remap_
from samo.core.weight import Weight
from samo.errors import CompressionError, MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.pruning.choices import grow_random, prune_to
from samo.pruning.growth import Growth
from samo.pruning.members import (
    check_free,
    check_moving,
    finite_values,
    moving_weights,
    with_others,
)
from samo.pruning.rates import RateFactor
from samo.pruning.schedules import cosine_fraction, is_replacing_step, pack, unpack, warmup_factor
from samo.utils.validation import check_model, finite_number, optimizers_of, whole_number

__all__ = ["DynamicSparse"]

Grow = Literal["random", "gradient"]

_MOVERS: Final[weakref.WeakKeyDictionary[Weight, weakref.ref["DynamicSparse"]]] = (
    weakref.WeakKeyDictionary()
)
"""Who moves the mask of a weight."""


class DynamicSparse:
    """Drop the smallest kept entries every so often, and grow as many others in their place.

    ``grow="random"`` draws them (SET: Mocanu et al., 2018). ``grow="gradient"`` takes those with the
    largest gradient (RigL: Evci et al., 2020), which it finds in the backward pass before an update,
    while a weight's dense gradient is there: no more than one of them is ever alive. Nothing has to be
    called for that. Where gradients add up over several backward passes, the choice is exact for the
    entries held from the first on: ``candidates`` times as many as are to grow, or all.

    Masks move of matrices that are trained: with ``requires_grad``, and in a group of ``opt``. Patterns
    (n:m) and channels would be dissolved, and are refused where they can be told.

    Of each tensor a fraction of the kept entries is replaced, ``drop`` at first and less and less:
    ``drop / 2 * (1 + cos(pi * step / stop))``. Entries grow among all that are not kept after the drop.
    So one that was just dropped may be chosen again, and then stays as it was. Grown entries start at 0.

    Replicas of DistributedDataParallel go on as they are: parameters keep their lengths. Gradients are summed
    over them in the backward passes before a replacement, in which each rank must use every pruned
    weight, and all get the masks of the first rank.

    A step that the optimizer skips, as `torch.amp.GradScaler` does where gradients overflow, is counted
    too; masks do not move by gradients that are not finite.

    Adam's bias correction knows the steps of a whole tensor, and makes the first updates of a grown
    entry up to 3 times too large; ``samo.AdamW(..., entry_steps=True)`` counts the steps of each entry.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> model = samo.compress_(model, samo.prune(model, 0.9, method="random"))
        >>> opt = samo.AdamW(model.parameters(), entry_steps=True)
        >>> moving = samo.DynamicSparse(model, opt, grow="gradient", every=5, stop=20)
        >>> for _ in range(20):
        ...     model(torch.randn(4, 64)).square().mean().backward()
        ...     opt.step()
        ...     opt.zero_grad()
        ...     masks = moving.step()
        >>> [param.numel() for param in model.parameters()]
        [410, 64]

    Args:
        model: A compressed model; the masks of its trained matrices that have one move.
        opt: Its optimizer, ours or torch's, or several.
        grow: ``"random"`` or ``"gradient"``.
        drop: Fraction of the kept entries that is replaced at first.
        every: Steps from one replacement to the next.
        stop: Step from which on the masks stay as they are; three quarters of a run are usual.
        seed: Chooses the entries of ``grow="random"``, and between equals.
        warmup: Steps over which the learning rate rises to its own value after each replacement.
        candidates: For ``grow="gradient"``: how many times as many entries as are to grow have their
            gradients summed while parts of a gradient come, 4 bytes each until `step`. None sums all that
            are not kept, which is exact and takes 4 bytes for each weight of the model.
        group: Ranks with replicas of the model, if it is not DistributedDataParallel that makes them.

    Raises:
        TypeError: ``opt`` is no optimizer, or ``model`` no module.
        ValueError: A setting is out of range, masks would never move, or another object multiplies
            the rate of the optimizer.
        CompressionError: The model has no masks, or another object moves them.
        MaskError: No tensor with a mask is trained, all of them keep everything, or one has a
            structure that would be lost.
    """

    def __init__(
        self,
        model: nn.Module,
        opt: Optimizer | Iterable[Optimizer],
        *,
        grow: Grow = "random",
        drop: float = 0.3,
        every: int = 100,
        stop: int,
        seed: int = 0,
        warmup: int = 0,
        candidates: int | None = 4,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_model(model)
        if grow not in get_args(Grow):
            raise ValueError(f"grow must be one of {', '.join(get_args(Grow))}, got {grow!r}")
        if not 0 < finite_number("drop", drop) <= 1:
            raise ValueError(
                f"drop is the fraction of kept entries replaced at first, in (0, 1], got {drop}"
            )
        every, stop = whole_number("every", every), whole_number("stop", stop)
        warmup = whole_number("warmup", warmup)
        if every < 1 or stop < 1 or warmup < 0:
            raise ValueError(
                f"steps are counted from 1 on: every and stop at least 1, warmup at least 0, got "
                f"every={every}, stop={stop}, warmup={warmup}"
            )
        if stop <= every:
            raise ValueError(
                f"masks move every {every:,} steps and no more from step {stop:,} on, so they never would; "
                "lower every, or raise stop"
            )
        if candidates is not None:
            candidates = whole_number("candidates", candidates, least=1)
        self._model: Final = model
        self._optimizers: Final = optimizers_of(opt)
        self._grow: Final = grow
        self._drop: Final = float(drop)
        self._every: Final = every
        self._stop: Final = stop
        self._seed = whole_number("seed", seed)
        self._warmup: Final = warmup
        self._candidates: Final = candidates
        self._group: Final = group
        self._steps = 0
        self._is_detached = False
        self._growths: dict[str, Growth] = {}
        weights = check_moving(model, self._optimizers)
        masks = [weight.mask for weight in weights.values() if weight.mask is not None]
        kept, numel = sum(mask.kept for mask in masks), sum(mask.numel for mask in masks)
        if kept == numel:
            raise MaskError(
                f"all {kept:,} weights are kept, so that none is left to grow; prune the model first, or "
                "use samo.GradualPruning to prune it as it trains"
            )
        check_free(model, weights)
        for name, weight in weights.items():
            if weight in _MOVERS and _MOVERS[weight]() is not None:
                raise CompressionError(
                    f"another DynamicSparse moves the mask of '{name}' already, and both would drop what the "
                    "other has grown; call its detach() first, or delete it"
                )
        self._rates: Final = RateFactor(self._optimizers if warmup else [])
        for weight in weights.values():
            _MOVERS[weight] = weakref.ref(self)
        self._prepare()

    @property
    def lr_factor(self) -> float:
        """The factor on the learning rate of the next step."""
        return warmup_factor(self._steps, self._stop, self._every, self._warmup)

    @torch.no_grad()
    def step(self) -> Masks | None:
        """Count a step, after the optimizer's, and replace entries if it is time.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.prune(model, 0.9, method="random"))
            >>> opt = samo.AdamW(model.parameters())
            >>> moving = samo.DynamicSparse(model, opt, every=2, stop=10)
            >>> [masks is not None for masks in (moving.step() for _ in range(4))]
            [False, True, False, True]

        Returns:
            The new masks, or None if they stay as they are.

        Raises:
            CompressionError: Entries are to grow by gradients, and there was no backward pass; or
                `detach` was called.
            ValueError: A weight is NaN or infinite.
        """
        if self._is_detached:
            raise CompressionError(
                "this DynamicSparse was detached and changes nothing any more; build a new one"
            )
        step = self._steps + 1
        masks = None
        if is_replacing_step(step, self._stop, self._every):
            weights = moving_weights(self._model, self._optimizers)
            by_gradient = self._grow == "gradient"
            changed = self._by_gradient(weights) if by_gradient else self._at_random(weights, step)
            if changed is not None:
                masks = with_others(
                    self._model, _of_first_rank(changed, self._group or _group_of(weights))
                )
                remap_(self._model, masks, self._optimizers)
        self._steps = step
        self._prepare()
        return masks

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside model and optimizer; call it after `step`.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.prune(model, 0.9))
            >>> opt = samo.AdamW(model.parameters())
            >>> state = samo.DynamicSparse(model, opt, every=10, stop=100, seed=3).state_dict()
            >>> state["steps"], state["seed"], state["settings"]["every"]
            (0, 3, 10)
        """
        return pack(self._steps, self._seed, self._settings)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.prune(model, 0.9))
            >>> opt = samo.AdamW(model.parameters())
            >>> moving = samo.DynamicSparse(model, opt, every=10, stop=100)
            >>> moving.load_state_dict({"steps": 70, "seed": 3})

        Raises:
            ValueError: It is no such state, or of other settings.
        """
        self._steps, self._seed = unpack("DynamicSparse", state, self._seed, self._settings)
        self._prepare()

    def detach(self) -> None:
        """Leave the model and the rates of its optimizers alone from here on.

        Deleting the object does the same. Either makes room for another one.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.prune(model, 0.9))
            >>> opt = samo.AdamW(model.parameters())
            >>> moving = samo.DynamicSparse(model, opt, every=10, stop=100, warmup=5)
            >>> moving.detach()
            >>> moving = samo.DynamicSparse(model, opt, every=20, stop=100, warmup=5)
        """
        self._is_detached = True
        self._growths = {}
        self._rates.detach()
        for weight, mover in list(_MOVERS.items()):
            if mover() is self:
                del _MOVERS[weight]

    @property
    def _settings(self) -> dict[str, Any]:
        names = ("grow", "drop", "every", "stop", "warmup", "candidates")
        return {name: getattr(self, f"_{name}") for name in names}

    def _prepare(self) -> None:
        """Let the weights be watched in the backward passes before a replacement, and in no others."""
        step = self._steps + 1
        self._rates.value = self.lr_factor
        self._growths = {}  # the last ones watch no more
        if self._grow == "random" or not is_replacing_step(step, self._stop, self._every):
            return
        fraction, seed = cosine_fraction(step, self._stop, self._drop), self._seed_at(step)
        for name, weight in moving_weights(self._model, self._optimizers).items():
            self._growths[name] = Growth(weight, fraction, seed, self._candidates, self._group)

    def _by_gradient(self, weights: dict[str, Weight]) -> dict[str, Mask] | None:
        """Return the new masks; None if there are gradients that are not finite."""
        if not any(growth.has_seen for growth in self._growths.values()):
            raise CompressionError(
                f"step {self._steps + 1} is to grow entries by their gradients, and no backward pass of "
                "theirs came before it; call step() once after each optimizer step, and do not compile the "
                "backward pass of the model"
            )
        if not all(growth.is_finite for growth in self._growths.values()):
            return None
        masks: dict[str, Mask] = {}
        for name, growth in self._growths.items():
            if name not in weights:  # frozen since
                continue
            finite_values(name, weights[name])
            mask = growth.decide()
            if mask is not None:
                masks[name] = mask
        return masks

    def _at_random(self, weights: dict[str, Weight], step: int) -> dict[str, Mask]:
        masks: dict[str, Mask] = {}
        seed = self._seed_at(step)
        for name, weight in weights.items():
            assert weight.mask is not None
            count = round(cosine_fraction(step, self._stop, self._drop) * weight.kept)
            staying = weight.kept - count
            values = finite_values(name, weight)
            survivors = prune_to(name, weight.mask, values, staying, seed)
            masks[name] = survivors | grow_random(name, survivors, count, seed)
        return masks

    def _seed_at(self, step: int) -> int:
        return self._seed * 2**32 + step


def _group_of(weights: dict[str, Weight]) -> dist.ProcessGroup | None:
    return group_of(next(iter(weights.values())).values) if weights else None


def _of_first_rank(masks: dict[str, Mask], group: dist.ProcessGroup | None) -> dict[str, Mask]:
    """Return the masks that the first of the ranks with replicas has chosen."""
    if group is None or dist.get_world_size(group) == 1:
        return masks
    found: dict[str, Mask] = {}
    for name, mask in masks.items():
        words = mask.words.clone()
        dist.broadcast(words, dist.get_global_rank(group, 0), group=group)
        found[name] = Mask(mask.shape, words)
    return found
