"""`DynamicSparse`: masks that move while a model trains, each tensor with as many entries as before."""

from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samo.dynamic.choices import grow_random, prune_to
from samo.dynamic.growth import Growth
from samo.dynamic.members import pruned_weights
from samo.dynamic.rates import RateFactor
from samo.dynamic.schedules import cosine_fraction, is_replacing_step, warmup_factor
from samo.errors import CompressionError
from samo.mask import Mask
from samo.masks import Masks
from samo.remapping import remap_
from samo.weights import Weight

__all__ = ["DynamicSparse"]

Grow = Literal["random", "gradient"]


class DynamicSparse:
    """Drop the smallest kept entries every so often, and grow as many others in their place.

    ``grow="random"`` draws them (SET: Mocanu et al., 2018). ``grow="gradient"`` takes those with the
    largest gradient (RigL: Evci et al., 2020), which it finds in the backward pass before an update,
    while a weight's dense gradient is there: no more than one of them is ever alive. Nothing has to be
    called for that; gradients may add up over any number of backward passes.

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
        model: A compressed model; the masks of its tensors that have one move.
        opt: Its optimizer, ours or torch's, or several.
        grow: ``"random"`` or ``"gradient"``.
        drop: Fraction of the kept entries that is replaced at first.
        every: Steps from one replacement to the next.
        stop: Step from which on the masks stay as they are; three quarters of a run are usual.
        seed: Chooses the entries of ``grow="random"``, and between equals.
        warmup: Steps over which the learning rate rises to its own value after each replacement.
        density_power: The learning rate is multiplied by the kept fraction to this power: -0.5 doubles
            it at a quarter kept, 0 leaves it alone. Both act for the time of a step, on the groups that
            hold a pruned weight.
        add_up: Sums a dense gradient over the ranks of a run, each of which has seen a part of the batch;
            called for every pruned weight in the backward passes before an update, if entries grow by
            gradients. Then all ranks choose the same entries.

    Raises:
        ValueError: A setting is out of range.
        CompressionError: The model is not compressed.
        MaskError: No tensor has a mask.
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
        add_up: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if grow not in get_args(Grow):
            raise ValueError(f"grow must be one of {', '.join(get_args(Grow))}, got {grow!r}")
        if not 0 < drop <= 1:
            raise ValueError(
                f"drop is the fraction of kept entries replaced at first, in (0, 1], got {drop}"
            )
        if every < 1 or stop < 1 or warmup < 0:
            raise ValueError(
                f"steps are counted from 1 on: every and stop at least 1, warmup at least 0, got "
                f"every={every}, stop={stop}, warmup={warmup}"
            )
        self._model: Final = model
        self._optimizers: Final = [opt] if isinstance(opt, Optimizer) else list(opt)
        self._grow: Final = grow
        self._drop: Final = drop
        self._every: Final = every
        self._stop: Final = stop
        self._seed = seed
        self._warmup: Final = warmup
        self._add_up: Final = add_up
        self._steps = 0
        self._growths: dict[str, Growth] = {}
        masks = [w.mask for w in pruned_weights(model).values() if w.mask is not None]
        density = sum(mask.kept for mask in masks) / sum(mask.numel for mask in masks)
        self._density_factor: Final = density**density_power
        if warmup or density_power:
            RateFactor(lambda: self.lr_factor).attach(self._optimizers)
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
            CompressionError: Entries are to grow by gradients, and there was no backward pass.
        """
        step = self._steps + 1
        masks = None
        if is_replacing_step(step, self._stop, self._every):
            weights = pruned_weights(self._model)
            masks = self._by_gradient(weights) if self._growths else self._at_random(weights, step)
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
            >>> samo.DynamicSparse(model, opt, stop=100, seed=3).state_dict()
            {'steps': 0, 'seed': 3}
        """
        return {"steps": self._steps, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.prune(model, 0.9))
            >>> opt = samo.AdamW(samo.parameters(model))
            >>> moving = samo.DynamicSparse(model, opt, stop=100)
            >>> moving.load_state_dict({"steps": 70, "seed": 3})
        """
        self._steps, self._seed = int(state["steps"]), int(state["seed"])
        self._prepare()

    def _prepare(self) -> None:
        """Let the weights be watched in the backward passes before a replacement, and in no others."""
        step = self._steps + 1
        is_watched = self._grow == "gradient" and is_replacing_step(step, self._stop, self._every)
        fraction, seed = cosine_fraction(step, self._stop, self._drop), self._seed_at(step)
        self._growths = {}
        for name, weight in pruned_weights(self._model).items():
            weight.watcher = None
            if is_watched:
                weight.watcher = self._growths[name] = Growth(fraction, seed, self._add_up)

    def _by_gradient(self, weights: dict[str, Weight]) -> Masks:
        if not any(growth.has_seen for growth in self._growths.values()):
            raise CompressionError(
                f"step {self._steps + 1} is to grow entries by their gradients, and no backward pass came "
                "before it; call step() once after each optimizer step"
            )
        masks: dict[str, Mask] = {}
        for name, growth in self._growths.items():
            weight = weights[name]
            mask = growth.decide(weight)
            assert weight.mask is not None
            masks[name] = weight.mask if mask is None else mask
        return Masks(masks)

    def _at_random(self, weights: dict[str, Weight], step: int) -> Masks:
        masks: dict[str, Mask] = {}
        seed = self._seed_at(step)
        for name, weight in weights.items():
            assert weight.mask is not None
            count = round(cosine_fraction(step, self._stop, self._drop) * weight.kept)
            staying = weight.kept - count
            survivors = prune_to(name, weight.mask, weight.masters(), staying, seed)
            masks[name] = survivors | grow_random(name, survivors, count, seed)
        return Masks(masks)

    def _seed_at(self, step: int) -> int:
        return self._seed * 2**32 + step
