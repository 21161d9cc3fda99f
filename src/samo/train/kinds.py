"""Runs of ``samo train`` and of ``samo finetune``: the one place that tells them apart."""

from dataclasses import fields
from typing import Any

from samo.errors import ConfigError
from samo.train.config import MeshConfig, RunConfig, TrainConfig
from samo.train.finetune_config import (
    FinetuneConfig,
    FinetuneMesh,
    FinetuneRun,
    Resolved,
    ResolvedFinetune,
)
from samo.train.finetune_resolve import resolve_finetune
from samo.train.metrics import WandB
from samo.train.resolve import resolve as resolve_train, resumed
from samo.train.run_dir import RunDir
from samo.train.subject import Subject

__all__ = []


def resolve(config: TrainConfig | FinetuneConfig) -> Resolved:
    """Return the settings with "auto" replaced, and refuse what cannot work."""
    if config.run.wandb is not None and not WandB.is_installed():
        raise ConfigError("--wandb needs a package that is missing: pip install wandb")
    if isinstance(config, FinetuneConfig):
        return resolve_finetune(config)
    return resolve_train(config)


def resolve_resumed(recorded: Resolved, wanted: TrainConfig | FinetuneConfig) -> Resolved:
    """Return the settings of a resumed run: "auto" means as recorded, but for the mesh."""
    sections = resumed(recorded, wanted)
    kind = FinetuneConfig if isinstance(recorded, ResolvedFinetune) else TrainConfig
    return resolve(kind(**sections))


def again(recorded: Resolved, mesh: MeshConfig | None = None) -> Any:
    """Return the settings that a resume begins with: as recorded, on any number of ranks.

    What was planned for the ranks is "auto" again; optimizer state and checkpointing stay.
    """
    kinds: tuple[Any, Any, Any] = (TrainConfig, RunConfig, MeshConfig)
    if isinstance(recorded, ResolvedFinetune):
        kinds = (FinetuneConfig, FinetuneRun, FinetuneMesh)
    free = {"data", *recorded.mesh.planned} - {"state", "checkpointing"}

    def section(kind: Any, values: Any) -> Any:
        names = [entry.name for entry in fields(kind)]
        return kind(**{name: "auto" if name in free else getattr(values, name) for name in names})

    sections = {entry.name: getattr(recorded, entry.name) for entry in fields(kinds[0])}
    sections["run"] = section(kinds[1], recorded.run)
    sections["mesh"] = mesh or section(kinds[2], recorded.mesh)
    return kinds[0](**sections)


def subject_of(config: Resolved, run: RunDir | None = None) -> Subject:
    """Return the model and data of a run; ``run`` is its folder if it resumes."""
    if isinstance(config, ResolvedFinetune):
        from samo.train.causal_lm import CausalLMSubject  # what samo train does not need

        return CausalLMSubject(config, run)
    from samo.train.gpt_subject import GPTSubject

    return GPTSubject(config)
