"""From `FinetuneConfig` to `ResolvedFinetune`: fill in "auto", and refuse what cannot work.

Before data and model are in hand, steps, warmup, weights and state stay "auto"; see
`samo.train.causal_lm`.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, replace

from samo.errors import ConfigError
from samo.train.config import ResolvedMesh
from samo.train.finetune_config import (
    FinetuneConfig,
    FinetuneData,
    FinetuneModel,
    FinetunePrune,
    ResolvedFinetune,
    ResolvedFinetuneModel,
    ResolvedFinetuneOptim,
    ResolvedFinetuneRun,
)
from samo.train.resolve import check_ranges, device_and_dtype, filled, flag, weights_of

__all__ = ["resolve_finetune"]


def resolve_finetune(config: FinetuneConfig) -> ResolvedFinetune:
    """Return the settings with absolute paths, and "auto" only where data and model decide.

    Raises:
        ConfigError: A setting is out of range, conflicts with another, or needs a GPU.
    """
    example = "samo finetune my-llama --data notes.jsonl"
    if config.model.model is None:
        raise ConfigError(f"no model to fine-tune; name its folder: {example}")
    if not config.data.data:
        raise ConfigError(f"no data to train on; name a file: {example}")
    for section in fields(FinetuneConfig):
        check_ranges(getattr(config, section.name))
    machine = device_and_dtype(config.run.device)
    run = filled(config.run, compile=False, **machine)
    is_sharded = config.mesh.shard == "weights"
    if config.run.weights != "auto" or is_sharded:
        wanted = "resident" if config.run.weights == "auto" else config.run.weights
        run["weights"] = weights_of(wanted, is_sharded)
    optim = filled(config.optim)
    if is_sharded and optim["state"] == "auto":
        optim["state"] = "exact"  # shards may split values at any place
    checkpointing = run["device"] == "cuda"
    model = filled(config.model, checkpointing=checkpointing)
    resolved = ResolvedFinetune(
        data=FinetuneData(**filled(config.data)),
        model=ResolvedFinetuneModel(**model),
        prune=FinetunePrune(**filled(config.prune)),
        optim=ResolvedFinetuneOptim(**optim),
        run=ResolvedFinetuneRun(**run),
        mesh=ResolvedMesh(**filled(config.mesh, pipe=1, shard="none")),
    )
    for is_wrong, message in _rules(resolved):
        if is_wrong:
            raise ConfigError(message)
    return resolved


def with_steps(config: ResolvedFinetune, sequences: int) -> ResolvedFinetune:
    """Return settings whose steps and warmup follow from the sequences of an epoch."""
    run, optim, steps = config.run, config.optim, config.run.steps
    if isinstance(steps, str):
        taken = run.batch_size * run.accumulate
        steps = max(1, math.ceil(run.epochs * sequences / taken))
    warmup = optim.warmup_steps
    if isinstance(warmup, str):
        warmup = math.ceil(0.03 * steps)
    return replace(config, run=replace(run, steps=steps), optim=replace(optim, warmup_steps=warmup))


def _rules(config: ResolvedFinetune) -> Iterator[tuple[bool, str]]:
    """Yield whether something is wrong, and the message."""
    model, prune, run, mesh = config.model, config.prune, config.run, config.mesh
    prunes = prune.sparsity != "auto" or prune.pattern is not None
    unused = FinetunePrune()
    names = [entry.name for entry in fields(unused) if entry.name not in ("masks", "sparsity")]
    ignored = [flag(name) for name in names if getattr(prune, name) != getattr(unused, name)]
    yield (
        not prunes and bool(ignored),
        f"{', '.join(ignored)} has no effect without --sparsity; add one, such as --sparsity 0.5, "
        "to prune the model first",
    )
    yield (
        prunes and prune.masks is not None,
        f"--masks {prune.masks} says what is pruned, so --sparsity and --pattern have no effect; "
        "leave one of them out",
    )
    yield (
        prune.sparsity == 0 and not prune.rules,
        "--sparsity 0 prunes nothing; use one such as 0.5, or leave it out for a pruned model",
    )
    default = FinetuneModel()
    given = [n for n in ("distill", "temperature") if getattr(model, n) != getattr(default, n)]
    yield (
        model.teacher is None and bool(given),
        f"{', '.join(map(flag, given))} has no effect without --teacher; name the folder of the "
        "dense model",
    )
    yield (
        run.mode != "samo" or bool(run.compile) or mesh.plan or mesh.stages_per_rank != 1,
        "samo finetune has no settings mode, compile, plan or stages_per_rank; leave them out",
    )
    yield (
        mesh.pipe > 1,
        f"--pipe {mesh.pipe} does not work with samo finetune: its loss is computed with the head, "
        "and checkpoints of stages have no folder of their own; use replicas, and --shard weights "
        "if the model does not fit. In Python, samo.Pipeline cuts models of Hugging Face",
    )
    yield (
        run.fp32_gradients and run.dtype != "bfloat16",
        f"--fp32-gradients has no effect with --dtype {run.dtype}; leave it out",
    )
    yield (
        run.fp32_gradients and config.optim.state == "lean",
        "--fp32-gradients does not work with --state lean: its gradients have 16 bits; leave one "
        "of them out",
    )
    is_sharded = mesh.shard == "weights"
    yield (
        is_sharded and config.optim.state == "lean",
        "--state lean does not work with --shard weights: shards may split values at any place; "
        "leave one of them out",
    )
    yield (
        is_sharded and run.weights != "streamed",
        f"--weights {run.weights} has no effect with --shard weights, which streams them; leave "
        "one of them out",
    )
