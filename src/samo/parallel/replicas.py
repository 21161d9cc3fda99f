"""Train a compressed model on many ranks: `replicate`, `no_sync` and `traffic`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from samo.errors import CompressionError
from samo.owners import owned_weights
from samo.parallel.agreement import broadcast_values, check_same
from samo.parallel.collectives import Group
from samo.parallel.members import Member, released
from samo.parallel.team import ReplicaTeam, Settings
from samo.parallel.traffic import Traffic
from samo.weights import Weight

__all__ = ["Replicas", "no_sync", "replicate", "traffic"]

_WIRE_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def replicate(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    shard: Literal["state"] | None = None,
    wire_dtype: torch.dtype | None = None,
    bucket_bytes: float = 5e6,
    average: bool = True,
    overlap: bool = True,
    timeout_s: float = 600.0,
    heartbeat_s: float = 1.0,
) -> "Replicas":
    """Train a compressed model together with its copies on the other ranks of an axis.

    Only kept entries are sent. Gradients are reduced while backward runs, in buckets whose memory is that
    of the gradients themselves, and are complete when ``backward()`` returns. All ranks start with the
    weights and buffers of the axis' first rank.

    With ``shard="state"`` each rank holds optimizer state for its own part of the kept entries alone:
    gradients are summed where they are needed, and new values sent to all after a step. Build the
    optimizer afterwards, one that updates each entry by itself (Adam, SGD and most others), and clip with
    `samo.clip_grad_norm_`.

    Example:
        >>> import torch, samo
        >>> mesh = samo.mesh()                                   # started by torchrun, or one rank
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> model = samo.compress_(model, samo.prune(model, 0.5))
        >>> replicas = samo.replicate(model, mesh["data"], shard="state")
        >>> opt = samo.AdamW(samo.parameters(model), lr=1e-3)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> opt.step()
        >>> torch.distributed.destroy_process_group()

    Args:
        model: A compressed model, with the same masks on all ranks.
        mesh: One axis of a mesh, as ``mesh["data"]``.
        shard: None for all optimizer state on every rank, ``"state"`` for a part on each.
        wire_dtype: Type in which gradients are sent and summed; by default that in which they are held.
        bucket_bytes: Size of a bucket; smaller ones start earlier, larger ones are fewer. At 90 %
            sparsity 5 MB are the gradients of 25 M parameters.
        average: Whether gradients are divided by the number of ranks. False for a loss that each rank has
            divided by the number of tokens of *all* ranks.
        overlap: Whether reductions start during backward.
        timeout_s: Seconds after which a rank that waits for the others gives up.
        heartbeat_s: Seconds between a rank's signs of life, by which the others know who stopped.

    Returns:
        What compares masks, lays out buckets anew and counts bytes.

    Raises:
        TypeError: ``mesh`` is not a mesh.
        ValueError: A setting is out of range, or the mesh has more than one axis.
        CompressionError: The model is not compressed or replicated already, or ranks differ.
        MaskError: Masks differ between ranks; the message names the rank and the tensor.
        PeerError: A rank did not come.
    """
    _check(mesh, shard, wire_dtype, bucket_bytes, timeout_s, heartbeat_s)
    weights = _weights(model)
    for name, weight in weights.items():
        if weight.replica is not None and not _is_released(weight):
            raise CompressionError(
                f"the model is replicated already (its parameter '{name}' is); call rebuild() of what "
                "samo.replicate returned, or release() before you replicate it otherwise"
            )
        weight.check()
        weight.reclaim()
    group = Group(mesh.get_group(), timeout_s=timeout_s, heartbeat_s=heartbeat_s)
    settings = Settings(shard, wire_dtype, bucket_bytes, average, overlap)
    replicas = Replicas(model, ReplicaTeam(group, settings))
    replicas.check_masks()
    broadcast_values(group, model, weights)
    replicas.team.lay_out(weights)
    group.meter.restart_clock()
    return replicas


class Replicas:
    """The copies of a model on the ranks of an axis; `samo.replicate` makes it.

    Example:
        >>> import torch, samo
        >>> mesh = samo.mesh()
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> model = samo.compress_(model, samo.prune(model, 0.5))
        >>> replicas = samo.replicate(model, mesh["data"])
        >>> replicas.check_masks()
        >>> replicas
        Replicas(Sequential, copy 1 of 1, shard=None, 1 bucket)
        >>> torch.distributed.destroy_process_group()

    Args:
        model: The model.
        team: This rank's side of the group.
    """

    def __init__(self, model: nn.Module, team: ReplicaTeam) -> None:
        self.model: Final = model
        self.team: Final = team

    def __repr__(self) -> str:
        group, shard = self.team.group, self.team.settings.shard
        buckets = len(self.team.buckets)
        return (
            f"Replicas({type(self.model).__name__}, copy {group.rank + 1} of {group.size}, shard={shard!r}, "
            f"{buckets} bucket{'' if buckets == 1 else 's'})"
        )

    def check_masks(self) -> None:
        """Compare masks, types and settings over the ranks.

        Example:
            >>> import torch, samo
            >>> mesh = samo.mesh()
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> model = samo.compress_(model, samo.prune(model, 0.5))
            >>> samo.replicate(model, mesh["data"]).check_masks()
            >>> torch.distributed.destroy_process_group()

        Raises:
            MaskError: A mask differs; the message names the rank and the tensor.
            CompressionError: Something else does.
        """
        check_same(self.team.group, _weights(self.model), self.team.settings._asdict())

    def rebuild(self) -> None:
        """Lay out the buckets anew, after masks have changed or parameters were frozen or unfrozen.

        Gradients are dropped. With sharded state, call `release` before the change, and build a new
        optimizer afterwards.

        Example:
            >>> import torch, samo
            >>> mesh = samo.mesh()
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> model = samo.compress_(model, samo.prune(model, 0.5))
            >>> replicas = samo.replicate(model, mesh["data"])
            >>> model[0].requires_grad_(False)
            Linear(in_features=8, out_features=8, bias=True)
            >>> replicas.rebuild()
            >>> torch.distributed.destroy_process_group()

        Raises:
            MaskError: Masks differ between ranks.
            CompressionError: State is sharded, and was not released.
        """
        weights = _weights(self.model)
        for name, weight in weights.items():
            if weight.part is not weight:
                raise CompressionError(
                    f"the state of '{name}' is sharded over ranks by its old mask; call release() before "
                    "masks change, and rebuild() afterwards"
                )
        self.check_masks()
        self.team.lay_out(weights)

    def release(self, *, is_final: bool = False) -> None:
        """Bring remainders back to all ranks; there is no backward pass until `rebuild`.

        What an optimizer holds for a rank's parts (moments) stays with those parts.

        Args:
            is_final: Whether each rank goes on alone, with gradients that nobody reduces.

        Example:
            >>> import torch, samo
            >>> mesh = samo.mesh()
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> model = samo.compress_(model, samo.prune(model, 0.5))
            >>> replicas = samo.replicate(model, mesh["data"], shard="state")
            >>> replicas.release()
            >>> replicas.rebuild()
            >>> torch.distributed.destroy_process_group()
        """
        for bucket in self.team.buckets:
            if bucket.is_sharded:
                bucket.gather_rests()
        self.team.forget()
        for weight in _weights(self.model).values():
            weight.leaf.grad = None
            weight.replica = None if is_final else released(self.team, weight)

    def accept_gradients(self) -> None:
        """Take gradients that were changed since backward as they are, where state is sharded.

        Without this a step refuses them: most likely torch's own clipping changed them, by the norm of
        this rank's part instead of the whole.

        Example:
            >>> import torch, samo
            >>> mesh = samo.mesh()
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> model = samo.compress_(model, samo.prune(model, 0.5))
            >>> samo.replicate(model, mesh["data"]).accept_gradients()
            >>> torch.distributed.destroy_process_group()
        """
        for bucket in self.team.buckets:
            bucket.accept()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep the gradients of backward passes in this block on their rank, to accumulate micro-batches.

    What counts is where ``backward()`` is called. Leave the last micro-batch out of the block: its
    backward pass reduces the sum of all.

    Example:
        >>> import torch, samo
        >>> mesh = samo.mesh()
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> model = samo.compress_(model, samo.prune(model, 0.5))
        >>> replicas = samo.replicate(model, mesh["data"])
        >>> with samo.no_sync(model):
        ...     model(torch.ones(1, 8)).sum().backward()
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> samo.traffic(model).reductions
        1
        >>> torch.distributed.destroy_process_group()

    Raises:
        CompressionError: The model is not replicated.
    """
    team = _team(model)
    before, team.is_syncing = team.is_syncing, False
    try:
        yield
    finally:
        team.is_syncing = before


