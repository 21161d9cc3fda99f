"""A run in a checkpoint: model, optimizer and scaler, and where the run stood."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samo.checkpoints import read_manifest
from samo.checkpoints.loading import load
from samo.checkpoints.saving import save
from samo.errors import CheckpointError
from samo.masks import Masks
from samo.models import GPT
from samo.training.events import Phase
from samo.training.learner import Learner

__all__ = []


@dataclasses.dataclass(kw_only=True, slots=True)
class Progress:
    """Where a run stands: what its checkpoints hold beside model and optimizer."""

    step: int = 0
    tokens: int = 0
    position: int = 0
    elapsed_s: float = 0.0
    valid_loss: float | None = None
    valid_step: int | None = None
    best_loss: float | None = None
    metrics_bytes: int = 0
    phase: Phase = "dense"
    accounted: Phase | None = None
    dense_skipped: int = 0


def write(path: Path, learner: Learner, progress: Progress, *, tokenizer: str) -> None:
    """Save a run.

    Raises:
        CheckpointError: It could not be written; what was there before still is.
    """
    assert isinstance(learner.model, GPT)
    progress.phase = learner.phase
    progress.dense_skipped = learner.dense_skipped
    extra = {
        "progress": dataclasses.asdict(progress),
        "model": dataclasses.asdict(learner.model.config),
        "tokenizer": tokenizer,
        **_random_states(learner.device),
    }
    save(path, learner.model, learner.opt, scaler=learner.scaler, extra=extra)


def restore(path: Path, learner: Learner, *, masks: Path) -> Progress:
    """Bring a fresh learner to where a checkpoint stands, and return where that is.

    Args:
        path: The checkpoint.
        learner: In its dense phase.
        masks: The masks of a run on dense state, whose checkpoints hold none.

    Raises:
        CheckpointError: The checkpoint is damaged, of another model, or not of a run.
    """
    try:
        progress = Progress(**read_manifest(path).extra["progress"])
    except (KeyError, TypeError):
        raise CheckpointError(
            f"'{path}' was not saved by samo train: it does not say where the run stood; read it with "
            "samo.load"
        ) from None
    if progress.phase != "dense":
        source = path if progress.phase == "samo" else masks
        learner.prune(Masks.load(source).to(learner.device), progress.phase)
    extra = load(path, learner.model, learner.opt, scaler=learner.scaler)
    learner.dense_skipped = progress.dense_skipped
    _set_random_states(extra)
    return progress


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"random_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random_cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(extra: dict[str, Any]) -> None:
    torch.set_rng_state(extra["random_cpu"])
    if "random_cuda" in extra and torch.cuda.is_available():
        torch.cuda.set_rng_state(extra["random_cuda"])
