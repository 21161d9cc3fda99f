"""A factor on the learning rate of an optimizer for the time of a step.

A scheduler owns a group's ``lr`` and may compute the next one from it, so the factor is put on right
before a step and taken off right after it.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from torch.optim import Optimizer

from samo.weights import weight_of

__all__ = []


class RateFactor:
    """Multiplies the rate of the groups that hold a pruned weight."""

    def __init__(self, factor: Callable[[], float]) -> None:
        self.factor: Final = factor
        self._own_rates: list[tuple[dict[str, Any], Any]] = []

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Follow the steps of these optimizers."""
        for opt in optimizers:
            opt.register_step_pre_hook(self._before_step)
            opt.register_step_post_hook(self._after_step)

    def _before_step(self, opt: Optimizer, args: object, kwargs: object) -> None:
        self._after_step(opt, args, kwargs)  # a step that raised has left the factor on
        factor = self.factor()
        for group in opt.param_groups:
            if any(_is_pruned(leaf) for leaf in group["params"]):
                self._own_rates.append((group, group["lr"]))
                group["lr"] = group["lr"] * factor

    def _after_step(self, opt: Optimizer, args: object, kwargs: object) -> None:
        while self._own_rates:
            group, rate = self._own_rates.pop()
            group["lr"] = rate


def _is_pruned(leaf: Any) -> bool:
    weight = weight_of(leaf)
    return weight is not None and weight.mask is not None
