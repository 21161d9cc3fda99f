"""`samo.Pipeline`: a model cut into stages, one for each rank of the axis `pipe`."""

import math
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _sync_module_states

from samo.core.compress import masks as masks_of
from samo.core.rank_checks import compare_masks
from samo.errors import PeerError
from samo.mask.masks import Masks
from samo.pipeline.engine import in_flight_limits
from samo.pipeline.gradients import Wait, average_gradients, partial_norm, sync_found_inf
from samo.pipeline.mask_check import MaskCheck, digest
from samo.pipeline.microbatch import Reduction, Tensors, cut, loss_weights
from samo.pipeline.peers import Peers
from samo.pipeline.runner import Batch, Runner
from samo.pipeline.split import check_cuts, take_apart
from samo.pipeline.stage import Source, build_stage
from samo.pipeline.tied import check_tied_masks, find_tied
from samo.pipeline.timeline import Event, Timeline
from samo.pipeline.transport.connect import Meeting
from samo.pipeline.transport.nccl import open_links
from samo.pipeline.transport.tcp import Transport
from samo.pipeline.units import LayersLike
from samo.utils.collectives import all_gather_json, backend_of
from samo.utils.validation import whole_number

_BROADCAST_BYTES: Final = 250 * 2**20  # DistributedDataParallel's


