"""A training step: a model with its optimizer, in one of two phases.

dense   fp32 weights, torch's AdamW, autocast for 16-bit dtypes
samo    compressed state, weights in the compute dtype; on several ranks replicas (DDP) or shards
        (FSDP2)
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from samo.core.adamw import AdamW
from samo.core.compress import compress_, masks as masks_of
from samo.core.modules import CompressedModule, named_weights
from samo.core.param_groups import param_groups
from samo.core.rank_checks import compare_masks
from samo.core.shards import sharded_like
from samo.core.weight import weight_of
from samo.data.batches import IGNORE, Batch
from samo.kernels.operators import launch_statically
from samo.mask.masks import Masks
from samo.memory.ledger import Ledger, ledger
from samo.pipeline.pipeline import Pipeline
from samo.train.events import Accounted, Phase, Scheduled
from samo.train.finetune_config import Config
from samo.train.rank_group import RankGroup
from samo.train.rules import MOVING

BACKEND = "inductor"
"""Backend of torch.compile; tests use a faster one that computes as eager mode does."""

_BLOCK: Final = re.compile(r"blocks\.\d+")


def gpt_loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of the losses of a batch, which is on the device of the model."""
    loss: Tensor = model(batch.inputs_BT, batch.targets_BT, reduction="sum")
    return loss


