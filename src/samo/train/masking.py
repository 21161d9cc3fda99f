"""The masks of a run: when they are drawn, which, and how they change after that.

before the draw   `look` after every dense step, `is_due` before the next one
the draw          `draw`, then `follow` once the model is pruned
after it          `change` after every step

All decisions follow from the settings, the model and `state_dict`, which goes into the checkpoint.
"""

import fnmatch
import json
from typing import Any, Final

import torch

from samo.checkpoint.load import load_masks
from samo.errors import CheckpointError, ConfigError
from samo.mask.masks import Masks
from samo.mask.prunable import matching, prunable
from samo.pruning.dynamic import DynamicSparse
from samo.pruning.early_bird import EarlyBird
from samo.pruning.gradual import GradualPruning
from samo.pruning.prune import prune
from samo.train import events
from samo.train.config import PruneConfig, TrainConfig
from samo.train.config_methods import MOVING, first_look
from samo.train.learner import Learner

__all__ = []

_CHANGES: Final = "mask_changes"


class Masking:
    """The masks of one run."""

    def __init__(self, config: TrainConfig, learner: Learner) -> None:
        self._config: Final = config
        self._learner: Final = learner
        self._bird: EarlyBird | None = None
        self._changing: GradualPruning | DynamicSparse | None = None
        if config.prune.method == "early-bird" and config.run.mode != "dense":
            self._bird = _new_bird(learner.model, config)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to draw: it is done, or the run is dense."""
        return self._config.run.mode == "dense" or self._learner.phase != "dense"

    def look(self, step: int) -> events.Observed | None:
        """Look at the model after a step, if early-bird is to look now."""
        settings, bird = self._config.prune, self._bird
        if bird is None or bird.masks is not None or not self._is_look(step):
            return None
        bird.observe(step)
        return events.Observed(
            step=step,
            distances=bird.distances[-1],
            largest=max(self._recent(bird), default=None),
            threshold=settings.threshold,
            queue=settings.queue,
        )

    def _is_look(self, step: int) -> bool:
        every, dense_steps = self._config.prune.mask_every, self._config.prune.dense_steps
        warmup_steps = self._config.optim.warmup_steps
        assert isinstance(every, int)
        assert isinstance(dense_steps, int)
        assert isinstance(warmup_steps, int)
        return first_look(every, warmup_steps) <= step <= dense_steps and step % every == 0

    def is_due(self, step: int) -> bool:
        """Return whether masks are to be drawn before the step after this one."""
        dense_steps = self._config.prune.dense_steps
        assert isinstance(dense_steps, int)
        has_settled = self._bird is not None and self._bird.masks is not None
        return not self.is_over and (has_settled or step >= dense_steps)

    def draw(self, step: int) -> tuple[Masks, events.Pruned]:
        """Return the masks for the model as it is after this step, and what is to be said of them."""
        settings, bird = self._config.prune, self._bird
        reason: events.DrawReason = "masks" if settings.masks else "dense_steps"
        if bird is not None:
            reason = "limit" if bird.masks is None else "settled"
        masks = draw_masks(self._learner, self._config) if bird is None else bird.draw_now()
        kept, numel = self._of_all_stages(masks)
        return masks, events.Pruned(
            step=step,
            kept=kept,
            numel=numel,
            sparsity=1 - kept / numel,
            reason=reason,
            distances=[] if bird is None else self._recent(bird),
            threshold=None if bird is None else settings.threshold,
        )

    def follow(self) -> None:
        """Begin to change the masks of the model, which is pruned now, if that is the method."""
        self._bird = None
        settings, learner = self._config.prune, self._learner
        every, stop, dense_steps = settings.mask_every, settings.mask_stop, settings.dense_steps
        sparsity, seed = settings.sparsity, self._config.run.seed
        assert isinstance(every, int)
        assert isinstance(stop, int)
        assert isinstance(dense_steps, int)
        assert not isinstance(sparsity, str)
        stop -= dense_steps  # steps are counted from the draw on
        if settings.method == "gradual":
            self._changing = GradualPruning(
                learner.model, learner.opt, sparsity, start=0, stop=stop, every=every, seed=seed
            )
        elif settings.method in MOVING:
            self._changing = DynamicSparse(
                learner.model,
                learner.opt,
                grow="gradient" if settings.method == "rigl" else "random",
                drop=settings.drop,
                every=every,
                stop=stop,
                seed=seed,
            )

    def change(self, step: int) -> events.Remapped | None:
        """Change the masks after a step, if it is time; the learner has the new ones."""
        if self._changing is None:
            return None
        before, masks = self._learner.masks, self._changing.step()
        if masks is None:
            return None
        assert before is not None
        self._learner.remapped(masks)
        common = (before & masks).kept
        return events.Remapped(
            step=step,
            kept=masks.kept,
            numel=masks.numel,
            sparsity=masks.sparsity,
            dropped=before.kept - common,
            grown=masks.kept - common,
        )

    @property
    def changes(self) -> bool:
        """Whether masks may change from here on."""
        return self._changing is not None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, beside model and optimizer: extras of a checkpoint."""
        if self._changing is not None:
            return {_CHANGES: self._changing.state_dict()}
        return {} if self._bird is None else self._bird.state_dict()

    def load_state_dict(self, extra: dict[str, Any]) -> None:
        """Go on from the extras of a checkpoint; the model is pruned already if it was then.

        Raises:
            CheckpointError: They are of another method, or damaged.
        """
        try:
            if self._learner.phase != "dense":
                self.follow()
                if self._changing is not None:
                    self._changing.load_state_dict(extra[_CHANGES])
            elif self._bird is not None:
                self._bird.load_state_dict(extra)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint does not say how method {self._config.prune.method} stood: {error}; take "
                "another checkpoint of this run"
            ) from error

    def _of_all_stages(self, masks: Masks) -> tuple[int, int]:
        """Return how many weights are kept, and of how many, in the masks of all stages."""
        ranks = self._learner.ranks
        said = ranks.texts("the size of the masks", json.dumps([masks.kept, masks.numel]))
        counts = [json.loads(text) for text in said[:: ranks.num_replicas]]
        return sum(kept for kept, _ in counts), sum(numel for _, numel in counts)

    def _recent(self, bird: EarlyBird) -> list[float]:
        """Return the distances of the newest masks to the others in the queue."""
        rows = bird.distances
        return rows[-1][-(self._config.prune.queue - 1) :] if rows else []


