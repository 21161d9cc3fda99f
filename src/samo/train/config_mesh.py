"""The settings of a run on many ranks. Imports no torch.

[mesh]            samo launch -n 4 train notes.txt --pipe 2
pipe = 2          4 ranks: 2 stages, each with 2 replicas
shard = "weights" instead of pipe: 4 ranks with a quarter of the pruned model each
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from samo.errors import ConfigError
from samo.train.config_methods import CHANGING

if TYPE_CHECKING:
    from samo.train.config import TrainConfig

__all__ = ["MeshConfig"]

Schedule = Literal["message-driven", "1f1b", "gpipe", "interleaved"]

_PER_STAGE: Final = 2
"""Micro-batches for each stage, if nothing is said: the pipeline is idle for less than a third of a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """The grid of ranks, for runs under torchrun or samo launch.

    Example:
        >>> from samo.train.config_mesh import MeshConfig
        >>> MeshConfig(pipe=2).data
        'auto'
    """

    pipe: int = 1
    """Stages that the model is cut into."""
    data: int | Literal["auto"] = "auto"
    """Replicas of each stage, which share every batch; auto: as many as there are ranks for."""
    micro_batches: int | Literal["auto"] = "auto"
    """Parts of a pass that follow each other through the stages; auto: two for each stage."""
    pipe_schedule: Schedule = "message-driven"
    """Order in which stages compute them."""
    shard: Literal["none", "weights"] = "none"
    """Let each replica keep a share of the pruned model and its state, with FSDP2, and stream the weights;
    the dense phase has whole replicas."""
    timeout_s: float = 600.0
    """Seconds after which a rank that waits for another gives up."""


def place(mesh: MeshConfig, num_ranks: int, rank: int) -> str:
    """Return how a rank is called: with its stage, if the model is cut into some.

    Example:
        >>> from samo.train.config_mesh import MeshConfig, place
        >>> place(MeshConfig(pipe=2), 4, 3)
        'rank 3 (stage 1 of 2)'
    """
    stage = rank // max(num_ranks // mesh.pipe, 1)
    return f"rank {rank}" + (f" (stage {stage} of {mesh.pipe})" if mesh.pipe > 1 else "")


def check_mesh(config: "TrainConfig") -> None:
    """Refuse settings of a grid that cannot be meant, whatever the number of ranks.

    Raises:
        ConfigError: One is out of range, would have no effect, or is not for what else is asked.
    """
    mesh = config.mesh
    for name in ("pipe", "data", "micro_batches"):
        value = getattr(mesh, name)
        if not isinstance(value, str) and not 1 <= value < 2**31:
            raise ConfigError(f"{name} must be 1 or more, and less than 2^31, got {value}")
    if not (mesh.timeout_s > 0 and math.isfinite(mesh.timeout_s)):
        raise ConfigError(f"timeout_s must be a number of seconds over 0, got {mesh.timeout_s}")
    if mesh.shard == "weights":
        _check_shard(config)
    if mesh.pipe == 1:
        for name in ("micro_batches", "pipe_schedule"):
            usual = getattr(MeshConfig(), name)
            if getattr(mesh, name) != usual:
                raise ConfigError(
                    f"{name} is for a model that is cut into stages, and pipe is 1; leave it at {usual}, "
                    "or choose --pipe 2 or more"
                )
        return
    _check_pipe(config)


def _check_shard(config: "TrainConfig") -> None:
    mesh, prune, run = config.mesh, config.prune, config.run
    if run.mode != "samo":
        raise ConfigError(
            f"shard weights divides the kept values of a pruned model, and the mode is {run.mode}; leave one "
            "of them out"
        )
    if mesh.pipe > 1:
        raise ConfigError(
            f"shard weights divides a whole model among its replicas, and pipe {mesh.pipe} cuts it into "
            "stages; use --pipe 1, or leave shard out: each stage holds a part of the model already"
        )
    if prune.method in CHANGING:
        raise ConfigError(
            f"method {prune.method} changes masks, and with shard weights each rank holds a share of the old "
            "values; leave shard out, or choose a method that draws masks once: magnitude, random or "
            "early-bird"
        )
    if config.optim.state != "exact":
        raise ConfigError(
            f"shard weights cuts values anywhere, and state {config.optim.state} goes by their places in the "
            "weights; leave one of them out"
        )
    if run.weights != "streamed":
        raise ConfigError(
            f"shard weights streams all dense weights, and an amount of {run.weights} bytes that stay would "
            "have no effect; leave weights out"
        )


