"""A GPT that is split into pipeline stages: initial weights, forward and backward passes."""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from samo.data.batches import IGNORE, Batch, part_of
from samo.models.gpt import GPT, draw_weights
from samo.models.shapes import GPTConfig
from samo.pipeline.partition import partition
from samo.pipeline.pipeline import Pipeline
from samo.pipeline.split import parameter_costs, take_apart
from samo.train.config import TrainConfig
from samo.train.rank_group import RankGroup
from samo.train.rules import micro_batches

__all__ = []


class PipelinedGPT:
    """A GPT of which this rank has one stage; initial weights are those of one process."""

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
        self.names: Final = [name for name, _ in whole.named_parameters()]
        self.num_params: Final = sum(param.numel() for param in whole.parameters())
        rows = part_of(config.run.batch_size, ranks.part)
        self._rows: Final = rows.stop - rows.start
        self._divisor = 1.0
        self._num_replicas: Final = ranks.num_replicas
        self.pipeline: Final = Pipeline(
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

    def backward(
        self,
        batch: Batch,
        num_tokens: int,
        scaler: torch.amp.GradScaler | None,
        *,
        is_last: bool,
    ) -> Tensor:
        """Run forward and backward of a batch, and return its part of the loss per token.

        The loss is divided by the tokens of all replicas, whose gradients the pipeline averages.
        """
        self._divisor = num_tokens / self._num_replicas
        loss = self.pipeline.step(
            batch.inputs_BT, target=batch.targets_BT, is_last=is_last, scaler=scaler
        )
        return loss / self._num_replicas

    def loss_sum(self, batch: Batch) -> Tensor:
        """Return the sum of the losses of a batch, which may have fewer rows than others."""
        self._divisor = 1.0
        missing = max(self._rows - len(batch.inputs_BT), 0)  # one row for each micro-batch
        inputs_BT = F.pad(batch.inputs_BT, (0, 0, 0, missing))
        targets_BT = F.pad(batch.targets_BT, (0, 0, 0, missing), value=IGNORE)
        return self.pipeline.eval(inputs_BT, target=targets_BT)

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        total = F.cross_entropy(
            logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum"
        )
        return total / self._divisor
