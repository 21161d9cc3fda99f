"""The settings of ``samo finetune``: those of ``samo train`` where they mean the same.

Imports no torch.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from tyro.conf import DisallowNone, Positional, arg

from samo.train.config import (
    AUTO,
    Amount,
    Count,
    Files,
    Fraction,
    Hidden,
    MaskConfig,
    MeshConfig,
    OptimConfig,
    OptionalPath,
    OrAuto,
    Power,
    Range,
    RunConfig,
    Seed,
    Share,
    Steps,
    TrainConfig,
    Weights,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneData:
    """The data to train on."""

    data: Files = ()
    """Examples (.jsonl, .parquet, or a folder of datasets), or text and token files."""
    valid: Files = ()
    """Files to validate on. By default a part of the data is held out."""
    valid_fraction: Share = 0.05
    """Fraction of the data to hold out if no validation files are given."""
    pack: bool = True
    """Put several short examples into one sequence. They do not see each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneModel:
    """The model."""

    model: Annotated[Positional[OptionalPath], arg(metavar="MODEL_DIR")] = None
    """A Hugging Face folder: dense with zeros, compressed by samo, or to be pruned."""
    context: OrAuto[Count] = AUTO
    """Sequence length, in tokens. auto: 1,024, or that of the model if it is shorter."""
    checkpointing: Annotated[
        DisallowNone[bool | None], arg(help_behavior_hint="(default: on a GPU)")
    ] = None
    """Recompute activations in the backward pass instead of storing them: saves memory."""
    freeze_embeddings: bool = False
    """Do not train embeddings and head, which then need neither gradients nor state."""
    teacher: OptionalPath = None
    """Learn from this model's predictions too: usually the dense model before it was pruned."""
    distill: Annotated[float, Range(1e-9, 1 + 1e-9)] = 0.5
    """Share of the teacher in the loss; the text has the rest."""
    temperature: Annotated[float, Range(1e-3)] = 2.0
    """Temperature at which the predictions of both are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetunePrune(MaskConfig):
    """Which weights are pruned. By default those that the folder says, or that are 0."""

    sparsity: OrAuto[Annotated[float, Range(0, 1, "0.7 prunes 70 %")]] = AUTO
    """Prune the model first, to this sparsity. auto: the model is already
    pruned, or --pattern sets the sparsity."""
    method: Literal["magnitude", "random", "wanda", "sparsegpt"] = "wanda"
    """How to prune. wanda and sparsegpt calibrate on some of the training data."""
    masks: OptionalPath = None
    """Take the masks from this file, checkpoint, run or model."""

    @property
    def prunes(self) -> bool:
        """Whether the run prunes the model before it trains it."""
        return self.sparsity != AUTO or self.pattern is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneOptim(OptimConfig):
    """AdamW and its learning rate."""

    lr: Amount = 2e-5
    """Peak learning rate. The default suits training all weights of a pretrained model. Heavily
    pruned models, and small ones, recover faster with more: 1e-3 for SmolLM2-135M, 60 % pruned."""
    warmup_steps: OrAuto[Steps] = AUTO
    """Linear warmup. auto: 3 % of all steps."""
    final_lr: Amount = 0.0
    density_power: Power = 0.0
    """Scale the learning rate of a pruned tensor by density to this power."""
    weight_decay: Amount = 0.01
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    state: OrAuto[Literal["exact", "lean"]] = AUTO
    """Optimizer state: fp32, or 8 bits. auto: exact, if it fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneRun(RunConfig):
    """The run itself."""

    steps: OrAuto[Count] = AUTO
    """Optimizer steps. auto: what --epochs take."""
    epochs: OrAuto[Annotated[float, Range(1e-9)]] = AUTO
    """Passes over the data, in place of --steps. auto: 1."""
    batch_size: Count = 8
    seed: Seed = 0
    """Seed of the data order, and of ties between weights to prune."""
    weights: Weights = AUTO
    """Keep the dense weights in memory, or expand each one when it is used; an amount such as 4GB
    keeps that much. auto: the fastest that fits."""
    eval_every: Count = 50
    """Steps between validations. One precedes the first step."""
    sample_tokens: Steps = 100
    mode: Hidden[Literal["samo"]] = "samo"
    compile: Hidden[Literal[False]] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneMesh(MeshConfig):
    """Replicas, for runs under torchrun or samo launch."""

    data: Annotated[OrAuto[Count], arg(name="replicas")] = AUTO
    """Replicas, which share every batch. auto: one for each rank."""
    shard: OrAuto[Literal["none", "weights"]] = AUTO
    """weights: shard the model and its state over the ranks with FSDP2, and stream the weights.
    auto: none."""
    plan: Hidden[Literal[False]] = False
    pipe: Hidden[Literal[1]] = 1
    micro_batches: Hidden[Literal[1]] = 1
    stages_per_rank: Hidden[Literal[1]] = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig:
    """All settings of ``samo finetune``.

    Example:
        >>> from pathlib import Path
        >>> from samo.train.finetune_config import FinetuneConfig, FinetuneData, FinetuneModel
        >>> config = FinetuneConfig(
        ...     data=FinetuneData(data=(Path("notes.jsonl"),)),
        ...     model=FinetuneModel(model=Path("my-llama")),
        ... )
        >>> config.optim.lr
        2e-05
    """

    kind = "finetune"

    model: FinetuneModel = field(default_factory=FinetuneModel)
    data: FinetuneData = field(default_factory=FinetuneData)
    prune: FinetunePrune = field(default_factory=FinetunePrune)
    optim: FinetuneOptim = field(default_factory=FinetuneOptim)
    run: FinetuneRun = field(default_factory=FinetuneRun)
    mesh: FinetuneMesh = field(default_factory=FinetuneMesh)

    @property
    def name(self) -> str:
        """What a run is called by default."""
        return self.source.name

    @property
    def source(self) -> Path:
        """The folder of the model."""
        assert self.model.model is not None  # or `resolve` has refused it
        return self.model.model


Config = TrainConfig | FinetuneConfig
"""What the loop takes, resolved."""

KINDS: Final[dict[str, Any]] = {each.kind: each for each in (TrainConfig, FinetuneConfig)}
"""The settings of the kinds of runs, by the commands that start them."""
