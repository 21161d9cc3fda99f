"""The commands of ``samo`` as dataclasses: each field is a flag, the string below it its help."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from tyro.conf import DisallowNone, Positional, arg, subcommand

from samo.bench.settings import KernelsConfig, StepConfig
from samo.train.config import (
    AUTO,
    Amount,
    Auto,
    Count,
    DType,
    Files,
    MaskConfig,
    OptionalPath,
    OrAuto,
    Range,
    Seed,
    Sparsity,
    Steps,
    TrainConfig,
)
from samo.train.finetune_config import FinetuneConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """Show samo on a laptop CPU in a minute: train, prune 90 %, train on, compare."""

    out: OptionalPath = None
    """Output folder. By default runs/demo, or runs/demo-2 and so on."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Where settings come from, and where a run goes."""

    config: OptionalPath = None
    """TOML file with settings. Flags override it."""
    resume: OptionalPath = None
    """Resume the run in this folder."""
    out: OptionalPath = None
    """Run folder. By default runs/NAME-OF-TEXT-OR-MODEL, with -2, -3, ... if that exists."""


@dataclass(frozen=True, kw_only=True)
class Train(RunFolder, TrainConfig):
    """Train a GPT on your text: densely at first, then pruned, with compressed state."""


@dataclass(frozen=True, kw_only=True)
class Finetune(RunFolder, FinetuneConfig):
    """Train a pruned Hugging Face language model, or prune one and train it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Train on several ranks of this machine: samo launch -n 4 train notes.txt."""

    command: Annotated[
        Positional[tuple[str, ...]], arg(metavar="COMMAND ...", help_behavior_hint="")
    ]
    """The word train or finetune, and its files and flags."""
    num_ranks: Annotated[Count, arg(aliases=("-n",))] = 2
    """Processes to start; with GPUs, one for each."""
    max_restarts: Steps = 0
    """How often to restart all ranks after a failure; they resume from the last checkpoint."""
    logs: OptionalPath = None
    """Folder for the output of all ranks but the first; their errors are printed too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prune(MaskConfig):
    """Prune a Hugging Face model, or choose masks for a run or a checkpoint."""

    source: Positional[Path]
    """A checkpoint, a run folder, or a folder with config.json and model weights."""
    sparsity: OrAuto[Sparsity] = AUTO
    """Fraction of the weights to prune; 0.5 to 0.7 is sensible for language models. auto: that of
    --pattern, or 0.9 for a model of samo train."""
    out: OptionalPath = None
    """Folder to write, with zeros for pruned weights and the masks beside them, or a mask file
    (.safetensors). By default NAME-pruned for a Hugging Face model, else masks.safetensors."""
    method: Literal["magnitude", "random", "wanda", "sparsegpt", "zeros"] = "magnitude"
    """Keep the largest weights, or random ones. wanda: weigh them by their inputs. sparsegpt: so
    that outputs change least, which changes kept weights too. zeros: what a pruned model keeps."""
    scope: Literal["tensor", "global", "erk", "owl"] = "tensor"  # type: ignore[assignment]
    """Prune each matrix to the sparsity, or all of them together; erk: small matrices less; owl:
    blocks with many outliers less."""
    calibration: OptionalPath = None
    """Text for wanda, sparsegpt and owl, of the kind that the model will see; for a Hugging Face
    model also examples (.jsonl, .parquet), as samo finetune reads them."""
    samples: Count = 128
    """Pieces of the text to calibrate on."""
    context: OrAuto[Count] = AUTO
    """Tokens of a piece. auto: what the model reads, at most 2,048."""
    device: Literal["cpu", "cuda"] | Auto = "auto"
    """Where to compute the model's blocks, one at a time. auto: a GPU if there is one."""
    seed: int = 0
    """Draws the pieces of the text, and decides between weights of equal rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Write a model as a Hugging Face folder: dense, or compressed to a fraction of the bytes."""

    source: Positional[Path]
    """A run folder, a checkpoint of a run, or a Hugging Face folder, dense or compressed."""
    out: OptionalPath = None
    """Folder to write, which must not exist yet. By default NAME-FORMAT, such as notes-dense for
    runs/notes, in the working folder."""
    format: Literal["dense", "compressed", "bitmask"] = "dense"
    """dense: zeros where weights are pruned; every tool reads it. compressed: values and bitmaps,
    for samo. bitmask: the layout sparse-bitmask of compressed-tensors 0.14, for older tools."""
    dtype: DType = AUTO
    """Dtype of the weights. auto: that in which the model computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate:
    """Generate text from a model, or chat with it."""

    model: Positional[Path]
    """A run folder, a checkpoint of a run, or a Hugging Face folder, dense or compressed."""
    prompt: Annotated[DisallowNone[str | None], arg(metavar="TEXT", help_behavior_hint="")] = None
    """Text to continue. By default what is piped in."""
    chat: bool = False
    """Talk: one message a line, Ctrl-C stops an answer, Ctrl-D ends."""
    max_tokens: Count = 200
    """Maximum number of new tokens."""
    temperature: Amount = 0.8
    """Below 1, likely tokens become likelier still; 0 always takes the likeliest."""
    top_p: Annotated[float, Range(1e-9, 1 + 1e-9)] = 0.95
    """Draw from the likeliest tokens that together have this probability."""
    seed: Seed = 0
    """Seed of the draws."""
    weights: Literal["dense", "streamed"] = "dense"
    """dense: expand pruned weights once, which is faster. streamed: at each use, in less memory."""
    device: Literal["cpu", "cuda"] | Auto = "auto"
    """auto: a GPU if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """Measure how well a model predicts some data: its loss and perplexity."""

    model: Positional[Path]
    """A run folder, for its last checkpoint; a checkpoint; or a Hugging Face folder, dense or
    compressed."""
    data: Files = ()
    """Required: text or token files, or for a Hugging Face model examples (.jsonl, .parquet, or a
    folder of datasets)."""
    context: OrAuto[Count] = AUTO
    """Sequence length, in tokens. auto: 1,024, or that of the model or of the text if it is
    shorter."""
    batch_size: Count = 8
    """Sequences at a time."""
    max_batches: OrAuto[Count] = AUTO
    """Read so many batches, spread evenly over the data. auto: all of it."""
    pack: bool = True
    """Put several short examples into one sequence. They do not see each other."""
    weights: Literal["dense", "streamed"] = "dense"
    """dense: expand pruned weights once, which is faster. streamed: at each use, in less memory."""
    device: Literal["cpu", "cuda"] | Auto = "auto"
    """auto: a GPU if there is one."""
    dtype: DType = AUTO
    """Dtype of computation. auto: bfloat16 on a GPU, float32 on a CPU."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Does it fit, with which settings, and how fast: predict memory and time, choose a layout."""

    target: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")] = ""
    """A Hugging Face folder or config.json, or a shape such as gpt3-13b. Without it, --num-layers,
    --width and --vocab-size describe a GPT."""
    sparsity: float | Auto = "auto"
    """Fraction pruned of the matrices of attention, MLPs and experts. auto: that of the folder's
    masks, or else 0.7 for a language model and 0.9 for a GPT."""
    rules: Annotated[dict[str, float], arg(help_behavior_hint="")] = field(default_factory=dict)
    """Sparsities of kinds of matrices: pairs of attention, mlp, experts, router, embedding or head,
    and a value."""
    gpu: str = "h100"
    """v100-16, v100-32, a100-40, a100-80, h100, h200, b200, rtx3090, rtx4090, rtx5090, laptop-8gb,
    24GB for any card of 24 GB, here for this machine, or a .toml or .json file as --measure writes
    it."""
    gpus: int = 1
    """Number of GPUs."""
    gpus_per_node: int | Auto = "auto"
    """GPUs of a node. auto: usual for the kind."""
    node_gbit: float | Auto = "auto"
    """Bandwidth between nodes, for each node, in Gbit/s. auto: usual for the kind."""
    batch: int | Auto = "auto"
    """Sequences of a step, over all GPUs. auto: 8 for each."""
    context: int | Auto = "auto"
    """Tokens of a sequence. auto: that of the model, at most 2,048."""
    freeze_embeddings: bool = False
    """Train all but embeddings and head, which then have neither gradients nor state."""
    teacher: Annotated[str, arg(metavar="MODEL", help_behavior_hint="")] = ""
    """A model to learn from, which every GPU holds in 16 bits."""
    num_layers: int | Auto = "auto"
    """Blocks of a GPT that has no name."""
    width: int | Auto = "auto"
    """Its width."""
    vocab_size: int | Auto = "auto"
    """Its vocabulary. auto: 50,304."""
    json: bool = False
    """Print JSON."""
    figure: OptionalPath = None
    """Draw memory and time to this file, .svg or .png."""
    measure: OptionalPath = None
    """Time this machine instead, and write a hardware file for --gpu; under torchrun, its links."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspect:
    """Show masks, a checkpoint, a run or a model; without a path, this machine and its kernels."""

    path: Positional[OptionalPath] = None
    """A mask file, a checkpoint, a run folder or a Hugging Face folder."""
    verify: bool = False
    """Read the whole checkpoint, or both of a run, and verify the checksums."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Make an HTML page of one run, or of several to compare: curves, memory, speed."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...", help_behavior_hint="")]
    """Run folders."""
    out: OptionalPath = None
    """The page to write. By default report.html in the run folder, or in the folder that holds all
    of several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Measure speed and memory on this machine: of the kernels, or of a training step."""

    question: (
        Annotated[KernelsConfig, subcommand("kernels")] | Annotated[StepConfig, subcommand("step")]
    )


