"""A factor on the learning rate of an optimizer for the time of a step.

A scheduler owns a group's ``lr`` and may compute the next one from it, so the factor is put on right
before a step and taken off right after it, also when the step raises. torch's hooks do not run then;
so ``step`` of the optimizer itself is wrapped, as torch's schedulers do, before or after one of them.
"""

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch.optim import Optimizer

from samo.weights import weight_of

__all__ = []

_ATTRIBUTE: Final = "_samo_rate_factor"


class RateFactor:
    """Multiplies the rate of the groups that hold a pruned weight, as long as this object lives."""

    def __init__(self) -> None:
        self.value = 1.0

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Follow the steps of these optimizers.

        Raises:
            ValueError: Another one does so already.
        """
        optimizers = list(optimizers)
        for opt in optimizers:
            if _factor_on(opt) is not None:
                raise ValueError(
                    f"the rate of this {type(opt).__name__} is multiplied by another DynamicSparse already "
                    "(warmup or density_power); call its detach() first"
                )
        for opt in optimizers:
            if _ATTRIBUTE not in vars(opt):
                _wrap_step(opt)
            vars(opt)[_ATTRIBUTE] = weakref.ref(self)

    def detach(self, optimizers: Iterable[Optimizer]) -> None:
        """Leave the rates of these optimizers alone from here on."""
        for opt in optimizers:
            if _factor_on(opt) is self:
                vars(opt)[_ATTRIBUTE] = _nothing


def _nothing() -> None:
    return None


def _factor_on(opt: Optimizer) -> RateFactor | None:
    found: RateFactor | None = vars(opt).get(_ATTRIBUTE, _nothing)()
    return found


def _wrap_step(opt: Optimizer) -> None:
    # The optimizer must not refer to itself, or its memory would wait for the garbage collector.
    reference = weakref.ref(opt)
    function: Any = getattr(opt.step, "__func__", None)
    wrapper: Any = (
        opt.step if function is None else None
    )  # a scheduler's, which refers to it weakly

    @functools.wraps(function or wrapper)
    def step_of(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with _multiplied(self):
            if wrapper is not None:
                return wrapper(*args, **kwargs)
            return function(self, *args, **kwargs)

    @functools.wraps(step_of)
    def step(*args: Any, **kwargs: Any) -> Any:
        return step_of(reference(), *args, **kwargs)  # type: ignore[arg-type]

    step.__func__ = step_of  # type: ignore[attr-defined]  # what torch's schedulers look for
    opt.step = step  # type: ignore[method-assign]


@contextmanager
def _multiplied(opt: Optimizer) -> Iterator[None]:
    factor = _factor_on(opt)
    changed: list[tuple[dict[str, Any], Any, Any]] = []
    try:
        if factor is not None and factor.value != 1.0:
            for group in opt.param_groups:
                if any(_is_pruned(leaf) for leaf in group["params"]):
                    own = group["lr"]
                    changed.append((group, own, own * factor.value))
                    group["lr"] = changed[-1][2]
        yield
    finally:
        for group, own, ours in changed:
            if group["lr"] is ours:  # somebody may have set another during the step
                group["lr"] = own


def _is_pruned(leaf: Any) -> bool:
    weight = weight_of(leaf)
    return weight is not None and weight.mask is not None