def traffic(model: nn.Module) -> Traffic:
    """Return what this rank has sent for a replicated model so far, by purpose, and how long it took.

    Example:
        >>> import torch, samo
        >>> mesh = samo.mesh()
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> model = samo.compress_(model, samo.prune(model, 0.5))
        >>> replicas = samo.replicate(model, mesh["data"])
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> found = samo.traffic(model)
        >>> found.gradients.argument_bytes, found.gradients.sent_bytes     # one rank sends nothing
        (160, 0)
        >>> torch.distributed.destroy_process_group()

    Raises:
        CompressionError: The model is not replicated.
    """
    return _team(model).group.meter.read()


def team_of(model: nn.Module) -> ReplicaTeam | None:
    """Return this rank's side of the group that a model is replicated over, if it is."""
    for weight in owned_weights(model).values():
        team = None if weight.replica is None else weight.replica.team
        if isinstance(team, ReplicaTeam) and not _is_released(weight):
            return team
    return None


def _team(model: nn.Module) -> ReplicaTeam:
    team = team_of(model)
    if team is None:
        raise CompressionError(
            "the model is not replicated; call samo.replicate(model, mesh['data']) first"
        )
    return team


def _is_released(weight: Weight) -> bool:
    return isinstance(weight.replica, Member) and weight.replica.is_released


def _weights(model: nn.Module) -> dict[str, Weight]:
    weights = owned_weights(model)
    if not weights:
        raise CompressionError(
            "the model is not compressed; call samo.compress_(model, masks) first"
        )
    return weights


def _check(
    mesh: object,
    shard: str | None,
    wire_dtype: torch.dtype | None,
    bucket_bytes: float,
    timeout_s: float,
    heartbeat_s: float,
) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be one axis of a DeviceMesh, got {type(mesh).__name__}; build one with "
            "samo.mesh() and pass mesh['data']"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one axis, got {mesh.mesh_dim_names}; pass one of them, as mesh['data']"
        )
    if shard not in (None, "state"):
        raise ValueError(f"shard must be None or 'state', got {shard!r}")
    if wire_dtype is not None and wire_dtype not in _WIRE_DTYPES:
        raise ValueError(f"wire_dtype must be None or one of {_WIRE_DTYPES}, got {wire_dtype}")
    for name, value in (
        ("bucket_bytes", bucket_bytes),
        ("timeout_s", timeout_s),
        ("heartbeat_s", heartbeat_s),
    ):
        if not value > 0:
            raise ValueError(f"{name} must be over 0, got {value}")