def _check_pipe(config: "TrainConfig") -> None:
    mesh, prune, run = config.mesh, config.prune, config.run
    num_layers = config.model.num_layers
    assert isinstance(num_layers, int), "resolve() comes first"
    pieces = mesh.pipe * (2 if mesh.pipe_schedule == "interleaved" else 1)
    if pieces > num_layers + 2:  # embeddings, blocks, head
        raise ConfigError(
            f"a model of {num_layers} blocks has {num_layers + 2} layers with embeddings and head, too few "
            f"for {pieces} pieces; lower --pipe"
        )
    if prune.scope != "tensor" and run.mode != "dense" and prune.masks is None:
        raise ConfigError(
            f"scope {prune.scope} compares the weights of all stages, which lie on different ranks with "
            f"pipe {mesh.pipe}; use scope tensor, --pipe 1, or masks that samo prune made"
        )
    if prune.method in ("early-bird", "gradual", "set", "rigl") and run.mode != "dense":
        raise ConfigError(
            f"method {prune.method} follows the masks of the whole model, which lies on {mesh.pipe} stages; "
            "use --pipe 1, or a method that draws masks once: magnitude or random"
        )


def in_any_grid(config: "TrainConfig") -> "TrainConfig":
    """Return the settings of a run that goes on, with as many replicas as there are ranks for."""
    return replace(config, mesh=replace(config.mesh, data="auto"))


def with_stages(config: "TrainConfig", given: MeshConfig) -> "TrainConfig":
    """Leave out recorded settings of stages that there are no more, if they were not given anew."""
    usual = MeshConfig()
    names = ("micro_batches", "pipe_schedule") if config.mesh.pipe == 1 else ()
    unused = {name: getattr(usual, name) for name in names}
    unused = {name: value for name, value in unused.items() if getattr(given, name) == value}
    return replace(config, mesh=replace(config.mesh, **unused))


def check_batch(config: "TrainConfig", num_replicas: int) -> None:
    """Refuse a batch that cannot be shared out.

    Raises:
        ConfigError: It has too few sequences.
    """
    mesh, size = config.mesh, config.run.batch_size
    least = size // num_replicas
    if least < 1:
        raise ConfigError(
            f"a batch of {size} sequences cannot be shared by {num_replicas} replicas; raise --batch-size "
            f"to {num_replicas} or more, or use fewer ranks"
        )
    if mesh.pipe == 1:
        return
    count = micro_batches(config, num_replicas)
    if count > least:
        raise ConfigError(
            f"a replica's {least} sequences cannot be cut into {count} micro-batches; raise --batch-size to "
            f"{num_replicas * count} or more, or lower --micro-batches"
        )
    if mesh.pipe_schedule == "message-driven":
        return
    if size % num_replicas or least % count:
        raise ConfigError(
            f"pipe_schedule {mesh.pipe_schedule} takes equal micro-batches, and {size} sequences are not "
            f"{num_replicas} replicas x {count} micro-batches of the same size; change --batch-size, or use "
            "message-driven"
        )
    if mesh.pipe_schedule in ("1f1b", "interleaved") and count < mesh.pipe:
        raise ConfigError(
            f"pipe_schedule {mesh.pipe_schedule} needs as many micro-batches as stages, and {count} are "
            f"fewer than {mesh.pipe}; raise --micro-batches"
        )


def micro_batches(config: "TrainConfig", num_replicas: int) -> int:
    """Return how many micro-batches a pass is cut into.

    Example: 4 stages and 6 sequences for each replica give 6, one for each sequence.
    """
    mesh = config.mesh
    if not isinstance(mesh.micro_batches, str):
        return mesh.micro_batches
    least = max(config.run.batch_size // num_replicas, 1)
    count = min(_PER_STAGE * mesh.pipe, least)
    if mesh.pipe_schedule != "message-driven":
        while least % count:
            count -= 1
    return count
