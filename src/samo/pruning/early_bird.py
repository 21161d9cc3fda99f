"""`EarlyBird`: draw the masks of a dense model in training once they stabilize.

queue of 5     m3 m4 m5 m6 | m7 arrives; m2 has left
distances of m7          0.31 0.18 0.09 0.04      to m3, m4, m5, m6
settled        if the queue is full and no distance exceeds the threshold
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, get_args

from torch import nn

from samo.core.modules import named_weights
from samo.errors import CompressionError, TicketError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters
from samo.pruning.prune import Scope, check_choice, check_patterns, decide, prune
from samo.pruning.schedules import check_settings
from samo.utils.validation import check_model, finite_number, whole_number

__all__ = ["EarlyBird"]

Distance = Literal["kept", "hamming"]

_KEY: Final = "early_bird"
"""Key of the plain values in a saved state, and prefix of the names of masks."""
_FIELDS: Final = {"settings", "calls", "steps", "distances", "how", "masks"}


class Settling:
    """A queue of the newest masks, and the distances of each new one to the others.

    Args:
        queue: Length of the queue, the newest mask included.
        threshold: Largest distance at which masks agree.
        distance: ``"kept"`` or ``"hamming"``; see `EarlyBird`.
        keeps_all: Whether to keep masks that leave the queue, and compare new ones with them too.
    """

    def __init__(
        self, queue: int, threshold: float, distance: Distance, *, keeps_all: bool
    ) -> None:
        self.queue = queue
        self.threshold = threshold
        self.distance: Distance = distance
        self.keeps_all = keeps_all
        self.masks: list[Masks] = []
        # The distances of each observation to earlier ones, oldest first, as far as known.
        self.rows: list[list[float]] = []

    def add(self, masks: Masks) -> bool:
        """Add a new mask, and return whether masks have settled."""
        measure = Masks.distance if self.distance == "kept" else Masks.hamming
        older = self.masks if self.keeps_all else self.masks[-(self.queue - 1) :]
        row = [measure(masks, other) for other in older]  # may raise: before anything changes
        self.masks = [*older, masks]
        self.rows.append(row)
        return self.has_settled

    @property
    def recent(self) -> list[float]:
        """Distances of the newest mask to the others in the queue, oldest first."""
        return self.rows[-1][-(self.queue - 1) :] if self.rows else []

    @property
    def has_settled(self) -> bool:
        """Whether the queue is full and the newest mask within the threshold of all others."""
        return len(self.recent) == self.queue - 1 and max(self.recent) <= self.threshold

    @property
    def reason(self) -> str:
        """Why masks have settled, or how far they are from it."""
        held, shown = min(len(self.rows), self.queue), ", ".join(f"{d:.3f}" for d in self.recent)
        if self.has_settled:
            at = f"settled at observation {len(self.rows):,}"
            return f"{at}: distances {shown}, threshold {self.threshold}"
        if held < self.queue:
            known = f", distances {shown}" if shown else ""
            return f"the queue holds {held} of {self.queue} masks{known}"
        others = f"to the previous {self.queue - 1} masks"
        return f"distances {shown} {others}, threshold {self.threshold}"


class EarlyBird:
    """Watch a dense model in training and draw a ticket, its masks, once they stabilize.

    Which weights will be large is clear long before a network is trained (You et al. 2020). Every
    observation takes the masks that pruning would give now. They have settled when the queue is
    full and the newest is within ``threshold`` of all others in it.

    The model is not changed and stays dense; `samo.compress_` with the masks starts pruned
    training.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        >>> bird = samo.EarlyBird(model, sparsity=0.9, queue=3)
        >>> for step in range(10):
        ...     if masks := bird.observe(step):  # not trained here, so masks settle at once
        ...         break
        >>> step, masks
        (2, Masks(2 tensors, 461 of 4,608 weights kept, sparsity 0.900))
        >>> bird.reason
        'settled at observation 3: distances 0.000, 0.000, threshold 0.1'

    Args:
        model: The model itself, not a wrapper such as DDP, which would change the names of masks.
        sparsity: Fraction to prune.
        every: Observe at every ``every``-th call of `observe`, the first included. Masks a step or
            two apart are within any threshold even while they drift: use 5 or more with a call
            after each step, 1 with a call after each epoch.
        queue: Number of masks that must agree, the newest included; 5 as published.
        threshold: Largest distance at which masks agree.
        distance: ``"kept"``: fraction of the kept weights not shared, over all tensors together. It
            means the same at any sparsity. ``"hamming"``, as published: fraction of all weights on
            which masks differ; at sparsity 0.9 at most 0.2, and 0.18 for random masks.
        scope: As in `samo.prune`.
        pattern: As in `samo.prune`.
        skip: As in `samo.prune`.
        rules: As in `samo.prune`.
        seed: As in `samo.prune`.
        limit: Number of observations after which `observe` raises if masks have not settled.
        history: Hold all masks, on the CPU, and compare each with all before it in `distances`. By
            default only the queue is held, on the devices of the weights: 1/8 byte per weight and
            mask.

    Raises:
        TypeError: ``model`` is not a module, or a setting has the wrong type.
        ValueError: A setting is out of range or contradicts another.
        CompressionError: The model is compressed.
    """

    def __init__(
        self,
        model: nn.Module,
        sparsity: float | None = None,
        *,
        every: int = 1,
        queue: int = 5,
        threshold: float = 0.1,
        distance: Distance = "kept",
        scope: Scope = "tensor",
        pattern: str | None = None,
        skip: Iterable[str] = (),
        rules: Mapping[str, float] | None = None,
        seed: int = 0,
        limit: int | None = None,
        history: bool = False,
    ) -> None:
        check_model(model)
        _check_dense(model)
        check_choice("distance", distance, get_args(Distance))
        if not 0 <= finite_number("threshold", threshold) < 1:
            raise ValueError(
                f"threshold must be at least 0 and less than 1, got {threshold}; 0.1 is usual"
            )
        self._pruning: Final[dict[str, Any]] = {
            "sparsity": sparsity,
            "scope": scope,
            "pattern": pattern,
            "skip": check_patterns(skip, rules),
            "rules": dict(rules or {}),
        }
        if not decide(model, dense_parameters(model), **self._pruning):
            raise ValueError(
                "sparsity 0 prunes nothing, so there is nothing to watch; choose one such as 0.9"
            )
        self._pruning["seed"] = whole_number("seed", seed)
        self._settings: Final[dict[str, Any]] = {
            **self._pruning,
            "every": whole_number("every", every, 1),
            "queue": whole_number("queue", queue, 2),
            "threshold": threshold,
            "distance": distance,
            "history": history,
        }
        self._limit: Final = None if limit is None else whole_number("limit", limit, 1)
        self.model: Final = model
        self._settling: Final = Settling(queue, threshold, distance, keeps_all=history)
        self._calls = 0
        self._steps: list[int] = []
        self._drawn: Masks | None = None
        self._how = ""

    def observe(self, step: int | None = None) -> Masks | None:
        """Observe the model, and return its masks if they have settled.

        Call it at any interval of steps or epochs. Once drawn, the ticket is returned by every call
        without looking at the model.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> bird = samo.EarlyBird(model, sparsity=0.5, queue=2)
            >>> bird.observe()
            >>> bird.observe()
            Masks(1 tensors, 32 of 64 weights kept, sparsity 0.500)

        Args:
            step: Name of this observation in `steps`; by default the number of calls before it.

        Raises:
            CompressionError: The model was compressed since.
            TicketError: Masks have not settled within ``limit`` observations. `draw_now` draws them
                anyway.
            ValueError: A weight is NaN or infinite.
            MaskError: A tensor would keep nothing.
        """
        if self._drawn is not None:
            return self._drawn
        self._check_limit()
        step = self._calls if step is None else whole_number("step", step)
        if self._calls % self._settings["every"]:
            self._calls += 1
            return None
        masks = self._take()
        has_settled = self._settling.add(self._held(masks))
        self._steps.append(step)
        self._calls += 1
        if has_settled:
            return self._draw(masks, self._settling.reason)
        self._check_limit()
        return None

    def draw_now(self) -> Masks:
        """Return the masks of the model as it is now, settled or not.

        A ticket that is already drawn stays. `reason` records how far masks were from settling.

        Example:
            >>> import torch, samo
            >>> bird = samo.EarlyBird(torch.nn.Sequential(torch.nn.Linear(8, 8)), sparsity=0.5)
            >>> bird.draw_now()
            Masks(1 tensors, 32 of 64 weights kept, sparsity 0.500)
            >>> bird.reason
            'drawn on demand after 0 observations: the queue holds 0 of 5 masks'

        Raises:
            ValueError: A weight is NaN or infinite.
            MaskError: A tensor would keep nothing.
        """
        if self._drawn is None:
            how = f"drawn on demand after {self._count}: {self._settling.reason}"
            return self._draw(self._take(), how)
        return self._drawn

    @property
    def masks(self) -> Masks | None:
        """The ticket, or None if none is drawn yet."""
        return self._drawn

    @property
    def reason(self) -> str:
        """Why the ticket was drawn, or why not yet, for logs."""
        return self._how or f"not settled after {self._count}: {self._settling.reason}"

    @property
    def steps(self) -> list[int]:
        """The step of each observation."""
        return list(self._steps)

    @property
    def distances(self) -> list[list[float]]:
        """The distances of each observation to the earlier ones still held, oldest first."""
        return [list(row) for row in self._settling.rows]

    def state_dict(self) -> dict[str, Any]:
        """Return everything observed so far: plain values under one key, and a tensor per mask.

        All keys start with ``early_bird``, to go beside others in the extras of a checkpoint:
        ``samo.save(path, model, opt, extra={"step": step, **bird.state_dict()})``.

        Example:
            >>> import torch, samo
            >>> bird = samo.EarlyBird(torch.nn.Sequential(torch.nn.Linear(8, 8)), sparsity=0.5)
            >>> _ = bird.observe(step=100)
            >>> list(bird.state_dict())
            ['early_bird', 'early_bird/0/0.weight']
        """
        held = {str(place): masks for place, masks in enumerate(self._settling.masks)}
        if self._drawn is not None:
            held["drawn"] = self._drawn
        values = {
            "settings": dict(self._settings),
            "calls": self._calls,
            "steps": self.steps,
            "distances": self.distances,
            "how": self._how,
            "masks": {
                key: {name: list(mask.shape) for name, mask in masks.items()}
                for key, masks in held.items()
            },
        }
        words = {
            f"{_KEY}/{key}/{name}": mask.words.clone()
            for key, masks in held.items()
            for name, mask in masks.items()
        }
        return {_KEY: values, **words}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, and draw what would have been drawn without a break.

        Other keys are ignored: ``bird.load_state_dict(samo.load(path, model))``.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> first = samo.EarlyBird(model, sparsity=0.5, queue=2)
            >>> _ = first.observe()
            >>> bird = samo.EarlyBird(model, sparsity=0.5, queue=2)
            >>> bird.load_state_dict(first.state_dict())
            >>> bird.observe()
            Masks(1 tensors, 32 of 64 weights kept, sparsity 0.500)

        Raises:
            ValueError: There is no such state, or it has other settings; only ``limit`` may differ.
            MaskError: Its masks belong to another model.
        """
        values = self._check_state(state)
        held: dict[str, Masks] = {}
        for key, shapes in values["masks"].items():
            masks = Masks(
                {name: Mask(shape, state[f"{_KEY}/{key}/{name}"]) for name, shape in shapes.items()}
            )
            parameters = masks.parameters_of(self.model)
            held[key] = Masks({name: m.to(parameters[name].device) for name, m in masks.items()})
        self._drawn = held.pop("drawn", None)
        self._settling.masks = [self._held(held[str(place)]) for place in range(len(held))]
        self._settling.rows = [list(row) for row in values["distances"]]
        self._calls, self._how = values["calls"], values["how"]
        self._steps = list(values["steps"])

    def __repr__(self) -> str:
        shown = self._settings["sparsity"] or self._settings["pattern"]
        return f"EarlyBird({type(self.model).__name__}, {shown}, {self.reason})"

    @property
    def _count(self) -> str:
        return f"{len(self._steps):,} observation{'' if len(self._steps) == 1 else 's'}"

    def _take(self) -> Masks:
        _check_dense(self.model)
        return prune(self.model, **self._pruning)

    def _draw(self, masks: Masks, how: str) -> Masks:
        self._drawn, self._how = masks, how
        if not self._settling.keeps_all:
            self._settling.masks = []
        return masks

    def _held(self, masks: Masks) -> Masks:
        """Return masks on the device where they are held."""
        return masks.to("cpu") if self._settings["history"] else masks

    def _check_limit(self) -> None:
        if self._limit is not None and len(self._steps) >= self._limit:
            raise TicketError(
                f"no ticket after {self._count}, the limit: {self._settling.reason}; take the masks as "
                "they are with draw_now(), or allow more observations, a larger threshold or a smaller "
                "learning rate"
            )

    def _check_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the plain values of a saved state that fits this object."""
        if _KEY not in state:
            raise ValueError(
                f"this is not the state of an EarlyBird (no '{_KEY}' among {len(state)} keys); save it "
                "with samo.save(..., extra=bird.state_dict())"
            )
        values = state[_KEY]
        missing = _FIELDS - set(values if isinstance(values, Mapping) else ())
        if missing:
            raise ValueError(
                f"the state of the EarlyBird lacks {', '.join(sorted(missing))}; use another checkpoint"
            )
        check_settings("EarlyBird", values["settings"], self._settings)
        wanted = [
            f"{_KEY}/{key}/{name}" for key, names in values["masks"].items() for name in names
        ]
        lost = [name for name in wanted if name not in state]
        if lost:
            raise ValueError(
                f"the state of the EarlyBird lacks the mask '{lost[0]}' ({len(lost)} of {len(wanted)}); "
                "save all that state_dict() returns"
            )
        return values


def _check_dense(model: nn.Module) -> None:
    if next(named_weights(model), None) is not None:
        raise CompressionError(
            "the model is compressed, so its masks are fixed and would settle at once. EarlyBird watches "
            "a dense model; change the masks of a compressed one with samo.GradualPruning or "
            "samo.DynamicSparse"
        )