class Pipeline:
    """Trains a model whose layers lie on several ranks; every rank runs the same program.

    `step` computes forward and backward of all micro-batches and accumulates gradients. The
    optimizer is the caller's, over the parameters of ``pipeline.module``, which holds this rank's
    layers under the names they have in the whole model, compressed or not. Losses, gradients and
    updates are those of one process that computes the same micro-batches in sequence, bit for bit
    on a CPU; but gradients of a weight tied over ranks are added up in another order.

    If the mesh has a dimension "data" too, each stage has replicas: they start with the values of
    the first, compute batches of their own, and average their gradients.

    Example:
        >>> import torch, samo
        >>> layers = [lambda: torch.nn.Linear(8, 8), torch.nn.Tanh, lambda: torch.nn.Linear(8, 1)]
        >>> pipeline = samo.Pipeline(layers, torch.nn.functional.mse_loss, None, micro_batches=4)
        >>> opt = torch.optim.SGD(pipeline.module.parameters(), lr=0.1)
        >>> x, y = torch.randn(16, 8), torch.randn(16, 1)
        >>> first = pipeline.step(x, target=y)
        >>> opt.step()
        >>> bool(pipeline.eval(x, target=y) < first)
        True

    Args:
        layers: ``nn.Sequential``, a list of layers or of functions that build one, samo's GPT, or a
            causal language model of Hugging Face. Functions, and layers on the meta device, take
            memory only on the rank that holds them.
        loss_fn: Called with the output and the target of a micro-batch; returns a scalar.
        mesh: A device mesh with a dimension "pipe", and "data" if stages have replicas; None for
            one stage in this process.
        micro_batches: Number of micro-batches a batch is cut into.
        in_flight: Micro-batches a stage may hold, one number or one for each stage; by default the
            number of stages.
        stages_per_rank: Stages on each rank: stage 0 is on the first rank, stage 1 on the second,
            and so on in turns. More of them leave ranks idle for less time, and send more.
        cuts: First layer and the one after the last of each stage, as `partition` returns them; by
            default even in the number of weights.
        device: Where the stage computes; by default the mesh's device.
        weights: Values by name, or safetensors: a file, or a folder of files. Each rank reads its
            own.
        seed: Seed of layers that have no values yet.
        loss_reduction: Whether ``loss_fn`` returns a mean or a sum over its targets. For a mean,
            each micro-batch is weighted by its number of targets other than -100.
        wire_dtype: Send float32 activations and their gradients as this type, such as
            ``torch.bfloat16``: half the bytes, rounded; by default as they are.
        timeout_s: Seconds of silence after which another rank is given up. Must be longer than
            anything a rank does between two batches.
    """

    def __init__(
        self,
        layers: LayersLike,
        loss_fn: Callable[[Any, Any], Tensor],
        mesh: DeviceMesh | None,
        micro_batches: int,
        *,
        in_flight: int | Sequence[int] | None = None,
        stages_per_rank: int = 1,
        cuts: Sequence[tuple[int, int]] | None = None,
        device: torch.device | str | None = None,
        weights: Source | None = None,
        seed: int = 0,
        loss_reduction: Reduction = "mean",
        wire_dtype: torch.dtype | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        micro_batches = whole_number("micro_batches", micro_batches, 1)
        stages_per_rank = whole_number("stages_per_rank", stages_per_rank, 1)
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be more than 0 seconds, got {timeout_s}")
        if mesh is not None and "pipe" not in (mesh.mesh_dim_names or ()):
            raise ValueError(
                f"the mesh has dimensions {mesh.mesh_dim_names}, none of them 'pipe'; build it "
                "with init_device_mesh(device, (4,), mesh_dim_names=('pipe',))"
            )
        group, replicas = _group(mesh, "pipe"), _group(mesh, "data")
        num_ranks = 1 if group is None else group.size()
        per_rank = stages_per_rank if num_ranks > 1 else 1  # one rank need not take turns
        self.stage: Final = 0 if group is None else dist.get_rank(group)
        self.num_stages: Final = num_ranks * per_rank
        self.micro_batches: Final = micro_batches
        self.in_flight: Final = in_flight_limits(in_flight, self.num_stages)
        if device is None:
            is_cpu = mesh is None or mesh.device_type == "cpu"
            device = "cpu" if is_cpu else torch.device("cuda", torch.cuda.current_device())
        self.device: Final = torch.empty(0, device=device).device  # with its index
        self.mesh: Final = mesh
        split = take_apart(layers)
        self.tied: Final = split.tied
        self.cuts: Final = check_cuts(cuts, split, self.num_stages)
        own = slice(self.stage, None, num_ranks)
        self.module: Final = build_stage(
            split, self.cuts[own], device=self.device, seed=seed, weights=weights
        )
        self._loss_fn = loss_fn
        self._reduction: Final[Reduction] = loss_reduction
        self._is_last: Final = self.stage == num_ranks - 1
        self._group: Final = group
        self._replicas: Final = replicas
        self._replica: Final = 0 if replicas is None else dist.get_rank(replicas)
        backend = backend_of(group or replicas, self.device.type) if group or replicas else ""
        meeting: Meeting | None = None
        transport = Transport()
        if group is not None and mesh is not None:
            ranks = dist.get_process_group_ranks(group)
            everyone = mesh.mesh.flatten().tolist()
            is_ring = per_rank > 1
            meeting = Meeting(ranks, self.stage, timeout_s, is_ring=is_ring, everyone=everyone)
            transport = open_links(meeting, self.device, backend)
        self._ties: Final = find_tied(split, self.cuts, meeting, backend)
        self._own_ties: Final = [tie for tie in self._ties if self.stage in tie.ranks]
        self._tie_check: Final = MaskCheck(group) if self._ties and group is not None else None
        self._replica_check: Final = MaskCheck(replicas) if replicas else None
        # A program that ends without close() runs this before torch's own exit handlers.
        self._finalizer: Final = weakref.finalize(self, transport.close)
        self._peers: Final = Peers(transport, timeout_s, meeting)
        self._runner: Final = Runner(
            [partial(self.module, piece=piece) for piece in range(per_rank)],
            self._peers,
            self.in_flight[own],
            wire_dtype,
        )
        # With NCCL, streams wait for collectives, and not the host.
        self._wait: Final[Wait] = dist.Work.wait if backend == "nccl" else self._peers.wait
        if backend == "nccl" and group is not None:
            # Create the communicator while no kernel waits for a neighbour.
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        if replicas is not None:
            _sync_module_states(self.module, replicas, _BROADCAST_BYTES, 0, ())
        for tie in self._own_ties:
            tie.broadcast(self.module)

    def step(
        self,
        x: Tensors | None = None,
        *,
        target: Tensors | None = None,
        is_last: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Compute forward and backward of a batch, accumulate gradients, and return the loss.

        Call on every rank. Only the first stage reads ``x`` and only the last reads ``target``;
        all return the loss of the batch, a replica that of its own part. Gradients are averaged
        over replicas, and those of tied weights are summed over stages. If a gradient is not finite
        on any stage, all stages get a NaN in theirs, so that `samo.AdamW` and GradScaler skip the
        same steps everywhere.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
            >>> pipeline = samo.Pipeline(model, torch.nn.functional.cross_entropy, None, 2)
            >>> pipeline.step(torch.zeros(6, 4), target=torch.ones(6, dtype=torch.int64)).shape
            torch.Size([])

        Args:
            x: Inputs, a tensor or a tuple of tensors.
            target: What ``loss_fn`` compares the output with.
            is_last: Whether an optimizer step follows. Pass False for every batch but the last, so
                that gradients are averaged over replicas once.
            scaler: Scales the loss before backward, and not the one that is returned. Each rank has
                its own; they keep the same scale.

        Raises:
            PeerError: Another rank died, hung, failed or sent something invalid.
            MaskError: Replicas, or the stages of a tied weight, have different masks.
        """
        self._check_open()
        if scaler is not None:
            scaler.scale(torch.zeros((), device=self.device))  # creates the scale, on all stages
        for tie in self._own_ties:
            tie.before_batch(self.module)
        # One for each micro-batch of each replica.
        seed = int(torch.randint(2**47, (), device="cpu")) + self._replica * self.micro_batches
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            loss = self._runner.run(lambda: self._batch(x, target, seed=seed, scaler=scaler))
        if is_last or self._ties:
            with self._peers.collective():
                self._reduce_gradients(is_last)
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all stages by their common norm, and return the norm.

        As ``torch.nn.utils.clip_grad_norm_`` on the whole model, with a tied weight counted once.
        Call on every rank. If the norm is not finite, gradients become NaN on all stages.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
            >>> pipeline = samo.Pipeline(model, lambda y, target: y.sum(), None, 1)
            >>> loss = pipeline.step(torch.ones(1, 4), target=torch.ones(1))
            >>> pipeline.clip_grad_norm_(1.0)
            tensor(4.)
            >>> model[0].weight.grad.norm()
            tensor(1.0000)

        Args:
            max_norm: Upper bound of the norm.
            norm_type: 2, another power, or ``math.inf`` for the largest magnitude.

        Raises:
            PeerError: Another rank did not join.
        """
        self._check_open()
        if not norm_type > 0:
            raise ValueError(f"norm_type must be over 0, got {norm_type}")
        params = dict(self.module.named_parameters())
        elsewhere = {n for tie in self._own_ties if tie.ranks[0] != self.stage for n in tie.names}
        grads = [p.grad for n, p in params.items() if p.grad is not None and n not in elsewhere]
        total = partial_norm(grads, norm_type, self.device)
        is_max = norm_type == math.inf
        if self._group is not None:
            op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
            with self._peers.collective():
                self._wait(dist.all_reduce(total, op, group=self._group, async_op=True))
        norm = total if is_max else total.pow(1.0 / norm_type)
        # A factor of 0, as torch has it for an infinite norm, would let other stages step.
        used = torch.where(norm.isfinite(), norm, math.nan)
        nn.utils.clip_grads_with_norm_(params.values(), max_norm, used)
        return norm.float()

    def eval(self, x: Tensors | None = None, *, target: Tensors | None = None) -> Tensor:
        """Return the loss of a batch, without gradients. ``module.eval()`` turns off dropout."""
        self._check_open()
        return self._runner.run(lambda: self._batch(x, target))

    def timeline(self) -> Timeline:
        """Return what each stage did when in the last batch. Call on every rank of one machine."""
        events = self._runner.events
        if self._group is not None:
            gathered = all_gather_json(events, self._group)
            events = [Event(*event) for events in gathered for event in events]
        return Timeline(self.num_stages, self.micro_batches, events)

    def masks(self, masks: Masks) -> Masks:
        """Select the masks of this rank's layers, including tied weights."""
        names = {name: group for group in self.tied for name in group}
        found = {other: mask for name, mask in masks.items() for other in names.get(name, [name])}
        here = dict(self.module.named_parameters())
        return Masks({name: mask for name, mask in found.items() if name in here})

    @property
    def sent_bytes(self) -> int:
        """Bytes of tensors sent to neighbours so far."""
        return self._runner.sent_bytes

    def close(self) -> None:
        """Close the links, as leaving a ``with`` block does. The pipeline cannot be used again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise PeerError("the pipeline was closed, and its links with it; build a new one")
        if isinstance(next(self.module.parameters(), None), DTensor):
            raise TypeError(
                "the layers of a stage cannot be sharded with FSDP2; use replicas, a mesh with an "
                "axis 'data', or FSDP2 without a pipeline"
            )

    def _batch(
        self,
        x: Tensors | None,
        target: Tensors | None,
        *,
        seed: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Batch:
        """Cut what this rank needs of a batch; in the runner, which tells others of a failure.

        A batch that is trained on has a seed.
        """

        def moved(pieces: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
            return [tuple(tensor.to(self.device) for tensor in piece) for piece in pieces]

        inputs = moved(cut(x, self.micro_batches, "x")) if self.stage == 0 else None
        loss = None
        if self._is_last:
            pieces = cut(target, self.micro_batches, "target")
            weights, targets = cache(loss_weights(pieces, self._reduction)), moved(pieces)

            def loss(micro_batch: int, output: Any) -> Tensor:
                wanted, factor = targets[micro_batch], weights()[micro_batch]
                found = self._loss_fn(output, wanted[0] if len(wanted) == 1 else wanted)
                if not isinstance(found, Tensor) or found.numel() != 1:
                    what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                    raise TypeError(f"loss_fn must return a scalar tensor, got {what}")
                if factor == 0:  # a mean over no targets is NaN
                    return torch.zeros_like(found).reshape(())
                return found.reshape(()) * factor

        scale = None if scaler is None else scaler.scale
        return Batch(self.micro_batches, inputs, loss, seed is not None, scale, seed)

    def _reduce_gradients(self, is_last: bool) -> None:
        """Sum those of tied weights over stages; after the last batch, average over replicas.

        All ranks start these collectives in the same order, after their last pass.
        """
        if self._tie_check is not None:
            check_tied_masks(self._ties, self.module, self._tie_check, self._wait)
            for tie in self._own_ties:
                tie.all_reduce(self.module, self._wait)
        if not is_last:
            return
        if self._replicas is not None and self._replica_check is not None:
            masks = masks_of(self.module)  # they may have changed on any rank
            if self._replica_check.differing([digest(masks)], self._wait):
                compare_masks(masks, self._replicas)
            average_gradients(self.module.parameters(), self._replicas, self._wait)
        if self._group is not None:
            sync_found_inf(self.module.parameters(), self._group, self.device, self._wait)


def _group(mesh: DeviceMesh | None, axis: str) -> dist.ProcessGroup | None:
    """Return the group of this rank along an axis of the mesh, None if there are no others."""
    if mesh is None or axis not in (mesh.mesh_dim_names or ()) or mesh[axis].size() == 1:
        return None
    return mesh[axis].get_group()
