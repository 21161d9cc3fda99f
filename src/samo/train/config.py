"""The settings of a training run, shared by the command line, TOML files and the Python API.

One dataclass is one section of the file and one group of flags; the string below a field is its
help, and its type may carry its `Range`. "auto" is a value that follows from others, which
`samo.train.resolve` fills in. Imports no torch.

    [run]                       samo train notes.txt --steps 2000
    steps = 2000                TrainConfig(run=RunConfig(steps=2000), ...)
"""

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeVar

from tyro.conf import DisallowNone, Fixed, Positional, Suppress, arg

from samo.models.shapes import ShapeName


class Range(NamedTuple):
    """The range of a setting: ``least <= value < below``."""

    least: float
    below: float = math.inf
    hint: str = ""

    def rule(self, value: float) -> str:
        """Return what a value that is out of the range has to be."""
        least = "more than 0" if 0 < self.least < 1e-6 else f"{self.least:g} or more"
        limit = f" and less than {self.below:,}"
        if 1 < self.below < 1 + 1e-6:
            limit = " and at most 1"
        elif self.below == math.inf or (self.below >= 2**31 and not value >= self.below):
            limit = ""  # no wonder that the value is not too large
        return f"{least}{limit}{self.hint and f' ({self.hint})'}"


Count = Annotated[int, Range(1, 2**31)]
Steps = Annotated[int, Range(0, 2**31)]
Amount = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(1e-9, 1)]
Power = Annotated[float, Range(-3, 3)]
Sparsity = Annotated[float, Range(0, 1, "0.9 prunes 90 %")]
Seed = Annotated[int, Range(0, 2**63)]
OptionalPath = Annotated[DisallowNone[Path | None], arg(metavar="PATH", help_behavior_hint="")]
Files = Annotated[tuple[Path, ...], arg(metavar="FILE ...", help_behavior_hint="")]
Pattern = Annotated[DisallowNone[str | None], arg(metavar="N:M", help_behavior_hint="")]
Names = Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")]
Method = Literal["magnitude", "random", "early-bird", "gradual", "set", "rigl"]
Mode = Literal["samo", "dense"]

Value = TypeVar("Value")
Hidden = Annotated[Value, Fixed, Suppress]
"""A field that is recorded, and is no flag."""
Auto = Literal["auto"]
AUTO: Final[Any] = "auto"

# The type of a setting is that of its resolved value. What a user may write besides it is known to
# the command line and to the readers of files, which look at types as they run.
if TYPE_CHECKING:
    OrAuto = Annotated[Value, AUTO]
    DType = Literal["float32", "bfloat16", "float16"]
    Weights = Literal["resident", "streamed"] | int
