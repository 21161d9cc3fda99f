"""`samo.Pipeline`: a model cut into stages, one for each rank of the axis `pipe`."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _sync_module_states

from samo.errors import PeerError
from samo.mask.masks import Masks
from samo.pipeline.checking import check_even, check_replicas, check_settings, check_ties
from samo.pipeline.engine import in_flight_limits
from samo.pipeline.filling import Source, build_stage
from samo.pipeline.gradients import average, partial_norm, spoil_together
from samo.pipeline.layers import LayersLike, take_apart
from samo.pipeline.microbatch import Count, Reduction, Tensors, cut, nothing, weights as weigh
from samo.pipeline.runner import Batch, Runner
from samo.pipeline.setup import (
    chunks_of,
    connected,
    cuts_of,
    data_groups,
    device_of,
    pipe_group,
    transport_of,
)
from samo.pipeline.tied import Tie, ties_of
from samo.pipeline.timeline import Timeline
from samo.pipeline.torch_schedules import TorchRunner
from samo.pipeline.transport.gloo import GlooTransport

__all__ = ["Pipeline"]

_BROADCAST_BYTES: Final = 250 * 2**20  # DistributedDataParallel's


class Pipeline:
    """Trains a model whose layers lie on several ranks; every rank runs the same program.

    `step` computes forward and backward of all micro-batches and adds up gradients; the optimizer is
    the caller's, on the parameters of ``pipeline.module``, which holds this rank's layers under the
    names they have in the whole model, compressed or not. Losses, gradients and updates are those of one
    process that computes the same micro-batches one after the other, bit for bit on a CPU.

    A mesh may have a dimension "data" beside "pipe": then each stage has replicas, which start with the
    values of the first, compute batches of their own, and share the mean of their gradients.

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
        layers: ``nn.Sequential``, a list of layers or of functions that make one, samo's GPT, or
            Hugging Face's GPT-2 or Llama. Functions, and layers on the meta device, take no memory but
            for those of the rank's own stage.
        loss_fn: Called with the output and the target of a micro-batch; returns a scalar.
        mesh: A device mesh with a dimension called "pipe", and "data" where stages have replicas; None
            for one stage in this process.
        micro_batches: Number of micro-batches a batch is cut into.
        schedule: "message-driven", or "1f1b", "gpipe" and "interleaved" as torch runs them.
        in_flight: Micro-batches a stage may hold, one number or one for each stage; the number of
            stages by default. Only for "message-driven".
        stages_per_rank: Pieces of the model on each rank, for "interleaved".
        cuts: First layer and the one after the last of each stage, as `partition` returns them; by
            default even in the number of weights.
        device: Where the stage computes; the mesh's device by default.
        weights: Values by name, or safetensors: a file, or a folder of files. Each rank reads its own.
        seed: For layers that have no values yet.
        tied: Groups of parameter names that are one weight, where the model does not show it.
        loss_reduction: Whether ``loss_fn`` is a mean, as usual, or a sum over what it is given.
        count: How many terms a mean loss has for a target; entries other than -100 by default.
        timeout_s: Seconds of silence after which another rank is given up. Longer than anything a rank
            does between two batches.

    Raises:
        ValueError: A setting is out of range, or layers cannot be cut so.
        TypeError: The layers are none of the above.
    """

    def __init__(
        self,
        layers: LayersLike,
        loss_fn: Callable[[Any, Any], Tensor],
        mesh: DeviceMesh | None,
        micro_batches: int,
        *,
        schedule: Literal["message-driven", "1f1b", "gpipe", "interleaved"] = "message-driven",
        in_flight: int | Sequence[int] | None = None,
        stages_per_rank: int | None = None,
        cuts: Sequence[tuple[int, int]] | None = None,
        device: torch.device | str | None = None,
        weights: Source | None = None,
        seed: int = 0,
        tied: Sequence[tuple[str, ...]] = (),
        loss_reduction: Reduction = "mean",
        count: Count | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        group = pipe_group(mesh)
        num_ranks = 1 if group is None else group.size()
        self.stage: Final = 0 if group is None else dist.get_rank(group)
        check_settings(
            schedule, micro_batches, in_flight, stages_per_rank, loss_reduction, timeout_s
        )
        per_rank = (stages_per_rank or 2) if schedule == "interleaved" else 1
        self.num_stages: Final = num_ranks * per_rank
        self.micro_batches: Final = micro_batches
        self.schedule: Final = schedule
        self.in_flight: Final = in_flight_limits(in_flight, num_ranks)
        self.device: Final = device_of(device, mesh)
        self.mesh: Final = mesh
        row = take_apart(layers, tied)
        self.names: Final = tuple(name for unit in row.units for name in unit.tensor_names())
        self.tied: Final = row.tied
        self.cuts: Final = cuts_of(cuts, row, self.num_stages)
        mine = list(range(self.stage, self.num_stages, num_ranks))
        self.module: Final = build_stage(
            row, [self.cuts[i] for i in mine], device=self.device, seed=seed, weights=weights
        )
        self._loss_fn = loss_fn
        self._reduction: Final[Reduction] = loss_reduction
        self._count = count
        self._replicas: Final = data_groups(mesh, timeout_s)
        self._is_first: Final = self.stage == 0
        self._is_last: Final = self.stage == num_ranks - 1
        self._transport: Final = transport_of(group, self.device, timeout_s)
        # None for one stage in this process.
        self._links = self._transport if isinstance(self._transport, GlooTransport) else None
        self._ties: Final = connected(ties_of(row, self.cuts, num_ranks), group, timeout_s)
        # Also where a program ends without a word, and before torch's own end.
        self._finalizer: Final = weakref.finalize(self, self._transport.close)
        self._has_more = False
        self._aside: list[Tensor | None] = []
        self._versions: list[int] = []
        self._runner: Runner | TorchRunner
        if schedule == "message-driven" or group is None:
            self._runner = Runner(
                self.module,
                self._transport,
                in_flight=self.in_flight[self.stage],
                timeout_s=timeout_s,
            )
        else:
            chunks = chunks_of(self.module, [self.cuts[i] for i in mine])
            self._runner = TorchRunner(
                schedule,
                list(zip(mine, chunks)),
                self.num_stages,
                group,
                self.device,
                micro_batches,
            )
        if self._replicas is not None:
            _sync_module_states(self.module, self._replicas[0], _BROADCAST_BYTES, 0, ())
        for tie in self._own_ties():
            tie.copy_weight(self.module)

    def step(
        self,
        x: Tensors | None = None,
        *,
        target: Tensors | None = None,
        is_last: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Compute forward and backward of a batch, add up gradients, and return the loss.

        Every rank calls it; only the first stage reads ``x``, only the last one ``target``. Every stage gets
        the loss of the whole batch; a replica that of its own part. Pass ``is_last=False`` for a batch that
        others of the same optimizer step follow. After the last one, gradients are averaged over replicas,
        those of tied weights are summed over stages, and if a gradient is not finite on any stage, all
        stages get a NaN in theirs: `samo.AdamW` and GradScaler skip the same steps everywhere. Gradients
        that are cleared between two batches are gone, those of tied weights too.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
            >>> pipeline = samo.Pipeline(model, torch.nn.functional.cross_entropy, None, 2)
            >>> opt = torch.optim.AdamW(pipeline.module.parameters())
            >>> scaler = torch.amp.GradScaler("cpu")  # for float16; each rank has one of its own
            >>> x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))
            >>> loss = pipeline.step(x, target=y, scaler=scaler)
            >>> scaler.step(opt)
            >>> scaler.update()
            >>> loss.shape, scaler.get_scale()
            (torch.Size([]), 65536.0)

        Args:
            x: Inputs, a tensor or a tuple of them.
            target: What ``loss_fn`` compares the output with.
            is_last: Whether an optimizer step follows.
            scaler: Scales the loss before it goes backward, and not the one that is returned. The scalers
                of all ranks have one scale at all times, since they find the same gradients finite.

        Raises:
            PeerError: Another rank died, hung, failed or sent nonsense.
            MaskError: Replicas, or the stages of a tied weight, have different masks.
        """
        self._check_open()
        if scaler is not None:
            scaler.scale(torch.zeros((), device=self.device))  # makes the scale, on all stages
        ties = self._own_ties()
        if self._has_more:
            left = zip(ties, self._aside, self._versions)
            self._aside = [tie.resume(self.module, old, version) for tie, old, version in left]
        else:
            self._aside = [tie.set_aside(self.module) for tie in ties]
        self._has_more = not is_last
        loss = self._run(x, target, is_training=True, scaler=scaler)
        if is_last:
            self._runner.run_collective(self._share_gradients)
        else:
            self._versions = [t.leave(self.module, old) for t, old in zip(ties, self._aside)]
        return loss

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients of all stages so that their norm is at most ``max_norm``; return the norm.

        As ``torch.nn.utils.clip_grad_norm_`` on the whole model, a tied weight counted once. Every rank
        calls it. Where the norm is not finite, gradients become NaN on all stages.

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
            max_norm: The norm is at most this afterwards.
            norm_type: 2, another power, or ``math.inf`` for the largest magnitude.
            error_if_nonfinite: Whether a norm that is not finite is an error.

        Raises:
            ValueError: ``norm_type`` is not over 0.
            RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
            PeerError: Another rank did not come.
        """
        self._check_open()
        if not norm_type > 0:
            raise ValueError(f"norm_type must be over 0, got {norm_type}")
        params = dict(self.module.named_parameters())
        elsewhere = {n for tie in self._own_ties() if tie.ranks[0] != self.stage for n in tie.names}
        held = [p.grad for n, p in params.items() if p.grad is not None and n not in elsewhere]
        total = partial_norm(held, norm_type, self.device)
        is_largest = norm_type == math.inf
        if self._links is not None:
            group, op = self._links.group, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
            self._runner.run_collective(lambda: dist.all_reduce(total, op, group=group))
        norm = total if is_largest else total.pow(1.0 / norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the norm of the gradients is {float(norm)}, so they cannot be clipped; pass "
                "error_if_nonfinite=False to let the optimizer skip the step"
            )
        # A factor of 0, as torch has it for an infinite norm, would let other stages step.
        used = torch.where(norm.isfinite(), norm, math.nan)
        nn.utils.clip_grads_with_norm_(params.values(), max_norm, used)
        is_wide = any(param.dtype == torch.float64 for param in params.values())
        return norm if is_wide else norm.float()

    def eval(self, x: Tensors | None = None, *, target: Tensors | None = None) -> Tensor:
        """Return the loss of a batch without gradients; call ``pipeline.module.eval()`` for dropout.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1))
            >>> pipeline = samo.Pipeline(model, torch.nn.functional.mse_loss, None, 2)
            >>> pipeline.eval(torch.zeros(2, 4), target=torch.zeros(2, 1)).requires_grad
            False
        """
        return self._run(x, target, is_training=False)

    def timeline(self) -> Timeline:
        """Return when each stage computed what in the last batch; every rank calls it.

        Clocks are those of the ranks, so all of them must be on one machine. Only for "message-driven".

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1))
            >>> pipeline = samo.Pipeline(model, torch.nn.functional.mse_loss, None, 2)
            >>> loss = pipeline.step(torch.zeros(2, 4), target=torch.zeros(2, 1))
            >>> pipeline.timeline().peak_in_flight(0)
            1

        Raises:
            ValueError: The schedule is torch's, which keeps no times.
        """
        if not isinstance(self._runner, Runner):
            raise ValueError(
                f"schedule '{self.schedule}' keeps no times; use torch.profiler, or 'message-driven'"
            )
        everyones: list[Any] = [self._runner.events]
        if self._links is not None:
            everyones = [None] * self._links.num_stages
            dist.all_gather_object(everyones, self._runner.events, group=self._links.host_group)
        events = [event for events in everyones for event in events]
        return Timeline(self.num_stages, self.micro_batches, events)

    def masks(self, masks: Masks) -> Masks:
        """Return those of a whole model's masks that belong to this rank's layers, tied ones included.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
            >>> pipeline = samo.Pipeline(model, torch.nn.functional.mse_loss, None, 2)
            >>> sorted(pipeline.masks(samo.prune(model, 0.5)))
            ['0.weight', '1.weight']
        """
        found = dict(masks)
        for group in self.tied:
            for name in group:
                found |= {other: masks[name] for other in group if name in masks}
        here = dict(self.module.named_parameters())
        return Masks({name: mask for name, mask in found.items() if name in here})

    @property
    def exchanged_bytes(self) -> tuple[int, int]:
        """Bytes of tensors sent to and received from neighbours so far; 0 with torch's schedules."""
        if not isinstance(self._runner, Runner):
            return 0, 0
        return self._runner.sent_bytes, self._runner.received_bytes

    def close(self) -> None:
        """End the threads that wait for messages. The pipeline is not used again.

        It is what leaving a ``with`` block does, and the end of the program.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1))
            >>> with samo.Pipeline(model, torch.nn.functional.mse_loss, None, 2) as pipeline:
            ...     loss = pipeline.eval(torch.zeros(2, 4), target=torch.zeros(2, 1))
            >>> pipeline.close()    # a second time does nothing
        """
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(
        self,
        x: Tensors | None,
        target: Tensors | None,
        *,
        is_training: bool,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        self._check_open()
        if isinstance(self._runner, Runner):
            # Within the runner, whose other stages must hear of a batch that cannot be cut.
            return self._runner.run(lambda: self._batch(x, target, scaler, is_training))
        batch = self._batch(x, target, scaler, is_training)
        inputs = (x,) if isinstance(x, Tensor) else (x or ())
        check_even(inputs, self.micro_batches, self.schedule)
        return self._runner.run(batch, tuple(tensor.to(self.device) for tensor in inputs))

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise PeerError("the pipeline was closed, and its links with it; build a new one")

    def _batch(
        self,
        x: Tensors | None,
        target: Tensors | None,
        scaler: torch.amp.GradScaler | None,
        is_training: bool,
    ) -> Batch:
        """Cut what this stage needs of a batch."""
        inputs = loss = None
        if self._is_first:
            inputs = [
                tuple(t.to(self.device) for t in piece)
                for piece in cut(x, self.micro_batches, "x")  # type: ignore[arg-type]
            ]
        if self._is_last:
            pieces = cut(target, self.micro_batches, "target")  # type: ignore[arg-type]
            targets = [tuple(t.to(self.device) for t in piece) for piece in pieces]
            factors = weigh(targets, self._reduction, self._count)

            def loss(micro_batch: int, output: Any) -> Tensor:
                wanted, factor = targets[micro_batch], factors[micro_batch]
                if factor == 0:  # a mean over nothing, which is not a number
                    return nothing(output)
                return self._loss_fn(output, wanted[0] if len(wanted) == 1 else wanted) * factor

        scale: Callable[[Tensor], Tensor] | None = None if scaler is None else scaler.scale
        return Batch(self.micro_batches, inputs, loss, is_training, scale)

    def _own_ties(self) -> list[Tie]:
        return [tie for tie in self._ties if self.stage in tie.ranks]

    def _share_gradients(self) -> None:
        """Make gradients those of the whole batch: over replicas, then over stages."""
        if self._replicas is not None:
            group, on_host = self._replicas
            check_replicas(self.module, on_host)
            average(self.module.parameters(), group)
        if self._links is None or self._links.num_stages == 1:
            return
        if self._ties:
            check_ties(self._ties, self.module, self._links.host_group)
            for tie, old in zip(self._own_ties(), self._aside):
                tie.add_up(self.module, old)
        spoil_together(self.module.parameters(), self._links.group, self.device)
