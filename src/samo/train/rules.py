"""Settings that cannot work, or can hardly be meant: refused before anything is created."""

import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from samo.errors import ConfigError, DataError
from samo.train.config import AUTO, PruneConfig, Range, TrainConfig
from samo.train.finetune_config import Config, FinetuneConfig, FinetuneModel, FinetunePrune
from samo.train.learning_rate import learning_rate

MOVING: Final = ("set", "rigl")
"""Methods whose masks keep their sparsity and move."""
CHANGING: Final = ("gradual", *MOVING)
"""Methods whose masks change after they were drawn."""

_METHODS: Final = {
    "mask_every": ("early-bird", *CHANGING),
    "mask_stop": CHANGING,
    "queue": ("early-bird",),
    "threshold": ("early-bird",),
    "distance": ("early-bird",),
    "drop": MOVING,
}
"""Settings that belong to some methods."""
_UNUSED: Final = PruneConfig(sparsity=0.9, dense_steps=0, mask_every=1, mask_stop=0)
"""What "auto" becomes where a setting has no effect."""


def doubts(config: Config) -> Iterator[str]:
    """Yield a line for each setting that works but can hardly be meant."""
    warmup, steps = config.optim.warmup_steps, config.run.steps
    if config.optim.lr == 0:
        yield "--lr 0 trains nothing"
    if AUTO not in (warmup, steps) and warmup >= steps:
        peak = learning_rate(steps, steps, config.optim)
        yield (
            f"--warmup-steps {warmup:,} takes all of the {steps:,} steps, so the learning rate "
            f"only rises, to {peak:.3g}"
        )


def check_ranges(settings: Any) -> None:
    """Refuse settings of a dataclass and its sections that are out of their `Range`.

    "auto" never is.
    """
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        if is_dataclass(value):
            check_ranges(value)
        values = value.values() if isinstance(value, dict) else value
        numbers = values if isinstance(value, tuple | dict) else (value,)
        for number, limits in itertools.product(numbers, _ranges(hint)):
            is_number = isinstance(number, int | float)
            if is_number and not limits.least <= number < limits.below:
                rule = limits.rule(number)
                raise ConfigError(f"{flag(name)} must be {rule}, got {str(number)[:40]}")


@contextmanager
def pruning(model: Path | None = None) -> Iterator[None]:
    """Turn an argument that `samo.prune` refuses into an error about the settings."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except ValueError as error:
        what = "cannot prune" if model is None else f"cannot prune '{model}'"
        raise ConfigError(f"{what}: {_in_flags(error)}") from error


def _in_flags(error: Exception) -> str:
    """Return a message of `samo.prune` with flags in place of its arguments."""
    text = re.sub(r"rules=\{([^}]*)\}", lambda found: f"--rules {_bare(found[1])}", str(error))
    text = re.sub(r"skip=\[([^]]*)\]", lambda found: f"--skip {_bare(found[1])}", text)
    return re.sub(r"\b(method|scope)='([^']*)'", r"--\1 \2", text)


def _bare(listed: str) -> str:
    """Return the inside of a list or dict as it is typed after a flag.

    Example:
        >>> _bare("'a.b': 0.5, 'c': 0.5")
        'a.b 0.5 c 0.5'
    """
    return re.sub(r"[',]|:(?= )", "", listed)


def _ranges(hint: Any) -> Iterator[Range]:
    """Yield the ranges in a type, such as ``Annotated[int, Range(1)] | Literal["auto"]``."""
    for inner in get_args(hint):
        if isinstance(inner, Range):
            yield inner
        yield from _ranges(inner)


def problems(config: Config) -> Iterator[str]:
    """Yield why settings do not work together, whatever the number of ranks."""
    for one, other, why in _conflicts(config):
        if one:
            how = f"does not work with {other}: {why}" if why else f"has no effect with {other}"
            yield f"{one} {how}; leave one of them out"
    if isinstance(config, FinetuneConfig):
        yield from _finetune_problems(config)
    else:
        yield from _train_problems(config)


def _train_problems(config: TrainConfig) -> Iterator[str]:
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
            "it, raise --steps, or use --mode dense"
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


def _finetune_problems(config: FinetuneConfig) -> Iterator[str]:
    model, prune = config.model, config.prune
    how = _changed(prune, FinetunePrune(), ["method", "scope", "skip", "rules"])
    what = _changed(prune, FinetunePrune(), ["sparsity", "pattern"])
    if what and prune.masks is not None:
        yield f"{what} has no effect with --masks {prune.masks}; leave one of them out"
    if how and not what:
        yield f"{how} has no effect without --sparsity; add one, such as --sparsity 0.5"
    if prune.sparsity == 0 and not prune.rules:
        yield "--sparsity 0 prunes nothing; use one such as 0.5, or leave it out for a pruned model"
    if AUTO not in (config.run.steps, config.run.epochs):
        yield "--steps and --epochs both say how long to train; leave one of them out"
    given = _changed(model, FinetuneModel(), ["distill", "temperature"])
    if given and model.teacher is None:
        yield f"{given} has no effect without --teacher; name the folder of the dense model"


def _conflicts(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield a setting ("" if it is not given), what it conflicts with, why ("": no effect)."""
    run, lean = config.run, "--state lean" if config.optim.state == "lean" else ""
    wide = "--fp32-gradients" if run.fp32_gradients else ""
    yield wide if run.dtype != "bfloat16" else "", f"--dtype {run.dtype}", ""
    yield wide and lean, "--fp32-gradients", "its gradients have 16 bits"
    if config.mesh.shard == "weights" and run.mode != "dense":
        yield lean, "--shard weights", "shards may split values at any place"
        held = "" if run.weights in ("streamed", AUTO) else f"--weights {run.weights}"
        yield held, "--shard weights", ""
    if isinstance(config, TrainConfig):
        yield from _train_conflicts(config)


def _train_conflicts(config: TrainConfig) -> Iterator[tuple[str, str, str]]:
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


def check_batch(config: Config, num_replicas: int) -> None:
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


def micro_batches(config: Config, num_replicas: int) -> int:
    """Return the micro-batches of a pass: by default two per stage, if there are as many sequences.

    With two, a pipeline idles for less than a third of a batch.
    """
    mesh = config.mesh
    if mesh.micro_batches != AUTO:
        return mesh.micro_batches
    return min(2 * mesh.pipe, max(config.run.batch_size // num_replicas, 1))


def first_observation(every: int, warmup_steps: int) -> int:
    """Return the step of early-bird's first observation: during warmup masks barely move."""
    return max(1, -(-warmup_steps // every)) * every


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")
