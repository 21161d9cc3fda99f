"""Settings that cannot work: which, and why. Imports no torch.

magnitude, random   masks are drawn once, after the dense phase
early-bird          the same, as soon as the masks are stable; the dense phase is the limit
gradual             masks keep everything at first, and lose weights step by step
set, rigl           masks keep their sparsity, and move
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from samo.errors import ConfigError
from samo.train.config import DataConfig, MeshConfig, PruneConfig, ResolvedConfig

__all__ = []

Rules = Iterator[tuple[bool, str]]
"""Pairs: whether something is wrong, and the message."""

DEFAULT_SPARSITY: Final = 0.9

MOVING: Final = ("set", "rigl")
"""Methods whose masks keep their sparsity and move."""
CHANGING: Final = ("gradual", *MOVING)
"""Methods whose masks change after they were drawn."""

_METHOD_SETTINGS: Final[dict[str, tuple[tuple[str, ...], Any]]] = {
    "mask_every": (("early-bird", *CHANGING), 0),
    "mask_stop": (CHANGING, 0),
    "queue": (("early-bird",), 5),
    "threshold": (("early-bird",), 0.1),
    "distance": (("early-bird",), "kept"),
    "history": (("early-bird",), False),
    "drop": (MOVING, 0.3),
}
"""Settings that belong to some methods, and their value with any other."""


def check(config: ResolvedConfig) -> None:
    """Refuse settings that cannot work, whatever the number of ranks."""
    for is_wrong, message in _rules(config):
        if is_wrong:
            raise ConfigError(message)


def _rules(config: ResolvedConfig) -> Rules:
    yield from _ranges(config)
    yield from _prune_rules(config)
    yield from _method_rules(config)
    yield from _mesh_rules(config)
    data, optim, run = config.data, config.optim, config.run
    is_dense, is_lean = run.mode == "dense", optim.state == "lean"
    weights, dtype = f"--weights {run.weights}", f"dtype {run.dtype}"
    yield is_dense and run.weights != "resident", _no_effect(weights, "--mode dense")
    yield is_dense and is_lean, _no_effect("--state lean", "--mode dense")
    is_wide = run.fp32_gradients and run.dtype != "bfloat16"
    yield is_wide, _no_effect("--fp32-gradients", dtype, "its gradients are float32")
    is_wide = run.fp32_gradients and is_lean
    yield is_wide, _conflict("--fp32-gradients", "--state lean", "its gradients have 16 bits")
    has_both = bool(data.valid) and data.valid_fraction != DataConfig().valid_fraction
    yield has_both, _no_effect("--valid-fraction", "--valid")


def _ranges(config: ResolvedConfig) -> Rules:
    data, model, prune = config.data, config.model, config.prune
    optim, run, mesh = config.optim, config.run, config.mesh
    yield not data.train, "no text to train on; name a file: samo train notes.txt"
    counts: list[tuple[Any, str]] = [
        *((model, name) for name in ("num_layers", "width", "num_heads", "context")),
        *((run, name) for name in ("steps", "batch_size", "accumulate", "eval_every")),
        *((run, name) for name in ("eval_batches", "save_every", "log_every")),
        *((mesh, name) for name in ("pipe", "data", "micro_batches", "stages_per_rank")),
        (data, "vocab_size"),
    ]
    for section, name in counts:
        value = getattr(section, name)
        if value != "auto":
            yield _out_of_range(name, value, 1 <= value < 2**31, "1 or more, and less than 2^31")
    amounts: list[tuple[Any, str]] = [
        *((optim, name) for name in ("lr", "final_lr", "weight_decay", "eps", "clip")),
        (optim, "warmup_steps"),
        (prune, "dense_steps"),
        (run, "sample_tokens"),
        (run, "seed"),
    ]
    for section, name in amounts:
        value = getattr(section, name)
        fits = 0 <= value < 2**63 and math.isfinite(value)
        yield _out_of_range(name, value, fits, "a number of 0 or more")
    for name, value in (("sparsity", prune.sparsity), *prune.rules.items()):
        fits = 0 <= value < 1
        yield _out_of_range(name, value, fits, "at least 0 and less than 1", "0.9 prunes 90 %")
    power, fraction, timeout = optim.density_power, data.valid_fraction, mesh.timeout_s
    hint = "-1 trains pruned tensors 10 times as fast at 90 %, and 0 as fast as all others"
    yield _out_of_range("density_power", power, -3 <= power <= 3, "from -3 to 3", hint)
    yield _out_of_range("valid_fraction", fraction, 0 < fraction < 1, "between 0 and 1")
    fits = all(0 <= beta < 1 for beta in optim.betas)
    yield _out_of_range("betas", optim.betas, fits, "two numbers in [0, 1)")
    fits = timeout > 0 and math.isfinite(timeout)
    yield _out_of_range("timeout_s", timeout, fits, "a number of seconds over 0")
    yield (
        model.width % model.num_heads != 0,
        f"--num-heads must divide --width, got {model.num_heads} heads and width {model.width}",
    )


def _prune_rules(config: ResolvedConfig) -> Rules:
    prune, run, power = config.prune, config.run, config.optim.density_power
    if run.mode == "dense":
        unused = {name: value for name, (_, value) in _METHOD_SETTINGS.items()}
        defaults = PruneConfig(**unused, dense_steps=0, sparsity=prune.sparsity)
        changed = _changed(prune, defaults, PruneConfig.__slots__)
        yield bool(changed), _no_effect(changed, "--mode dense")
        yield power != 0, _no_effect(f"--density-power {power}", "--mode dense")
        return
    yield (
        prune.dense_steps >= run.steps,
        f"--dense-steps {prune.dense_steps:,} leaves none of the {run.steps:,} steps to train pruned; lower "
        "it, or train without pruning with --mode dense",
    )
    if prune.masks is not None:
        names = ["sparsity", "scope", "pattern", "skip", "rules"]
        names += [] if prune.method in MOVING else ["method"]  # those start from given masks
        changed = _changed(prune, PruneConfig(sparsity=DEFAULT_SPARSITY), names)
        yield bool(changed), _no_effect(changed, f"--masks {prune.masks}")
    is_nothing = prune.sparsity == 0 and not prune.rules and prune.masks is None
    yield is_nothing, "--sparsity 0 prunes nothing; use one such as 0.9, or train with --mode dense"
    pattern, scope = f"--pattern {prune.pattern}", f"--scope {prune.scope}"
    is_wrong = prune.pattern is not None and prune.scope != "tensor"
    yield is_wrong, _no_effect(scope, pattern, "it gives every matrix the same sparsity")


def _method_rules(config: ResolvedConfig) -> Rules:
    prune, warmup, steps = config.prune, config.optim.warmup_steps, config.run.steps
    method, every, dense, stop = prune.method, prune.mask_every, prune.dense_steps, prune.mask_stop
    name = f"--method {method}"
    for setting, (owners, unused) in _METHOD_SETTINGS.items():
        yield (
            method not in owners and getattr(prune, setting) != unused,
            _no_effect(_flag(setting), name, f"it is a setting of method {_listed(owners)}"),
        )
    if config.run.mode == "dense" or method in ("magnitude", "random"):
        return
    yield _out_of_range("mask_every", every, 1 <= every < 2**31, "1 or more, and less than 2^31")
    if method == "early-bird":
        queue, threshold = prune.queue, prune.threshold
        yield _out_of_range("queue", queue, 2 <= queue < 2**31, "2 or more, and less than 2^31")
        hint = "0.1 means that nine of ten kept weights agree"
        fits = 0 <= threshold < 1
        yield _out_of_range("threshold", threshold, fits, "at least 0 and less than 1", hint)
        full = first_observation(every, warmup) + (queue - 1) * every
        yield (
            full > dense,
            f"{name} compares {queue} masks, {every:,} steps apart and after the warmup of {warmup:,} steps, "
            f"so they cannot be stable before step {full:,}, and the dense phase ends at step {dense:,}; "
            "raise --dense-steps or --steps, or lower --mask-every, --queue or --warmup-steps",
        )
        return
    yield (
        not dense < stop < 2**63,
        f"--mask-stop {stop:,} is not after the dense phase, which ends at step {dense:,}; masks change "
        "between the two",
    )
    has_pattern = prune.pattern is not None
    yield has_pattern, _conflict(name, f"--pattern {prune.pattern}", "masks would not keep to it")
    if method == "gradual":
        yield (
            stop > steps,
            f"{name} reaches its sparsity at --mask-stop {stop:,}, and the run ends at step {steps:,}; lower "
            "it, or train for more steps",
        )
        changed = _changed(prune, PruneConfig(), ("scope", "rules"))
        yield bool(changed), _no_effect(changed, name, "it prunes every matrix alike")
        return
    yield (
        stop - dense <= every,
        f"{name} moves masks every {every:,} steps between the dense phase, which ends at step {dense:,}, "
        f"and --mask-stop {stop:,}, which leaves none; lower --mask-every, or train for more steps",
    )
    hint = "0.3 replaces 30 % of the kept weights at first"
    fits = 0 < prune.drop <= 1
    yield _out_of_range("drop", prune.drop, fits, "more than 0 and at most 1", hint)
    is_lean = config.optim.state == "lean"
    yield is_lean, _conflict(name, "--state lean", "it counts the updates of each weight")


def _mesh_rules(config: ResolvedConfig) -> Rules:
    mesh, prune, run, num_layers = config.mesh, config.prune, config.run, config.model.num_layers
    method, scope, pipe = (
        f"--method {prune.method}",
        f"--scope {prune.scope}",
        f"--pipe {mesh.pipe}",
    )
    if mesh.shard == "weights":
        shard, once = "--shard weights", "use magnitude, random or early-bird"
        yield run.mode != "samo", _no_effect(shard, "--mode dense", "it shards pruned weights")
        yield mesh.pipe > 1, _conflict(shard, pipe, "each stage holds a part of the model already")
        is_changing = prune.method in CHANGING
        yield is_changing, _conflict(shard, method, f"it changes masks; {once}")
        is_lean = config.optim.state == "lean"
        yield is_lean, _conflict(shard, "--state lean", "shards may split values at any place")
        is_held = run.weights != "streamed"
        yield is_held, _no_effect(f"--weights {run.weights}", shard, "it streams all weights")
    if mesh.pipe == 1:
        changed = _changed(mesh, MeshConfig(), ("micro_batches", "stages_per_rank"))
        yield bool(changed), _no_effect(changed, "--pipe 1", "the model is not split into stages")
        return
    num_stages = mesh.pipe * mesh.stages_per_rank
    yield (
        num_stages > num_layers + 2,
        f"a model of {num_layers} blocks has {num_layers + 2} layers with embeddings and head, too few for "
        f"{num_stages} stages; lower --pipe or --stages-per-rank",
    )
    if run.mode == "dense":
        return
    is_global = prune.scope != "tensor" and prune.masks is None
    reason = "it compares the weights of all stages; use --scope tensor, or --masks of samo prune"
    yield is_global, _conflict(scope, pipe, reason)
    needs_all = prune.method in ("early-bird", *CHANGING)
    reason = "it needs the masks of all stages; use magnitude or random"
    yield needs_all, _conflict(method, pipe, reason)


def _out_of_range(
    name: str, value: object, fits: bool, rule: str, hint: str = ""
) -> tuple[bool, str]:
    named = name if "*" in name or "." in name else _flag(name)  # a pattern of --rules
    return not fits, f"{named} must be {rule}, got {str(value)[:40]}{hint and f'; {hint}'}"


def _no_effect(setting: str, other: str, reason: str = "") -> str:
    because = reason and f": {reason}"
    return f"{setting} would have no effect with {other}{because}; leave one of them out"


def _conflict(setting: str, other: str, reason: str) -> str:
    return f"{setting} does not work with {other}: {reason}; leave one of them out"


def _changed(section: Any, defaults: Any, names: Iterable[str]) -> str:
    """Return the flags of settings that are not at their defaults."""
    return ", ".join(
        _flag(name) for name in names if getattr(section, name) != getattr(defaults, name)
    )


def check_batch(config: ResolvedConfig, num_replicas: int) -> None:
    """Refuse a batch that cannot be divided among replicas and micro-batches."""
    mesh, size = config.mesh, config.run.batch_size
    least, count = size // num_replicas, micro_batches(config, num_replicas)
    for is_wrong, message in (
        (
            least < 1,
            f"a batch of {size} sequences cannot be divided among {num_replicas} replicas; raise "
            f"--batch-size to {num_replicas} or more, or use fewer ranks",
        ),
        (
            mesh.pipe > 1 and count > least,
            f"the {least} sequences of a replica cannot be split into {count} micro-batches; raise "
            f"--batch-size to {num_replicas * count} or more, or lower --micro-batches",
        ),
    ):
        if is_wrong:
            raise ConfigError(message)


def micro_batches(config: ResolvedConfig, num_replicas: int) -> int:
    """Return the number of micro-batches of a pass: two for each stage by default.

    Then a pipeline idles for less than a third of a batch. Example: 4 stages and 6 sequences for
    each replica give 6, one for each sequence.
    """
    mesh = config.mesh
    if not isinstance(mesh.micro_batches, str):
        return mesh.micro_batches
    return min(2 * mesh.pipe, max(config.run.batch_size // num_replicas, 1))


def first_observation(every: int, warmup_steps: int) -> int:
    """Return the step of early-bird's first observation: during warmup masks barely move.

    Example:
        >>> from samo.train.config_rules import first_observation
        >>> first_observation(every=20, warmup_steps=50), first_observation(every=20, warmup_steps=0)
        (60, 20)
    """
    return max(1, -(-warmup_steps // every)) * every


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _listed(names: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
