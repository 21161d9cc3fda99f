"""The settings of ``samo finetune``: those of ``samo train`` where they mean the same.

Imports no torch. `samo.train.finetune_resolve` makes a `ResolvedFinetune` of a `FinetuneConfig`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import DisallowNone, Fixed, Positional, arg

from samo.train.config import (
    Amount,
    Auto,
    Count,
    DType,
    Files,
    MaskConfig,
    MeshConfig,
    Mode,
    OptimConfig,
    OptionalPath,
    Range,
    ResolvedConfig,
    ResolvedMesh,
    RunConfig,
    Share,
    Weights,
)

__all__ = ["FinetuneConfig", "ResolvedFinetune"]

MethodName = Literal["magnitude", "random", "wanda", "sparsegpt"]
StateName = Literal["exact", "lean"]


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
    context: Count | Auto = "auto"
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

    sparsity: Annotated[float, Range(0, 1, "0.7 prunes 70 %")] | Auto = "auto"
    """Prune the model first, to this sparsity. auto: it is pruned, or --pattern says how."""
    method: MethodName = "magnitude"
    """How to prune. wanda and sparsegpt calibrate on some of the training data."""
    masks: OptionalPath = None
    """Take the masks from this file or checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneOptim(OptimConfig):
    """AdamW and its learning rate."""

    lr: Amount = 2e-5
    """Peak learning rate: usual for all weights of a pretrained model. Heavily pruned models, and
    small ones, recover faster with up to 10 times as much."""
    warmup_steps: Annotated[int, Range(0, 2**31)] | Auto = "auto"
    """Linear warmup. auto: 3 % of all steps."""
    final_lr: Amount = 0.0
    """Final learning rate, as a fraction of the peak."""
    density_power: Annotated[float, Range(-3, 3)] = 0.0
    """Scale the learning rate of a pruned tensor by density to this power."""
    weight_decay: Amount = 0.01
    """Decoupled weight decay of matrices and embeddings."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay rates of the two moments."""
    state: Literal["auto", "exact", "lean"] = "auto"
    """Optimizer state: fp32, or 8 bits. auto: exact, if it fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneRun(RunConfig):
    """The run itself."""

    mode: Fixed[Mode] = "samo"
    steps: Count | Auto = "auto"  # type: ignore[assignment]
    """Optimizer steps. auto: what --epochs take."""
    epochs: Annotated[float, Range(1e-9)] = 1.0
    """Passes over the data, if --steps does not say."""
    batch_size: Count = 8
    """Sequences per forward and backward pass."""
    seed: Annotated[int, Range(0, 2**63)] = 0
    """Seed of the data order, and of ties between weights to prune."""
    weights: Annotated[str | int, arg(metavar="{auto,resident,streamed}|BYTES")] = "auto"
    """Keep the dense weights in memory, or expand each one when it is used; an amount such as 4GB
    keeps that much. auto: by what fits, and is fastest."""
    compile: Fixed[bool | None] = None
    eval_every: Count = 50
    """Steps between validations. One precedes the first step."""
    sample_tokens: Annotated[int, Range(0, 2**31)] = 100
    """Length of the sample that the model generates at the end. 0: no sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneMesh(MeshConfig):
    """Replicas, for runs under torchrun or samo launch."""

    plan: Fixed[bool] = False
    data: Annotated[Count | Auto, arg(name="replicas")] = "auto"
    """Replicas, which share every batch. auto: one for each rank."""
    micro_batches: Fixed[Count | Auto] = "auto"
    stages_per_rank: Fixed[Count] = 1
    shard: Literal["auto", "none", "weights"] = "auto"
    """weights: shard the model and its state over the ranks with FSDP2, and stream the weights.
    auto: none."""


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

    @property
    def name(self) -> str:
        """What a run is called by default."""
        return "finetune" if self.model.model is None else self.model.model.name

    model: FinetuneModel = field(default_factory=FinetuneModel)
    data: FinetuneData = field(default_factory=FinetuneData)
    prune: FinetunePrune = field(default_factory=FinetunePrune)
    optim: FinetuneOptim = field(default_factory=FinetuneOptim)
    run: FinetuneRun = field(default_factory=FinetuneRun)
    mesh: FinetuneMesh = field(default_factory=FinetuneMesh)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedFinetuneModel(FinetuneModel):
    """`FinetuneModel` without "auto"."""

    context: int
    checkpointing: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedFinetuneOptim(FinetuneOptim):
    """`FinetuneOptim`; until the model is in hand, ``state`` may be "auto"."""

    lr: float
    warmup_steps: int
    density_power: float
    state: StateName


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedFinetuneRun(FinetuneRun):
    """`FinetuneRun`; until data and model are in hand, ``steps`` and ``weights`` may be "auto"."""

    device: Literal["cpu", "cuda"]
    dtype: DType
    steps: int
    weights: Weights
    compile: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedFinetune(FinetuneConfig):
    """The settings as a run uses and records them."""

    model: ResolvedFinetuneModel
    optim: ResolvedFinetuneOptim
    run: ResolvedFinetuneRun
    mesh: ResolvedMesh  # type: ignore[assignment]


Resolved = ResolvedConfig | ResolvedFinetune
"""What the loop takes."""

KINDS: dict[str, type[ResolvedConfig] | type[ResolvedFinetune]] = {
    each.kind: each for each in (ResolvedConfig, ResolvedFinetune)
}
"""The settings of the kinds of runs, by the commands that start them."""
