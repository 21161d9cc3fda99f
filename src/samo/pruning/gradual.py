"""`GradualPruning`: a model that grows sparser while it trains."""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from samo.core.remap import remap_
from samo.core.weight import Weight
from samo.errors import MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.pruning.choices import prune_to
from samo.pruning.members import check_moving, finite_values, moving_weights, with_others
from samo.pruning.schedules import cubic_sparsity, is_pruning_step, pack, unpack
from samo.utils.validation import check_model, finite_number, optimizers_of, whole_number

__all__ = ["GradualPruning"]


class GradualPruning:
    """Prune a compressed model step by step, by magnitude, on a cubic schedule (Zhu and Gupta, 2017).

    Every so many steps each pruned tensor loses its smallest kept entries until it has the sparsity of
    that step:

        sparsity + (initial - sparsity) * (1 - (step - start) / (stop - start)) ** 3

    State shrinks along: what is dropped is freed. Entries never come back. A tensor that is sparser than
    the schedule asks for waits until the schedule has caught up.

    Matrices that are trained are pruned: with ``requires_grad``, and in a group of ``opt``. Steps are
    counted from 1 on, so with ``start=0`` the first pruning is at step ``every``, and ``initial`` is where the
    curve begins, not a sparsity that the model ever has. A run that is past ``stop`` without its final
    sparsity is pruned to it at the next step.

    Replicas with equal weights prune alike. DistributedDataParallel is built for the lengths of the
    parameters, and has to be built anew after each pruning, ``DistributedDataParallel(ddp.module)``; its
    next forward pass is refused otherwise.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> model = samo.compress_(model, samo.Masks.whole(model))
        >>> opt = samo.AdamW(model.parameters())
        >>> pruning = samo.GradualPruning(model, opt, sparsity=0.9, start=0, stop=20, every=5)
        >>> for _ in range(20):
        ...     model(torch.randn(4, 64)).square().mean().backward()
        ...     opt.step()
        ...     opt.zero_grad()
        ...     masks = pruning.step()
        >>> masks
        Masks(1 tensors, 410 of 4,096 weights kept, sparsity 0.900)

    Args:
        model: A compressed model; its trained matrices with a mask are pruned. `samo.Masks.whole` makes masks
            that keep everything to start from.
        opt: Its optimizer, ours or torch's, or several.
        sparsity: Fraction pruned of each tensor in the end.
        start: Step from which on it is pruned.
        stop: Step at which it has the final sparsity.
        every: Steps from one pruning to the next.
        initial: Sparsity that the schedule starts from.
        seed: Chooses between entries of equal magnitude.

    Raises:
        TypeError: ``opt`` is no optimizer, or ``model`` no module.
        ValueError: A setting is out of range.
        CompressionError: The model has no masks.
        MaskError: No tensor with a mask is trained, one would keep nothing, or all of them are
            sparser than they are to become.
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
        check_model(model)
        sparsity, initial = finite_number("sparsity", sparsity), finite_number("initial", initial)
        start, stop = whole_number("start", start), whole_number("stop", stop)
        every = whole_number("every", every)
        if not 0 <= initial <= sparsity < 1:
            raise ValueError(
                f"sparsity is the fraction pruned and may only grow: 0 <= initial <= sparsity < 1, got "
                f"initial={initial} and sparsity={sparsity}"
            )
        if not 0 <= start < stop or every < 1:
            raise ValueError(
                f"pruning goes on from step start to a later step stop, every 1 or more steps, got "
                f"start={start}, stop={stop}, every={every}"
            )
        self._model: Final = model
        self._optimizers: Final = optimizers_of(opt)
        self._schedule: Final = (start, stop, initial, sparsity)
        self._every: Final = every
        self._seed = whole_number("seed", seed)
        self._steps = 0
        weights = check_moving(model, self._optimizers)
        for name, weight in weights.items():
            if _num_kept(weight, sparsity) == 0:
                raise MaskError(
                    f"sparsity {sparsity} would keep none of the {weight.shape.numel():,} weights of "
                    f"'{name}'; leave it without a mask, or prune less"
                )
        # As many as in the end is what a run has that goes on after its last pruning.
        if all(weight.kept < _num_kept(weight, sparsity) for weight in weights.values()):
            kept = sum(weight.kept for weight in weights.values())
            numel = sum(weight.shape.numel() for weight in weights.values())
            raise MaskError(
                f"the model is sparser already ({1 - kept / numel:.3f}, in every tensor) than sparsity "
                f"{sparsity}, so nothing would ever be pruned; choose a higher one, or start from "
                "samo.Masks.whole(model)"
            )

    @torch.no_grad()
    def step(self) -> Masks | None:
        """Count a step, after the optimizer's, and prune if it is time.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.Masks.whole(model))
            >>> opt = samo.AdamW(model.parameters())
            >>> pruning = samo.GradualPruning(model, opt, 0.75, start=1, stop=3, every=1)
            >>> [masks and round(masks.sparsity, 2) for masks in (pruning.step() for _ in range(4))]
            [None, 0.66, 0.75, None]

        Returns:
            The new masks, or None if they stay as they are.

        Raises:
            ValueError: A weight is NaN or infinite.
        """
        step = self._steps + 1
        start, stop, initial, final = self._schedule
        masks = None
        if step > stop or is_pruning_step(step, start, stop, self._every):
            masks = self._prune(cubic_sparsity(step, start, stop, initial, final))
        self._steps = step
        return masks

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside model and optimizer.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.Masks.whole(model))
            >>> opt = samo.AdamW(model.parameters())
            >>> state = samo.GradualPruning(model, opt, 0.9, start=0, stop=9, every=1).state_dict()
            >>> state["steps"], state["settings"]["stop"]
            (0, 9)
        """
        return pack(self._steps, self._seed, self._settings)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
            >>> model = samo.compress_(model, samo.Masks.whole(model))
            >>> opt = samo.AdamW(model.parameters())
            >>> pruning = samo.GradualPruning(model, opt, 0.9, start=0, stop=9, every=1)
            >>> pruning.load_state_dict({"steps": 7})

        Raises:
            ValueError: It is no such state, or of other settings.
        """
        self._steps, self._seed = unpack("GradualPruning", state, self._seed, self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        start, stop, initial, sparsity = self._schedule
        when = {"start": start, "stop": stop, "every": self._every}
        return {**when, "initial": initial, "sparsity": sparsity}

    def _prune(self, sparsity: float) -> Masks | None:
        changed: dict[str, Mask] = {}
        for name, weight in moving_weights(self._model, self._optimizers).items():
            assert weight.mask is not None
            kept = _num_kept(weight, sparsity)
            if kept < weight.kept:
                values = finite_values(name, weight)
                changed[name] = prune_to(name, weight.mask, values, kept, self._seed)
        if not changed:
            return None
        masks = with_others(self._model, changed)
        remap_(self._model, masks, self._optimizers)
        return masks


def _num_kept(weight: Weight, sparsity: float) -> int:
    numel = weight.shape.numel()
    return numel - round(numel * sparsity)
