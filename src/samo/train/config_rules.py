"""Settings that cannot work: out of range, or in conflict with others. Imports no torch.

magnitude, random   masks are drawn once, after the dense phase
early-bird          the same, as soon as the masks are stable; the dense phase is the limit
gradual             masks keep everything at first, and lose weights step by step
set, rigl           masks keep their sparsity, and move
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

from samo.errors import ConfigError
from samo.train.config import PruneConfig, Range, ResolvedConfig, TrainConfig

__all__ = []

DEFAULT_SPARSITY: Final = 0.9

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
    "history": ("early-bird",),
    "drop": MOVING,
}
"""Settings that belong to some methods."""
_UNUSED: Final = PruneConfig(
    sparsity=DEFAULT_SPARSITY, dense_steps=0, mask_every=1, mask_stop=0, history=False
)
"""What "auto" becomes where a setting has no effect."""


def check_ranges(config: TrainConfig) -> None:
    """Refuse settings that are out of range; "auto" never is."""
    if not config.data.train:
        raise ConfigError("no text to train on; name a file: samo train notes.txt")
    for section in fields(TrainConfig):
        hints = get_type_hints(section.type, include_extras=True)
        for name, value in _values(getattr(config, section.name)):
            for least, below in _ranges(hints[name]):
                if isinstance(value, int | float) and not least <= value < below:
                    limit = "" if below == math.inf else f" and less than {below:,}"
                    rule = f"{least:g} or more{limit}"
                    raise ConfigError(f"{flag(name)} must be {rule}, got {str(value)[:40]}")


def _values(section: Any) -> Iterator[tuple[str, Any]]:
    for entry in fields(section):
        value = getattr(section, entry.name)
        yield from ((entry.name, one) for one in (value if isinstance(value, tuple) else (value,)))


def _ranges(hint: Any) -> list[Range]:
    """Return the ranges in a type, such as ``Annotated[int, Range(1)] | Literal["auto"]``."""
    if get_origin(hint) is Annotated:
        return [entry for entry in hint.__metadata__ if isinstance(entry, Range)]
    return list(dict.fromkeys(found for inner in get_args(hint) for found in _ranges(inner)))


def check(config: ResolvedConfig) -> None:
    """Refuse settings that do not work together, whatever the number of ranks."""
    for one, other, why in _conflicts(config):
        if one:
            how = f"does not work with {other}: {why}" if why else f"has no effect with {other}"
            raise ConfigError(f"{one} {how}; leave one of them out")
    for is_wrong, message in _step_rules(config):
        if is_wrong:
            raise ConfigError(message)
    model, mesh = config.model, config.mesh
    if model.width % model.num_heads:
        raise ConfigError(
            f"--num-heads must divide --width, got {model.num_heads} heads and width {model.width}"
        )
    num_stages = mesh.pipe * (2 if mesh.pipe_schedule == "interleaved" else 1)
    if num_stages > model.num_layers + 2:
        raise ConfigError(
            f"a model of {model.num_layers} blocks has {model.num_layers + 2} layers with "
            f"embeddings and head, too few for {num_stages} stages; lower --pipe"
        )


def _conflicts(config: ResolvedConfig) -> Iterator[tuple[str, str, str]]:
    """Yield a setting ("" if it is not given), what it conflicts with, why ("": no effect)."""
    prune, optim, run, mesh = config.prune, config.optim, config.run, config.mesh
    dense, method, pattern = (
        "--mode dense",
        f"--method {prune.method}",
        f"--pattern {prune.pattern}",
    )
    shard = "--shard weights" if mesh.shard == "weights" else ""
    lean = "--state lean" if optim.state == "lean" else ""
    weights = "" if run.weights == "resident" else f"--weights {run.weights}"
    wide = "--fp32-gradients" if run.fp32_gradients else ""
    yield wide if run.dtype != "bfloat16" else "", f"--dtype {run.dtype}", ""
    yield wide and lean, "--fp32-gradients", "its gradients have 16 bits"
    if run.mode == "dense":
        others = (name for name in PruneConfig.__slots__ if name != "sparsity")
        yield _changed(prune, others), dense, ""
        yield f"--density-power {optim.density_power}" if optim.density_power else "", dense, ""
        yield shard or weights or lean, dense, ""
        return
    if prune.masks is not None:
        names = ["sparsity", "scope", "pattern", "skip", "rules"]
        names += [] if prune.method in MOVING else ["method"]  # those start from given masks
        yield _changed(prune, names), f"--masks {prune.masks}", ""
    others = (name for name, methods in _METHODS.items() if prune.method not in methods)
    yield _changed(prune, others), method, ""
    if prune.method in CHANGING:
        yield pattern if prune.pattern else "", method, "masks would not keep to it"
        yield shard, method, "it changes masks; use magnitude, random or early-bird"
    if prune.method == "gradual":
        yield _changed(prune, ("scope", "rules")), method, ""
    if prune.method in MOVING:
        yield lean, method, "it counts the updates of each weight"
    if shard:
        yield lean, shard, "shards may split values at any place"
        yield weights if run.weights != "streamed" else "", shard, ""
    if mesh.pipe > 1:
        pipe, scope = f"--pipe {mesh.pipe}", f"--scope {prune.scope}"
        yield shard, pipe, "each stage holds a part of the model already"
        needs_all = prune.method in ("early-bird", *CHANGING)
        yield method if needs_all else "", pipe, "it needs the masks of all stages"
        needs_all = prune.scope != "tensor" and prune.masks is None
        yield scope if needs_all else "", pipe, "it compares the weights of all stages"


def _changed(prune: PruneConfig, names: Iterable[str]) -> str:
    """Return the flags of settings that the user has given."""
    return ", ".join(flag(n) for n in names if getattr(prune, n) != getattr(_UNUSED, n))


def _step_rules(config: ResolvedConfig) -> Iterator[tuple[bool, str]]:
    """Yield whether something is wrong, and the message."""
    prune, warmup, steps = config.prune, config.optim.warmup_steps, config.run.steps
    method, every, dense, stop = prune.method, prune.mask_every, prune.dense_steps, prune.mask_stop
    if config.run.mode == "dense":
        return
    is_nothing = prune.sparsity == 0 and not prune.rules and prune.masks is None
    yield is_nothing, "--sparsity 0 prunes nothing; use one such as 0.9, or train with --mode dense"
    yield (
        dense >= steps,
        f"--dense-steps {dense:,} leaves none of the {steps:,} steps to train pruned; lower it, or "
        "train without pruning with --mode dense",
    )
    if method == "early-bird":
        full = first_observation(every, warmup) + (prune.queue - 1) * every
        yield (
            full > dense,
            f"{prune.queue} masks {every:,} steps apart, after a warmup of {warmup:,}, cannot be "
            f"stable before step {full:,}, and the dense phase ends at step {dense:,}; raise "
            "--dense-steps or --steps, or lower --mask-every, --queue or --warmup-steps",
        )
    if method in CHANGING:
        first = dense + (every if method in MOVING else 0)
        yield (
            stop <= first,
            f"--mask-stop {stop:,} leaves --method {method} no step to change masks at, which "
            f"begins after step {first:,}; lower --mask-every, or train for more steps",
        )
    yield (
        method == "gradual" and stop > steps,
        f"--method gradual reaches its sparsity at --mask-stop {stop:,}, and the run ends at step "
        f"{steps:,}; lower it, or train for more steps",
    )


def check_batch(config: ResolvedConfig, num_replicas: int) -> None:
    """Refuse a batch that cannot be divided among replicas and micro-batches."""
    mesh, size = config.mesh, config.run.batch_size
    least, count = size // num_replicas, micro_batches(config, num_replicas)
    message = ""
    if least < 1:
        message = (
            f"a batch of {size} sequences cannot be divided among {num_replicas} replicas; raise "
            f"--batch-size to {num_replicas} or more, or use fewer ranks"
        )
    elif mesh.pipe > 1 and count > least:
        message = (
            f"the {least} sequences of a replica cannot be split into {count} micro-batches; raise "
            f"--batch-size to {num_replicas * count} or more, or lower --micro-batches"
        )
    elif mesh.pipe > 1 and mesh.pipe_schedule != "message-driven":
        if size % num_replicas or least % count:
            message = (
                f"--pipe-schedule {mesh.pipe_schedule} takes equal micro-batches, and {size} "
                f"sequences are not {num_replicas} replicas x {count} micro-batches of the same "
                "size; change --batch-size, or use message-driven"
            )
        elif mesh.pipe_schedule != "gpipe" and count < mesh.pipe:
            message = (
                f"--pipe-schedule {mesh.pipe_schedule} needs as many micro-batches as stages, and "
                f"{count} are fewer than {mesh.pipe}; raise --micro-batches"
            )
    if message:
        raise ConfigError(message)


def micro_batches(config: ResolvedConfig, num_replicas: int) -> int:
    """Return the number of micro-batches of a pass: by default two per stage, if sequences suffice.

    With two, a pipeline idles for less than a third of a batch.
    """
    mesh = config.mesh
    if not isinstance(mesh.micro_batches, str):
        return mesh.micro_batches
    least = max(config.run.batch_size // num_replicas, 1)
    count = min(2 * mesh.pipe, least)
    if mesh.pipe_schedule != "message-driven":
        while least % count:
            count -= 1
    return count


def first_observation(every: int, warmup_steps: int) -> int:
    """Return the step of early-bird's first observation: during warmup masks barely move."""
    return max(1, -(-warmup_steps // every)) * every


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")
