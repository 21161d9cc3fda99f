"""From settings to resolved ones: fill in "auto", and refuse what cannot work.

magnitude, random   masks are drawn once, after the dense phase
early-bird          the same, as soon as the masks are stable; the dense phase is the limit
gradual             masks keep everything at first, and lose weights step by step
set, rigl           masks keep their sparsity, and move
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from samo.errors import ConfigError
from samo.models.shapes import SHAPES, GPTConfig
from samo.pruning.pattern import parse_pattern, pattern_sparsity
from samo.train.config import (
    Auto,
    DataConfig,
    MeshConfig,
    PruneConfig,
    Range,
    ResolvedConfig,
    ResolvedMesh,
    ResolvedModel,
    ResolvedOptim,
    ResolvedPrune,
    ResolvedRun,
    TrainConfig,
    Weights,
)
from samo.train.finetune_config import (
    FinetuneConfig,
    FinetuneData,
    FinetuneModel,
    FinetunePrune,
    Resolved,
    ResolvedFinetune,
    ResolvedFinetuneModel,
    ResolvedFinetuneRun,
)
from samo.train.learning_rate import learning_rate
from samo.train.metrics import WandB

__all__ = ["resolve"]

_KINDS: Final[dict[str, Any]] = {each.kind: each for each in (TrainConfig, FinetuneConfig)}
DEFAULT_SPARSITY: Final = 0.9

MOVING: Final = ("set", "rigl")
"""Methods whose masks keep their sparsity and move."""
CHANGING: Final = ("gradual", *MOVING)
"""Methods whose masks change after they were drawn."""

_SIZES: Final = ("num_layers", "width", "num_heads", "context")
DTYPES: Final[dict[str, str]] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_METHODS: Final = {
    "mask_every": ("early-bird", *CHANGING),
    "mask_stop": CHANGING,
    "queue": ("early-bird",),
    "threshold": ("early-bird",),
    "distance": ("early-bird",),
    "drop": MOVING,
}
"""Settings that belong to some methods."""
_UNUSED: Final = PruneConfig(sparsity=DEFAULT_SPARSITY, dense_steps=0, mask_every=1, mask_stop=0)
"""What "auto" becomes where a setting has no effect."""
CHANGEABLE: Final = frozenset(
    {"steps", "eval_every", "eval_batches", "save_every", "save_minutes", "keep", "log_every"}
    | {"sample_tokens", "wandb"}
    | {"weights", "compile", "train", "valid"}
    | {entry.name for entry in fields(MeshConfig)}
)
"""Settings that a resumed run may change. ``train`` and ``valid`` are where the text is."""


def resolve(config: TrainConfig | FinetuneConfig) -> Resolved:
    """Return the settings with every "auto" replaced, and with absolute paths.

    What the data, a model of Hugging Face, or the number of ranks decides stays "auto".

    Example:
        >>> from pathlib import Path
        >>> from samo.train.config import DataConfig, TrainConfig
        >>> from samo.train.resolve import resolve
        >>> resolve(TrainConfig(data=DataConfig(train=(Path("notes.txt"),)))).prune.dense_steps
        200

    Raises:
        ConfigError: A setting is out of range, conflicts with another, or needs a GPU.
    """
    if config.run.wandb is not None and not WandB.is_installed():
        raise ConfigError("--wandb needs a package that is missing: pip install wandb")
    for section in fields(_KINDS[config.kind]):
        check_ranges(getattr(config, section.name))
    if isinstance(config, FinetuneConfig):
        resolved: Resolved = _resolve_finetune(config)
    else:
        resolved = _resolve_train(config)
    for message in _problems(resolved):
        raise ConfigError(message)
    if resolved.mesh.plan and not isinstance(config.mesh, ResolvedMesh):
        from samo.train.planning import planned  # loads torch

        assert isinstance(config, TrainConfig)
        assert isinstance(resolved, ResolvedConfig)
        return planned(config, resolved, lambda one: not any(_problems(one)))
    return resolved


def _resolve_train(config: TrainConfig) -> ResolvedConfig:
    if not config.data.train:
        raise ConfigError("no text to train on; name a file: samo train notes.txt")
    for path in (*config.data.train, *config.data.valid):
        if path.suffix in (".jsonl", ".ndjson", ".parquet"):
            raise ConfigError(
                f"'{path}' has examples, and samo train reads plain text; fine-tune a model on "
                f"them: samo finetune MODEL_DIR --data {path}; or write their text to a .txt file"
            )
    prune, steps = config.prune, config.run.steps
    shape, is_dense = SHAPES[config.model.shape], config.run.mode == "dense"
    is_trained = config.model.init is not None
    sizes = {name: getattr(shape, name) for name in _SIZES}
    model = ResolvedModel(**filled(config.model, checkpointing=False, **sizes))
    power = 0.0 if is_dense or is_trained else -1.0
    rates = {"lr": shape.lr, "warmup_steps": min(steps // 20, 1000), "density_power": power}
    optim = ResolvedOptim(**filled(config.optim, state="exact", **rates))
    method = "none" if is_dense else prune.method
    starts_pruned = method in ("none", *MOVING) or is_trained or prune.masks is not None
    dense_steps = 0 if starts_pruned else steps // 5
    if isinstance(prune.dense_steps, int):
        dense_steps = prune.dense_steps
    elif method == "early-bird":
        dense_steps = steps // 2
    mask_every, mask_stop = 1, 0
    if method == "early-bird":
        # Masks one step apart are always close: at least 5 steps, if the dense phase has room.
        room = (dense_steps - optim.warmup_steps) // prune.queue
        mask_every = max(1, min(max(steps // 200, 5), room))
    elif method in CHANGING:
        mask_every = max(1, min(steps // 40, 100))
        mask_stop = dense_steps + max(1, 3 * (steps - dense_steps) // 4)
    when = {"dense_steps": dense_steps, "mask_every": mask_every, "mask_stop": mask_stop}
    sparsity = resolve_sparsity(prune.sparsity, prune.pattern)
    weights = weights_of(config.run.weights, config.mesh.shard == "weights")
    return ResolvedConfig(
        data=DataConfig(**filled(config.data)),
        model=model,
        prune=ResolvedPrune(**filled(prune, **when) | {"sparsity": sparsity}),
        optim=optim,
        # Compiled blocks were not faster anywhere so far: 336 ms a step on an H200 where eager ones
        # took 298 (2.7B parameters, 8 x 1024 tokens, torch 2.11, 2026-11).
        run=ResolvedRun(
            **filled(config.run, compile=False, **device_and_dtype(config.run.device))
            | {"weights": weights}
        ),
        mesh=ResolvedMesh(**filled(config.mesh, pipe=1, shard="none")),
    )


def _resolve_finetune(config: FinetuneConfig) -> ResolvedFinetune:
    example = "samo finetune my-llama --data notes.jsonl"
    if config.model.model is None:
        raise ConfigError(f"no model to fine-tune; name its folder: {example}")
    if not config.data.data:
        raise ConfigError(f"no data to train on; name a file: {example}")
    machine = device_and_dtype(config.run.device)
    run, optim = filled(config.run, **machine), filled(config.optim)
    is_sharded = config.mesh.shard == "weights"
    if is_sharded or run["weights"] != "auto":
        run["weights"] = weights_of(run["weights"], is_sharded)
    if is_sharded and optim["state"] == "auto":
        optim["state"] = "exact"  # shards may split values at any place
    return ResolvedFinetune(
        data=FinetuneData(**filled(config.data)),
        model=ResolvedFinetuneModel(**filled(config.model, checkpointing=run["device"] == "cuda")),
        prune=FinetunePrune(**filled(config.prune)),
        optim=ResolvedOptim(**optim),
        run=ResolvedFinetuneRun(**run | {"mode": "samo", "compile": False}),
        mesh=ResolvedMesh(**filled(config.mesh, shard="none") | {"pipe": 1}),
    )


def with_steps(config: ResolvedFinetune, sequences: int) -> ResolvedFinetune:
    """Return settings whose steps and warmup follow from the sequences of an epoch."""
    run, optim, steps = config.run, config.optim, config.run.steps
    if isinstance(steps, str):
        taken = run.batch_size * run.accumulate
        epochs = 1.0 if isinstance(run.epochs, str) else run.epochs
        steps = max(1, math.ceil(epochs * sequences / taken))
    warmup = optim.warmup_steps
    if isinstance(warmup, str):
        warmup = math.ceil(0.03 * steps)
    run = replace(run, steps=steps, epochs="auto")  # the steps say it from here on
    return replace(config, run=run, optim=replace(optim, warmup_steps=warmup))


# Runs that resume


def again(recorded: Resolved, mesh: Any = None) -> TrainConfig | FinetuneConfig:
    """Return the settings that a resume begins with: as recorded, on any number of ranks.

    What was planned for the ranks is "auto" again; optimizer state and checkpointing stay.
    """
    kind = _KINDS[recorded.kind]
    free = {"data", *recorded.mesh.planned} - {"state", "checkpointing"}
    sections = {}
    for name, section in get_type_hints(kind).items():
        before = getattr(recorded, name)
        values = {entry.name: getattr(before, entry.name) for entry in fields(section)}
        if name in ("run", "mesh"):
            values |= dict.fromkeys(free & values.keys(), "auto")
        sections[name] = section(**values)
    return kind(**sections | ({} if mesh is None else {"mesh": mesh}))


def resolve_resumed(
    recorded: Resolved, wanted: TrainConfig | FinetuneConfig | Resolved
) -> Resolved:
    """Return the settings of a resumed run: "auto" means as recorded, but for the mesh."""
    is_planned = isinstance(wanted, TrainConfig) and wanted.mesh.plan
    sections = {}
    for section in fields(recorded):
        before, after = getattr(recorded, section.name), getattr(wanted, section.name)
        known = {} if section.name == "mesh" else filled(before)
        if is_planned:
            known.pop("weights", None)  # may differ on other ranks
        values = filled(after, **{name: known[name] for name in known if hasattr(after, name)})
        for name, value in values.items():
            if value != getattr(before, name) and name not in CHANGEABLE:
                raise ConfigError(
                    f"a resumed run keeps its settings, and {flag(name)} was "
                    f"{getattr(before, name)}, not {value}; leave it out, or start a new run. "
                    f"These may change: {', '.join(changeable(recorded.kind))}"
                )
        sections[section.name] = type(after)(**values)
    dense = recorded.prune.dense_steps if isinstance(recorded, ResolvedConfig) else 0
    if dense and sections["run"].steps <= dense:
        raise ConfigError(
            f"the run has {dense:,} dense steps before it is pruned; --steps must be more than "
            f"{dense:,}"
        )
    return resolve(_KINDS[recorded.kind](**sections))


def changeable(kind: str) -> list[str]:
    """Return the flags of the settings that a resumed run of a command may change."""
    found = []
    for section in get_type_hints(_KINDS[kind]).values():
        for name, hint in get_type_hints(section, include_extras=True).items():
            if name in CHANGEABLE:
                names = [getattr(each, "name", None) for each in getattr(hint, "__metadata__", ())]
                found.append(flag(next(filter(None, names), name)))
    return sorted("TEXT" if each == "--train" else each for each in found)


# Single settings


def resolve_sparsity(sparsity: float | Auto, pattern: str | None) -> float:
    """Return the sparsity; "auto" is that of the pattern, or the default."""
    given = None if isinstance(sparsity, str) else sparsity
    if pattern is None:
        return DEFAULT_SPARSITY if given is None else given
    try:
        return pattern_sparsity(parse_pattern(pattern), given)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None  # "pattern must be ..."


def doubts(config: Resolved) -> Iterator[str]:
    """Yield a line for each setting that works but can hardly be meant."""
    warmup, steps = config.optim.warmup_steps, config.run.steps
    if config.optim.lr == 0:
        yield "--lr 0 trains nothing"
    if isinstance(warmup, int) and isinstance(steps, int) and warmup >= steps:  # or "auto" yet
        peak = learning_rate(steps, steps, config.optim)
        yield (
            f"--warmup-steps {warmup:,} takes all of the {steps:,} steps, so the learning rate "
            f"only rises, to {peak:.3g}"
        )


def gpt_config(model: ResolvedModel, vocab_size: int) -> GPTConfig:
    """Return the shape of the model."""
    sizes = {name: getattr(model, name) for name in _SIZES}
    return GPTConfig(
        **sizes, vocab_size=vocab_size, is_tied=model.tied, is_checkpointed=model.checkpointing
    )


def device_and_dtype(wanted: str) -> dict[str, str]:
    """Return the device that is wanted, and its usual dtype."""
    import torch  # here, so that help does not load it

    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("--device cuda needs a GPU that torch can use; this machine has none")
    if wanted == "cpu" or not has_cuda:
        return {"device": "cpu", "dtype": "float32"}
    return {"device": "cuda", "dtype": "bfloat16" if torch.cuda.is_bf16_supported() else "float16"}


def weights_of(value: str | int, is_sharded: bool) -> Weights:
    """Return "resident", "streamed", or a number of bytes; sharded weights are always streamed."""
    if value == "streamed" or (value in ("auto", "resident") and is_sharded):
        return "streamed"
    if value in ("auto", "resident"):
        return "resident"
    if isinstance(value, int) and value >= 0:
        return value
    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?) ?([kmgt]?)b", str(value).lower())
    if found is None:
        raise ConfigError(
            "--weights must be auto, resident, streamed, or an amount of memory such as 4GB or "
            f"500MB, got {str(value)[:40]!r}"
        )
    return round(float(found[1]) * 1000 ** " kmgt".index(found[2] or " "))


def filled(section: Any, **defaults: Any) -> dict[str, Any]:
    """Return a section with defaults for "auto" and None, absolute paths, and torch's dtypes."""

    def absolute(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(absolute, value))
        return value.absolute() if isinstance(value, Path) else value

    values = {entry.name: absolute(getattr(section, entry.name)) for entry in fields(section)}
    if values.get("dtype") in DTYPES:
        values["dtype"] = DTYPES[values["dtype"]]
    return values | {k: v for k, v in defaults.items() if values[k] in ("auto", None)}


