"""A training step of one stage of a GPT that is split into pipeline stages."""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samo.data.batches import Batch, part_of
from samo.errors import MaskError
from samo.mask.masks import Masks
from samo.models.gpt import GPT, draw_weights
from samo.models.shapes import GPTConfig
from samo.pipeline.partition import partition
from samo.pipeline.pipeline import Pipeline
from samo.pipeline.split import parameter_costs, take_apart
from samo.train.config import TrainConfig
from samo.train.events import Scheduled
from samo.train.learner import Learner
from samo.train.rank_group import RankGroup
from samo.train.rules import micro_batches


class StagedLearner(Learner):
    """A learner whose ``model`` is a stage; initial weights are those of one process."""

    _caches_casts = False  # autocast spans a whole batch, for which it would keep copies of weights

    def __init__(self, config: TrainConfig, shape: GPTConfig, ranks: RankGroup) -> None:
        with torch.device("meta"):
            whole = GPT(shape)
        layers = take_apart(whole)
        per_rank = config.mesh.stages_per_rank
        cuts = partition(parameter_costs(layers), ranks.num_stages * per_rank)
        own = {
            name
            for start, stop in cuts[ranks.stage :: ranks.num_stages]
            for unit in layers.units[start:stop]
            for name, _ in unit.named_parameters()
        }
        tied = {name for group in layers.tied if own & {*group} for name in group}
        torch.manual_seed(config.run.seed)
        weights = draw_weights(shape, lambda name: name in own | tied, config.run.device)
        rows = part_of(config.run.batch_size, ranks.part)
        self._least_rows = rows.stop - rows.start  # one for each micro-batch
        self._divisor = 1.0
        self._pipeline: Final = Pipeline(
            whole,
            self._loss,
            ranks.mesh,
            micro_batches(config, ranks.num_replicas),
            stages_per_rank=per_rank,
            cuts=cuts,
            device=config.run.device,
            weights=weights,
            loss_reduction="sum",
            timeout_s=ranks.timeout_s,
        )
        super().__init__(self._pipeline.module, config, ranks=ranks)
        self.names = [name for name, _ in whole.named_parameters()]
        self.num_params = sum(param.numel() for param in whole.parameters())

    @property
    def whole(self) -> Pipeline:
        """The pipeline: what a checkpoint holds."""
        return self._pipeline

    def _forward_backward(self, batch: Batch, num_tokens: int, *, is_last: bool) -> Tensor:
        # The loss is divided by the tokens of all replicas, and the pipeline averages gradients.
        self._divisor = num_tokens / self.ranks.num_replicas
        with self._autocast():
            loss = self._pipeline.step(
                batch.inputs_BT, target=batch.targets_BT, is_last=is_last, scaler=self.scaler
            )
        return loss / self.ranks.num_replicas

    def _loss_sum(self, batch: Batch, model: nn.Module) -> Tensor:
        self._divisor = 1.0
        with self._autocast():
            return self._pipeline.eval(batch.inputs_BT, target=batch.targets_BT)

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        total = F.cross_entropy(
            logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum"
        )
        return total / self._divisor

    def _clip_grad_norm_(self, max_norm: float) -> Tensor:
        return self._pipeline.clip_grad_norm_(max_norm)

    def own_masks(self, masks: Masks) -> Masks:
        """Return the masks of this stage."""
        if unknown := {*masks} - {*self.names}:
            raise MaskError(
                f"the masks have '{min(unknown)}', which is not a weight of the model; use masks "
                "of the same model"
            )
        return self._pipeline.masks(masks)

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent, those between stages among them."""
        return {**super().traffic(), "activation_bytes": self._pipeline.sent_bytes}

    def timeline(self, step: int) -> Scheduled:
        """Return when each stage computed what in the last batch."""
        line = self._pipeline.timeline()
        passes = [e for what in ("forward", "backward") for e in line.events if e.what == what]
        first = line.events[0].start
        return Scheduled(
            step=step,
            num_stages=line.num_stages,
            micro_batches=line.num_micro_batches,
            stages=[event.stage for event in passes],
            numbers=[event.micro_batch for event in passes],
            start_ms=[round((event.start - first) * 1e3, 3) for event in passes],
            end_ms=[round((event.end - first) * 1e3, 3) for event in passes],
        )

    def close(self) -> None:
        """Close the connections between stages."""
        self._pipeline.close()
