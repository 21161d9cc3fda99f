"""A factor on the learning rate of an optimizer for the time of a step.

A scheduler owns a group's ``lr`` and may compute the next one from it, so the factor is put on right
before a step and taken off right after it, by torch's own hooks.
"""

import weakref
from collections.abc import Iterable
from typing import Any, Final

from torch.optim import Optimizer

from samo.core.weight import weight_of

__all__ = []

_FACTORS: Final[weakref.WeakKeyDictionary[Optimizer, weakref.ref["RateFactor"]]] = (
    weakref.WeakKeyDictionary()
)


class RateFactor:
    """Multiplies the rates of the groups that hold a pruned weight, as long as this object lives.

    Raises:
        ValueError: Another one does so already.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.value = 1.0
        self._changed: list[tuple[dict[str, Any], Any, Any]] = []
        self._ends: Final[list[weakref.finalize[Any, Any]]] = []
        optimizers = list(optimizers)
        for opt in optimizers:
            if opt in _FACTORS and _FACTORS[opt]() is not None:
                raise ValueError(
                    f"the rate of this {type(opt).__name__} is multiplied by another DynamicSparse already "
                    "(warmup); call its detach() first"
                )
        reference = weakref.ref(self)

        def before(opt: Optimizer, args: Any, kwargs: Any) -> None:
            factor = reference()
            if factor is not None:
                factor._put_on(opt)

        def after(opt: Optimizer, args: Any, kwargs: Any) -> None:
            factor = reference()
            if factor is not None:
                factor._take_off()

        for opt in optimizers:
            _FACTORS[opt] = reference
            for handle in (opt.register_step_pre_hook(before), opt.register_step_post_hook(after)):
                self._ends.append(weakref.finalize(self, handle.remove))

    def detach(self) -> None:
        """Leave the rates alone from here on."""
        self._take_off()
        for end in self._ends:
            end()
        for opt, factor in list(_FACTORS.items()):
            if factor() is self:
                del _FACTORS[opt]

    def _put_on(self, opt: Optimizer) -> None:
        self._take_off()  # after a step that raised
        if self.value == 1.0:
            return
        for group in opt.param_groups:
            weights = map(weight_of, group["params"])
            if any(weight is not None and weight.mask is not None for weight in weights):
                own = group["lr"]
                group["lr"] = own * self.value
                self._changed.append((group, own, group["lr"]))

    def _take_off(self) -> None:
        for group, own, ours in self._changed:
            if group["lr"] is ours:  # somebody may have set another during the step
                group["lr"] = own
        self._changed = []
