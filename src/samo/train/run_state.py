"""All that the next steps of a run depend on, data position included: saved and restored."""

import dataclasses
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from samo.checkpoint import read_manifest
from samo.checkpoint.load import checkpoint_masks, load
from samo.checkpoint.save import stage
from samo.data.batches import Batches
from samo.errors import CheckpointError, ConfigError, first_words
from samo.train.config_io import typed
from samo.train.events import Phase
from samo.train.rank_group import RankGroup
from samo.train.subject import Subject


@dataclasses.dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run has come: what its checkpoints hold besides model and optimizer."""

    step: int = 0
    tokens: int = 0
    position: int = 0
    elapsed_s: float = 0.0
    valid_loss: float | None = None
    valid_step: int | None = None
    best_loss: float | None = None
    best_step: int | None = None
    eval_batches: int | None = None  # of the validation with the best loss
    metrics_bytes: int = 0
    phase: Phase = "dense"
    accounted: Phase | None = None
    skipped_steps: int = 0

    def forget_best(self) -> None:
        """Let the next validation be the best: its loss cannot be compared with earlier ones."""
        self.best_loss = self.best_step = None


def _read_progress(path: Path) -> Progress:
    """Return the progress of the run that saved a checkpoint."""
    found = read_manifest(path).extra.get("progress")
    if not isinstance(found, dict) or "step" not in found:
        raise CheckpointError(f"'{path}' was not saved by a run of samo; load it with samo.load")
    hints = typing.get_type_hints(Progress)
    progress = Progress()
    for name in hints.keys() & found.keys():  # a newer samo may have added others
        try:
            value = typed(found[name], hints[name])
            if type(value) is int and not 0 <= value < 2**63:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            got = str(found[name])[:40]
            raise CheckpointError(
                f"'{path}' is damaged: its {name} is {got!r}; use another checkpoint"
            ) from None
        setattr(progress, name, value)
    return progress


class RunState:
    """All that the next steps of a run depend on: at its first step, or at that of a checkpoint."""

    def __init__(self, subject: Subject, ranks: RankGroup, checkpoint: Path | None = None) -> None:
        self.subject = subject
        self.progress = Progress()
        if checkpoint is not None:
            self.progress = ranks.run_all("the checkpoint", lambda: _read_progress(checkpoint))
            taken, steps = self.progress.step, subject.config.run.steps
            if taken > steps:
                raise ConfigError(
                    f"the run has taken {taken:,} steps already, more than the {steps:,} asked "
                    "for; leave --steps out, or raise it"
                )
        self.learner = subject.new_learner(ranks, checkpoint)
        self.masking = subject.new_masking(self.learner)
        config = subject.config
        self.batches = Batches(
            subject.text.train,
            context=config.model.context,
            batch_size=config.run.batch_size,
            seed=config.run.seed,
            part=ranks.part,
        )
        if checkpoint is not None:
            self._load(checkpoint)
        elif self.masking is not None:
            ranks.run_all("the masks", self.masking.check)

    def _load(self, path: Path) -> None:
        learner, progress = self.learner, self.progress
        if progress.phase == "samo" and learner.phase == "dense":
            masks = learner.ranks.run_all("the checkpoint", lambda: checkpoint_masks(path))
            learner.prune(learner.own_masks(masks).to(learner.device))
        extra = load(
            path,
            learner.whole,
            learner.opt,
            scaler=learner.scaler,
            mesh=learner.ranks.mesh,
            timeout_s=learner.ranks.timeout_s,
        )
        self.batches.position = progress.position
        learner.skipped_before += progress.skipped_steps - learner.skipped_steps
        try:
            if self.masking is not None:
                self.masking.load_state_dict(extra)
            torch.set_rng_state(extra["random_cpu"])
            if "random_cuda" in extra and torch.cuda.is_available():
                torch.cuda.set_rng_state(extra["random_cuda"])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {first_words(error)}"
            raise CheckpointError(
                f"'{path}' is damaged: its random state or masks are not valid ({reason}); use "
                "another checkpoint of this run"
            ) from None

    def stage(self, path: Path, *, copies: bool) -> Callable[[], None]:
        """Find, or copy, all that the next steps depend on; return a function that writes it."""
        learner, progress = self.learner, self.progress
        progress.phase = learner.phase
        progress.position = self.batches.position
        progress.skipped_steps = learner.skipped_steps
        extra: dict[str, Any] = {
            "progress": dataclasses.asdict(progress),
            **self.subject.record(),
            "random_cpu": torch.get_rng_state(),
            **({} if self.masking is None else self.masking.state_dict()),
        }
        if learner.device.type == "cuda":
            extra["random_cuda"] = torch.cuda.get_rng_state(learner.device)
        return stage(
            path,
            learner.whole,
            learner.opt,
            scaler=learner.scaler,
            extra=extra,
            mesh=learner.ranks.mesh,
            timeout_s=learner.ranks.timeout_s,
            copies=copies,
            look_after=learner.ranks.look_after,
        )
