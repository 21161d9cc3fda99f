"""A model with its optimizer, in one of two phases.

dense   fp32 weights, torch's AdamW, autocast for 16-bit types
samo    compressed state, weights in the type of the computation; on several ranks replicas, or shares of
        one model (FSDP2)
"""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from samo.checkpoint.tensors import shard_like
from samo.core.compress import compress_
from samo.core.groups import param_groups
from samo.core.modules import named_weights
from samo.core.optim import AdamW
from samo.core.ranks import compare_masks
from samo.data.batches import IGNORE, Batch
from samo.errors import MaskError, nearest
from samo.mask.masks import Masks
from samo.memory.ledger import Ledger, ledger
from samo.pipeline.pipeline import Pipeline
from samo.train.compiling import blocks_of, compile_blocks
from samo.train.config import OptimConfig
from samo.train.config_weights import Held
from samo.train.events import Phase
from samo.train.ranks import Ranks
from samo.train.stages import Stages

__all__ = []


class Learner:
    """Learns from batches; knows nothing of steps, files or schedules.

    On many ranks each learns from its part of a batch, and all take the same step: stages by their
    pipeline, replicas of a whole model by torch's DistributedDataParallel, and shares of a pruned one by
    torch's FSDP2.

    Args:
        model: The model.
        optim: Settings of the optimizer.
        dtype: Type to compute in.
        fp32_gradients: Whether gradients of a bfloat16 model are kept, and sent, in float32.
        entry_steps: Whether weights may be kept anew: then the updates of each are counted.
        weights: How the dense weights of a pruned model are held, as `samo.compress_` calls it.
        is_compiled: Whether steps run compiled blocks, in both phases.
        is_sharded: Whether replicas of a pruned model keep a share each. Weights are streamed then.
        ranks: Who learns together; one process alone if nothing is said.
        stages: Where ``model`` is one stage of a larger one: all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: OptimConfig,
        *,
        dtype: torch.dtype,
        fp32_gradients: bool = False,
        entry_steps: bool = False,
        weights: Held = "resident",
        is_compiled: bool = False,
        is_sharded: bool = False,
        ranks: Ranks | None = None,
        stages: Stages | None = None,
    ) -> None:
        self.model = model
        self.stages = stages
        self.ranks = ranks or Ranks()
        self.phase: Phase = "dense"
        self.masks: Masks | None = None
        self.device = next(model.parameters()).device
        # Dense parameters of the whole model.
        self.num_params = sum(param.numel() for param in model.parameters())
        if stages is not None:
            self.num_params = stages.num_params
        self.dtype, self._optim = dtype, optim
        assert not isinstance(optim.density_power, str), "settings are resolved first"
        self._density_power = optim.density_power
        is_narrow = dtype == torch.bfloat16 and not fp32_gradients
        # Between ranks torch takes gradients of the values' type alone.
        self._grad_dtype = torch.bfloat16 if is_narrow and self.ranks.size == 1 else None
        self._entry_steps = entry_steps
        self._weights = weights
        self._is_sharded = is_sharded and self.ranks.data is not None
        self.is_compiled = is_compiled
        if is_compiled:
            compile_blocks(model)
        self.skipped_before = 0  # skipped steps that this optimizer has not counted
        self.opt: torch.optim.Optimizer = torch.optim.AdamW(
            self._groups(), betas=optim.betas, eps=optim.eps, fused=True
        )
        self._rates = [group["lr"] for group in self.opt.param_groups]
        self.scaler: torch.amp.GradScaler | None = None
        if dtype == torch.float16:
            self.scaler = torch.amp.GradScaler(self.device.type)
        self._replicas: DistributedDataParallel | None = None
        self._sends_narrow = is_narrow and stages is None
        self._sent_bytes = 0  # gradients that replicas have added up
        self._wrap(is_first=True)

    @property
    def whole(self) -> nn.Module | Pipeline:
        """The model, or the pipeline whose stage it is: what checkpoints are about."""
        return self.model if self.stages is None else self.stages.pipeline

    @property
    def weights(self) -> Held | None:
        """How dense weights are held: resident, streamed, or so many bytes; None before pruning."""
        return self._weights if self.phase == "samo" else None

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing, because a gradient was not finite; waits for the device."""
        return self.skipped_before + (self.opt.skipped_steps if isinstance(self.opt, AdamW) else 0)

    def check_names(self, masks: Masks) -> None:
        """Refuse masks of weights that no stage has.

        Raises:
            MaskError: There is one.
        """
        names = masks if self.stages is None else self.stages.names
        for name in masks:
            if name not in names:
                raise MaskError(
                    f"the masks have '{name}'{nearest(name, names)}, which is no weight of the model; give "
                    "masks of the same model"
                )

    def own_masks(self, masks: Masks) -> Masks:
        """Return those of a whole model's masks that are about this rank's stage."""
        return masks if self.stages is None else self.stages.pipeline.masks(masks)

    def prune(self, masks: Masks) -> None:
        """Leave the dense phase: from here on pruned weights are 0, and the moments go on.

        Raises:
            MaskError: Another rank has other masks.
        """
        if self.ranks.data is not None:
            compare_masks(masks, self.ranks.data)
        self.masks = masks
        self.phase = "samo"
        dense = self.opt
        dense.zero_grad()
        is_lean = self._optim.state == "lean" and self.dtype == torch.bfloat16
        self._replicas = None
        compress_(
            self.model,
            masks,
            dtype=self.dtype,
            weights=self._weights,
            grad_dtype=self._grad_dtype,
            value_dtype=torch.bfloat16 if is_lean else None,
        )
        opt = self._new_adamw()
        opt.carry_over(dense)
        self.opt = self._shard(opt) if self._is_sharded else opt
        self._rates = [group["lr"] for group in self.opt.param_groups]
        self._wrap()

    def _new_adamw(self) -> AdamW:
        return AdamW(
            self._groups(),
            betas=self._optim.betas,
            eps=self._optim.eps,
            state=self._optim.state,
            entry_steps=self._entry_steps,
        )

    def _shard(self, whole: AdamW) -> AdamW:
        """Keep this rank's share of the parameters, and return an optimizer with its share of the state."""
        assert self.ranks.data is not None
        states = {name: whole.state[param] for name, param in self.model.named_parameters()}
        mesh = DeviceMesh.from_group(self.ranks.data, self.device.type, mesh_dim_names=("data",))
        policy = MixedPrecisionPolicy()
        if self.dtype.itemsize == 2:  # what is gathered, and what is sent back
            sent = torch.bfloat16 if self._sends_narrow else torch.float32
            policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=sent)
        for part in [*blocks_of(self.model), self.model]:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        opt = self._new_adamw()
        for name, param in self.model.named_parameters():
            opt.state[param] = {
                key: shard_like(value, param) if value.shape == param.shape else value
                for key, value in states[name].items()
            }
        return opt

    def backward(self, batches: Iterable[Batch]) -> Tensor:
        """Add up the gradients of some batches and return the loss, both for each real token.

        All tokens of a step weigh the same, however they are spread over its batches.
        """
        self.opt.zero_grad()
        batches = list(batches)
        num_tokens = sum(batch.num_tokens for batch in batches)
        losses = []
        with self.in_eager() if self._is_watched() else contextlib.nullcontext():
            for left, batch in zip(reversed(range(len(batches))), batches):
                losses.append(self._pass(batch, num_tokens, is_last=left == 0))
        return torch.stack(losses).sum()

    def _is_watched(self) -> bool:
        """Return whether someone waits for dense gradients, which compiled code shows to nobody."""
        if not self.is_compiled or self.phase == "dense":
            return False
        return any(weight.layout.watchers for _, weight in named_weights(self.model))

    def _pass(self, batch: Batch, num_tokens: int, *, is_last: bool) -> Tensor:
        """Compute forward and backward of one batch, and return its part of the loss."""
        if self.stages is not None:
            with self._autocast():
                return self.stages.backward(batch, num_tokens, self.scaler, is_last=is_last)
        with self._adding_up(is_last=is_last):
            loss = self._loss_sum(batch, self._replicas or self.model) / num_tokens
            # Losses are divided by the tokens of all replicas, whose gradients torch averages.
            whole = loss if self.ranks.data is None else loss * self.ranks.num_replicas
            (whole if self.scaler is None else self.scaler.scale(whole)).backward()
        return loss.detach()

    def whole_loss(self, loss: Tensor) -> float:
        """Return the loss of a whole batch, of which `backward` has returned this rank's part."""
        return float(self.ranks.add_up(loss.double(), "the loss"))

    def step(self, lr: float) -> Tensor:
        """Clip the gradient, update the weights, and return the norm before clipping.

        Gradients stay until the next pass, so that they can be accounted for.
        """
        for group, rate in zip(self.opt.param_groups, self._rates):
            group["lr"] = lr * rate
        if self.ranks.num_replicas > 1:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            self._sent_bytes += sum(
                grad.numel() * (2 if self._sends_narrow else grad.itemsize) for grad in gradients
            )
        if self.scaler is not None:
            self.scaler.unscale_(self.opt)
        max_norm = self._optim.clip or float("inf")
        if self.stages is None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        else:
            norm = self.stages.pipeline.clip_grad_norm_(max_norm)
        self._update(norm)
        return norm

    def _update(self, norm: Tensor) -> None:
        """Take a step of the optimizer, unless the gradient is not finite; samo's finds out by itself."""
        if self.scaler is not None:
            before = self.scaler.get_scale()
            self.scaler.step(self.opt)
            self.scaler.update()
            self.skipped_before += self.scaler.get_scale() < before
        elif self.phase == "samo" or norm.isfinite():
            self.opt.step()
        else:
            self.skipped_before += 1

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the loss for each real token of some batches."""
        self.model.eval()
        total, num_tokens = 0.0, 0
        with self.in_eager():
            for batch in batches:
                if len(batch.inputs_BT):  # the last batch may be too small for all ranks
                    total += float(self._loss_sum(batch, self.model))
                elif isinstance(self.model, FSDPModule):  # the others need this rank's weights
                    total += float(self._loss_sum(_without_targets(batch), self.model))
                num_tokens += batch.num_tokens
        self.model.train()
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # its own parameters stay whole until a backward pass comes
        whole = self.ranks.add_up(
            torch.tensor(total, dtype=torch.float64, device=self.device), "the validation loss"
        )
        return float(whole) / num_tokens

    def in_eager(self) -> contextlib.AbstractContextManager[object]:
        """Compute without compiled code, for shapes that are too rare to be compiled for."""
        if not self.is_compiled:
            return contextlib.nullcontext()
        return torch.compiler.set_stance("force_eager")

    def remapped(self, masks: Masks) -> None:
        """Learn that the masks of the compressed model have changed, here and on all ranks."""
        before, self.masks = self.masks, masks
        assert before is not None
        if all(mask.kept == before[name].kept for name, mask in masks.items()):
            return
        groups = self._groups()  # rates follow what is kept
        self.opt.param_groups.clear()
        for group in groups:
            self.opt.add_param_group(group)
        self._rates = [group["lr"] for group in groups]
        self._wrap()

    def traffic(self) -> dict[str, int] | None:
        """Return what this rank has sent, as `samo.train.events.Exchanged` names it."""
        if self.ranks.size == 1:
            return None
        sent = 0 if self.stages is None else self.stages.pipeline.exchanged_bytes[0]
        return {"gradient_bytes": self._sent_bytes, "activation_bytes": sent}

    def close(self) -> None:
        """End the links between stages; there is nothing more to learn."""
        if self.stages is not None:
            self.stages.pipeline.close()

    def ledger(self) -> Ledger | None:
        """Return the account of compressed state, or None if the state is dense."""
        return ledger(self.model, self.opt) if self.phase == "samo" else None

    def account(self) -> dict[str, Any]:
        """Return the bytes of model state, as `samo.train.events.Accounted` names them."""
        held = self.ledger()
        if held is not None:
            shares = (held.pruned, held.unpruned)
            return {
                "num_params": held.num_params,
                "measured_bytes": held.measured_bytes,
                "predicted_bytes": held.predicted_bytes,
                "dense_bytes": held.dense_bytes,
                "paper_bytes": held.paper_bytes,
                "measured": _sum(share.measured for share in shares),
                "predicted": _sum(share.predicted for share in shares),
            }
        params = list(self.model.parameters())
        count = sum(param.numel() for param in params)
        measured = {
            "dense": sum(param.nbytes for param in params),
            "gradients": sum(param.grad.nbytes for param in params if param.grad is not None),
            "moments": sum(
                value.nbytes
                for state in self.opt.state.values()
                for value in state.values()
                if isinstance(value, Tensor) and value.dim() > 0
            ),
        }
        predicted = {"dense": 4 * count, "gradients": 4 * count, "moments": 8 * count}
        return {
            "num_params": count,
            "measured_bytes": sum(measured.values()),
            "predicted_bytes": sum(predicted.values()),
            "dense_bytes": 16 * count,  # itself: fp32 throughout, whatever it computes in
            "paper_bytes": None,
            "measured": measured,
            "predicted": predicted,
        }

    def _groups(self) -> list[dict[str, Any]]:
        """Return groups whose rates are what the learning rate of a step is multiplied by."""
        return param_groups(
            self.model,
            lr=1.0,
            weight_decay=self._optim.weight_decay,
            density_power=self._density_power,
        )

    def _wrap(self, *, is_first: bool = False) -> None:
        """Let replicas add up gradients of the parameters as they are now."""
        self._replicas = None  # which holds on to the old ones
        is_sharded = isinstance(self.model, FSDPModule)
        if self.ranks.data is None or self.stages is not None or is_sharded:
            return
        self._replicas = DistributedDataParallel(
            self.model,
            process_group=self.ranks.data,
            gradient_as_bucket_view=True,
            init_sync=is_first,
        )
        if self._sends_narrow:
            self._replicas.register_comm_hook(self.ranks.data, _send_narrow)

    def _loss_sum(self, batch: Batch, model: nn.Module) -> Tensor:
        if self.stages is not None:
            with self._autocast():
                return self.stages.loss_sum(batch)
        inputs_BT = batch.inputs_BT.to(self.device, non_blocking=True)
        targets_BT = batch.targets_BT.to(self.device, non_blocking=True)
        with self._autocast():
            loss: Tensor = model(inputs_BT, targets_BT, reduction="sum")
        return loss

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.phase == "samo" or self.dtype == torch.float32:
            return contextlib.nullcontext()
        # Of stages this is around a whole batch: copies of weights are not to be kept for as long.
        is_kept = self.stages is None
        return torch.autocast(self.device.type, dtype=self.dtype, cache_enabled=is_kept)

    def _adding_up(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Keep gradients on their rank until those of the last batch of a step have come."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last)
        if self._replicas is None or is_last:
            return contextlib.nullcontext()
        return self._replicas.no_sync()


def _send_narrow(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Add up gradients in bfloat16: torch's own hook, which it refuses by name without NCCL."""
    return bf16_compress_hook(group, bucket)


def _without_targets(batch: Batch) -> Batch:
    """Return a batch of one sequence that counts for nothing, of the length of another's."""
    tokens_BT = batch.inputs_BT.new_zeros(1, batch.inputs_BT.shape[1])
    return batch._replace(inputs_BT=tokens_BT, targets_BT=torch.full_like(tokens_BT, IGNORE))


def _sum(parts: Iterable[dict[Any, int]]) -> dict[str, int]:
    together: dict[str, int] = {}
    for part in parts:
        for kind, size in part.items():
            together[kind] = together.get(kind, 0) + size
    return together
