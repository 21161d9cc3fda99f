"""Masks that change while a compressed model trains: `GradualPruning` and `DynamicSparse`."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from samo.core.compress import check_not_sharded, masks
from samo.core.modules import named_weights
from samo.core.rank_checks import group_of
from samo.core.remap import remap_
from samo.core.weight import Weight
from samo.errors import CompressionError, MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.pruning.growth import Growth, grow_largest, prune_to
from samo.pruning.scope import check_choice
from samo.pruning.topk import equal_values
from samo.utils.validation import check_model, finite_number, optimizers_of, whole_number

Grow = Literal["random", "gradient"]


def cubic_sparsity(step: int, start: int, stop: int, initial: float, final: float) -> float:
    """Return the sparsity at a step: it rises fast at first, then ever slower."""
    part = min(max((step - start) / (stop - start), 0.0), 1.0)
    return final + (initial - final) * (1 - part) ** 3


class MaskSchedule:
    """Base of `GradualPruning` and `DynamicSparse`: counts steps and remaps the model.

    Only the masks of matrices that are trained change: with ``requires_grad``, and in a group of
    one of the optimizers. Norms and biases have masks as parts of a channel, and keep them.
    """

    def __init__(
        self,
        model: nn.Module,
        opt: Optimizer | Iterable[Optimizer],
        seed: int,
        settings: Mapping[str, Any],
    ) -> None:
        check_model(model)
        check_not_sharded(model, "its masks can no longer change", "change them before fully_shard")
        self._model: Final = model
        self._optimizers: Final = optimizers_of(opt)
        self._seed = whole_number("seed", seed)
        self._settings: Final = dict(settings)
        self._steps = 0
        pruned = masks(model)
        if not pruned:
            raise CompressionError(
                "the model has no masks; call samo.compress_(model, masks) first, with masks of "
                "samo.prune(model, sparsity), or samo.Masks.ones(model) to start dense"
            )
        if not self._weights():
            raise MaskError(
                f"none of the {len(pruned)} tensors with a mask is a matrix that requires grad and "
                "is in the optimizer; pass the optimizers that train them"
            )

    @torch.no_grad()
    def step(self) -> Masks | None:
        """Count a step, after the optimizer's, and return the new masks if they have changed."""
        new, changed = None, self._changed(self._steps + 1)
        if changed:
            own = masks(self._model)
            new = Masks({name: changed.get(name, mask) for name, mask in own.items()})
            remap_(self._model, new, self._optimizers)
        self._steps += 1
        self._watch()
        return new

    def _changed(self, step: int) -> dict[str, Mask]:
        """Return the masks that change at a step."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides model and optimizer. Call it after `step`."""
        return {"steps": self._steps, "seed": self._seed, "settings": dict(self._settings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state saved with the same settings."""
        check_settings(type(self).__name__, state["settings"], self._settings)
        steps = whole_number("'steps' of the saved state", state["steps"], least=0)
        self._seed = whole_number("'seed' of the saved state", state["seed"])
        self._steps = steps
        self._watch()

    def _watch(self) -> None:
        """Prepare for the next step."""

    def _weights(self) -> dict[str, Weight]:
        """Return the weights whose masks may change now, by name."""
        groups = [group for opt in self._optimizers for group in opt.param_groups]
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        return {
            name: weight
            for name, weight in named_weights(self._model)
            if weight.mask is not None and len(weight.shape) > 1 and id(weight.values) in trained
        }


class GradualPruning(MaskSchedule):
    """Prune a compressed model gradually, by magnitude, on a cubic schedule (Zhu and Gupta, 2017).

    At ``start``, every ``every`` steps after it and at ``stop``, each pruned tensor drops its
    smallest kept entries to reach the sparsity of that step:

        sparsity + (initial - sparsity) * (1 - (step - start) / (stop - start)) ** 3

    Gradients and optimizer state shrink with it. A tensor sparser than the schedule waits for it.
    Only matrices that ``opt`` trains are pruned. Start from `samo.Masks.ones` to prune a dense
    model. Steps count from 1, so with ``start=0`` the first pruning is at step ``every``.

    Rebuild DistributedDataParallel after each pruning, as ``DistributedDataParallel(ddp.module)``;
    its next forward pass raises otherwise.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> model = samo.compress_(model, samo.Masks.ones(model))
        >>> opt = samo.AdamW(model.parameters())
        >>> pruning = samo.GradualPruning(model, opt, sparsity=0.9, start=0, stop=20, every=5)
        >>> for _ in range(20):
        ...     model(torch.randn(4, 64)).square().mean().backward()
        ...     opt.step()
        ...     opt.zero_grad()
        ...     masks = pruning.step()
        >>> masks
        Masks(1 tensor, 410 of 4,096 weights kept, sparsity 0.900)

    Args:
        model, opt: A compressed model and its optimizer, or several; any of torch's.
        sparsity: Final fraction pruned of each tensor, reached at ``stop``.
        initial: Sparsity at which the curve starts.
        seed: Breaks ties between equal magnitudes.
    """

    def __init__(
        self,
        model: nn.Module,
        opt: Optimizer | Iterable[Optimizer],
        sparsity: float,
        start: int,
        stop: int,
        every: int,
        initial: float = 0.0,
        *,
        seed: int = 0,
    ) -> None:
        sparsity, initial = finite_number("sparsity", sparsity), finite_number("initial", initial)
        start, every = whole_number("start", start, 0), whole_number("every", every, 1)
        stop = whole_number("stop", stop, start + 1)
        if not 0 <= initial <= sparsity < 1:
            raise ValueError(
                "sparsity is the fraction pruned and can only rise: 0 <= initial <= sparsity < 1, "
                f"got initial={initial} and sparsity={sparsity}"
            )
        settings = {"start": start, "stop": stop, "every": every, "initial": initial}
        super().__init__(model, opt, seed, {**settings, "sparsity": sparsity})
        weights = self._weights()
        for name, weight in weights.items():
            if not _num_kept(weight, sparsity):
                raise MaskError(
                    f"sparsity {sparsity} would keep none of the {weight.shape.numel():,} weights "
                    f"of '{name}'; leave it without a mask, or prune less"
                )
        # A run that resumes after its last pruning keeps exactly as many.
        if all(weight.kept < _num_kept(weight, sparsity) for weight in weights.values()):
            raise MaskError(
                f"every tensor is already sparser than sparsity {sparsity}, so nothing would be "
                "pruned; raise it, or start from samo.Masks.ones(model)"
            )

    def _changed(self, step: int) -> dict[str, Mask]:
        at, found = self._settings, {}
        start, stop = at["start"], at["stop"]
        if step >= stop or (step >= start and (step - start) % at["every"] == 0):
            sparsity = cubic_sparsity(step, start, stop, at["initial"], at["sparsity"])
            for name, weight in self._weights().items():
                kept = _num_kept(weight, sparsity)
                if weight.mask is not None and kept < weight.kept:
                    values = _finite_values(name, weight)
                    found[name] = prune_to(name, weight.mask, values, kept, self._seed)
        return found


class DynamicSparse(MaskSchedule):
    """Drop the smallest kept entries every so many steps, and grow as many others in their place.

    ``grow="random"`` draws them (SET: Mocanu et al., 2018). ``grow="gradient"`` takes those with
    the largest gradient (RigL: Evci et al., 2020), chosen in the backward pass before an update, so
    that at most one dense gradient is alive.

    The fraction of each tensor's kept entries that is replaced decays from ``drop``:
    ``drop / 2 * (1 + cos(pi * step / stop))``. An entry that was just dropped may be chosen again
    and keeps its value. Grown entries start at 0; let ``samo.AdamW(..., entry_steps=True)`` count
    their steps from then on. Patterns such as 2:4 are not preserved.

    Under DistributedDataParallel, gradients are summed over replicas in the backward passes before
    an update, in which each rank must use every pruned weight, and all ranks get the masks of the
    first. Steps that a `torch.amp.GradScaler` skips count too; masks do not move by gradients that
    are not finite.

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
        model, opt: A compressed model and its optimizer, or several; any of torch's.
        drop: Initial fraction of the kept entries to replace.
        every: Steps between updates.
        stop: Step at which masks stop moving; three quarters of a run is usual.
        seed: Draws the entries of ``grow="random"``, and breaks ties.
        candidates: For ``grow="gradient"`` with gradient accumulation: entries whose gradients are
            summed, as a multiple of those that will grow, 4 bytes each until `step`. None sums
            those of all pruned entries, which is exact.
        group: Ranks with replicas of the model, if not those of DistributedDataParallel.
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
            raise ValueError(f"drop is the fraction of kept entries to replace, got {drop}")
        every = whole_number("every", every, 1)
        stop = whole_number("stop", stop, every + 1)
        if candidates is not None:
            candidates = whole_number("candidates", candidates, least=1)
        settings = {"grow": grow, "drop": float(drop), "every": every, "stop": stop}
        super().__init__(model, opt, seed, {**settings, "candidates": candidates})
        self._group: Final = group
        self._growths: dict[str, Growth] = {}
        if all(weight.kept == weight.shape.numel() for weight in self._weights().values()):
            raise MaskError(
                "all weights are kept, so none is left to grow; prune the model first, or use "
                "samo.GradualPruning to prune it as it trains"
            )
        self._watch()

    def _changed(self, step: int) -> dict[str, Mask]:
        if not self._moves_at(step):
            return {}
        by_gradient = self._settings["grow"] == "gradient"
        return self._of_first_rank(self._by_gradient() if by_gradient else self._at_random(step))

    def _moves_at(self, step: int) -> bool:
        return 0 < step < self._settings["stop"] and step % self._settings["every"] == 0

    def _fraction_and_seed(self, step: int) -> tuple[float, int]:
        """Return the fraction of the kept entries to replace at a step, and its seed."""
        stop, drop = self._settings["stop"], self._settings["drop"]
        return drop / 2 * (1 + math.cos(math.pi * step / stop)), self._seed * 2**32 + step

    def _watch(self) -> None:
        """Watch the gradients in the backward passes before an update, and in no others."""
        step = self._steps + 1
        self._growths = {}  # stops the last ones
        if self._settings["grow"] == "gradient" and self._moves_at(step):
            how = *self._fraction_and_seed(step), self._settings["candidates"], self._group
            self._growths = {name: Growth(w, *how) for name, w in self._weights().items()}

    def _by_gradient(self) -> dict[str, Mask]:
        """Return the new masks; none if gradients are not finite."""
        weights, growths = self._weights(), self._growths
        scores = [growth.scores for growth in growths.values() if growth.scores is not None]
        if not scores:
            raise CompressionError(
                f"step {self._steps + 1} grows entries by gradient, but there was no backward pass "
                "since the last step; call step() after each optimizer step, and do not compile "
                "the backward pass"
            )
        if not all(bool(each.isfinite().all()) for each in scores):
            return {}
        found: dict[str, Mask] = {}
        for name, growth in growths.items():
            if name in weights:  # not frozen since
                _finite_values(name, weights[name])
                if (mask := growth.decide()) is not None:
                    found[name] = mask
        return found

    def _at_random(self, step: int) -> dict[str, Mask]:
        found: dict[str, Mask] = {}
        fraction, seed = self._fraction_and_seed(step)
        for name, weight in self._weights().items():
            assert weight.mask is not None
            count = round(fraction * weight.kept)
            values = _finite_values(name, weight)
            survivors = prune_to(name, weight.mask, values, weight.kept - count, seed)
            scores = equal_values(weight.shape, values.device)
            found[name] = survivors | grow_largest(name, scores, survivors, count, seed)
        return found

    def _of_first_rank(self, changed: dict[str, Mask]) -> dict[str, Mask]:
        """Broadcast the masks that the first rank of the replicas has chosen."""
        weights = self._weights().values()
        group = self._group or next((group_of(weight.values) for weight in weights), None)
        if group is None or dist.get_world_size(group) == 1:
            return changed
        words = {name: mask.words.clone() for name, mask in changed.items()}
        for each in words.values():
            dist.broadcast(each, dist.get_global_rank(group, 0), group=group)
        return {name: Mask(mask.shape, words[name]) for name, mask in changed.items()}


def check_settings(kind: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise a ValueError unless a state was saved with these settings."""
    for name, value in own.items():
        if saved.get(name) != value:
            raise ValueError(
                f"the state was saved by {kind} with {name}={saved.get(name)!r}, but this one has "
                f"{value!r}; build it with the settings it was saved with"
            )


def _num_kept(weight: Weight, sparsity: float) -> int:
    numel = weight.shape.numel()
    return numel - round(numel * sparsity)


def _finite_values(name: str, weight: Weight) -> Tensor:
    """Return the kept values of a weight; raise a ValueError if one is NaN or infinite."""
    weight.sync_written()
    values = weight.values.detach()
    bad = int(torch.count_nonzero(~values.isfinite()))
    if bad:
        raise ValueError(
            f"{bad:,} of the {values.numel():,} kept weights of '{name}' are NaN or infinite; "
            "resume from an earlier checkpoint"
        )
    return values
