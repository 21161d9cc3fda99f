"""`DynamicSparse`: drop and regrow weights while a model trains, at constant sparsity."""

import math
import weakref
from collections.abc import Iterable
from typing import Final, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from samo.core.modules import named_weights
from samo.core.rank_checks import group_of
from samo.core.weight import Weight
from samo.errors import CompressionError, MaskError
from samo.mask import bitmap
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import layout_of, matrices
from samo.pruning.growth import Growth, grow_random, prune_to
from samo.pruning.prune import check_choice
from samo.pruning.schedules import MaskSchedule, cosine_fraction, finite_values
from samo.utils.validation import finite_number, whole_number

__all__ = ["DynamicSparse"]

Grow = Literal["random", "gradient"]

_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_MOVERS: Final[weakref.WeakKeyDictionary[Weight, weakref.ref["DynamicSparse"]]] = (
    weakref.WeakKeyDictionary()
)
"""The object that moves the mask of a weight."""


class DynamicSparse(MaskSchedule):
    """Drop the smallest kept entries every so many steps, and grow as many others in their place.

    ``grow="random"`` draws them (SET: Mocanu et al., 2018). ``grow="gradient"`` takes those with
    the largest gradient (RigL: Evci et al., 2020), found in the backward pass before an update
    while a weight's dense gradient exists, so that at most one dense gradient is alive. If
    gradients accumulate over several backward passes, the choice is exact among the entries held
    since the first pass: ``candidates`` times as many as will grow, or all.

    Masks move if their matrices are trained: with ``requires_grad``, and in a group of ``opt``.
    Masks with a structure that this would destroy, n:m patterns and channels, are refused where
    detected.

    The fraction of each tensor's kept entries that is replaced decays from ``drop``:
    ``drop / 2 * (1 + cos(pi * step / stop))``. Entries grow among all that are not kept after the
    drop, so one that was just dropped may be chosen again and keeps its value. Grown entries start
    at 0.

    Replicas of DistributedDataParallel keep working: parameters keep their lengths. Gradients are
    summed over replicas in the backward passes before an update, in which each rank must use every
    pruned weight, and all ranks get the masks of the first.

    Steps that the optimizer skips, as with `torch.amp.GradScaler` on overflow, count too; masks do
    not move by gradients that are not finite.

    Adam's bias correction counts the steps of a whole tensor, which makes the first updates of a
    grown entry up to 3 times too large. ``samo.AdamW(..., entry_steps=True)`` counts the steps of
    each entry.

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
        model: A compressed model.
        opt: Its optimizer, or several; any of torch's.
        grow: ``"random"`` or ``"gradient"``.
        drop: Initial fraction of the kept entries to replace.
        every: Steps between updates.
        stop: Step at which masks stop moving; three quarters of a run is usual.
        seed: Draws the entries of ``grow="random"``, and breaks ties.
        candidates: For ``grow="gradient"``: entries whose gradients are summed while a gradient
            comes in parts, as a multiple of those that will grow, 4 bytes each until `step`. None
            sums all that are not kept, which is exact and takes 4 bytes per weight of the model.
        group: Ranks with replicas of the model, if not those of DistributedDataParallel.

    Raises:
        TypeError: ``opt`` is not an optimizer, or ``model`` not a module.
        ValueError: A setting is out of range, or masks would never move.
        CompressionError: The model has no masks, or another object moves them.
        MaskError: No tensor with a mask is trained, all keep everything, or one has a structure
            that would be lost.
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
        candidates: int | None = 4,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_choice("grow", grow, get_args(Grow))
        if not 0 < finite_number("drop", drop) <= 1:
            raise ValueError(
                f"drop is the initial fraction of kept entries to replace, in (0, 1], got {drop}"
            )
        every, stop = whole_number("every", every, 1), whole_number("stop", stop, 1)
        if stop <= every:
            raise ValueError(
                f"masks move every {every:,} steps until step {stop:,}, which is never; lower every, or "
                "raise stop"
            )
        if candidates is not None:
            candidates = whole_number("candidates", candidates, least=1)
        settings = {"grow": grow, "drop": float(drop), "every": every, "stop": stop}
        super().__init__(model, opt, seed, {**settings, "candidates": candidates})
        self._group: Final = group
        self._is_detached = False
        self._growths: dict[str, Growth] = {}
        weights = self._weights()
        numel = sum(weight.shape.numel() for weight in weights.values())
        if sum(weight.kept for weight in weights.values()) == numel:
            raise MaskError(
                f"all {numel:,} weights are kept, so none is left to grow; prune the model first, or use "
                "samo.GradualPruning to prune it as it trains"
            )
        _check_structure(model, weights)
        for name, weight in weights.items():
            if weight in _MOVERS and _MOVERS[weight]() is not None:
                raise CompressionError(
                    f"another DynamicSparse already moves the mask of '{name}', and each would drop what "
                    "the other grows; call its detach() first, or delete it"
                )
        for weight in weights.values():
            _MOVERS[weight] = weakref.ref(self)
        self._watch()

    @torch.no_grad()
    def step(self) -> Masks | None:
        """Count a step, after the optimizer's, and move the masks if it is time.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.prune(model, 0.9, method="random"))
            >>> opt = samo.AdamW(model.parameters())
            >>> moving = samo.DynamicSparse(model, opt, every=2, stop=10)
            >>> [masks is not None for masks in (moving.step() for _ in range(4))]
            [False, True, False, True]

        Returns:
            The new masks, or None if they did not change.

        Raises:
            CompressionError: Entries should grow by gradient without a backward pass, or `detach`
                was called.
            ValueError: A weight is NaN or infinite.
        """
        if self._is_detached:
            raise CompressionError("this DynamicSparse is detached; build a new one")
        step, masks = self._steps + 1, None
        if self._moves_at(step):
            weights = self._weights()
            by_gradient = self._settings["grow"] == "gradient"
            changed = self._by_gradient(weights) if by_gradient else self._at_random(weights, step)
            if changed is not None:
                masks = self._remap(self._of_first_rank(changed, weights))
        self._steps = step
        self._watch()
        return masks

    def detach(self) -> None:
        """Stop moving masks, as deleting the object does, so that another one may.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.prune(model, 0.9))
            >>> opt = samo.AdamW(model.parameters())
            >>> moving = samo.DynamicSparse(model, opt, every=10, stop=100)
            >>> moving.detach()
            >>> moving = samo.DynamicSparse(model, opt, every=20, stop=100)
        """
        self._is_detached = True
        self._growths = {}
        for weight, mover in list(_MOVERS.items()):
            if mover() is self:
                del _MOVERS[weight]

    def _moves_at(self, step: int) -> bool:
        return 0 < step < self._settings["stop"] and step % self._settings["every"] == 0

    def _fraction(self, step: int) -> float:
        return cosine_fraction(step, self._settings["stop"], self._settings["drop"])

    def _seed_at(self, step: int) -> int:
        return self._seed * 2**32 + step

    def _watch(self) -> None:
        """Watch the gradients in the backward passes before an update, and in no others."""
        step = self._steps + 1
        self._growths = {}  # stops the last ones
        if self._settings["grow"] == "gradient" and self._moves_at(step):
            about = self._fraction(step), self._seed_at(step), self._settings["candidates"]
            self._growths = {
                name: Growth(weight, *about, self._group)
                for name, weight in self._weights().items()
            }

    def _by_gradient(self, weights: dict[str, Weight]) -> dict[str, Mask] | None:
        """Return the new masks, or None if gradients are not finite."""
        if not any(growth.has_seen for growth in self._growths.values()):
            raise CompressionError(
                f"step {self._steps + 1} grows entries by their gradients, but no backward pass came "
                "before it; call step() once after each optimizer step, and do not compile the backward "
                "pass of the model"
            )
        if not all(growth.is_finite for growth in self._growths.values()):
            return None
        masks: dict[str, Mask] = {}
        for name, growth in self._growths.items():
            if name in weights:  # not frozen since
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
            count = round(self._fraction(step) * weight.kept)
            values = finite_values(name, weight)
            survivors = prune_to(name, weight.mask, values, weight.kept - count, seed)
            masks[name] = survivors | grow_random(name, survivors, count, seed)
        return masks

    def _of_first_rank(self, masks: dict[str, Mask], weights: dict[str, Weight]) -> dict[str, Mask]:
        """Broadcast the masks that the first rank of the replicas has chosen."""
        group = self._group or next((group_of(weight.values) for weight in weights.values()), None)
        if group is None or dist.get_world_size(group) == 1:
            return masks
        found: dict[str, Mask] = {}
        for name, mask in masks.items():
            words = mask.words.clone()
            dist.broadcast(words, dist.get_global_rank(group, 0), group=group)
            found[name] = Mask(mask.shape, words)
        return found


def _check_structure(model: nn.Module, weights: dict[str, Weight]) -> None:
    """Refuse n:m patterns and pruned channels, which entries moving one by one would destroy."""
    for name, scale in named_weights(model):
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, _BATCH_NORMS) and scale.mask is not None and scale.mask.sparsity:
            raise MaskError(
                f"'{name}' keeps {scale.mask.kept:,} of {scale.mask.numel:,} channels, and entries that "
                "grow in a pruned channel would never get a gradient; use masks without channels, such "
                "as those of samo.prune"
            )
    named = dict(model.named_parameters(remove_duplicate=False))
    names = {id(named[name]): name for name in matrices(model)}
    for name, weight in weights.items():
        layout = layout_of(model, names[id(weight.values)], len(weight.shape))
        assert weight.mask is not None
        pattern = _pattern_of(weight.mask, layout.input_dim)
        if pattern is not None:
            raise MaskError(
                f"the mask of '{name}' has the pattern {pattern}, which entries moving one by one would "
                "destroy; keep it as it is, or prune without a pattern"
            )


def _pattern_of(mask: Mask, input_dim: int | None) -> str | None:
    """Return ``"n:m"`` if the first 2**20 entries of a mask, or a few rows, follow such a pattern."""
    if input_dim is None:
        return None
    inputs, after = mask.shape[input_dim], math.prod(mask.shape[input_dim + 1 :])
    for group in (2, 4, 8, 16, 32):
        unit = group * after
        # In a random mask a group has the count of the next with probability 1/2 at most: 64 groups
        # alike are no accident.
        if inputs % group or not unit or mask.numel < 64 * group:
            continue
        stop = min(mask.numel, max(unit, 2**20 // unit * unit))
        counts = bitmap.unpack(mask.words, 0, stop).view(-1, group, after).sum(1)
        kept = int(counts.view(-1)[0])
        if 0 < kept < group and bool((counts == kept).all()):
            return f"{kept}:{group}"
    return None