def gpt_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a GPT, or of a stage of one."""
    return [module for path, module in model.named_modules() if _BLOCK.fullmatch(path)]


def compression(config: Config, ranks: RankGroup) -> dict[str, Any]:
    """Return the dtypes of a compressed model, as options of `samo.compress_`."""
    dtype: torch.dtype = getattr(torch, config.run.dtype)
    is_bf16 = dtype == torch.bfloat16
    # Between ranks torch needs gradients of the dtype of the values.
    has_bf16_gradients = is_bf16 and not config.run.fp32_gradients and ranks.size == 1
    return {
        "dtype": dtype,
        "grad_dtype": torch.bfloat16 if has_bf16_gradients else None,
        "value_dtype": torch.bfloat16 if is_bf16 and config.optim.state == "lean" else None,
    }


class Learner:
    """A model and its optimizer; files and schedules are the trainer's.

    On many ranks each trains on its part of a batch, and all take the same step: replicas with DDP,
    shards of a pruned model with FSDP2, stages with a `StagedLearner`.

    A compressed model, with the dtypes of `compression`, starts pruned. ``loss_sum`` and ``blocks``
    say how to read a batch with it, and what to compile and to shard one by one.
    """

    will_compile: bool  # in the next step
    _caches_casts = True
    # That a rank evaluates: its part of the last batch may have none, and all gather weights.
    _least_rows = 1
    _rates: list[float]  # factors of the learning rate, for each parameter group
    _ddp: DistributedDataParallel | None

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        *,
        ranks: RankGroup | None = None,
        loss_sum: Callable[[nn.Module, Batch], Tensor] = gpt_loss_sum,
        blocks: Callable[[nn.Module], list[nn.Module]] = gpt_blocks,
    ) -> None:
        self.model = model
        self.ranks = ranks or RankGroup()
        self.phase: Phase = "dense"
        self.masks: Masks | None = None
        self._loss_sum_of = loss_sum
        self._blocks = blocks
        self.names = [name for name, _ in model.named_parameters()]  # of all ranks
        shapes = [(weight_of(param) or param).shape for param in model.parameters()]
        self.num_params = sum(shape.numel() for shape in shapes)
        self.dtype: torch.dtype = getattr(torch, config.run.dtype)
        self.weights = config.run.weights
        self.skipped_before = 0  # steps that this optimizer has not counted
        self._optim = config.optim
        self._entry_steps = config.prune.method in MOVING  # counts updates of each regrown weight
        self._is_sharded = config.mesh.shard == "weights" and self.ranks.data is not None
        self._compression = compression(config, self.ranks)
        is_bf16 = self.dtype == torch.bfloat16 and not config.run.fp32_gradients
        self._reduces_bf16 = is_bf16 and self.ranks.num_stages == 1
        self._reduced_bytes = 0
        self._is_compiled = config.run.compile
        if self._is_compiled:  # larger units would delay the reduction of gradients between ranks
            if BACKEND == "inductor":
                launch_statically()
            for block in blocks(model):
                block.compile(fullgraph=True, backend=BACKEND)
        self.opt: torch.optim.Optimizer
        self.device = next(model.parameters()).device
        if isinstance(model, CompressedModule):
            self._start_pruned(masks_of(model))
        else:
            self.opt = torch.optim.AdamW(
                self._groups(), betas=self._optim.betas, eps=self._optim.eps, fused=True
            )
        self.scaler: torch.amp.GradScaler | None = None
        if self.dtype == torch.float16:
            self.scaler = torch.amp.GradScaler(self.device.type)
        self._prepare(is_first=True)

    @property
    def whole(self) -> nn.Module | Pipeline:
        """The model, or the pipeline whose stage it is: what a checkpoint holds."""
        return self.model

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because a gradient was not finite; synchronizes with the device."""
        return self.skipped_before + (self.opt.skipped_steps if isinstance(self.opt, AdamW) else 0)

    # A step

    def backward(self, batches: Iterable[Batch]) -> Tensor:
        """Accumulate the gradients of batches and return the loss, both per real token.

        All tokens of a step have the same weight, however they are divided into batches.
        """
        self.opt.zero_grad()
        batches = list(batches)
        num_tokens = sum(batch.num_tokens for batch in batches)
        losses = []
        with self.in_eager() if self._has_watchers() else contextlib.nullcontext():
            for number, batch in enumerate(batches, start=1):
                is_last = number == len(batches)
                losses.append(self._forward_backward(batch, num_tokens, is_last=is_last))
        self.will_compile = False
        return torch.stack(losses).sum()

    def _forward_backward(self, batch: Batch, num_tokens: int, *, is_last: bool) -> Tensor:
        """Run one batch, and return its part of the loss; the last one reduces the gradients."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last)
        with self._ddp.no_sync() if self._ddp and not is_last else contextlib.nullcontext():
            loss = self._loss_sum(batch, self._ddp or self.model) / num_tokens
            # The loss is divided by the tokens of all replicas, and torch averages their gradients.
            whole = loss if self.ranks.data is None else loss * self.ranks.num_replicas
            (whole if self.scaler is None else self.scaler.scale(whole)).backward()
        return loss.detach()

    def step(self, lr: float) -> Tensor:
        """Clip the gradient, update the weights, and return the norm before clipping.

        A step with a gradient that is not finite is skipped. Gradients stay until the next pass, so
        that their bytes can be measured.
        """
        for group, rate in zip(self.opt.param_groups, self._rates):
            group["lr"] = lr * rate
        if self.ranks.num_replicas > 1:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            self._reduced_bytes += sum(
                grad.numel() * (2 if self._reduces_bf16 else grad.itemsize) for grad in gradients
            )
        if self.scaler is not None:
            self.scaler.unscale_(self.opt)
        norm = self._clip_grad_norm_(self._optim.clip or float("inf"))
        if self.scaler is not None:
            before = self.scaler.get_scale()
            self.scaler.step(self.opt)
            self.scaler.update()
            self.skipped_before += self.scaler.get_scale() < before
        elif self.phase == "samo" or norm.isfinite():  # samo.AdamW checks gradients itself
            self.opt.step()
        else:
            self.skipped_before += 1
        return norm

    def _clip_grad_norm_(self, max_norm: float) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def whole_loss(self, loss: Tensor) -> float:
        """Return the loss over all replicas; `backward` returns this rank's part."""
        return float(self.ranks.all_reduce_(loss.double(), "the loss"))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the loss per real token of batches."""
        self.model.eval()
        total, num_tokens = 0.0, 0
        with self.in_eager():
            for batch in batches:
                num_tokens += batch.num_tokens
                total += float(self._loss_sum(padded(batch, self._least_rows), self.model))
        self.model.train()
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # or its parameters stay gathered until the next backward
        whole = torch.tensor(total, dtype=torch.float64, device=self.device)
        return float(self.ranks.all_reduce_(whole, "the validation loss")) / num_tokens

    def _loss_sum(self, batch: Batch, model: nn.Module) -> Tensor:
        with self._autocast():
            return self._loss_sum_of(model, batch.to(self.device))

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.phase == "samo" or self.dtype == torch.float32:
            return contextlib.nullcontext()
        caches = self._caches_casts
        return torch.autocast(self.device.type, dtype=self.dtype, cache_enabled=caches)

    def in_eager(self) -> contextlib.AbstractContextManager[object]:
        """Run without compiled code, for shapes that are too rare to compile for."""
        if not self._is_compiled:
            return contextlib.nullcontext()
        return torch.compiler.set_stance("force_eager")

    def _has_watchers(self) -> bool:
        """Return whether dense gradients are watched, which compiled code does not expose."""
        if not self._is_compiled or self.phase == "dense":
            return False
        return any(weight.layout.watchers for _, weight in named_weights(self.model))

    # Masks

    def own_masks(self, masks: Masks) -> Masks:
        """Return the masks of this rank's part of the model."""
        return masks

    def prune(self, masks: Masks) -> None:
        """End the dense phase: compress the model, and carry over the moments."""
        self.opt.zero_grad()
        self._ddp = None
        self._start_pruned(masks, self.opt)
        self._prepare()

    def _start_pruned(self, masks: Masks, dense: torch.optim.Optimizer | None = None) -> None:
        """Make the optimizer of a compressed model; compress it first if it was dense."""
        if self.ranks.data is not None:
            compare_masks(masks, self.ranks.data)
        self.masks = masks
        self.phase = "samo"
        if dense is not None:
            compress_(self.model, masks, weights=self.weights, **self._compression)
        opt = self._new_adamw()
        if dense is not None:
            opt.carry_over(dense)
        self.opt = self._shard(opt) if self._is_sharded else opt

    def remapped(self, masks: Masks) -> None:
        """Update parameter groups and replicas after the masks have changed, on all ranks."""
        before, self.masks = self.masks, masks
        assert before is not None
        if all(mask.kept == before[name].kept for name, mask in masks.items()):
            return
        groups = self._groups()  # learning rates follow the density
        self.opt.param_groups.clear()
        for group in groups:
            self.opt.add_param_group(group)
        self._prepare()

    def _groups(self) -> list[dict[str, Any]]:
        """Return parameter groups whose rates are factors of the learning rate of a step."""
        return param_groups(
            self.model,
            lr=1.0,
            weight_decay=self._optim.weight_decay,
            density_power=self._optim.density_power,
        )

    def _new_adamw(self) -> AdamW:
        return AdamW(
            self._groups(),
            betas=self._optim.betas,
            eps=self._optim.eps,
            state=self._optim.state,
            entry_steps=self._entry_steps,
        )

    def _shard(self, whole: AdamW) -> AdamW:
        """Shard the model with FSDP2; return an optimizer with this rank's shard of the state."""
        assert self.ranks.data is not None
        states = {name: whole.state[param] for name, param in self.model.named_parameters()}
        mesh = DeviceMesh.from_group(self.ranks.data, self.device.type, mesh_dim_names=("data",))
        policy = MixedPrecisionPolicy()
        if self.dtype.itemsize == 2:
            sent = torch.bfloat16 if self._reduces_bf16 else torch.float32
            policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=sent)
        for part in [*self._blocks(self.model), self.model]:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        opt = self._new_adamw()
        for name, param in self.model.named_parameters():
            opt.state[param] = {
                key: sharded_like(value, param) if value.shape == param.shape else value
                for key, value in states[name].items()
            }
        return opt

    def _prepare(self, *, is_first: bool = False) -> None:
        """Get ready to train the parameters as they are now: wrap the model for replicas."""
        self._rates = [group["lr"] for group in self.opt.param_groups]
        self.will_compile = self._is_compiled
        self._ddp = None  # it holds the old parameters
        is_wrapped = isinstance(self.model, FSDPModule) or self.ranks.num_stages > 1
        if self.ranks.data is None or is_wrapped:
            return
        self._ddp = DistributedDataParallel(
            self.model,
            process_group=self.ranks.data,
            gradient_as_bucket_view=True,
            init_sync=is_first,
        )
        if self._reduces_bf16:
            self._ddp.register_comm_hook(
                self.ranks.data,
                # torch refuses this hook by its name without NCCL.
                lambda group, bucket: bf16_compress_hook(group, bucket),
            )

    # What the trainer records

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent, as fields of `samo.train.events.Exchanged`."""
        return {"gradient_bytes": self._reduced_bytes, "activation_bytes": 0}

    def timeline(self, step: int) -> Scheduled | None:
        """Return when each stage computed what in the last batch, if there are several."""
        return None

    def ledger(self) -> Ledger | None:
        """Return the ledger of compressed state, or None if the state is dense."""
        return ledger(self.model, self.opt) if self.phase == "samo" else None

    def accounted(self, step: int) -> Accounted:
        """Return the bytes of state of a replica with all its stages; a collective of all ranks."""
        ranks = self.ranks.all_gather("the size of the model state", self._state_bytes())
        stages = ranks[:: self.ranks.num_replicas]
        measured = _sum(stage["measured"] for stage in stages)
        predicted = _sum(stage["predicted"] for stage in stages)
        return Accounted(
            step=step,
            **_sum(stage["totals"] for stage in stages),
            paper_bytes=sum(stage["paper"] for stage in stages) if self.phase == "samo" else None,
            measured_bytes=sum(measured.values()),
            predicted_bytes=sum(predicted.values()),
            measured=measured,
            predicted=predicted,
            weights=self.weights if self.phase == "samo" else None,
            rank_bytes=[sum(rank["measured"].values()) for rank in ranks],
        )

    def _state_bytes(self) -> dict[str, Any]:
        """Return the bytes of this rank's model state."""
        if (held := self.ledger()) is not None:
            shares = (held.pruned, held.unpruned)
            return {
                "totals": {"num_params": held.num_params, "dense_bytes": held.dense_bytes},
                "paper": held.paper_bytes,
                "measured": _sum(share.measured for share in shares),
                "predicted": _sum(share.predicted for share in shares),
            }
        params = list(self.model.parameters())
        count = sum(param.numel() for param in params)
        states = [value for state in self.opt.state.values() for value in state.values()]
        return {
            "totals": {"num_params": count, "dense_bytes": 16 * count},  # fp32 in any dtype
            "measured": {
                "dense": sum(param.nbytes for param in params),
                "gradients": sum(param.grad.nbytes for param in params if param.grad is not None),
                "moments": sum(v.nbytes for v in states if isinstance(v, Tensor) and v.dim() > 0),
            },
            "predicted": {"dense": 4 * count, "gradients": 4 * count, "moments": 8 * count},
        }

    def close(self) -> None:
        """Close the connections between stages."""


def _sum(parts: Iterable[Mapping[Any, int]]) -> dict[str, int]:
    """Add up numbers by name."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def padded(batch: Batch, least: int) -> Batch:
    """Return a batch of ``least`` sequences or more: those it lacks add nothing to the loss."""
    missing = max(least - len(batch.inputs_BT), 0)
    rows = (0, 0, 0, missing)
    places_BT = batch.positions_BT
    return batch._replace(
        inputs_BT=F.pad(batch.inputs_BT, rows),
        targets_BT=F.pad(batch.targets_BT, rows, value=IGNORE),
        positions_BT=None if places_BT is None else F.pad(places_BT, rows),
    )
