"""`GradualPruning`: raise the sparsity of a model while it trains."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from samo.core.weight import Weight
from samo.errors import MaskError
from samo.mask.masks import Masks
from samo.pruning.growth import prune_to
from samo.pruning.schedules import MaskSchedule, cubic_sparsity, finite_values
from samo.utils.validation import finite_number, whole_number

__all__ = ["GradualPruning"]


class GradualPruning(MaskSchedule):
    """Prune a compressed model gradually, by magnitude, on a cubic schedule (Zhu and Gupta, 2017).

    At ``start``, every ``every`` steps after it and at ``stop``, each pruned tensor drops its
    smallest kept entries to reach the sparsity of that step:

        sparsity + (initial - sparsity) * (1 - (step - start) / (stop - start)) ** 3

    Gradients and optimizer state shrink with it. Entries never come back. A tensor sparser than the
    schedule waits until the schedule has caught up.

    Matrices are pruned if they are trained: with ``requires_grad``, and in a group of ``opt``.
    Steps count from 1, so with ``start=0`` the first pruning is at step ``every``. A run past
    ``stop`` that has not reached its sparsity is pruned to it at the next step.

    Replicas with equal weights prune alike. DistributedDataParallel is built for fixed parameter
    lengths: rebuild it after each pruning with ``DistributedDataParallel(ddp.module)``. Its next
    forward pass raises otherwise.

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
        model: A compressed model. Start dense with masks of `samo.Masks.whole`.
        opt: Its optimizer, or several; any of torch's.
        sparsity: Final fraction pruned of each tensor.
        start: First step of the schedule.
        stop: Step at which the final sparsity is reached.
        every: Steps between prunings.
        initial: Sparsity at which the curve starts.
        seed: Breaks ties between equal magnitudes.

    Raises:
        TypeError: ``opt`` is not an optimizer, or ``model`` not a module.
        ValueError: A setting is out of range.
        CompressionError: The model has no masks.
        MaskError: No tensor with a mask is trained, one would keep nothing, or all are sparser
            already.
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
        start, stop = whole_number("start", start), whole_number("stop", stop)
        every = whole_number("every", every)
        if not 0 <= initial <= sparsity < 1:
            raise ValueError(
                "sparsity is the fraction pruned and can only rise: 0 <= initial <= sparsity < 1, got "
                f"initial={initial} and sparsity={sparsity}"
            )
        if not 0 <= start < stop or every < 1:
            raise ValueError(
                "pruning runs from step start to a later step stop, every 1 or more steps, got "
                f"start={start}, stop={stop}, every={every}"
            )
        self._curve = (start, stop, initial, sparsity)
        self._every = every
        settings = {"start": start, "stop": stop, "every": every}
        super().__init__(model, opt, seed, {**settings, "initial": initial, "sparsity": sparsity})
        weights = self._weights()
        for name, weight in weights.items():
            if _num_kept(weight, sparsity) == 0:
                raise MaskError(
                    f"sparsity {sparsity} would keep none of the {weight.shape.numel():,} weights of "
                    f"'{name}'; leave it without a mask, or prune less"
                )
        # A run that resumes after its last pruning keeps exactly as many.
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
            The new masks, or None if they did not change.

        Raises:
            ValueError: A weight is NaN or infinite.
        """
        step, (start, stop, *_) = self._steps + 1, self._curve
        changed = {}
        if step >= stop or (step >= start and (step - start) % self._every == 0):
            sparsity = cubic_sparsity(step, *self._curve)
            for name, weight in self._weights().items():
                kept = _num_kept(weight, sparsity)
                if weight.mask is not None and kept < weight.kept:
                    values = finite_values(name, weight)
                    changed[name] = prune_to(name, weight.mask, values, kept, self._seed)
        masks = self._remap(changed) if changed else None
        self._steps = step
        return masks


def _num_kept(weight: Weight, sparsity: float) -> int:
    numel = weight.shape.numel()
    return numel - round(numel * sparsity)
