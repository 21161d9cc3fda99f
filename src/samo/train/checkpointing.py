"""Checkpoints of a run: model, optimizer and scaler, and the progress of the run."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samo.checkpoint import verify
from samo.checkpoint.load import load, load_masks
from samo.checkpoint.save import save
from samo.errors import CheckpointError
from samo.mask.masks import Masks
from samo.models.shapes import GPTConfig
from samo.train.events import Phase
from samo.train.masking import Masking
from samo.train.step import Learner

__all__ = []


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
    metrics_bytes: int = 0
    phase: Phase = "dense"
    accounted: Phase | None = None
    skipped_steps: int = 0


def save_run(
    path: Path,
    learner: Learner,
    masking: Masking,
    progress: Progress,
    *,
    shape: GPTConfig,
    tokenizer: str,
) -> None:
    """Save a run."""
    progress.phase = learner.phase
    progress.skipped_steps = learner.skipped_steps
    extra: dict[str, Any] = {
        "progress": dataclasses.asdict(progress),
        "model": dataclasses.asdict(shape),
        "tokenizer": tokenizer,
        **_random_states(learner.device),
        **masking.state_dict(),
    }
    save(
        path,
        learner.whole,
        learner.opt,
        scaler=learner.scaler,
        extra=extra,
        mesh=learner.ranks.mesh,
        timeout_s=learner.ranks.timeout_s,
    )


def load_run(path: Path, learner: Learner, masking: Masking) -> Progress:
    """Load a checkpoint into a new learner and its masks, and return the progress of the run."""
    progress, masks = learner.ranks.run_all("the checkpoint", lambda: _read(path))
    if masks is not None:
        learner.prune(learner.own_masks(masks).to(learner.device))
    extra = load(
        path,
        learner.whole,
        learner.opt,
        scaler=learner.scaler,
        mesh=learner.ranks.mesh,
        timeout_s=learner.ranks.timeout_s,
    )
    masking.load_state_dict(extra)
    learner.skipped_before += progress.skipped_steps - learner.skipped_steps
    _set_random_states(extra)
    return progress


def _read(path: Path) -> tuple[Progress, Masks | None]:
    """Return the progress of a run, and its masks if the model was compressed."""
    progress = _progress(path, verify(path).extra.get("progress"))
    return progress, load_masks(path) if progress.phase == "samo" else None


def _progress(path: Path, found: Any) -> Progress:
    """Check the progress that a checkpoint holds; unknown fields of a newer samo are ignored."""
    hints = typing.get_type_hints(Progress)
    known = {} if not isinstance(found, dict) else {k: v for k, v in found.items() if k in hints}
    if "step" not in known:
        raise CheckpointError(
            f"'{path}' was not saved by samo train: it does not hold the progress of a run; load it with "
            "samo.load"
        )
    for name, value in known.items():
        if not _fits(hints[name], value) or (isinstance(value, int) and not 0 <= value < 2**63):
            raise CheckpointError(
                f"'{path}' is damaged: its {name} is {str(value)[:40]!r}; use another checkpoint"
            )
    return Progress(**known)


def _fits(hint: Any, value: Any) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    return any(_fits(kind, value) for kind in typing.get_args(hint)) or type(value) is hint


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"random_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random_cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(extra: dict[str, Any]) -> None:
    torch.set_rng_state(extra["random_cpu"])
    if "random_cuda" in extra and torch.cuda.is_available():
        torch.cuda.set_rng_state(extra["random_cuda"])
