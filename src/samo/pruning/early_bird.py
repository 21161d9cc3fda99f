"""`EarlyBird`: watch the masks of a dense model in training, and draw them once they have settled."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from samo.core.modules import named_weights
from samo.errors import CompressionError, TicketError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.pruning.early_bird_settings import check_settings
from samo.pruning.early_bird_state import KEY, check_saved
from samo.pruning.prune import Scope, check_choice_of, decide, prune
from samo.pruning.settling import Distance, Settling
from samo.utils.validation import check_model, whole_number

__all__ = ["EarlyBird"]


class EarlyBird:
    """Watch a dense model in training and draw a ticket, its masks, once they have settled.

    Long before a network is trained it is clear which of its weights will be the large ones (You et
    al. 2020). Every observation takes the masks that pruning would give now. They have settled when the
    queue is full and the newest are within ``threshold`` of all others in it.

    The model is not changed and stays dense; `samo.compress_` with the masks starts pruned training.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        >>> bird = samo.EarlyBird(model, sparsity=0.9, queue=3)
        >>> for step in range(10):
        ...     if masks := bird.observe(step):  # nothing is trained here, so they settle at once
        ...         break
        >>> step, masks
        (2, Masks(2 tensors, 461 of 4,608 weights kept, sparsity 0.900))
        >>> bird.reason
        'settled at observation 3: distances 0.000, 0.000, threshold 0.1'

    Args:
        model: The model under training, itself and not a wrapper such as DDP: masks are named as here.
        sparsity: Fraction to prune.
        every: Take masks at every ``every``-th call of `observe`, the first included. Masks a step or two
            apart are within any threshold though they move steadily: a call after each step wants 5 or
            more, a call after each epoch 1.
        queue: Masks that must agree, the newest counted; 5 as published.
        threshold: Largest distance at which masks agree.
        distance: ``"kept"`` is the share of the kept weights not in common, over all tensors together. It
            means the same at any sparsity. ``"hamming"``, as published, is the share of all weights on
            which masks differ; at sparsity 0.9 it is at most 0.2, and 0.18 for random masks.
        scope: As in `samo.prune`.
        pattern: As in `samo.prune`.
        skip: As in `samo.prune`.
        rules: As in `samo.prune`.
        seed: As in `samo.prune`.
        limit: Observations after which `observe` raises if masks have not settled.
        device: Where masks are held until they are drawn, such as ``"cpu"``: an eighth of a byte for
            each weight and place of the queue. None leaves them on the devices of the weights.
        history: Hold all masks, on the CPU, so that `matrix` has no gaps.

    Raises:
        TypeError: ``model`` is no module, or a setting of another kind.
        ValueError: A setting is out of range or contradicts another.
        CompressionError: The model is compressed, so that its masks are settled already.
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
        device: torch.device | str | None = None,
        history: bool = False,
    ) -> None:
        check_model(model)
        skip = check_choice_of(skip, rules)
        _check_dense(model)
        self._settings: Final[dict[str, Any]] = {
            **{"sparsity": sparsity, "every": every, "queue": queue, "threshold": threshold},
            **{"distance": distance, "scope": scope, "pattern": pattern, "skip": skip},
            **{"rules": dict(rules or {}), "seed": seed, "history": history, "limit": limit},
        }
        self.model: Final = model
        self._device: Final = device if device is not None or not history else "cpu"
        self._calls = 0
        self._drawn: Masks | None = None
        self._how = ""
        check_settings(self._settings, self._device)
        self._settling: Final = Settling(queue, threshold, distance, keeps_all=history)
        self._steps: list[int] = []
        settings = {key: value for key, value in self._prune_settings.items() if key != "seed"}
        if not decide(model, **settings):
            raise ValueError(
                "sparsity 0 prunes nothing, so there is nothing to watch; choose one such as 0.9"
            )

    def observe(self, step: int | None = None) -> Masks | None:
        """Look at the model, and return its masks if they have settled.

        Call it at any interval, of steps or epochs. Once a ticket is drawn it is returned at every call,
        and the model is not looked at any more.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> bird = samo.EarlyBird(model, sparsity=0.5, queue=2)
            >>> bird.observe()
            >>> bird.observe()
            Masks(1 tensors, 32 of 64 weights kept, sparsity 0.500)

        Args:
            step: What `steps` calls this observation; the number of calls before it if nothing is said.

        Raises:
            CompressionError: The model was compressed since.
            TicketError: ``limit`` observations were made, and masks have not settled. `draw_now` draws
                them all the same.
            ValueError: A weight is NaN or infinite.
            MaskError: Nothing of a tensor would be kept.
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
        if not has_settled:
            self._check_limit()
            return None
        return self._draw(masks, self._settling.verdict)

    def draw_now(self) -> Masks:
        """Return the masks of the model as it is now, whether they have settled or not.

        A ticket that is drawn already stays as it is. `reason` says how far masks were from settling.

        Example:
            >>> import torch, samo
            >>> bird = samo.EarlyBird(torch.nn.Sequential(torch.nn.Linear(8, 8)), sparsity=0.5)
            >>> bird.draw_now()
            Masks(1 tensors, 32 of 64 weights kept, sparsity 0.500)
            >>> bird.reason
            'drawn on demand after 0 observations: the queue holds 0 of 5 masks'

        Raises:
            ValueError: A weight is NaN or infinite.
            MaskError: Nothing of a tensor would be kept.
        """
        if self._drawn is None:
            how = f"drawn on demand after {_count(len(self._steps))}: {self._settling.state}"
            return self._draw(self._take(), how)
        return self._drawn

    @property
    def masks(self) -> Masks | None:
        """The ticket, or None while none is drawn."""
        return self._drawn

    @property
    def reason(self) -> str:
        """Why the ticket was drawn, or why it is not yet: a sentence for the log."""
        return self._how or f"not settled after {_count(len(self._steps))}: {self._settling.state}"

    @property
    def steps(self) -> list[int]:
        """The step of each observation."""
        return list(self._steps)

    @property
    def distances(self) -> list[list[float]]:
        """For each observation its distances to those before it that were still held, oldest first."""
        return [list(row) for row in self._settling.rows]

    def matrix(self) -> list[list[float | None]]:
        """Return the distances of all observations to all others; None where they were not compared.

        Masks that were never in the queue together are not compared, unless ``history`` holds all.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> bird = samo.EarlyBird(model, sparsity=0.5, queue=2)
            >>> _ = bird.observe()
            >>> with torch.no_grad():
            ...     _ = model[0].weight.copy_(torch.arange(64).view(8, 8))
            >>> _ = bird.observe()
            >>> bird.matrix()[1][0] == bird.distances[1][0]
            True
        """
        return self._settling.matrix()

    def state_dict(self) -> dict[str, Any]:
        """Return everything observed so far: plain values under one key, and a tensor for each mask.

        All keys begin with ``early_bird``, so that they can stand beside others in the extras of a
        checkpoint: ``samo.save(path, model, opt, extra={"step": step, **bird.state_dict()})``.

        Example:
            >>> import torch, samo
            >>> bird = samo.EarlyBird(torch.nn.Sequential(torch.nn.Linear(8, 8)), sparsity=0.5)
            >>> _ = bird.observe(step=100)
            >>> list(bird.state_dict())
            ['early_bird', 'early_bird/0/0.weight']
            >>> bird.state_dict()["early_bird"]["steps"]
            [100]
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
                key: {n: list(m.shape) for n, m in masks.items()} for key, masks in held.items()
            },
        }
        words = {
            f"{KEY}/{key}/{name}": mask.words.clone()
            for key, masks in held.items()
            for name, mask in masks.items()
        }
        return {KEY: values, **words}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state: what is drawn then is what would have been drawn without a break.

        Keys that are not of `state_dict` are passed over: ``bird.load_state_dict(samo.load(path, model))``.

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
            ValueError: There is no such state, or it is of other settings; ``limit`` alone may differ.
            MaskError: Its masks are of another model.
        """
        values = check_saved(state, self._settings)
        held = {
            key: self._placed({n: Mask(shapes[n], state[f"{KEY}/{key}/{n}"]) for n in shapes})
            for key, shapes in values["masks"].items()
        }
        self._drawn = held.pop("drawn", None)
        queued = [held[str(place)] for place in range(len(held))]
        self._settling.masks = [self._held(masks) for masks in queued]
        self._settling.rows = [list(row) for row in values["distances"]]
        self._calls, self._how = values["calls"], values["how"]
        self._steps = list(values["steps"])

    def __repr__(self) -> str:
        shown = self._settings["sparsity"] or self._settings["pattern"]
        return f"EarlyBird({type(self.model).__name__}, {shown}, {self.reason})"

    @property
    def _prune_settings(self) -> dict[str, Any]:
        names = ("sparsity", "scope", "pattern", "skip", "rules", "seed")
        return {name: self._settings[name] for name in names}

    def _take(self) -> Masks:
        _check_dense(self.model)
        return prune(self.model, **self._prune_settings)

    def _draw(self, masks: Masks, how: str) -> Masks:
        self._drawn, self._how = masks, how
        self._settling.drop_masks()
        return masks

    def _placed(self, masks: Mapping[str, Mask]) -> Masks:
        """Return masks on the devices of their weights."""
        parameters = Masks(masks).parameters_of(self.model)
        return Masks({name: mask.to(parameters[name].device) for name, mask in masks.items()})

    def _held(self, masks: Masks) -> Masks:
        """Return masks where the queue is held."""
        return masks if self._device is None else masks.to(self._device)

    def _check_limit(self) -> None:
        limit = self._settings["limit"]
        if limit is not None and len(self._steps) >= limit:
            raise TicketError(
                f"no ticket after {_count(len(self._steps))}, the limit: {self._settling.state}; take the masks "
                "as they are with draw_now(), or give it more time, a larger threshold or a smaller "
                "learning rate"
            )


def _check_dense(model: nn.Module) -> None:
    if next(named_weights(model), None) is not None:
        raise CompressionError(
            "the model is compressed: its masks stay as they are, and would settle at once. An EarlyBird "
            "watches a dense model; masks of a compressed one change with samo.GradualPruning or "
            "samo.DynamicSparse"
        )


def _count(number: int) -> str:
    return f"{number:,} observation{'' if number == 1 else 's'}"
