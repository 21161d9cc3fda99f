"""What `samo.plan` decides for a run: its layout with ``--plan``, and what does not fit at all."""

import itertools
from dataclasses import replace
from typing import Any, Final

import torch.distributed as dist
from torch import nn

from samo.data.tokenizers import open_tokenizer
from samo.errors import ConfigError
from samo.mask.masks import Masks
from samo.memory.predict import Scheme
from samo.models.sum_in_chunks import MAX_LOGITS
from samo.planner.configs import from_module
from samo.planner.hardware import Cluster
from samo.planner.memory import Job, Layout, peak
from samo.planner.network import ENDS, Network, gpt
from samo.planner.search import choose, dense_phase, layouts
from samo.planner.sparsity import pruned_by_masks
from samo.planner.this_machine import this_cluster
from samo.train.config import AUTO, TrainConfig, with_values
from samo.train.finetune_config import Config, FinetuneConfig
from samo.train.launch_env import num_ranks
from samo.train.resolve import gpt_config
from samo.train.rules import micro_batches, problems
from samo.utils.formatting import size

_VOCAB: Final = 50_304
"""Vocabulary of token files, which are not open yet: GPT-2's."""


# samo train


def planned(config: TrainConfig, resolved: TrainConfig) -> TrainConfig:
    """Return the settings with the fastest layout that fits these ranks and their device.

    Args:
        config: What was asked for: its settings that are not "auto" stay.
        resolved: The same, with defaults for "auto".

    Raises:
        ConfigError: No layout that the settings allow fits.
    """
    count = dist.get_world_size() if dist.is_initialized() else num_ranks()
    cluster, job = this_cluster(resolved.run.device, count), _gpt_job(resolved)
    among = []
    # A pass is a batch; without a pipeline it is not cut.
    for layout in layouts(replace(job, batch=config.run.batch_size), cluster, _scheme(config)):
        settings = _applied(config, resolved, layout)
        own = layout_of(settings, layout.data)
        is_same_mesh = (own.pipe, own.shard) == (layout.pipe, layout.shard)
        is_allowed = is_same_mesh and config.mesh.data in (AUTO, own.data)
        if is_allowed and own not in among and not any(problems(settings)):
            among.append(own)
    if has_dense := _has_dense_phase(resolved):
        among = _with_dense_phase(among, job, cluster)
    best, why = choose(job, cluster, among, budgets=config.run.weights == AUTO)
    reason = f"planned: {why}"
    if has_dense:
        dense = dense_phase(job, best.layout, cluster)
        reason += f"; dense steps take {size(dense.memory.needed_bytes)}"
    return _applied(config, resolved, best.layout, reason)