def draw_masks(learner: Learner, config: TrainConfig) -> Masks:
    """Return the first masks of a run: read from a file, or drawn from the weights as they are now.

    Raises:
        ConfigError: The settings do not fit the model.
        MaskError: The masks of a file do not.
    """
    settings = config.prune
    if settings.masks is not None:
        masks = load_masks(settings.masks).to(config.run.device)
        learner.check_names(masks)
        masks = learner.own_masks(masks)
        masks.parameters_of(learner.model)
        return masks
    if settings.method == "gradual":
        return Masks.whole(learner.model, skip=settings.skip)
    return _pruned(learner, config)


def check_masks(learner: Learner, config: TrainConfig) -> None:
    """Refuse what cannot be pruned at the start of a run, not after a dense phase.

    Raises:
        ConfigError: The settings do not fit the model.
        MaskError: The masks of a file do not, or nothing of a tensor would be kept.
    """
    if config.prune.masks is not None:
        draw_masks(learner, config)
    elif config.run.mode != "dense":
        _pruned(learner, config)


def _pruned(learner: Learner, config: TrainConfig) -> Masks:
    model, choice = learner.model, _choice(config.prune)
    try:
        if learner.stages is not None:
            choice = _own_choice(model, learner.stages.names, choice)
            if not ({*prunable(model)} - choice.pop("skipped") or choice["rules"]):
                return Masks({})  # embeddings or a head alone
        return prune(
            model,
            method="random" if _is_random(config) else "magnitude",
            **choice,
            seed=config.run.seed,
        )
    except ValueError as error:
        raise ConfigError(f"cannot prune: {error}") from error


def _own_choice(model: torch.nn.Module, names: list[str], choice: dict[str, Any]) -> dict[str, Any]:
    """Leave out patterns that are about other stages, once they are known to be about one of them."""
    whole, here = dict.fromkeys(names), dict(model.named_parameters())
    for argument in ("skip", "rules"):
        matching(choice[argument], whole, argument)

    def is_here(pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in here)

    skip = tuple(filter(is_here, choice["skip"]))
    rules = {pattern: value for pattern, value in choice["rules"].items() if is_here(pattern)}
    skipped = matching(skip, here, "skip")
    return {**choice, "skip": skip, "rules": rules, "skipped": skipped}


def _is_random(config: TrainConfig) -> bool:
    """Return whether the first masks keep any weights: magnitudes mean nothing before training."""
    is_trained = config.prune.dense_steps != 0 or config.model.init is not None
    return config.prune.method == "random" or (config.prune.method in MOVING and not is_trained)


def _choice(settings: PruneConfig) -> dict[str, Any]:
    """Return what is pruned, as `prune` and `EarlyBird` call it."""
    assert not isinstance(settings.sparsity, str), "resolve() comes first"
    names = ("sparsity", "scope", "pattern", "skip", "rules")
    return {name: getattr(settings, name) for name in names}


def _new_bird(model: torch.nn.Module, config: TrainConfig) -> EarlyBird:
    settings = config.prune
    assert isinstance(settings.history, bool)
    try:
        return EarlyBird(
            model,
            **_choice(settings),
            seed=config.run.seed,
            queue=settings.queue,
            threshold=settings.threshold,
            distance=settings.distance,
            history=settings.history,
        )
    except ValueError as error:
        raise ConfigError(f"cannot prune: {error}") from error