# What cannot work


def check_ranges(settings: Any) -> None:
    """Refuse settings of a dataclass that are out of their `Range`; "auto" never is."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        values = value.values() if isinstance(value, dict) else value
        numbers = values if isinstance(value, tuple | dict) else (value,)
        for number, limits in itertools.product(numbers, _ranges(hint)):
            is_number = isinstance(number, int | float)
            if is_number and not limits.least <= number < limits.below:
                rule = limits.rule(number)
                raise ConfigError(f"{flag(name)} must be {rule}, got {str(number)[:40]}")


def in_flags(error: Exception) -> str:
    """Return a message of `samo.prune` with flags in place of its arguments."""
    text = re.sub(r"rules=\{'([^']*)': ([^}]*)\}", r"--rules \1 \2", str(error))
    text = re.sub(r"skip=\['([^']*)'\]", r"--skip \1", text)
    return re.sub(r"\b(method|scope)='([^']*)'", r"--\1 \2", text)


def _ranges(hint: Any) -> Iterator[Range]:
    """Yield the ranges in a type, such as ``Annotated[int, Range(1)] | Literal["auto"]``."""
    for inner in get_args(hint):
        if isinstance(inner, Range):
            yield inner
        yield from _ranges(inner)


def _problems(config: Resolved) -> Iterator[str]:
    """Yield why settings do not work together, whatever the number of ranks."""
    for one, other, why in _conflicts(config):
        if one:
            how = f"does not work with {other}: {why}" if why else f"has no effect with {other}"
            yield f"{one} {how}; leave one of them out"
    if isinstance(config, ResolvedFinetune):
        yield from _finetune_problems(config)
    else:
        yield from _train_problems(config)


def _train_problems(config: ResolvedConfig) -> Iterator[str]:
    model, mesh, prune = config.model, config.mesh, config.prune
    if model.width % model.num_heads:
        heads = f"{model.num_heads} heads and width {model.width}"
        yield f"--num-heads must divide --width, got {heads}"
    if model.init is not None and (model.init / "config.json").is_file():
        yield (
            f"--init takes a checkpoint of samo train, and '{model.init}' is a Hugging Face model; "
            "train that with samo finetune"
        )
    num_layers, num_stages = model.num_layers + 2, mesh.pipe * mesh.stages_per_rank
    if num_stages > num_layers:
        yield (
            f"a model of {model.num_layers} blocks has {num_layers} layers with embeddings and "
            f"head, too few for {num_stages} stages; lower --pipe"
        )
    if config.run.mode == "dense":
        return
    if prune.sparsity == 0 and not prune.rules and prune.masks is None:
        yield "--sparsity 0 prunes nothing; use one such as 0.9, or train with --mode dense"
    warmup, steps = config.optim.warmup_steps, config.run.steps
    method, every, dense, stop = prune.method, prune.mask_every, prune.dense_steps, prune.mask_stop
    if dense >= steps:
        yield (
            f"--dense-steps {dense:,} leaves none of the {steps:,} steps to train pruned; lower "
            "it, or use --mode dense"
        )
    full = first_observation(every, warmup) + (prune.queue - 1) * every
    if method == "early-bird" and full > dense:
        yield (
            f"{prune.queue} masks {every:,} steps apart, after a warmup of {warmup:,}, cannot be "
            f"stable before step {full:,}, and the dense phase ends at step {dense:,}; raise "
            "--dense-steps or --steps, or lower --mask-every, --queue or --warmup-steps"
        )
    first = dense + (every if method in MOVING else 0)
    if method in CHANGING and stop <= first:
        yield (
            f"--mask-stop {stop:,} leaves --method {method} no step to change masks at, which "
            f"begins after step {first:,}; lower --mask-every, or train for more steps"
        )
    if method == "gradual" and stop > steps:
        yield (
            f"--method gradual reaches its sparsity at --mask-stop {stop:,}, and the run ends at "
            f"step {steps:,}; lower it, or train for more steps"
        )


def _finetune_problems(config: ResolvedFinetune) -> Iterator[str]:
    model, prune = config.model, config.prune
    how = _changed(prune, FinetunePrune(), ["method", "scope", "skip", "rules"])
    what = _changed(prune, FinetunePrune(), ["sparsity", "pattern"])
    if what and prune.masks is not None:
        yield f"{what} has no effect with --masks {prune.masks}; leave one of them out"
    if how and not what:
        yield f"{how} has no effect without --sparsity; add one, such as --sparsity 0.5"
    if prune.sparsity == 0 and not prune.rules:
        yield "--sparsity 0 prunes nothing; use one such as 0.5, or leave it out for a pruned model"
    if isinstance(config.run.steps, int) and config.run.epochs != "auto":
        yield "--steps and --epochs both say how long to train; leave one of them out"
    given = _changed(model, FinetuneModel(), ["distill", "temperature"])
    if given and model.teacher is None:
        yield f"{given} has no effect without --teacher; name the folder of the dense model"


def _conflicts(config: Resolved) -> Iterator[tuple[str, str, str]]:
    """Yield a setting ("" if it is not given), what it conflicts with, why ("": no effect)."""
    run, lean = config.run, "--state lean" if config.optim.state == "lean" else ""
    wide = "--fp32-gradients" if run.fp32_gradients else ""
    yield wide if run.dtype != "bfloat16" else "", f"--dtype {run.dtype}", ""
    yield wide and lean, "--fp32-gradients", "its gradients have 16 bits"
    if config.mesh.shard == "weights" and run.mode != "dense":
        yield lean, "--shard weights", "shards may split values at any place"
        held = "" if run.weights == "streamed" else f"--weights {run.weights}"
        yield held, "--shard weights", ""
    if isinstance(config, ResolvedConfig):
        yield from _train_conflicts(config)


def _train_conflicts(config: ResolvedConfig) -> Iterator[tuple[str, str, str]]:
    prune, optim, run, mesh = config.prune, config.optim, config.run, config.mesh
    method = f"--method {prune.method}"
    shard = "--shard weights" if mesh.shard == "weights" else ""
    lean = "--state lean" if optim.state == "lean" else ""
    if run.mode == "dense":
        power = f"--density-power {optim.density_power}" if optim.density_power else ""
        weights = "" if run.weights == "resident" else f"--weights {run.weights}"
        names = [entry.name for entry in fields(PruneConfig) if entry.name != "sparsity"]
        ignored = _changed(prune, _UNUSED, names)
        yield ignored or power or shard or weights or lean, "--mode dense", ""
        return
    if prune.masks is not None:
        names = ["sparsity", "scope", "pattern", "skip", "rules"]
        names += [] if prune.method in MOVING else ["method"]  # those start from given masks
        yield _changed(prune, _UNUSED, names), f"--masks {prune.masks}", ""
    others = [name for name, methods in _METHODS.items() if prune.method not in methods]
    yield _changed(prune, _UNUSED, others), method, ""
    if prune.method in CHANGING:
        pattern = f"--pattern {prune.pattern}" if prune.pattern else ""
        yield pattern, method, "it moves masks away from the pattern"
        yield shard, method, "it changes masks; use magnitude, random or early-bird"
    if prune.method == "gradual":
        yield _changed(prune, _UNUSED, ["scope", "rules"]), method, ""
    if prune.method in MOVING:
        yield lean, method, "it counts the updates of each weight"
    if mesh.pipe > 1:
        pipe = f"--pipe {mesh.pipe}"
        yield shard, pipe, "each stage holds a part of the model already"
        if prune.method in ("early-bird", *CHANGING):
            yield method, pipe, "it needs the masks of all stages"
        if prune.scope != "tensor" and prune.masks is None:
            yield f"--scope {prune.scope}", pipe, "it compares the weights of all stages"


def _changed(section: Any, unused: Any, names: Iterable[str]) -> str:
    """Return the flags of settings that the user has given."""
    return ", ".join(
        flag(name) for name in names if getattr(section, name) != getattr(unused, name)
    )


def check_batch(config: Resolved, num_replicas: int) -> None:
    """Refuse a batch that cannot be divided among replicas and micro-batches."""
    size, count = config.run.batch_size, micro_batches(config, num_replicas)
    if size < num_replicas:
        raise ConfigError(
            f"a batch of {size} sequences cannot be divided among {num_replicas} replicas; raise "
            f"--batch-size to {num_replicas} or more, or use fewer ranks"
        )
    least = size // num_replicas
    if config.mesh.pipe > 1 and count > least:
        raise ConfigError(
            f"the {least} sequences of a replica cannot be split into {count} micro-batches; raise "
            f"--batch-size to {num_replicas * count} or more, or lower --micro-batches"
        )


def micro_batches(config: Resolved, num_replicas: int) -> int:
    """Return the micro-batches of a pass: by default two per stage, if there are as many sequences.

    With two, a pipeline idles for less than a third of a batch.
    """
    mesh = config.mesh
    if not isinstance(mesh.micro_batches, str):
        return mesh.micro_batches
    return min(2 * mesh.pipe, max(config.run.batch_size // num_replicas, 1))


def first_observation(every: int, warmup_steps: int) -> int:
    """Return the step of early-bird's first observation: during warmup masks barely move."""
    return max(1, -(-warmup_steps // every)) * every


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")
