"""The settings of a training run, as the command line, a TOML file and the Python API know them.

One dataclass is one section of the file and one group of flags; the string under a field is its help.
"auto" stands for a value that follows from others; `resolve` puts it in, so that what a run records
is what it did. Imports no torch.

    [run]                       samo train notes.txt --steps 2000
    steps = 2000                TrainConfig(run=RunConfig(steps=2000), ...)
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from tyro.conf import DisallowNone, Positional, arg

from samo.errors import ConfigError
from samo.models.shapes import SHAPES, GPTConfig, ShapeName
from samo.pruning.densities import parse_pattern, pattern_sparsity
from samo.train.config_mesh import MeshConfig, check_mesh
from samo.train.config_methods import MOVING, NONE, Distance, Method, check_method, resolve_method
from samo.train.config_weights import check_weights, resolve_weights

__all__ = ["DataConfig", "ModelConfig", "OptimConfig", "PruneConfig", "RunConfig", "TrainConfig"]

VERSION: Final = 1
"""Version of the settings' format, in files as ``version = 1``."""

DEFAULT_SPARSITY: Final = 0.9

Auto = Literal["auto"]
OptionalPath = Annotated[Path | None, arg(metavar="PATH")]
Weights = Annotated[str | int, arg(metavar="{resident,streamed}|BYTES")]
Switch = DisallowNone[bool | None]
DType = Literal["float32", "bfloat16", "float16"]
Mode = Literal["samo", "dense"]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The text to learn."""

    train: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE ...")] = ()
    """Text files, or files of tokens: .npy (integers) or .bin (16-bit, as nanoGPT writes them)."""
    valid: tuple[Path, ...] = ()
    """Files to validate on; without them the end of the training text is held back."""
    valid_fraction: float = 0.05
    """Share of the text that is held back, if no files are given."""
    tokenizer: Literal["bytes"] | Path = "bytes"
    """The word bytes, or a folder with a Hugging Face tokenizer (tokenizer.json)."""
    vocab_size: int | Auto = "auto"
    """Tokens the model knows; auto: as many as the tokenizer or the token files have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The GPT to train."""

    shape: ShapeName = "tiny"
    """A shape by name; the next four settings change parts of it."""
    num_layers: int | Auto = "auto"
    """Transformer blocks."""
    width: int | Auto = "auto"
    """Model width."""
    num_heads: int | Auto = "auto"
    """Attention heads."""
    context: int | Auto = "auto"
    """Length of a sequence, in tokens."""
    tied: bool = False
    """Share the embedding's weight with the head."""
    checkpointing: bool = False
    """Compute activations again in backward instead of storing them: less memory, more time."""
    init: OptionalPath = None
    """Start from the weights of this checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneConfig:
    """What is pruned, and when."""

    sparsity: float | Auto = "auto"
    """Fraction of the weights to prune; auto: 0.9, or what --pattern prunes."""
    dense_steps: int | Auto = "auto"
    """Steps of dense training before pruning; auto: a fifth of all, none with --init or --masks; with
    early-bird the longest that it waits, auto: half of all; with set and rigl none."""
    method: Method = "magnitude"
    """Keep the largest weights, or any; early-bird: the largest, as soon as they are always the same;
    gradual: ever fewer; set, rigl: others every so often, grown at random or by their gradients."""
    scope: Literal["tensor", "global", "erk"] = "tensor"
    """Prune each matrix to the sparsity, or all of them together; erk: small ones less."""
    pattern: str | None = None
    """Keep n of every m neighbours along the inputs: "2:4" and the like."""
    skip: tuple[str, ...] = ()
    """Patterns of weights to leave whole, such as "blocks.0.*"."""
    rules: dict[str, float] = field(default_factory=dict)
    """Sparsities for single weights: pattern and value, in pairs."""
    masks: OptionalPath = None
    """Take the masks from this file or checkpoint instead of pruning."""
    mask_every: int | Auto = "auto"
    """Steps between two looks at the masks (early-bird; auto: a 200th of all, 5 at least) or two changes
    of them (gradual, set, rigl; auto: a fortieth, 100 at most)."""
    mask_stop: int | Auto = "auto"
    """Step from which on masks stay as they are (gradual, set, rigl); auto: three quarters of the steps
    after the dense phase."""
    queue: int = 5
    """Masks in a row that must agree (early-bird)."""
    threshold: float = 0.1
    """Largest distance at which they agree (early-bird)."""
    distance: Distance = "kept"
    """Share of the kept weights not in common, or of all weights that differ (early-bird)."""
    history: bool | Auto = "auto"
    """Compare every mask with all before it, not the queue alone, for the report (early-bird); auto: in
    models of up to 30 million weights."""
    drop: float = 0.3
    """Share of the kept weights that the first change replaces (set, rigl)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW and its learning rate."""

    lr: float | Auto = "auto"
    """Highest learning rate; auto: the usual one for the shape."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Course of the learning rate after its warm-up; wsd: constant, and falling in the last fifth."""
    warmup_steps: int | Auto = "auto"
    """Steps in which the learning rate rises; auto: a twentieth of all, 1,000 at most."""
    final_lr: float = 0.1
    """Where the learning rate ends, as a fraction of the highest."""
    density_power: float | Auto = "auto"
    """Pruned tensors learn at the rate times their kept fraction to this power: with -1 10 times as fast at
    90 %; auto: -1 for weights that start anew, 0 with init."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the denominator."""
    state: Literal["exact", "lean"] = "exact"
    """Optimizer state of pruned training: fp32, or 8 bits."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 leaves it alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The run itself."""

    mode: Mode = "samo"
    """Compressed state; for comparison, dense training without pruning."""
    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 16
    """Sequences for each forward and backward pass."""
    accumulate: int = 1
    """Passes for each step; their gradients are added up."""
    seed: int = 0
    """Of the first weights and of the order of the text."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: on a GPU if there is one."""
    dtype: DType | Auto = "auto"
    """Type to compute in; auto: bfloat16 on a GPU that has it, float32 on a CPU."""
    fp32_gradients: bool = False
    """Keep gradients of bfloat16 in float32, also between ranks; for many passes a step."""
    weights: Weights = "resident"
    """Keep the dense weights of a pruned model between uses, or make each for its use; an amount such as
    4GB: keep as many on each rank. Less memory, more time; on a CPU the same numbers."""
    compile: Switch = None
    """Compile the model's blocks (torch.compile): first steps take longer, numbers are rounded otherwise;
    if nothing is said where it was measured to be no slower, which is nowhere yet."""
    eval_every: int = 100
    """Steps from one validation to the next."""
    eval_batches: int = 20
    """Batches to validate on."""
    save_every: int = 200
    """Steps from one checkpoint to the next; a better validation loss saves one too."""
    save_errors: Literal["stop", "continue"] = "stop"
    """What to do when a checkpoint cannot be written, say on a full disk; the last good one stands."""
    log_every: int = 10
    """Steps from one line of metrics to the next."""
    sample_tokens: int = 200
    """Length of the text the model writes at the end; 0 for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All settings of a training run.

    Example:
        >>> from samo.train.config import DataConfig, RunConfig, TrainConfig
        >>> config = TrainConfig(data=DataConfig(train=("notes.txt",)), run=RunConfig(steps=500))
        >>> config.prune.method
        'magnitude'
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    prune: PruneConfig = field(default_factory=PruneConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)


def resolve(config: TrainConfig) -> TrainConfig:
    """Return the config with every "auto" replaced that needs no look at data or hardware.

    Example:
        >>> from samo.train.config import DataConfig, TrainConfig, resolve
        >>> resolve(TrainConfig(data=DataConfig(train=("notes.txt",)))).prune.dense_steps
        200

    Raises:
        ConfigError: A setting is out of range, or two contradict each other.
    """
    shape = SHAPES[config.model.shape]
    model = replace(
        config.model,
        num_layers=_or(config.model.num_layers, shape.num_layers),
        width=_or(config.model.width, shape.width),
        num_heads=_or(config.model.num_heads, shape.num_heads),
        context=_or(config.model.context, shape.context),
    )
    warmup_steps = _or(config.optim.warmup_steps, min(config.run.steps // 20, 1000))
    method = resolve_method(
        config.prune,
        steps=config.run.steps,
        warmup_steps=warmup_steps,
        is_dense=config.run.mode == "dense",
        has_start=config.model.init is not None or config.prune.masks is not None,
        num_weights=12 * _number(model.num_layers) * _number(model.width) ** 2,
    )
    resolved = replace(
        config,
        model=model,
        prune=replace(
            config.prune,
            sparsity=resolve_sparsity(config.prune.sparsity, config.prune.pattern),
            **method,
        ),
        optim=replace(
            config.optim,
            lr=_or(config.optim.lr, shape.lr),
            warmup_steps=warmup_steps,
            density_power=_or(
                config.optim.density_power,
                0.0 if config.run.mode == "dense" or config.model.init is not None else -1.0,
            ),
        ),
        run=replace(
            config.run,
            weights=resolve_weights(config.run.weights, is_sharded=config.mesh.shard == "weights"),
        ),
    )
    _check(resolved)
    return resolved


def resolve_sparsity(sparsity: float | Auto, pattern: str | None) -> float:
    """Return the sparsity that "auto" stands for: that of the pattern, if there is one.

    Raises:
        ConfigError: The pattern is none, or sparsity and pattern contradict each other.
    """
    if pattern is None:
        return _or(sparsity, DEFAULT_SPARSITY)
    try:
        given = None if isinstance(sparsity, str) else sparsity
        return pattern_sparsity(parse_pattern(pattern), given)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def gpt_config(model: ModelConfig, vocab_size: int) -> GPTConfig:
    """Return the shape of a resolved model."""
    return GPTConfig(
        num_layers=_number(model.num_layers),
        width=_number(model.width),
        num_heads=_number(model.num_heads),
        context=_number(model.context),
        vocab_size=vocab_size,
        is_tied=model.tied,
        is_checkpointed=model.checkpointing,
    )


def _check(config: TrainConfig) -> None:
    data, model, prune = config.data, config.model, config.prune
    optim, run = config.optim, config.run
    _require(bool(data.train), "no text to train on; name a file: samo train notes.txt")
    for name, count in (
        ("num_layers", model.num_layers),
        ("width", model.width),
        ("num_heads", model.num_heads),
        ("context", model.context),
        ("vocab_size", data.vocab_size),
        ("steps", run.steps),
        ("batch_size", run.batch_size),
        ("accumulate", run.accumulate),
        ("eval_every", run.eval_every),
        ("eval_batches", run.eval_batches),
        ("save_every", run.save_every),
        ("log_every", run.log_every),
    ):
        fits = isinstance(count, str) or 1 <= count < 2**31
        _require(fits, f"{name} must be 1 or more, and less than 2^31, got {str(count)[:40]}")
    _require(
        _number(model.width) % _number(model.num_heads) == 0,
        f"num_heads must divide width, got {model.num_heads} heads and width {model.width}",
    )
    _require(
        0 < data.valid_fraction < 1,
        f"valid_fraction must lie between 0 and 1, got {data.valid_fraction}",
    )
    for name, value in (("sparsity", _number(prune.sparsity)), *prune.rules.items()):
        _require(
            0 <= value < 1,
            f"{name} must be at least 0 and less than 1, got {value}; 0.9 prunes 90 %",
        )
    for name, value in (
        ("lr", _number(optim.lr)),
        ("final_lr", optim.final_lr),
        ("weight_decay", optim.weight_decay),
        ("eps", optim.eps),
        ("clip", optim.clip),
        ("warmup_steps", _number(optim.warmup_steps)),
        ("dense_steps", _number(prune.dense_steps)),
        ("sample_tokens", run.sample_tokens),
        ("seed", run.seed),
    ):
        fits = 0 <= value < 2**63 and math.isfinite(value)
        _require(fits, f"{name} must be a number of 0 or more, got {str(value)[:40]}")
    _require(
        -3 <= _number(optim.density_power) <= 3,
        f"density_power must be a number from -3 to 3, got {optim.density_power}; -1 makes pruned tensors "
        "learn 10 times as fast at 90 %, and 0 as fast as all others",
    )
    _require(
        all(0 <= beta < 1 for beta in optim.betas),
        f"betas must be two numbers in [0, 1), got {optim.betas}",
    )
    _check_together(config)


def _check_together(config: TrainConfig) -> None:
    data, prune, run = config.data, config.prune, config.run
    dense_steps = _number(prune.dense_steps)
    _require(
        run.mode == "dense" or dense_steps < run.steps,
        f"dense_steps {dense_steps:,} leaves none of the {run.steps:,} steps to train pruned; lower "
        "dense_steps, or train densely with mode dense",
    )
    if run.mode == "dense":
        defaults = PruneConfig(**{**NONE, "dense_steps": dense_steps})
        changed = [
            name
            for name in PruneConfig.__slots__
            if name != "sparsity" and getattr(prune, name) != getattr(defaults, name)
        ]
        _require(
            not changed and dense_steps == 0,
            f"mode dense prunes nothing, and {', '.join(changed) or 'dense_steps'} would have no "
            "effect; leave it out, or choose mode samo",
        )
        _require(
            config.optim.density_power == 0,
            f"mode dense prunes nothing, and density_power {config.optim.density_power} would have no effect; "
            "leave it out, or choose mode samo",
        )
    if prune.masks is not None:
        defaults = PruneConfig(sparsity=DEFAULT_SPARSITY)
        changed = [
            name
            for name in ("sparsity", "method", "scope", "pattern", "skip", "rules")
            if getattr(prune, name) != getattr(defaults, name)
            and not (name == "method" and prune.method in MOVING)  # those start from given masks
        ]
        _require(
            not changed,
            f"masks are taken from '{prune.masks}', so {', '.join(changed)} would have no effect; "
            "give one or the other",
        )
    _require(
        prune.masks is not None
        or run.mode == "dense"
        or _number(prune.sparsity) > 0
        or bool(prune.rules),
        "sparsity 0 prunes nothing; choose a sparsity such as 0.9, or train densely with mode dense",
    )
    _require(
        prune.pattern is None or prune.scope == "tensor",
        f"pattern {prune.pattern} gives every matrix the same sparsity, and scope {prune.scope} would "
        "have no effect; leave one of them out",
    )
    check_method(
        prune,
        mode=run.mode,
        steps=run.steps,
        warmup_steps=_number(config.optim.warmup_steps),
        state=config.optim.state,
    )
    check_mesh(config)
    check_weights(config)
    _require(
        config.optim.state == "exact" or run.mode == "samo",
        f"state lean is for mode samo, and the mode is {run.mode}; leave one of them out",
    )
    _require(
        not run.fp32_gradients or run.dtype in ("bfloat16", "auto"),
        f"fp32_gradients has no effect with dtype {run.dtype}, whose gradients are float32; leave it out",
    )
    _require(
        not run.fp32_gradients or config.optim.state == "exact",
        "fp32_gradients is for state exact, and state lean keeps values and gradients in 16 bits; leave one "
        "of them out",
    )
    _require(
        not data.valid or data.valid_fraction == DataConfig().valid_fraction,
        "valid_fraction has no effect when files to validate on are given; leave one of them out",
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _or(value: Number | Auto, otherwise: Number) -> Number:
    return otherwise if isinstance(value, str) else value


def _number(value: Number | Auto) -> Number:
    assert not isinstance(value, str), "resolve() comes first"
    return value
