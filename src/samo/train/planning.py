"""``--plan``: what is left "auto" of a run's layout, by `samo.plan` for the ranks at hand."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import torch.distributed as dist

from samo.data.tokenizers import open_tokenizer
from samo.errors import ConfigError
from samo.planner.choose import choose
from samo.planner.hardware import Cluster
from samo.planner.local import this_cluster
from samo.planner.memory import Job, Layout, Scheme
from samo.planner.network import gpt, sparsities
from samo.planner.search import dense_phase, layouts
from samo.train.config import ResolvedConfig, TrainConfig
from samo.train.launch_env import num_ranks
from samo.train.resolve import gpt_config
from samo.utils.formatting import size

__all__ = ["planned"]

_VOCAB: Final = 50_304
"""Vocabulary of token files, which are not open yet: GPT-2's."""

Works = Callable[[ResolvedConfig], bool]


def planned(config: TrainConfig, resolved: ResolvedConfig, works: Works) -> ResolvedConfig:
    """Return the settings with the fastest layout that fits these ranks and their device.

    Args:
        config: What was asked for: its settings that are not "auto" stay.
        resolved: The same, with defaults for "auto".
        works: Says which settings work together.

    Raises:
        ConfigError: No layout that the settings allow fits.
    """
    count = dist.get_world_size() if dist.is_initialized() else num_ranks()
    cluster, run = this_cluster(resolved.run.device, count), resolved.run
    is_dense = run.mode == "dense"
    job = Job(
        network=gpt(gpt_config(resolved.model, _vocab_size(resolved))),
        sparsity=tuple(sparsities(0.0 if is_dense else resolved.prune.sparsity).items()),
        batch=run.batch_size * run.accumulate,
        context=resolved.model.context,
        dtype=run.dtype,
    )
    among = [
        one for one in _allowed(config, job, cluster) if works(_applied(config, resolved, one))
    ]
    has_dense = not is_dense and (resolved.prune.dense_steps or resolved.prune.method == "gradual")
    if has_dense:
        among = _with_dense_phase(among, job, cluster)
    choice = choose(job, cluster, among=among, budgets=config.run.weights == "auto")
    reason = f"planned: {choice.reason}"
    if has_dense:
        dense = dense_phase(job, choice.layout, cluster)
        reason += f"; dense steps take {size(dense.memory.needed_bytes)}"
    return _applied(config, resolved, choice.layout, reason)


def _vocab_size(config: ResolvedConfig) -> int:
    if not isinstance(config.data.vocab_size, str):
        return config.data.vocab_size
    if any(path.suffix in (".npy", ".bin") for path in config.data.train):
        return _VOCAB
    return open_tokenizer(str(config.data.tokenizer)).vocab_size


def _allowed(config: TrainConfig, job: Job, cluster: Cluster) -> Iterator[Layout]:
    """Yield the layouts that have all settings that were given."""
    run, mesh = config.run, config.mesh
    scheme: Scheme = "autocast" if run.mode == "dense" else "samo"
    given: dict[str, Any] = {
        "state": config.optim.state,
        "checkpointing": config.model.checkpointing,
        "weights": run.weights,
    }
    given = {name: value for name, value in given.items() if value not in ("auto", None)}
    seen = set()
    # A pass is a batch; without a pipeline it is not cut.
    for layout in layouts(replace(job, batch=run.batch_size), cluster, scheme):
        rows = -(-run.batch_size // layout.data)
        own = replace(layout, **given)
        if layout.pipe > 1 and isinstance(mesh.micro_batches, int):
            own = replace(own, micro_batch=-(-rows // mesh.micro_batches))
        if (
            own not in seen
            and mesh.pipe in ("auto", own.pipe)
            and mesh.data in ("auto", own.data)
            and (
                mesh.shard == "auto" or cluster.num_gpus == 1 or own.shard == (mesh.shard != "none")
            )
            and (own.pipe > 1 or own.micro_batch == rows)
        ):
            seen.add(own)
            yield own


def _applied(
    config: TrainConfig, resolved: ResolvedConfig, own: Layout, reason: str = ""
) -> ResolvedConfig:
    """Return the settings with a layout in place of each "auto"."""
    model, optim, run, mesh = config.model, config.optim, config.run, config.mesh
    asked = {
        "pipe": mesh.pipe,
        "shard": mesh.shard,
        "micro_batches": mesh.micro_batches if own.pipe > 1 else None,
        "weights": run.weights,
        "state": optim.state,
        "checkpointing": "auto" if model.checkpointing is None else None,
    }
    free = {name for name, value in asked.items() if value == "auto"}
    rows = run.batch_size // own.data
    found: dict[str, Any] = {
        "pipe": own.pipe,
        "shard": "weights" if own.shard else "none",
        "micro_batches": min(-(-rows // own.micro_batch), rows),
        "weights": own.weights,
        "state": own.state,
        "checkpointing": own.checkpointing,
    }

    def changes(*names: str) -> dict[str, Any]:
        return {name: found[name] for name in names if name in free}

    return replace(
        resolved,
        model=replace(resolved.model, **changes("checkpointing")),
        optim=replace(resolved.optim, **changes("state")),
        run=replace(resolved.run, **changes("weights")),
        mesh=replace(
            resolved.mesh,
            **changes("pipe", "shard", "micro_batches"),
            planned=tuple(sorted(free)),
            reason=reason,
        ),
    )


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
