"""The masks of a run: when they are drawn, which, and how they change.

before the draw   `observe` after every dense step, `is_due` before the next one
the draw          `draw`, then `start_changing` once the model is pruned
after it          `change` after every step

All decisions follow from the settings, the model and `state_dict`, which goes into the checkpoint.
"""

from typing import Any, Final

from samo.errors import ConfigError
from samo.integrations.model_folders import load_masks
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters, matching, prunable
from samo.pruning.early_bird import EarlyBird
from samo.pruning.mask_schedules import DynamicSparse, GradualPruning
from samo.pruning.prune import prune
from samo.pruning.scope import decide
from samo.train import events
from samo.train.config import TrainConfig
from samo.train.learner import Learner
from samo.train.rules import MOVING, first_observation, pruning

_CHANGES: Final = "mask_changes"


class Masking:
    """The masks of one run of ``samo train``."""

    def __init__(self, config: TrainConfig, learner: Learner) -> None:
        self._config: Final = config
        self._learner: Final = learner
        self._given: Masks | None = None
        self._bird: EarlyBird | None = None
        self._changing: GradualPruning | DynamicSparse | None = None
        settings = config.prune
        with pruning():
            self._choice: Final = self._choose()
            if settings.method == "early-bird":
                self._bird = EarlyBird(
                    learner.model,
                    **self._choice,
                    seed=config.run.seed,
                    queue=settings.queue,
                    threshold=settings.threshold,
                    distance=settings.distance,
                )

    def check(self) -> None:
        """Refuse at the start of a run what would fail after the dense phase."""
        model = self._learner.model
        if self._config.prune.masks is not None:
            self._given = self._load()
        elif self._choice:
            with pruning():
                groups = decide(model, dense_parameters(model), **self._choice)
            for group in groups:
                if group.kept == 0:
                    raise ConfigError(
                        f"sparsity {group.sparsity} would keep none of the weights of "
                        f"'{group.names[0]}'; lower it with --rules, or --skip the weights"
                    )

    def observe(self, step: int) -> events.Observed | None:
        """Compare the masks that pruning would give now, if early-bird is due to."""
        settings, bird = self._config.prune, self._bird
        if bird is None or bird.masks is not None or step % settings.mask_every:
            return None
        first = first_observation(settings.mask_every, self._config.optim.warmup_steps)
        if not first <= step <= settings.dense_steps:
            return None
        with pruning():  # weights may not be finite
            bird.observe()
        return events.Observed(
            step=step,
            distances=bird.distances[-1],
            largest=max(bird.distances[-1], default=None),
            threshold=settings.threshold,
            queue=settings.queue,
        )

    def is_due(self, step: int) -> bool:
        """Return whether masks are to be drawn before the next step."""
        if self._learner.phase != "dense":
            return False
        is_stable = self._bird is not None and self._bird.masks is not None
        return is_stable or step >= self._config.prune.dense_steps

    def draw(self, step: int) -> tuple[Masks, events.Pruned]:
        """Return the masks for the model as it is after this step, and the event to report."""
        settings, bird = self._config.prune, self._bird
        reason: events.DrawReason = "masks" if settings.masks else "dense_steps"
        if bird is not None:
            reason = "limit" if bird.masks is None else "settled"
            with pruning():
                masks = bird.draw_now()
        elif settings.masks is not None:
            masks, self._given = self._given or self._load(), None
        elif settings.method == "gradual":
            masks = Masks.ones(self._learner.model, skip=settings.skip)
        else:
            masks = self._prune()
        ranks = self._learner.ranks
        sizes = ranks.all_gather("the size of the masks", (masks.kept, masks.numel))
        kept, numel = map(sum, zip(*sizes[:: ranks.num_replicas]))  # of all stages
        return masks, events.Pruned(
            step=step,
            kept=kept,
            numel=numel,
            sparsity=1 - kept / max(numel, 1),
            reason=reason,
            distances=bird.distances[-1] if bird is not None and bird.distances else [],
            threshold=None if bird is None else settings.threshold,
        )

    def start_changing(self) -> None:
        """Begin to change the masks of the model, which is pruned now, if the method does."""
        self._bird = None
        settings, model, opt = self._config.prune, self._learner.model, self._learner.opt
        stop, seed = settings.mask_stop - settings.dense_steps, self._config.run.seed
        when: dict[str, Any] = {"every": settings.mask_every, "stop": stop, "seed": seed}
        if settings.method == "gradual":
            self._changing = GradualPruning(model, opt, settings.sparsity, start=0, **when)
        elif settings.method in MOVING:
            grow: Final = "gradient" if settings.method == "rigl" else "random"
            self._changing = DynamicSparse(model, opt, grow=grow, drop=settings.drop, **when)

    def change(self, step: int) -> events.Remapped | None:
        """Change the masks after a step, if that is due."""
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
    def is_idle(self) -> bool:
        """Whether `observe` and `change` have nothing to do from here on."""
        return self._bird is None and self._changing is None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides model and optimizer."""
        if self._changing is not None:
            return {_CHANGES: self._changing.state_dict()}
        return {} if self._bird is None else self._bird.state_dict()

    def load_state_dict(self, extra: dict[str, Any]) -> None:
        """Continue from the extras of a checkpoint; the model is pruned already if it was then."""
        if self._learner.phase != "dense":
            self.start_changing()
            if self._changing is not None:
                self._changing.load_state_dict(extra[_CHANGES])
        elif self._bird is not None:
            self._bird.load_state_dict(extra)

    def _load(self) -> Masks:
        path, learner = self._config.prune.masks, self._learner
        assert path is not None
        masks = learner.own_masks(load_masks(path)).to(learner.device)
        masks.parameters_of(learner.model)  # which refuses masks that do not fit
        return masks

    def _prune(self) -> Masks:
        if not self._choice:
            return Masks({})
        settings, seed = self._config.prune, self._config.run.seed
        is_trained = settings.dense_steps != 0 or self._config.model.init is not None
        # Before training, magnitudes carry no information.
        is_random = settings.method == "random" or (settings.method in MOVING and not is_trained)
        method: Final = "random" if is_random else "magnitude"
        with pruning():
            return prune(self._learner.model, method=method, **self._choice, seed=seed)

    def _choose(self) -> dict[str, Any]:
        """Return the weights to prune as arguments of `prune`; {} if this rank's stage has none.

        A pattern must match some stage, not every one.
        """
        choice, model = self._config.prune.choice(), self._learner.model
        if self._learner.ranks.num_stages == 1:
            return choice
        whole = dict.fromkeys(self._learner.names)
        here = {name for name, _ in model.named_parameters()}
        choice["skip"] = sorted(here & matching(choice["skip"], whole, "skip"))
        choice["rules"] = {
            pattern: sparsity
            for pattern, sparsity in choice["rules"].items()
            if here & matching([pattern], whole, "rules")
        }
        return choice if {*prunable(model)} - {*choice["skip"]} or choice["rules"] else {}