Command = (
    Demo
    | Train
    | Finetune
    | Launch
    | Prune
    | Export
    | Generate
    | Evaluate
    | Plan
    | Inspect
    | Report
    | Bench
)

USUAL: Final = frozenset(
    {"config", "resume", "out", "train", "valid", "tokenizer", "shape", "context", "init"}
    | {"checkpointing", "sparsity", "dense_steps", "method", "masks", "lr", "state", "mode"}
    | {"steps", "batch_size", "accumulate", "seed", "device", "dtype", "weights"}
    | {"eval_every", "save_every", "plan", "pipe"}
)
"""The settings that ``samo train --help`` shows; ``--help-all`` shows the others too."""

USUAL_FINETUNE: Final = frozenset(
    {"config", "resume", "out", "model", "data", "valid", "context", "freeze_embeddings"}
    | {"teacher", "distill", "sparsity", "method", "masks", "lr", "state", "steps", "epochs"}
    | {"batch_size", "accumulate", "weights", "eval_every", "shard", "checkpointing"}
)
"""The settings that ``samo finetune --help`` shows."""

COMMANDS: Final[dict[str, type]] = {kind.__name__.lower(): kind for kind in get_args(Command)}
"""Commands by name; each has a module of that name with a function ``run``, finetune train's."""
