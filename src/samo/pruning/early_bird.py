"""`EarlyBird`: draw the masks of a dense model in training once they stabilize.

queue of 5     m3 m4 m5 m6 | m7 arrives; m2 has left
distances of m7          0.31 0.18 0.09 0.04      to m3, m4, m5, m6
settled        if the queue is full and no distance exceeds the threshold
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from torch import nn

from samo.core.modules import named_weights
from samo.errors import CompressionError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters
from samo.pruning.mask_schedules import check_settings
from samo.pruning.prune import prune
from samo.pruning.scope import Scope, check_choice, decide
from samo.utils.validation import check_model, finite_number, whole_number

Distance = Literal["kept", "hamming"]

_KEY: Final = "early_bird"
"""Key of the plain values in a saved state, and prefix of the names of masks."""


def distance_of(a: Masks, b: Masks, distance: Distance = "kept") -> float:
    """Return the fraction of the kept entries that are not shared, or of all that differ."""
    common = sum(mask.common(b[name]) for name, mask in a.items())
    if distance == "hamming":
        return (a.kept + b.kept - 2 * common) / a.numel if a.numel else 0.0
    # Not 1 - common / kept, which rounds twice: 3 of 10 would be more than 0.3.
    kept = max(a.kept, b.kept)
    return (kept - common) / kept if kept else 0.0


@dataclass
class Settling:
    """A queue of the newest masks, and the distances of each new one to the others."""

    queue: int
    threshold: float
    distance: Distance
    masks: list[Masks] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)
    """Distances of each observation to earlier ones, oldest first."""

    def add(self, masks: Masks) -> bool:
        """Add a new mask, and return whether masks have settled."""
        older = self.masks[-(self.queue - 1) :]
        self.rows.append([distance_of(masks, other, self.distance) for other in older])
        self.masks = [*older, masks]
        return self.has_settled

    @property
    def recent(self) -> list[float]:
        """Distances of the newest mask to the others in the queue, oldest first."""
        return self.rows[-1] if self.rows else []

    @property
    def has_settled(self) -> bool:
        """Whether the queue is full and the newest mask within the threshold of all others."""
        return len(self.recent) == self.queue - 1 and max(self.recent) <= self.threshold

    @property
    def reason(self) -> str:
        """Why masks have settled, or how far they are from it."""
        shown = ", ".join(f"{distance:.3f}" for distance in self.recent) or "none"
        state = "settled" if self.has_settled else "not settled"
        return (
            f"{state} after {len(self.rows):,} observations: distances {shown}, "
            f"queue {self.queue}, threshold {self.threshold}"
        )


class EarlyBird:
    """Watch a dense model in training and draw a ticket, its masks, once they stabilize.

    Which weights will be large is clear long before a network is trained (You et al. 2020). Every
    observation takes the masks that pruning would give now. They have settled when the queue is
    full and the newest is within ``threshold`` of all others in it.

    Call `observe` after each epoch, or every 5 or more steps: masks a step or two apart are within
    any threshold even while they drift. The model is not changed and stays dense; `samo.compress_`
    with the masks starts pruned training.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        >>> bird = samo.EarlyBird(model, sparsity=0.9, queue=3)
        >>> for epoch in range(10):
        ...     if masks := bird.observe():  # not trained here, so masks settle at once
        ...         break
        >>> bird.reason
        'settled after 3 observations: distances 0.000, 0.000, queue 3, threshold 0.1'

    Args:
        model: The model itself, not a wrapper such as DDP, which would change the names of masks.
        sparsity: Fraction to prune.
        queue: Number of masks that must agree, the newest included; 5 as published. They are held
            on the devices of the weights: 1/8 byte per weight and mask.
        threshold: Largest distance at which masks agree.
        distance: ``"kept"``: fraction of the kept weights not shared, over all tensors together. It
            means the same at any sparsity. ``"hamming"``, as published: fraction of all weights on
            which masks differ; at sparsity 0.9 at most 0.2, and 0.18 for random masks.
        scope, pattern, skip, rules, seed: As in `samo.prune`.
    """

    def __init__(
        self,
        model: nn.Module,
        sparsity: float | None = None,
        *,
        queue: int = 5,
        threshold: float = 0.1,
        distance: Distance = "kept",
        scope: Scope = "tensor",
        pattern: str | None = None,
        skip: Iterable[str] = (),
        rules: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        check_model(model)
        _check_dense(model)
        check_choice("distance", distance, get_args(Distance))
        if not 0 <= finite_number("threshold", threshold) < 1:
            raise ValueError(f"threshold must be at least 0 and less than 1, got {threshold}")
        self._settling: Final = Settling(whole_number("queue", queue, 2), threshold, distance)
        self._pruning: Final[dict[str, Any]] = {
            "sparsity": sparsity,
            "scope": scope,
            "pattern": pattern,
            "skip": [skip] if isinstance(skip, str) else list(skip),
            "rules": dict(rules or {}),
        }
        if not decide(model, dense_parameters(model), **self._pruning):
            raise ValueError("sparsity 0 prunes nothing; choose one such as 0.9")
        self._pruning["seed"] = whole_number("seed", seed)
        self.model: Final = model
        self.masks: Masks | None = None  # the ticket, once it is drawn

    def observe(self) -> Masks | None:
        """Observe the model, and return its masks if they have settled, now or earlier."""
        if self.masks is None:
            masks = self._take()
            if self._settling.add(masks):
                return self._draw(masks)
        return self.masks

    def draw_now(self) -> Masks:
        """Return the ticket, or else the masks of the model as it is now, settled or not."""
        return self._draw(self._take()) if self.masks is None else self.masks

    @property
    def reason(self) -> str:
        """Why masks have settled, or how far they are from it, for logs."""
        return self._settling.reason

    @property
    def distances(self) -> list[list[float]]:
        """The distances of each observation to the earlier ones in the queue, oldest first."""
        return [list(row) for row in self._settling.rows]

    def state_dict(self) -> dict[str, Any]:
        """Return all observations, for ``samo.save(path, model, extra=bird.state_dict())``."""
        held = {str(place): masks for place, masks in enumerate(self._settling.masks)}
        if self.masks is not None:
            held["drawn"] = self.masks
        values = {
            "settings": self._settings(),
            "distances": self.distances,
            "masks": {key: list(masks) for key, masks in held.items()},
        }
        words = {
            f"{_KEY}/{key}/{name}": mask.words.clone()
            for key, masks in held.items()
            for name, mask in masks.items()
        }
        return {_KEY: values, **words}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, such as ``samo.load(path, model)``; ignores other keys."""
        if _KEY not in state:
            raise ValueError(f"the state has no '{_KEY}'; save all of EarlyBird.state_dict()")
        values = state[_KEY]
        check_settings("EarlyBird", values["settings"], self._settings())
        parameters = dense_parameters(self.model)

        def mask_of(key: str, name: str) -> Mask:
            parameter, words = parameters[name], state[f"{_KEY}/{key}/{name}"]
            return Mask(parameter.shape, words.to(parameter.device))

        held = {
            key: Masks({name: mask_of(key, name) for name in names})
            for key, names in values["masks"].items()
        }
        self.masks = held.pop("drawn", None)
        self._settling.masks = [held[str(place)] for place in range(len(held))]
        self._settling.rows = [list(row) for row in values["distances"]]

    def _settings(self) -> dict[str, Any]:
        rule = self._settling
        settings = {"queue": rule.queue, "threshold": rule.threshold, "distance": rule.distance}
        return {**self._pruning, **settings}

    def _take(self) -> Masks:
        _check_dense(self.model)
        return prune(self.model, **self._pruning)

    def _draw(self, masks: Masks) -> Masks:
        self.masks = masks
        self._settling.masks = []
        return masks


def _check_dense(model: nn.Module) -> None:
    if next(named_weights(model), None) is not None:
        raise CompressionError(
            "the model is compressed, so its masks are fixed; EarlyBird watches a dense model. "
            "samo.GradualPruning and samo.DynamicSparse change the masks of a compressed one"
        )
