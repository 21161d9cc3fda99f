"""`DynamicSparse`: masks that move while a model trains, each tensor with as many entries as before."""

from collections.abc import Iterable
from typing import Any, Final, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from samo.arguments import check_model, finite_number, optimizers_of, whole_number
from samo.dynamic import states
from samo.dynamic.choices import grow_random, prune_to
from samo.dynamic.growth import AddUp, Growth
from samo.dynamic.members import check_moving, finite_masters, moving_weights, with_others
from samo.dynamic.patterns import check_free
from samo.dynamic.rates import RateFactor
from samo.dynamic.schedules import cosine_fraction, is_replacing_step, warmup_factor
from samo.errors import CompressionError, MaskError
from samo.mask import Mask
from samo.masks import Masks
from samo.owners import owned_weights
from samo.remapping import remap_
from samo.weights import Weight

__all__ = ["DynamicSparse"]

Grow = Literal["random", "gradient"]


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

    Adam's bias correction knows the steps of a whole tensor, and makes the first updates of a grown
    entry up to 3 times too large; ``samo.AdamW(..., entry_steps=True)`` counts the steps of each entry.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> model = samo.compress_(model, samo.prune(model, 0.9, method="random"))
        >>> opt = samo.AdamW(samo.parameters(model), entry_steps=True)
        >>> moving = samo.DynamicSparse(model, opt, grow="gradient", every=5, stop=20)
        >>> for _ in range(20):
        ...     model(torch.randn(4, 64)).square().mean().backward()
        ...     opt.step()
        ...     opt.zero_grad()
        ...     masks = moving.step()
        >>> [leaf.numel() for leaf in samo.parameters(model)]
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
        density_power: For torch's optimizers; `samo.AdamW` has its own. The learning rate is multiplied by
            the kept fraction to this power: -0.5 doubles it at a quarter kept, 0 leaves it alone. Both act
            for the time of a step, on the groups that hold a pruned weight.
        candidates: For ``grow="gradient"``: how many times as many entries as are to grow have their
            gradients summed while parts of a gradient come, 4 bytes each until `step`. None sums all that
            are not kept, which is exact and takes 4 bytes for each weight of the model.
        add_up: Sums a tensor over the ranks of a run, each of which has seen a part of the batch, so that
            all of them choose the same entries by gradients. The replicas of `samo.replicate` do so by
            themselves; give it where gradients are summed otherwise: ``torch.distributed.all_reduce``, or a
            function that returns the sum. It gets a copy of the dense gradient of every pruned
            weight, in fp32 or wider, in the backward passes before a replacement.

    Raises:
        TypeError: ``opt`` is no optimizer, or ``model`` no module.
        ValueError: A setting is out of range, masks would never move, or another object multiplies
            the rate of the optimizer.
        CompressionError: The model is not compressed, or another object moves its masks.
        MaskError: No tensor that is trained has a mask, all of them keep everything, or one has a
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
        density_power: float = 0.0,
        candidates: int | None = 4,
        add_up: AddUp | None = None,
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
        self._density_power: Final = finite_number("density_power", density_power)
        self._candidates: Final = candidates
        self._add_up: Final = add_up
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
            if weight.mover is not None:
                raise CompressionError(
                    f"another DynamicSparse moves the mask of '{name}' already, and both would drop what the "
                    "other has grown; call its detach() first, or delete it"
                )
        doubled = [
            group["density_power"]
            for opt in self._optimizers
            for group in opt.param_groups
            if group.get("density_power")
        ]
        if doubled and self._density_power:
            raise ValueError(
                f"the optimizer has density_power={doubled[0]} already, and both factors would multiply; leave "
                "density_power out here, where it is meant for torch's optimizers"
            )
        self._density_factor: Final[float] = (kept / numel) ** self._density_power
        self._rates: Final = RateFactor()
        if warmup or self._density_power:
            self._rates.attach(self._optimizers)
        for weight in weights.values():
            weight.mover = self
        self._prepare()

    @property
    def lr_factor(self) -> float:
        """The factor on the learning rate of the next step."""
        warm = warmup_factor(self._steps, self._stop, self._every, self._warmup)
        return self._density_factor * warm

    @torch.no_grad()
    def step(self) -> Masks | None:
        """Count a step, after the optimizer's, and replace entries if it is time.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.prune(model, 0.9, method="random"))
            >>> opt = samo.AdamW(samo.parameters(model))
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
                masks = with_others(self._model, changed)
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
            >>> opt = samo.AdamW(samo.parameters(model))
            >>> state = samo.DynamicSparse(model, opt, every=10, stop=100, seed=3).state_dict()
            >>> state["steps"], state["seed"], state["settings"]["every"]
            (0, 3, 10)
        """
        return states.pack(self._steps, self._seed, self._settings)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.prune(model, 0.9))
            >>> opt = samo.AdamW(samo.parameters(model))
            >>> moving = samo.DynamicSparse(model, opt, every=10, stop=100)
            >>> moving.load_state_dict({"steps": 70, "seed": 3})

        Raises:
            ValueError: It is no such state, or of other settings.
        """
        self._steps, self._seed = states.unpack("DynamicSparse", state, self._seed, self._settings)
        self._prepare()

    def detach(self) -> None:
        """Leave the model and the rates of its optimizers alone from here on.

        Deleting the object does the same. Either makes room for another one.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.prune(model, 0.9))
            >>> opt = samo.AdamW(samo.parameters(model))
            >>> moving = samo.DynamicSparse(model, opt, every=10, stop=100, warmup=5)
            >>> moving.detach()
            >>> moving = samo.DynamicSparse(model, opt, every=20, stop=100, warmup=5)
        """
        self._is_detached = True
        self._growths = {}  # weights hold them weakly
        self._rates.detach(self._optimizers)
        for weight in owned_weights(self._model).values():
            if weight.mover is self:
                weight.mover = None

    @property
    def _settings(self) -> dict[str, Any]:
        names = ("grow", "drop", "every", "stop", "warmup", "density_power", "candidates")
        return {name: getattr(self, f"_{name}") for name in names}

    def _prepare(self) -> None:
        """Let the weights be watched in the backward passes before a replacement, and in no others."""
        step = self._steps + 1
        self._rates.value = self.lr_factor
        self._growths = {}  # weights hold them weakly, so that the last ones watch no more
        if self._grow == "random" or not is_replacing_step(step, self._stop, self._every):
            return
        fraction, seed = cosine_fraction(step, self._stop, self._drop), self._seed_at(step)
        for name, weight in moving_weights(self._model, self._optimizers).items():
            weight.part.was_skipped = None
            weight.watcher = self._growths[name] = Growth(
                fraction, seed, self._candidates, self._add_up
            )

    def _by_gradient(self, weights: dict[str, Weight]) -> dict[str, Mask] | None:
        """Return the new masks; None if the optimizer has found its gradients not to be finite."""
        if not any(growth.has_seen for growth in self._growths.values()):
            raise CompressionError(
                f"step {self._steps + 1} is to grow entries by their gradients, and no backward pass came "
                "before it; call step() once after each optimizer step"
            )
        skipped = [weight.part.was_skipped for weight in weights.values()]
        if any(flag is not None and bool(flag) for flag in skipped):
            return None
        masks: dict[str, Mask] = {}
        for name, growth in self._growths.items():
            if name not in weights:  # frozen since
                continue
            finite_masters(name, weights[name])
            mask = growth.decide(weights[name])
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
            masters = finite_masters(name, weight)
            survivors = prune_to(name, weight.mask, masters, staying, seed)
            masks[name] = survivors | grow_random(name, survivors, count, seed)
        return masks

    def _seed_at(self, step: int) -> int:
        return self._seed * 2**32 + step
