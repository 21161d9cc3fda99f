"""A model with its optimizer, in one of three phases: dense, then masked or samo.

dense    fp32 weights, torch's AdamW, autocast for 16-bit types
masked   the same, with pruned weights set back to 0 after every step; for comparisons
samo     compressed state, weights in the type of the computation
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from samo.compression import compress_
from samo.config import OptimConfig
from samo.data.batches import Batch
from samo.errors import MaskError, nearest
from samo.leaves import param_groups
from samo.masks import Masks
from samo.memory.ledger import Ledger, ledger
from samo.memory.predict import TensorSpec, paper_bytes
from samo.optim import AdamW, lr_scale
from samo.parallel.clipping import clip_grad_norm_
from samo.parallel.dense import add_up_gradients, broadcast_weights
from samo.parallel.replicas import Replicas, no_sync, replicate
from samo.parallel.traffic import KINDS
from samo.pipeline.api import Pipeline
from samo.scaling import LossScaler
from samo.training.events import Phase
from samo.training.ranks import HEARTBEAT_S, Ranks
from samo.training.stages import Stages

__all__ = []


class Learner:
    """Learns from batches; knows nothing of steps, files or schedules.

    On many ranks each learns from its part of a batch, and all take the same step.

    Args:
        model: The model.
        optim: Settings of the optimizer.
        dtype: Type to compute in.
        fp32_gradients: Whether 16-bit gradients are added up in float32.
        entry_steps: Whether weights may be kept anew: then the updates of each are counted.
        ranks: Who learns together; one process alone if nothing is said.
        is_sharded: Whether replicas divide compressed state.
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
        ranks: Ranks | None = None,
        is_sharded: bool = False,
        stages: Stages | None = None,
    ) -> None:
        self.model = model
        self.stages = stages
        self.ranks = ranks or Ranks()
        self.replicas: Replicas | None = None
        self._is_sharded = is_sharded
        self.phase: Phase = "dense"
        self.masks: Masks | None = None
        self.device = next(model.parameters()).device
        self.dtype, self._optim = dtype, optim
        assert not isinstance(optim.density_power, str), "settings are resolved first"
        self._density_power = optim.density_power
        self._grad_dtype = torch.float32 if fp32_gradients else None
        self._entry_steps = entry_steps
        self.dense_skipped = 0
        self._pruned: list[tuple[Tensor, Tensor]] = []  # masked: weights, and where they are 0
        self._lr_scales: dict[int, float] = {}  # masked: of weights, by id
        self._gradient_bytes = 0  # of the last dense step, measured before they are freed
        params = list(model.parameters())
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.opt: torch.optim.Optimizer = torch.optim.AdamW(
            groups, betas=optim.betas, eps=optim.eps, fused=True
        )
        self.scaler: LossScaler | torch.amp.GradScaler | None = None
        if dtype == torch.float16:
            self.scaler = torch.amp.GradScaler(self.device.type)
        if self.ranks.data is not None:
            broadcast_weights(self.ranks.data, model)

    @property
    def whole(self) -> nn.Module | Pipeline:
        """The model, or the pipeline whose stage it is: what checkpoints and clipping are about."""
        return self.model if self.stages is None else self.stages.pipeline

    @property
    def num_params(self) -> int:
        """Dense parameters of the whole model."""
        if self.stages is not None:
            return self.stages.num_params
        return sum(param.numel() for param in self.model.parameters())

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing, because a gradient was not finite; waits for the device."""
        return self.dense_skipped + (self.opt.skipped_steps if isinstance(self.opt, AdamW) else 0)

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

    def prune(self, masks: Masks, phase: Phase) -> None:
        """Leave the dense phase: from here on pruned weights are 0, and the moments go on.

        Raises:
            MaskError: Another rank has other masks.
        """
        self._check_masks(masks)
        self.masks = masks
        self.phase = phase
        if phase == "masked":
            parameters_of = masks.parameters_of(self.model)
            self._pruned = [(parameters_of[name], ~mask.to_bool()) for name, mask in masks.items()]
            self._zero_pruned()
            self._lr_scales = {
                id(parameters_of[name]): lr_scale(mask, self._density_power)
                for name, mask in masks.items()
            }
            return
        dense = self.opt
        compress_(self.model, masks, dtype=self.dtype, grad_dtype=self._grad_dtype)
        if self.ranks.mesh is not None and self.ranks.num_replicas > 1:
            self.replicas = replicate(
                self.model,
                self.ranks.mesh["data"],
                shard="state" if self._is_sharded else None,
                average=False,  # losses are divided by the tokens of all ranks
                timeout_s=self.ranks.timeout_s,
                heartbeat_s=HEARTBEAT_S,
            )
        self.opt = AdamW(
            param_groups(self.model, self._optim.weight_decay),
            betas=self._optim.betas,
            eps=self._optim.eps,
            state=self._optim.state,
            entry_steps=self._entry_steps,
            density_power=self._density_power,
        )
        self.opt.carry_over(dense)
        if isinstance(self.scaler, torch.amp.GradScaler):
            scale, good_steps = self.scaler.get_scale(), self.scaler._get_growth_tracker()
            self.scaler = LossScaler(self.model)
            self.scaler.load_state_dict({"scale": scale, "good_steps": good_steps})

    def backward(self, batches: Iterable[Batch]) -> Tensor:
        """Add up the gradients of some batches and return the loss, both for each real token.

        All tokens of a step weigh the same, however they are spread over its batches.
        """
        batches = list(batches)
        num_tokens = sum(batch.num_tokens for batch in batches)
        losses = []
        for left, batch in zip(reversed(range(len(batches))), batches):
            losses.append(self._pass(batch, num_tokens, is_last=left == 0))
        if self.phase != "samo" and self.ranks.data is not None:
            add_up_gradients(self.ranks.data, self.model.parameters())
        return torch.stack(losses).sum()

    def _pass(self, batch: Batch, num_tokens: int, *, is_last: bool) -> Tensor:
        """Compute forward and backward of one batch, and return its part of the loss."""
        if self.stages is None:
            with self._adding_up(is_last=is_last):
                loss = self._loss_sum(batch) / num_tokens
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            return loss.detach()
        scale: Tensor | float = 1.0
        if self.scaler is not None:
            scale = self.scaler.scale(torch.ones((), device=self.device))
        with self._autocast():
            return self.stages.backward(batch, num_tokens / scale, is_last=is_last) / scale

    def whole_loss(self, loss: Tensor) -> float:
        """Return the loss of a whole batch, of which `backward` has returned this rank's part."""
        return float(self.ranks.add_up(loss.double(), "the loss"))

    def step(self, lr: float) -> Tensor:
        """Clip the gradient, update the weights, and return the norm before clipping."""
        for group in self.opt.param_groups:
            group["lr"] = lr
        if self.phase == "samo":
            norm = clip_grad_norm_(self.whole, self._max_norm)
            self.opt.step()
        else:
            with self._own_rates():
                norm = self._dense_step()
        self.opt.zero_grad()
        return norm

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the loss for each real token of some batches."""
        self.model.eval()
        total, num_tokens = 0.0, 0
        for batch in batches:
            if len(batch.inputs_BT):  # the last batch may be too small for all ranks
                total += float(self._loss_sum(batch))
            num_tokens += batch.num_tokens
        self.model.train()
        whole = self.ranks.add_up(
            torch.tensor(total, dtype=torch.float64, device=self.device), "the validation loss"
        )
        return float(whole) / num_tokens

    def remapped(self, masks: Masks) -> None:
        """Learn that the masks of the compressed model have changed, here and on all ranks.

        Raises:
            MaskError: Another rank has other masks.
        """
        self.masks = masks
        if self.replicas is not None:
            self.replicas.rebuild()

    def traffic(self) -> dict[str, Any] | None:
        """Return what this rank has sent and received, as `samo.training.events.Exchanged` names it."""
        if self.ranks.size == 1:
            return None
        groups = self.ranks.groups
        if self.replicas is not None:
            groups.append(self.replicas.team.group)
        counts = [group.meter.read() for group in groups]
        both = {kind: sum(getattr(c, kind).sent_bytes for c in counts) for kind in KINDS}
        sent, received = (0, 0) if self.stages is None else self.stages.pipeline.exchanged_bytes
        return {
            "sent": {**both, "activations": sent},
            "received": {**both, "activations": received},
            "in_flight_s": sum(count.in_flight_s for count in counts),
            "exposed_s": sum(count.exposed_s for count in counts),
        }

    def close(self) -> None:
        """End the links between stages; there is nothing more to learn."""
        if self.stages is not None:
            self.stages.pipeline.close()

    def ledger(self) -> Ledger | None:
        """Return the account of compressed state, or None if the state is dense."""
        return ledger(self.model, self.opt) if self.phase == "samo" else None

    def account(self) -> dict[str, Any]:
        """Return the bytes of model state, as `samo.training.events.Accounted` names them."""
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
        moments = sum(
            value.nbytes
            for state in self.opt.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        )
        measured = {
            "weights": sum(param.nbytes for param in params),
            "gradients": self._gradient_bytes,
            "moments": moments,
        }
        predicted = {"weights": 4 * count, "gradients": 4 * count, "moments": 8 * count}
        if self.masks is not None:
            measured["bitmap"] = sum(pruned.nbytes for _, pruned in self._pruned)
            predicted["bitmap"] = self.masks.numel  # a byte each, as people do it
        return {
            "num_params": count,
            "measured_bytes": sum(measured.values()),
            "predicted_bytes": sum(predicted.values()),
            "dense_bytes": 16 * count,  # itself: fp32 throughout, whatever it computes in
            "paper_bytes": None if self.masks is None else self._paper_bytes(),
            "measured": measured,
            "predicted": predicted,
        }

    def _paper_bytes(self) -> int:
        assert self.masks is not None
        return sum(
            paper_bytes(
                TensorSpec(numel=p.numel(), kept=self.masks[n].kept if n in self.masks else None)
            )
            for n, p in self.model.named_parameters()
        )

    def _loss_sum(self, batch: Batch) -> Tensor:
        if self.stages is not None:
            with self._autocast():
                return self.stages.loss_sum(batch)
        inputs_BT = batch.inputs_BT.to(self.device, non_blocking=True)
        targets_BT = batch.targets_BT.to(self.device, non_blocking=True)
        with self._autocast():
            loss: Tensor = self.model(inputs_BT, targets_BT, reduction="sum")
        return loss

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.phase == "samo" or self.dtype == torch.float32:
            return contextlib.nullcontext()
        # Of stages this is around a whole batch: copies of weights are not to be kept for as long.
        is_kept = self.stages is None
        return torch.autocast(self.device.type, dtype=self.dtype, cache_enabled=is_kept)

    def _dense_step(self) -> Tensor:
        self._gradient_bytes = sum(
            param.grad.nbytes for param in self.model.parameters() if param.grad is not None
        )
        scaler = self.scaler
        if isinstance(scaler, torch.amp.GradScaler):
            scaler.unscale_(self.opt)
        for param, pruned in self._pruned:
            if param.grad is not None:
                param.grad.masked_fill_(pruned, 0)
        if self.stages is None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._max_norm)
        else:
            norm = clip_grad_norm_(self.whole, self._max_norm)
        if isinstance(scaler, torch.amp.GradScaler):
            before = scaler.get_scale()
            scaler.step(self.opt)
            scaler.update()
            self.dense_skipped += scaler.get_scale() < before
        elif norm.isfinite():
            self.opt.step()
        else:
            self.dense_skipped += 1
        self._zero_pruned()
        return norm

    @contextlib.contextmanager
    def _own_rates(self) -> Iterator[None]:
        """Let masked weights have rates of their own for a step, as `samo.AdamW` gives each weight one."""
        if not self._lr_scales:
            yield
            return
        usual = self.opt.param_groups
        groups: dict[tuple[int, float], dict[str, Any]] = {}
        for index, group in enumerate(usual):
            for param in group["params"]:
                scale = self._lr_scales.get(id(param), 1.0)
                # The rate times the decay stays as it is.
                own = {"lr": group["lr"] * scale, "weight_decay": group["weight_decay"] / scale}
                of_scale = groups.setdefault((index, scale), {**group, **own, "params": []})
                of_scale["params"].append(param)
        self.opt.param_groups = list(groups.values())
        try:
            yield
        finally:
            self.opt.param_groups = usual

    @torch.no_grad()
    def _zero_pruned(self) -> None:
        for param, pruned in self._pruned:
            param.masked_fill_(pruned, 0)

    @property
    def _max_norm(self) -> float:
        return self._optim.clip or float("inf")

    def _adding_up(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Keep gradients on their rank until those of the last batch of a step have come."""
        if self.replicas is None or is_last:
            return contextlib.nullcontext()
        return no_sync(self.model)

    def _check_masks(self, masks: Masks) -> None:
        prints = self.ranks.texts("the fingerprints of the masks", masks.fingerprint())
        for rank, found in enumerate(prints):
            first = rank - rank % self.ranks.num_replicas  # of its stage
            if found != prints[first]:
                raise MaskError(
                    f"the masks that rank {rank} has drawn are not those of rank {first}, though their "
                    "weights should be the same; start again from the last checkpoint"
                )


def _sum(parts: Iterable[dict[Any, int]]) -> dict[str, int]:
    together: dict[str, int] = {}
    for part in parts:
        for kind, size in part.items():
            together[kind] = together.get(kind, 0) + size
    return together