def layout_of(config: Config, num_replicas: int) -> Layout:
    """Return the layout of resolved settings."""
    run, mesh, rows = config.run, config.mesh, -(-config.run.batch_size // num_replicas)
    return Layout(
        scheme=_scheme(config),
        weights=run.weights,
        state=config.optim.state,
        checkpointing=bool(config.model.checkpointing),
        pipe=mesh.pipe,
        data=num_replicas,
        shard=mesh.shard == "weights" and num_replicas > 1,
        micro_batch=-(-rows // micro_batches(config, num_replicas)) if mesh.pipe > 1 else rows,
    )


def check_memory(config: TrainConfig, num_replicas: int) -> None:
    """Refuse a model that takes more than all memory of the device, before it takes any."""
    run, pipe = config.run, config.mesh.pipe
    job, layout = _gpt_job(config), layout_of(config, num_replicas)
    when, needed = "at the start", 4.0 * job.network.num_params / pipe  # fp32, until compressed
    if run.mode == "dense" or _has_dense_phase(config):
        dense = replace(layout, scheme="autocast", weights="resident", state="exact", shard=False)
        when, needed = "for its dense phase", peak(job, dense).peak_bytes
    elif config.prune.masks is None:  # or the sparsity is not known
        needed = max(needed, peak(job, layout).peak_bytes)
    available = this_cluster(run.device, pipe * num_replicas).hardware.memory_bytes
    if 0 < available < needed:
        raise ConfigError(
            f"a model of {job.network.num_params:,} parameters needs {size(needed)} {when}, with "
            f"{run.batch_size:,} x {job.context:,} tokens, and this {run.device} has "
            f"{size(available)} for each rank. Lower --batch-size or --context, use "
            "--checkpointing, a smaller --shape, or --method rigl, which has no dense phase"
        )


def _gpt_job(config: TrainConfig) -> Job:
    network = gpt(gpt_config(config.model, _vocab_size(config)))
    return _job(
        config, network.pruned(0.0 if config.run.mode == "dense" else config.prune.sparsity)
    )


def _job(config: Config, network: Network) -> Job:
    run = config.run
    batch, context = run.batch_size * run.accumulate, config.model.context
    return Job(network=network, batch=batch, context=context, dtype=run.dtype)


def _has_dense_phase(config: TrainConfig) -> bool:
    prune = config.prune
    return config.run.mode != "dense" and (prune.dense_steps > 0 or prune.method == "gradual")


def _scheme(config: Config) -> Scheme:
    return "autocast" if config.run.mode == "dense" else "samo"


def _vocab_size(config: TrainConfig) -> int:
    if config.data.vocab_size != AUTO:
        return config.data.vocab_size
    if any(path.suffix in (".npy", ".bin") for path in config.data.train):
        return _VOCAB
    return open_tokenizer(str(config.data.tokenizer)).vocab_size


def _applied(
    config: TrainConfig, resolved: TrainConfig, own: Layout, reason: str = ""
) -> TrainConfig:
    """Return the settings with a layout in place of each "auto"."""
    found: dict[str, Any] = {
        "pipe": own.pipe,
        "shard": "weights" if own.shard else "none",
        "weights": own.weights,
        "state": own.state,
        "checkpointing": own.checkpointing,
    }
    if own.pipe > 1:
        rows = config.run.batch_size // own.data
        found["micro_batches"] = min(-(-rows // own.micro_batch), rows)
    sections = config.model, config.optim, config.run, config.mesh
    asked = {name: getattr(own, name) for own in sections for name in found if hasattr(own, name)}
    free = {name: value for name, value in sorted(found.items()) if asked[name] in (AUTO, None)}
    return with_values(resolved, **free, planned=tuple(free), reason=reason)


def _with_dense_phase(among: list[Layout], job: Job, cluster: Cluster) -> list[Layout]:
    """Return the layouts on whose mesh dense steps fit, too."""
    dense = {own: dense_phase(job, own, cluster) for own in among}
    fitting = [own for own, option in dense.items() if option.fits]
    if among and not fitting:
        least = min(option.memory.needed_bytes for option in dense.values())
        raise ConfigError(
            f"the dense phase takes {size(least)} on each of {cluster.num_gpus} ranks at the "
            f"least, of {size(cluster.hardware.memory_bytes)}; start pruned with --masks, --init "
            "or --method rigl, lower --batch-size, or use more ranks"
        )
    return fitting


# samo finetune


def choose_layout(
    config: FinetuneConfig, model: nn.Module, masks: Masks, teacher: nn.Module | None, ranks: int
) -> tuple[Any, Any, str]:
    """Return how to keep weights and state where that is "auto", and why; "" if nothing is.

    Raises:
        ConfigError: Nothing that the settings allow fits.
    """
    run = config.run
    asked: tuple[Any, Any] = run.weights, config.optim.state
    if "auto" not in asked:
        return *asked, ""
    weights: Any = ("resident", "streamed") if asked[0] == "auto" else asked[:1]
    states: Any = ("exact", "lean") if asked[1] == "auto" else asked[1:]
    if asked[1] == "auto" and (run.dtype != "bfloat16" or run.fp32_gradients):
        states = ("exact",)
    try:
        network = replace(from_module(model), max_logits=MAX_LOGITS)
    except ConfigError:  # a family that samo plan does not know
        why = f"samo plan does not know {type(model).__name__}, so nothing is predicted"
        return weights[0], states[0], f"{weights[0]}, {states[0]}: {why}"
    network = pruned_by_masks(network, masks)
    if config.model.freeze_embeddings:
        network = network.with_frozen([kind for kind in ENDS if not network.sparsity[kind]])
    cluster = this_cluster(run.device, ranks)
    if teacher is not None:
        taken = sum(param.nbytes for param in teacher.parameters())
        left = max(cluster.hardware.memory_bytes - taken, 1.0)
        cluster = replace(cluster, hardware=replace(cluster.hardware, memory_bytes=left))
    own = layout_of(config, ranks)
    among = [replace(own, weights=w, state=s) for w, s in itertools.product(weights, states)]
    best, reason = choose(_job(config, network), cluster, among, budgets=asked[0] == "auto")
    return best.layout.weights, best.layout.state, reason
