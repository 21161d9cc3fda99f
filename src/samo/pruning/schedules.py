"""When masks change and by how much, and the base of the objects that change them."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samo.core.compress import masks
from samo.core.modules import named_weights
from samo.core.remap import remap_
from samo.core.weight import Weight
from samo.errors import CompressionError, MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import matrices
from samo.utils.validation import check_model, optimizers_of, whole_number

__all__ = []


def cubic_sparsity(step: int, start: int, stop: int, initial: float, final: float) -> float:
    """Return the sparsity at a step: it rises fast at first, then ever slower.

    Example:
        >>> [round(cubic_sparsity(step, 0, 100, 0.0, 0.9), 3) for step in (0, 50, 100, 200)]
        [0.0, 0.787, 0.9, 0.9]
    """
    part = min(max((step - start) / (stop - start), 0.0), 1.0)
    return final + (initial - final) * (1 - part) ** 3


def cosine_fraction(step: int, stop: int, drop: float) -> float:
    """Return the fraction of the kept entries to replace at a step.

    Example:
        >>> [round(cosine_fraction(step, 100, 0.3), 3) for step in (0, 50, 100)]
        [0.3, 0.15, 0.0]
    """
    return drop / 2 * (1 + math.cos(math.pi * step / stop))


class MaskSchedule:
    """Base of `GradualPruning` and `DynamicSparse`: counts steps and remaps the model when it is time.

    Only the masks of matrices that are trained change: with ``requires_grad``, and in a group of
    one of the optimizers. Norms and biases have masks as parts of a channel, and keep them.

    Args:
        model: A compressed model.
        opt: Its optimizers.
        seed: Breaks ties.
        settings: What a saved state must agree with.
    """

    def __init__(
        self,
        model: nn.Module,
        opt: Optimizer | Iterable[Optimizer],
        seed: int,
        settings: Mapping[str, Any],
    ) -> None:
        check_model(model)
        self._model: Final = model
        self._optimizers: Final = optimizers_of(opt)
        self._seed = whole_number("seed", seed)
        self._settings: Final = dict(settings)
        self._steps = 0
        pruned = masks(model)
        if not pruned:
            raise CompressionError(
                "no parameter of the model has a mask that could change; call "
                "samo.compress_(model, masks) first, with masks of samo.prune(model, sparsity), or "
                "samo.Masks.whole(model) to start dense"
            )
        if not self._weights():
            raise MaskError(
                f"none of the {len(pruned)} tensors with a mask can change it: each is frozen, is not a "
                "matrix, or is in no group of the optimizer; pass the optimizers that train them"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides model and optimizer. Call it after `step`."""
        return {"steps": self._steps, "seed": self._seed, "settings": dict(self._settings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Raises:
            ValueError: It is not such a state, or has other settings.
        """
        kind = type(self).__name__
        if not isinstance(state, Mapping) or not {"steps", "seed", "settings"} <= state.keys():
            raise ValueError(
                f"this is not the state of a {kind} (no 'steps', 'seed' and 'settings'); save it with "
                "samo.save(..., extra={'moving': moving.state_dict()}) and load extra['moving']"
            )
        check_settings(kind, state["settings"], self._settings)
        steps = whole_number("'steps' of the saved state", state["steps"], least=0)
        self._seed = whole_number("'seed' of the saved state", state["seed"])
        self._steps = steps
        self._watch()

    def _watch(self) -> None:
        """Prepare for the next step."""

    def _weights(self) -> dict[str, Weight]:
        """Return the weights whose masks may change now, by name."""
        named = dict(self._model.named_parameters(remove_duplicate=False))
        trained = {
            id(param)
            for opt in self._optimizers
            for group in opt.param_groups
            for param in group["params"]
        } & {id(named[name]) for name in matrices(self._model)}
        return {
            name: weight
            for name, weight in named_weights(self._model)
            if weight.mask is not None
            and weight.values.requires_grad
            and id(weight.values) in trained
        }

    def _remap(self, changed: Mapping[str, Mask]) -> Masks:
        """Give the model masks of which some have changed, and return all of them."""
        new = Masks({name: changed.get(name, mask) for name, mask in masks(self._model).items()})
        remap_(self._model, new, self._optimizers)
        return new


def check_settings(kind: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise a ValueError unless a state was saved with these settings."""
    for name, value in own.items():
        if saved.get(name) != value:
            raise ValueError(
                f"the state was saved by {kind} with {name}={saved.get(name)!r}, but this one has "
                f"{value!r}; build it with the settings it was saved with"
            )


def finite_values(name: str, weight: Weight) -> Tensor:
    """Return the kept values of a weight; raise a ValueError if one is NaN or infinite."""
    weight.sync_written()
    values = weight.values.detach()
    bad = int(torch.count_nonzero(~values.isfinite()))
    if bad:
        raise ValueError(
            f"{bad:,} of the {values.numel():,} kept weights of '{name}' are NaN or infinite and have no "
            "magnitude to compare; go back to an earlier checkpoint"
        )
    return values