else:
    OrAuto = Value | Auto
    DType = Annotated[
        Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16", "auto"],
        arg(metavar="{auto,bf16,fp16,fp32}"),
    ]
    Weights = Annotated[str | int, arg(metavar="{auto,resident,streamed}|BYTES")]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The text to train on."""

    train: Positional[Files] = ()
    """Text files, or token files: .npy (integers) or .bin (16-bit, as nanoGPT writes them)."""
    valid: Files = ()
    """Files to validate on. By default the end of the training text is held out."""
    valid_fraction: Share = 0.05
    """Fraction of the text to hold out if no validation files are given."""
    tokenizer: Literal["bytes"] | Path = "bytes"
    """The word bytes, or a folder with a Hugging Face tokenizer (tokenizer.json)."""
    vocab_size: OrAuto[Count] = AUTO
    """Vocabulary size. auto: that of the tokenizer or of the token files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The GPT to train."""

    shape: ShapeName = "tiny"
    """A named shape; --num-layers, --width, --num-heads and --context override parts of it."""
    num_layers: OrAuto[Count] = AUTO
    """Transformer blocks."""
    width: OrAuto[Count] = AUTO
    """Model width."""
    num_heads: OrAuto[Count] = AUTO
    """Attention heads."""
    context: OrAuto[Count] = AUTO
    """Sequence length, in tokens."""
    tied: bool = False
    """Tie the weights of the embedding and the output head."""
    checkpointing: Annotated[
        DisallowNone[bool | None], arg(help_behavior_hint="(default: False)")
    ] = None
    """Recompute activations in the backward pass instead of storing them: saves memory."""
    init: OptionalPath = None
    """Start from the weights of this checkpoint or run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskConfig:
    """Which weights to prune."""

    sparsity: OrAuto[Sparsity] = AUTO
    """Fraction of the weights to prune. auto: 0.9, or the sparsity of --pattern."""
    scope: Literal["tensor", "global", "erk"] = "tensor"
    """Prune each matrix to the sparsity, or all of them together; erk: small matrices less."""
    pattern: Pattern = None
    """Keep n of every m consecutive weights along the input dimension, such as "2:4"."""
    skip: Names = ()
    """Weights that are not pruned: names or patterns, such as "blocks.0.*"."""
    rules: Annotated[dict[str, Sparsity], arg(help_behavior_hint="")] = field(default_factory=dict)
    """Sparsities of individual weights: pairs of pattern and value."""

    def choice(self) -> dict[str, Any]:
        """Return the weights to prune as arguments of `samo.prune`."""
        found = {entry.name: getattr(self, entry.name) for entry in fields(MaskConfig)}
        return found | {"sparsity": None if self.sparsity == AUTO else self.sparsity}


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneConfig(MaskConfig):
    """What to prune, and when."""

    dense_steps: OrAuto[Steps] = AUTO
    """Dense steps before pruning. auto: a fifth of all steps; none with --init, --masks, set or
    rigl. With early-bird, the latest step to prune at; auto: half of all steps."""
    method: Method = "magnitude"
    """magnitude or random: prune once. early-bird: prune once the masks are stable. gradual:
    increase the sparsity over time. set, rigl: periodically drop and regrow weights, at random or
    by gradient."""
    masks: OptionalPath = None
    """Take the masks from this file, checkpoint, run or model instead of pruning."""
    mask_every: OrAuto[Count] = AUTO
    """Steps between two mask observations (early-bird; auto: a 200th of all steps, at least 5) or
    mask updates (gradual, set, rigl; auto: a fortieth of all steps, at most 100)."""
    mask_stop: OrAuto[Steps] = AUTO
    """Step at which the masks stop changing (gradual, set, rigl). auto: after three quarters of the
    steps that follow the dense phase."""
    queue: Annotated[int, Range(2, 2**31)] = 5
    """Consecutive masks that must agree (early-bird)."""
    threshold: Fraction = 0.1
    """Largest distance at which masks agree (early-bird)."""
    distance: Literal["kept", "hamming"] = "kept"
    """Distance of two masks: the fraction of kept or of all weights that differ (early-bird)."""
    drop: Share = 0.3
    """Fraction of the kept weights that the first update replaces (set, rigl)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW and its learning rate."""

    lr: OrAuto[Amount] = AUTO
    """Peak learning rate. auto: the usual one for the shape."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate after warmup. wsd: constant, then linear decay over the last fifth."""
    warmup_steps: OrAuto[Steps] = AUTO
    """Linear warmup. auto: a twentieth of all steps, at most 1,000."""
    final_lr: Amount = 0.1
    """Final learning rate, as a fraction of the peak."""
    density_power: OrAuto[Power] = AUTO
    """Scale the learning rate of a pruned tensor by density to this power: -1 trains it 10 times as
    fast at 90 % sparsity. auto: -1, or 0 with --init."""
    weight_decay: Amount = 0.1
    """Decoupled weight decay of matrices and embeddings."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: Amount = 1e-8
    """Added to the denominator."""
    state: OrAuto[Literal["exact", "lean"]] = AUTO
    """Optimizer state of pruned training: fp32, or 8 bits. auto: exact."""
    clip: Amount = 1.0
    """Maximum gradient norm. 0: no clipping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The run itself."""

    steps: Count = 1000
    """Optimizer steps."""
    batch_size: Count = 16
    """Sequences per forward and backward pass."""
    accumulate: Count = 1
    """Passes per optimizer step, whose gradients are accumulated."""
    seed: Seed = 0
    """Seed of the initial weights and of the data order."""
    device: OrAuto[Literal["cpu", "cuda"]] = AUTO
    """Device to train on. auto: a GPU if there is one."""
    dtype: DType = AUTO
    """Compute dtype. auto: bfloat16 on a GPU that supports it, float32 on a CPU."""
    fp32_gradients: bool = False
    """Keep the gradients of a bfloat16 model in float32, also between ranks."""
    weights: Weights = AUTO
    """Keep the dense weights of a pruned model in memory, or expand each one when it is used; an
    amount such as 4GB keeps that much on each rank. Streaming takes less memory and more time.
    auto: resident."""
    eval_every: Count = 100
    """Steps between validations."""
    eval_batches: Count = 20
    """Batches per validation."""
    save_every: Count = 200
    """Steps between checkpoints. A better validation loss saves one too."""
    save_minutes: Amount = 10.0
    """Minutes between checkpoints, besides --save-every: what slow steps can lose. 0: steps alone
    count."""
    keep: Count = 1
    """Checkpoints to keep, besides the best one: the last one, and those before it."""
    log_every: Count = 10
    """Steps between lines of metrics."""
    sample_tokens: Steps = 200
    """Length of the sample that the model generates at the end. 0: no sample."""
    wandb: Annotated[DisallowNone[str | None], arg(metavar="PROJECT", help_behavior_hint="")] = None
    """Send metrics to this project of Weights & Biases too, with its package wandb."""
    mode: Mode = "samo"
    """samo: prune, and train with compressed state. dense: do not prune, for comparison."""
    compile: bool = False
    """Compile the model's blocks with torch.compile: the first steps take longer, and results round
    differently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """The mesh of ranks, for runs under torchrun or samo launch."""

    plan: bool = False
    """Choose for these ranks and their memory: stages, sharding, weights, state, checkpointing,
    micro-batches. What is given stays."""
    pipe: OrAuto[Count] = AUTO
    """Pipeline stages to split the model into. auto: 1."""
    data: OrAuto[Count] = AUTO
    """Replicas of each stage, which share every batch. auto: as many as there are ranks for."""
    micro_batches: OrAuto[Count] = AUTO
    """Micro-batches per pass through the pipeline. auto: two for each stage."""
    stages_per_rank: Count = 1
    """Stages on each rank of the pipeline. With 2, ranks idle less and send more."""
    shard: OrAuto[Literal["none", "weights"]] = AUTO
    """weights: shard the pruned model and its state over the replicas with FSDP2, and stream the
    weights. The dense phase is not sharded. auto: none."""
    timeout_s: Annotated[float, Range(0.1)] = 600.0
    """Seconds that a rank waits for another one before the run fails."""
    planned: Hidden[tuple[str, ...]] = ()
    """The settings, of any section, that ``plan`` has chosen."""
    reason: Hidden[str] = ""
    """Why, in one line."""

    @property
    def num_stages(self) -> int:
        """The stages that were asked for."""
        return 1 if self.pipe == AUTO else self.pipe


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All settings of a training run.

    Example:
        >>> from samo.train.config import DataConfig, RunConfig, TrainConfig
        >>> config = TrainConfig(data=DataConfig(train=("notes.txt",)), run=RunConfig(steps=500))
        >>> config.prune.method
        'magnitude'
    """

    kind = "train"

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    prune: PruneConfig = field(default_factory=PruneConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    @property
    def name(self) -> str:
        """What a run is called by default."""
        return self.data.train[0].stem


def with_values(settings: Value, **values: Any) -> Value:
    """Return settings with other values, each in the first section that has its name."""
    config: Any = settings
    sections = {}
    for section in fields(config):
        if is_dataclass(section.type):
            own = getattr(config, section.name)
            names = [entry.name for entry in fields(own) if entry.name in values]
            sections[section.name] = replace(own, **{name: values.pop(name) for name in names})
    assert not values, f"no section has {', '.join(values)}"
    return replace(config, **sections)
